"""Parent files: a Hugging Face directory as a module of transformers, and the module as files.

The module holds the parent's weights and nothing else, and an export gives back the parent's
tensors: names, types, shapes, tied or not, experts apart or fused. A tensor without a part in the
module, such as a vision tower's or those of layers that guess further tokens, is copied. Quantised
parents are dequantised on reading (dequantisation.py) and exported in bfloat16.
Read next: text_model.py for the module, conversions.py for the names.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cray_agents.errors import BadInput, NotFound
from cray_agents.runtime.registry.adapters import SavedAdapter
from cray_agents.runtime.registry.checkpoints import base_of
from cray_agents.runtime.registry.foreign_model import read_config, read_weights
from cray_agents.trainers.models.transformers_backend.conversions import (
    Conversion,
    match_names,
    renaming_by_peft,
    tried,
)
from cray_agents.trainers.models.transformers_backend.dequantisation import DTYPE, packed_tensors
from cray_agents.trainers.models.transformers_backend.linear_adapter import SavedAs
from cray_agents.trainers.models.transformers_backend.text_model import TextModel
from cray_agents.trainers.progress import CLOCK

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|(^|\.)position_ids|\.masked_bias|attn\.bias)$")
_NAMED = 5


@dataclass(frozen=True)
class ExportUnit:
    """A part of an export that is made at once.

    `parameters`: of the module, parameters and buffers by name; none where tensors are copied.
    `tensors`: type and shape by the name in the files.
    """

    parameters: tuple[str, ...]
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]


class ParentFiles:
    """The weights of one Hugging Face directory, for its causal language model.

    Those of an adapter version are its base's, merged in `fill` and in `read`. Making one reads the
    headers alone, and compares them with the config. Raises NotFound without a config or
    safetensors, and BadInput for a kind that transformers does not know, for files that are
    damaged, lack a tensor or have one of another shape, and for a format that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = base_of(folder) or folder
        self._adapter = None if self.folder == folder else SavedAdapter(folder)
        folder = self.folder
        self._raw = read_config(folder)
        stored = read_weights(folder.resolve())
        if not stored:
            raise NotFound(f"{folder} holds no model.safetensors; other formats are not read")
        self._stored = stored
        try:
            self._packed, used = packed_tensors(self._raw, stored)
        except BadInput as error:
            raise BadInput(f"{folder}: {error}", param="parent") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise BadInput(
                f"{folder}: the tensors do not fit config.json's quantization_config: {error};"
                " download the checkpoint again",
                param="parent",
            ) from error
        self._files = {f: safe_open(folder / f, "pt") for f in {t.file for t in stored.values()}}
        plain = {name: t for name, t in stored.items() if name not in used}
        for name, tensor in plain.items():
            if tensor.dtype not in _DTYPES:
                raise self._unusable(
                    name,
                    f"is stored as {tensor.dtype}, and config.json has no quantization_config that"
                    " says how to read it; save the model unquantised",
                )
        self._shapes = {n: t.shape for n, t in plain.items()}
        self._shapes |= {n: t.shape for n, t in self._packed.items()}
        self._dtypes = {n: _DTYPES[t.dtype] for n, t in plain.items()}
        self._dtypes |= dict.fromkeys(self._packed, DTYPE)
        self._text = TextModel(self._raw, folder)
        if self._text.layers > len(stored):  # spares a hostile config's millions of names
            raise BadInput(
                f"{folder}/config.json speaks of {self._text.layers} layers, and there are"
                f" {len(stored)} tensors in all: they are of different models",
                param="parent",
            )
        self._plan()

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of an export: the parent's, without a quantisation that it has not."""
        if not self._packed:
            return dict(self._raw)
        config: dict[str, Any] = unquantised(self._raw)
        return config if "torch_dtype" in config else config | {"dtype": "bfloat16"}

    def skeleton(self) -> Any:
        """Return transformers' module on the meta device, without weights."""
        return self._text.build(torch.float32, "meta")

    @property
    def stored(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each tensor that can be read, by name, in the order of the files."""
        return {name: (self._dtypes[name], self._shapes[name]) for name in self._shapes}

    @property
    def copied(self) -> frozenset[str]:
        """The names of tensors that are no part of the text model."""
        return frozenset(self._copied)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored, or dequantised. Raises BadInput for NaN."""
        if self._adapter is not None:
            self._adapter.refuse_unknown(one.removesuffix(".weight") for one in self._shapes)
        return self._merged(name, self._finite(name))

    def _merged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        layer = name.removesuffix(".weight")
        return tensor if self._adapter is None else self._adapter.merged(layer, tensor)

    def build(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, filled: bool = True
    ) -> torch.nn.Module:
        """Return transformers' module with the parent's weights, on the device, in eval mode.

        Parameters are of `dtype`, except those that transformers keeps in float32. Numbers that the
        files store more exactly than `dtype` are rounded. Peak memory: the module on its device,
        and one unit of the export (a matrix, or the experts of a layer) twice on the host. Unless
        `filled`, parameters hold nothing yet, on the CPU, and the system gives them no memory.
        """
        module: Any = self._text.build(dtype, "cpu")
        for target, source in self._tied.items():
            owner, _, leaf = target.rpartition(".")
            setattr(module.get_submodule(owner), leaf, module.get_parameter(source))
        module.all_tied_weights_keys = dict(self._tied)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                return tensor.to(device)  # a buffer, computed just now
            return torch.empty_like(tensor, device=device) if filled else tensor

        module._apply(place)
        if filled:
            self.fill(module)
        built: torch.nn.Module = module
        return built

    @torch.no_grad()
    def fill(
        self,
        module: torch.nn.Module,
        put: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_,
    ) -> None:
        """Copy the parent's weights into a module that `build` made, in place.

        `put` copies one of them into a tensor of the module. Raises BadInput for infinite numbers
        and NaN, and where a rule's way back does not give the files' numbers. Layers that were cut
        off are not read. Peak memory: one unit twice.
        """
        own, shown_back = _tensors(module), set()
        saved = {} if self._adapter is None else self.adapter_names()
        layers = {f"{name}.weight": saved_as.tensors for name, saved_as in saved.items()}
        if self._adapter is not None:
            self._adapter.refuse_unknown(layers.values())
        for conversion in self._conversions:
            if self._own_name(conversion.targets[0]) not in own:
                continue
            made = conversion.load(self._finite, self._names)
            for name, tensor in made.items():
                own_name = self._own_name(name)
                put(own[own_name], self._merged(layers.get(own_name, ""), tensor))
            if conversion.rule is not None and id(conversion.rule) not in shown_back:
                shown_back.add(id(conversion.rule))  # one layer speaks for all
                self._show_way_back(conversion, made)

    def adapter_names(self) -> dict[str, SavedAs]:
        """Return what files of adapters call the matrices of the module, by their names in it.

        vLLM and PEFT read an adapter by the names of the parent's files, and PEFT renames them as
        transformers does. Where its rules lead such a name elsewhere, the whole model's name is
        taken; a layer that neither leads to is left out. Where the text is a part, PEFT finds its
        layers by their whole names: other parts may have some of the same last name.
        """
        names: dict[str, SavedAs] = {}
        renamed = renaming_by_peft(self._names)
        for conversion in self._conversions:
            for target in conversion.targets:
                matrix, dot, last = target.rpartition(".")
                if dot and last == "weight":
                    stored = conversion.files[0].removesuffix(".weight")
                    known = [stored] if conversion.rule is None else []
                    fitting = [name for name in (*known, matrix) if renamed(name) == matrix]
                    place = matrix if self._text.nested else matrix.rpartition(".")[2]
                    names |= {self._own_name(matrix): SavedAs(name, place) for name in fitting[:1]}
        return names

    def units(self, module: torch.nn.Module) -> list[ExportUnit]:
        """Return the parts of an export, which hold every tensor of the parent once, in its order.

        `module` is of `build`. Parameters are named as `module.named_parameters()` names them, so a
        tied one has one name.
        """
        name_of = {id(tensor): name for name, tensor in _tensors(module, tied=False).items()}
        own = _tensors(module)
        parameters: dict[str, dict[str, None]] = {}  # by the first file tensor of a unit
        files: dict[str, list[str]] = {}
        unit_of: dict[str, str] = {}
        for conversion in self._conversions:
            names = [name_of[id(own[self._own_name(n)])] for n in conversion.targets]
            unit = next((unit_of[n] for n in names if n in unit_of), conversion.files[0])
            parameters.setdefault(unit, {}).update(dict.fromkeys(names))
            files.setdefault(unit, []).extend(conversion.files)
            unit_of |= dict.fromkeys(names, unit)
        for name in self._copied:
            parameters[name], files[name] = {}, [name]
        units = [
            ExportUnit(
                tuple(parameters[unit]),
                {name: (self._dtypes[name], self._shapes[name]) for name in files[unit]},
            )
            for unit in parameters
        ]
        order = {name: place for place, name in enumerate(self._shapes)}
        return sorted(units, key=lambda unit: min(order[name] for name in unit.tensors))

    @torch.no_grad()
    def export(
        self,
        module: torch.nn.Module,
        unit: ExportUnit,
        whole: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the files, tensor in its stored type) of a unit, on the CPU.

        `whole` returns the weights of a tensor of the module. The tensor may share memory with the
        module or with the parent's file: do not change it. Peak memory: the unit's tensors, and
        once more where experts are taken apart.
        """
        if not unit.parameters:
            for name in unit.tensors:
                yield name, self._read(name)
            return
        own = _tensors(module)
        chosen = {id(c): c for c in (self._conversion_of[name] for name in unit.tensors)}
        for conversion in chosen.values():
            made = conversion.save(
                lambda name: whole(own[self._own_name(name)]).cpu(), self._names, self._shapes
            )
            for name in conversion.files:
                yield name, made.pop(name).to(self._dtypes[name]).contiguous()

    # ---- the plan
    def _plan(self) -> None:
        text = self._text.build(torch.float32, "meta")
        whole = self._text.build_whole()
        self._names = text if whole is None else whole
        self._prefix, self._base = _place_of(text, self._names)
        own = text.state_dict()
        conversions, left = match_names(self._shapes, self._names)
        whole_own = self._names.state_dict()
        self._conversions, self._copied = [], list(left)
        for conversion in conversions:
            if self._own_name(conversion.targets[0]) not in own:  # of another part than the text
                self._copied += conversion.files
                continue
            try:
                self._conversions.append(
                    tried(conversion, self._names, whole_own, self._dtypes, self._shapes)
                )
            except BadInput as error:
                raise BadInput(f"{self._place(conversion.files[0])}: {error}") from error
        self._conversion_of = {name: c for c in self._conversions for name in c.files}
        self._refuse_unknown(text, left)
        loaded = {self._own_name(name): c for c in self._conversions for name in c.targets}
        self._tied = {}
        for target, source in text.all_tied_weights_keys.items():
            both = target in loaded and source in loaded
            if both and not self._same(loaded[target], loaded[source]):
                continue  # as transformers does: two different tensors are two
            if target in loaded or source in loaded:
                self._tied[target] = source
        missing = own.keys() - loaded.keys() - self._tied.keys() - set(self._tied.values())
        if missing:
            raise BadInput(
                f"{self.folder} lacks the weights of {_listed(missing)}, which its config.json"
                " implies: training would start them at random; download the checkpoint again, or"
                " correct the config",
                param="parent",
            )

    def _refuse_unknown(self, text: Any, left: dict[str, str]) -> None:
        """Raise BadInput for tensors inside of the text model that the config does not imply."""
        ignored = [re.compile(p) for p in text._keys_to_ignore_on_load_unexpected or ()]
        fields = self._raw | (self._raw.get("text_config") or {})
        further = fields.get("num_nextn_predict_layers") or fields.get("num_mtp_layers") or 0
        layers = {str(self._text.layers + n) for n in range(further)}
        within = {name for name, _ in text.named_modules()}
        unknown = []
        for name, target in left.items():
            steps = self._own_name(target).split(".")
            place = ".".join(steps[: 2 if steps[0] == text.base_model_prefix else 1])
            number = next((step for step in steps if step.isdigit()), "")
            known = place not in within or number in layers or _BUFFERS.search(name)
            if not known and not any(p.search(n) for p in ignored for n in (name, target)):
                unknown.append(name)
        if unknown:
            raise BadInput(
                f"{self._place(unknown[0])} has tensors that config.json does not imply, and that"
                f" training would leave out: {_listed(unknown)}; correct the config, or save the"
                " model without them",
                param="parent",
            )

    def _same(self, one: Conversion, other: Conversion) -> bool:
        names = [one.files[0], other.files[0]]
        if one.rule or other.rule or self._shapes[names[0]] != self._shapes[names[1]]:
            return False
        return torch.equal(*map(self._read, names))

    def _own_name(self, name: str) -> str:
        """Translate a name of the whole model into the text model's own."""
        return self._base + name[len(self._prefix) :] if name.startswith(self._prefix) else name

    def _show_way_back(self, conversion: Conversion, made: dict[str, torch.Tensor]) -> None:
        back = conversion.save(made.__getitem__, self._names, self._shapes)
        for name in conversion.files:
            if not torch.equal(back[name].to(self._dtypes[name]), self._read(name)):
                raise self._unusable(
                    name,
                    "does not come back from the module as it was, by transformers' own rules;"
                    " save the parent with save_pretrained, and train from that",
                )

    # ---- reading
    def _read(self, name: str) -> torch.Tensor:
        packed = self._packed.get(name)
        if packed is None:
            return self._read_stored(name)
        packing = {role: self._read_stored(part) for role, part in packed.names.items()}
        try:
            tensor = packed.unpack(packing)
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:
            shapes = ", ".join(f"{n} {list(self._stored[n].shape)}" for n in packed.names.values())
            raise self._unusable(
                packed.names[next(iter(packed.names))],
                f"cannot be dequantised as config.json says ({shapes}): {error}; download the"
                " checkpoint again",
            ) from error
        if tuple(tensor.shape) != packed.shape:
            raise self._unusable(name, "is not of the shape that its packed form implies")
        return tensor.to(DTYPE)

    def _read_stored(self, name: str) -> torch.Tensor:
        CLOCK.tick()
        file: Any = self._files[self._stored[name].file]
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def _finite(self, name: str) -> torch.Tensor:
        tensor = self._read(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise self._unusable(
                name,
                "has infinite numbers or NaN: a model with these computes nothing; take an earlier"
                " checkpoint of it",
            )
        return tensor

    def _unusable(self, name: str, why: str) -> BadInput:
        return BadInput(f"{self._place(name)}: {name!r} {why}", param="parent")

    def _place(self, name: str) -> Path:
        stored = self._packed[name].names.values() if name in self._packed else [name]
        return self.folder / self._stored[next(iter(stored))].file


def unquantised(raw: Any) -> Any:
    """Return a config without quantisation, whose types are those of dequantised tensors."""
    if not isinstance(raw, dict):
        return raw
    kept = {k: unquantised(v) for k, v in raw.items() if k != "quantization_config"}
    return {k: "bfloat16" if k in ("dtype", "torch_dtype") else v for k, v in kept.items()}


def _place_of(text: Any, whole: Any) -> tuple[str, str]:
    """Return the prefixes of the text model's names: in the whole model, and its own."""
    if type(text) is type(whole):
        return "", ""
    inner = text.base_model
    for name, part in whole.named_modules():
        if type(part) is type(text):
            return f"{name}.", ""
        if type(part) is type(inner):
            return f"{name}.", f"{text.base_model_prefix}."
    raise BadInput(
        f"transformers' {type(whole).__name__} holds no {type(inner).__name__}, so which of its"
        " weights are the text's is not known; give a directory of the text model alone",
        param="parent",
    )


def _tensors(module: torch.nn.Module, *, tied: bool = True) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; `tied`: a shared one under each of its names."""
    parameters = dict(module.named_parameters(remove_duplicate=not tied))
    return parameters | dict(module.named_buffers(remove_duplicate=not tied))


def _listed(names: Any) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more
