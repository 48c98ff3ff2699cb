"""Conversions: which tensors of a checkpoint make which parameters of transformers' module.

transformers itself knows how names of the hub become names of its modules, and which tensors it
fuses, such as the experts of a layer (core_model_loading.py there). Its rules are tried here on
tensors without memory, forward and back, before any weight is read. So a config that does not fit
the files, and a rule that has no way back, are refused at once. Called by parent_files.py.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from cray_agents.errors import BadInput

Read = Callable[[str], torch.Tensor]
Tensors = dict[str, torch.Tensor]
_NO_WAY = (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Conversion:
    """Tensors of files that make parameters of the module together.

    `sources`: names of file tensors, in order, by the rule's pattern. `targets`: names in the
    module as transformers' rule has them. `rule`: its WeightConverter, or None where one tensor is
    one parameter as it is.
    """

    sources: dict[str, list[str]]
    targets: tuple[str, ...]
    rule: Any

    @property
    def files(self) -> list[str]:
        """The names of the file tensors."""
        return [name for names in self.sources.values() for name in names]

    def load(self, read: Read, module: Any) -> Tensors:
        """Return the parameters by name. Holds the file tensors and what they make at once."""
        if self.rule is None:
            return {self.targets[0]: read(self.files[0])}
        rule = deepcopy(self.rule)
        for pattern, names in self.sources.items():
            for name in names:
                rule.add_tensor(self.targets[0], name, pattern, read(name))
        made = rule.convert(self.targets[0], model=module, config=module.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    def save(self, read: Read, module: Any, shapes: dict[str, Any]) -> Tensors:
        """Return the file tensors by name; `read` gives parameters, `shapes` those of the files."""
        if self.rule is None:
            return {self.files[0]: read(self.targets[0])}
        back = deepcopy(self.rule).reverse_transform()
        patterns = list(back.source_patterns)
        tensors = [read(name) for name in self.targets]
        collected: dict[str, Any] = (
            {patterns[0]: tensors}
            if len(patterns) == 1
            else {pattern: [tensor] for pattern, tensor in zip(patterns, tensors, strict=True)}
        )
        for op in _decided(back.operations, shapes[self.files[0]], tensors[0].shape):
            collected = op.convert(
                collected,
                source_patterns=back.source_patterns,
                target_patterns=back.target_patterns,
                full_layer_name=self.files[0],
                model=module,
                config=module.config,
                missing_keys=None,
            )
        if len(collected) == 1 and len(self.files) == 1:
            collected = {back.target_patterns[0]: next(iter(collected.values()))}
        made: Tensors = {}
        for pattern, target in zip(self.rule.source_patterns, back.target_patterns, strict=True):
            for number, name in enumerate(self.sources.get(pattern, ())):
                part = collected[target.replace("*", str(number))]
                tensor = part[0] if isinstance(part, list) else part
                # transformers squeezes experts, and with them axes of one
                same = [n for n in tensor.shape if n != 1] == [n for n in shapes[name] if n != 1]
                made[name] = tensor.reshape(shapes[name]) if same else tensor
        return made


def _decided(operations: list[Any], stored: Any, own: Any) -> list[Any]:
    """Replace transpositions that look at a shape to decide: the way back has to undo them."""
    from transformers.core_model_loading import Transpose

    return [
        Transpose(op.dim0, op.dim1) if getattr(op, "check_dims", False) else op
        for op in operations
        if not getattr(op, "check_dims", False) or tuple(stored) != tuple(own)
    ]


def match_names(names: Iterable[str], module: Any) -> tuple[list[Conversion], dict[str, str]]:
    """Match names of files with a module, by transformers' rules.

    Returns the conversions, and the names that no part of the module takes, each with the name
    that the rules give it. Raises BadInput where two tensors are one parameter.
    """
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters = _rules_of(module)
    rule_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known, prefix = module.state_dict(), module.base_model_prefix
    made: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    left: dict[str, str] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in known:
            left[name] = target
            continue
        rule = rule_of[pattern] if pattern is not None else None
        _, sources = made.setdefault(target, (rule, {}))
        if rule is None and sources:
            first = next(iter(sources))
            raise BadInput(
                f"the tensors {first!r} and {name!r} are both the parameter {target!r}; remove one",
                param="parent",
            )
        sources.setdefault(pattern or name, []).append(name)
    return [Conversion(s, (target,), rule) for target, (rule, s) in made.items()], left


def renaming_by_peft(module: Any) -> Callable[[str], str]:
    """Return what finds the layer of a module that PEFT gives the adapter of a file's layer."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import rename_source_key

    if get_checkpoint_conversion_mapping(module.config.model_type) is None:
        return lambda layer: layer  # PEFT looks for rules of the whole model alone
    rules, end = _rules_of(module), ".lora_A.weight"
    return lambda layer: rename_source_key(layer + end, *rules)[0].removesuffix(end)


def _rules_of(module: Any) -> tuple[list[Any], list[Any]]:
    """Return transformers' rules for a module: those that rename a tensor, and all others."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(module)
    return (
        [rule for rule in rules if isinstance(rule, WeightRenaming)],
        [rule for rule in rules if isinstance(rule, WeightConverter)],
    )


def tried(
    conversion: Conversion, module: Any, own: Tensors, dtypes: Any, shapes: dict[str, Any]
) -> Conversion:
    """Try a conversion both ways on tensors without memory, and return it with all its targets.

    `own`: the module's tensors. `dtypes`, `shapes`: the file tensors'. Raises BadInput where
    the shapes do not fit the module, and where there is no way back.
    """
    first = conversion.files[0]

    def empty(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], dtype=dtypes[name], device="meta")

    try:
        made = conversion.load(empty, module)
    except _NO_WAY as error:
        raise BadInput(
            f"{first!r}, shaped {list(shapes[first])}, does not make {conversion.targets[0]!r} as"
            f" config.json has it: {error}; they are of different models",
            param="parent",
        ) from error
    for name, tensor in made.items():
        if name not in own or tensor.shape != own[name].shape:
            expected = list(own[name].shape) if name in own else "nothing"
            raise BadInput(
                f"{first!r} has the shape {list(shapes[first])}, and makes {name!r} shaped"
                f" {list(tensor.shape)}, where config.json implies {expected}: they are of"
                " different models",
                param="parent",
            )
    whole = Conversion(conversion.sources, tuple(made), conversion.rule)
    try:
        back = whole.save(lambda name: made[name], module, shapes)
    except _NO_WAY as error:
        back, reason = {}, f": {error}"
    else:
        reason = ""
    if {name: tuple(t.shape) for name, t in back.items()} != {n: shapes[n] for n in whole.files}:
        raise BadInput(
            f"transformers has no way back from {made.keys()} to {first!r} and its like{reason};"
            " save the parent with save_pretrained of transformers, and train from that",
            param="parent",
        )
    return whole
