"""Passes: how a network of transformers computes several sequences at once, each as if alone.

    packed   one row of all sequences; attention within each (packed_attention.py), or transformers'
             own with positions that begin anew; recurrent mixers once per sequence, as
             they would carry their state from one sequence into the next
    rows     a row for each sequence, filled up on the right to the longest
    alone    one sequence after the other

Few families are right with all of these. `choose_packing` therefore tries them on three sequences
when a model is loaded, with its first layers of every kind. It takes the first in which each
sequence equals itself alone, and a change of one moves no other, within rounding. The rounding is
measured. Called by causal_model.py.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from cray_agents.errors import BadInput
from cray_agents.trainers.models.architecture import layer_values
from cray_agents.trainers.models.transformers_backend.packed_attention import (
    PACKED,
    PackedMask,
    packed,
    register,
)

Shape = Literal["packed", "rows", "alone"]
LENGTHS = (13, 29, 22)  # of the sequences that the test packs
LONGEST_WINDOW = 1024  # the test's second sequence is longer than windows up to this
_PLACE = re.compile("layer|idx|index|number")  # numbers of a layer's place
LEAK = 0.01  # of the largest logit: more is never rounding
FLOOR = 1e-5  # of the largest logit: less always is
NOISE = 10.0  # times the difference that padding alone makes
# whatever a family's code raises where it cannot compute a way of packing
REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


class MixerSplit:
    """The lengths of the packed sequences of the pass in progress. Empty: nothing is split."""

    def __init__(self) -> None:
        self.lengths: tuple[int, ...] = ()

    @contextmanager
    def of(self, lengths: Sequence[int]) -> Iterator[None]:
        """Split by these lengths within the context, and in its recomputation afterwards."""
        self.lengths = tuple(lengths)
        yield

    def split(self, module: torch.nn.Module) -> None:
        """Let a module see one sequence at a time from now on, whoever split it before."""
        unsplit(module)
        whole = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if len(self.lengths) < 2:
                return whole(*args, **kwargs)
            return self._run(whole, args, kwargs)

        module.forward = forward

    def _run(self, whole: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tokens, results, start = sum(self.lengths), [], 0
        for number, length in enumerate(self.lengths):
            place = (number, slice(start, start + length), tokens)
            results.append(whole(*_cut(args, *place), **_cut(kwargs, *place)))
            start += length
        return _join(results, self.lengths)


def unsplit(module: torch.nn.Module) -> None:
    """Let a module see all sequences at once again."""
    module.__dict__.pop("forward", None)


def _cut(value: Any, number: int, place: slice, tokens: int) -> Any:
    """Cut one sequence out of all tensors [1, tokens, ...] of a module's arguments."""
    if isinstance(value, torch.Tensor):
        return value[:, place] if value.ndim > 1 and value.shape[:2] == (1, tokens) else value
    if isinstance(value, PackedMask):
        return value.of(number)
    if isinstance(value, tuple | list):
        return type(value)(_cut(each, number, place, tokens) for each in value)
    if isinstance(value, dict):
        return {key: _cut(each, number, place, tokens) for key, each in value.items()}
    return value


def _join(results: list[Any], lengths: tuple[int, ...]) -> Any:
    """Put the results of one module for all sequences together: [1, tokens, ...]."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        of_tokens = all(
            one.ndim > 1 and one.shape[1] == length
            for one, length in zip(results, lengths, strict=True)
        )
        return torch.cat(results, 1) if of_tokens else results[-1]
    if type(first) is tuple:
        return tuple(_join(list(each), lengths) for each in zip(*results, strict=True))
    return results[-1]


@dataclass(frozen=True)
class Packing:
    """A way to compute several sequences at once. `split`: modules that run once per sequence.

    `difference` is the largest to each sequence alone in the test, as a share of the largest logit;
    `rejected` says what was tried before, and why it was not taken.
    """

    shape: Shape
    attention: str | None  # None: the network has an attention that cannot be chosen
    split: tuple[str, ...] = ()
    difference: float = 0.0
    rejected: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The packing in a line."""
        if self.shape == "alone":
            return "one sequence after the other"
        if self.shape == "rows":
            return "rows padded on the right"
        own = "attention within each sequence" if self.attention == PACKED else "one mask for all"
        mixers = ", mixers once per sequence" if self.split else ""
        return f"packed: {own}{mixers}"


class Passes:
    """Forward passes of a network over several sequences, by a Packing that can be changed."""

    def __init__(self, network: Any) -> None:
        register()
        self.network, self._mixers = network, MixerSplit()
        self._accepts = frozenset(inspect.signature(network.forward).parameters)
        self._apart = "logits_to_keep" in self._accepts  # the head can be called alone
        self._usual = _attention_of(network)
        self.packing = Packing("alone", self._usual)

    def use(self, packing: Packing) -> None:
        """Compute by a packing from now on. Raises BadInput if the network cannot."""
        for name in self.packing.split:
            unsplit(self.network.get_submodule(name))
        for name in packing.split:
            self._mixers.split(self.network.get_submodule(name))
        self.packing = packing
        if packing.attention is not None and _attention_of(self.network) != packing.attention:
            self.network.set_attn_implementation(packing.attention)
            if _attention_of(self.network) != packing.attention:
                raise BadInput(f"{type(self.network).__name__} has only its own attention")

    def logits(
        self,
        tokens: torch.Tensor,
        lengths: Sequence[int],
        rows: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of `rows` [n] of the tokens [sum(lengths)].

        `rows` None: of all tokens. `positions` [tokens] are each token's in its sequence.
        """
        if self.packing.shape == "packed":
            if positions is None:
                positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths])
            own = self.packing.attention == PACKED
            with packed(lengths), self._mixers.of(lengths):
                # with a mask of ones transformers does not read its masks from positions
                mask = torch.ones_like(tokens)[None] if own else None
                return self._call(tokens[None], positions[None], mask, rows)[0]
        whole = self._in_rows(tokens, lengths)
        return whole if rows is None else whole[rows]

    def states(
        self,
        tokens: torch.Tensor,
        lengths: Sequence[int],
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return what `head` makes the same logits of, [rows, hidden]; None if it cannot."""
        children = self.network._modules
        self._body = next(
            (n for n in (self.network.base_model_prefix, "model") if n in children), ""
        )
        if self.packing.shape != "packed" or not self._apart or not self._body:
            return None
        outputs: list[Any] = []
        hook = children[self._body].register_forward_hook(
            lambda _, __, output: outputs.append(output)
        )
        try:
            self.logits(tokens, lengths, rows[:1], positions)
        finally:
            hook.remove()
        if not outputs:  # a family's head calls a part of its body
            self._apart = False
            return None
        self._output = type(outputs[0])
        states: torch.Tensor = outputs[0].last_hidden_state
        return states[0, rows]

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits of `states`, by the network's own forward around them."""
        children, name = self.network._modules, self._body
        body = children[name]
        children[name] = _GivenBody(body, self._output(last_hidden_state=states[None]))
        try:
            logits: torch.Tensor = self._call(
                torch.zeros(1, len(states), dtype=torch.int64, device=states.device),
                torch.arange(len(states), device=states.device)[None],
                None,
                None,
            )
        finally:
            children[name] = body
        return logits[0]

    def _in_rows(self, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return the logits of all tokens, computed in rows of no more tokens than there are."""
        sequences = torch.split(tokens, list(lengths))
        order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        logits_of: dict[int, torch.Tensor] = {}
        while order:
            longest = lengths[order[0]]
            most = len(tokens) // longest if self.packing.shape == "rows" else 1
            batch, order = order[:most], order[most:]
            row = torch.nn.utils.rnn.pad_sequence([sequences[i] for i in batch], batch_first=True)
            places = torch.arange(longest, device=tokens.device).expand(len(batch), -1)
            logits = self._call(row, places, None, None)
            logits_of |= {i: logits[n, : lengths[i]] for n, i in enumerate(batch)}
        return torch.cat([logits_of[i] for i in range(len(lengths))])

    def _call(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Call the network's own forward, whose code scales and bounds the logits."""
        given = {"position_ids": positions, "attention_mask": mask, "use_cache": False}
        options = {name: value for name, value in given.items() if name in self._accepts}
        if rows is not None and "logits_to_keep" in self._accepts:
            logits: torch.Tensor = self.network(tokens, logits_to_keep=rows, **options).logits
            return logits
        logits = self.network(tokens, **options).logits
        return logits if rows is None else logits[:, rows]


class _GivenBody(torch.nn.Module):
    """A network without its head, whose output is given; it has the settings of the real one."""

    def __init__(self, body: Any, output: Any) -> None:
        super().__init__()
        self.__dict__["body"], self.output = body, output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the output."""
        return self.output


def _attention_of(network: Any) -> Any:
    return getattr(network.config, "_attn_implementation", None)


# ---- the test
@torch.no_grad()
def choose_packing(network: Any, vocabulary: int) -> Packing:
    """Return the first packing that is right for a network of float32 weights on the CPU.

    Raises BadInput if not even a sequence alone gives finite logits.
    """
    passes = Passes(network)
    tokens, changed, lengths = _sequences(network.config, vocabulary)
    alone = _usable(passes, ["eager", "sdpa"], "alone")
    if alone is None:
        raise BadInput(f"transformers cannot compute its {type(network).__name__} here")
    truth = passes.logits(tokens, lengths)
    scale = float(truth.abs().max())
    if not 0 < scale < float("inf"):
        raise BadInput(
            f"{type(network).__name__} gives logits of {scale:g}: look at the parent's weights"
        )
    limit, rejected = FLOOR, []
    padded = None
    for attention in ("sdpa", "eager", alone.attention):
        padded = _usable(passes, [attention], "rows")
        if padded is not None:
            noise = _difference(passes, tokens, changed, lengths, truth) / scale
            if noise < LEAK:
                limit = max(limit, NOISE * noise)
                padded = Packing("rows", padded.attention, (), noise)
                break
            rejected.append(f"{padded.text}: differs by {noise:.1e}")
            padded = None
    mixers = _mixers(passes, tokens, lengths)
    chunked = any(layer_values(network.config, "attention_chunk_size"))
    for attention in (PACKED, "sdpa", "eager", None):
        if attention != PACKED and chunked:
            continue  # transformers cuts chunks at the row's places, and a test has few tokens
        candidate = Packing("packed", attention or passes._usual, mixers)
        try:
            passes.use(candidate)
            difference = _difference(passes, tokens, changed, lengths, truth) / scale
        except (BadInput, *REFUSALS) as error:
            rejected.append(f"{candidate.text}: {type(error).__name__}: {str(error)[:100]}")
            continue
        if difference <= limit:
            return Packing("packed", candidate.attention, mixers, difference, rejected)
        rejected.append(f"{candidate.text}: differs by {difference:.1e}, {limit:.1e} is rounding")
    passes.use(Packing("alone", alone.attention))  # leaves no module split
    if padded is None:
        return Packing("alone", alone.attention, (), 0.0, rejected)
    return Packing("rows", padded.attention, (), padded.difference, rejected)


def _sequences(config: Any, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return tokens of the test's sequences, the same with another second one, and lengths."""
    lengths = list(LENGTHS)
    fields = ("sliding_window", "attention_chunk_size")
    windows = [size for name in fields for size in layer_values(config, name)]
    sizes = [one for one in windows if isinstance(one, int) and one <= LONGEST_WINDOW]
    lengths[1] = max([LENGTHS[1], *(size + 5 for size in sizes)])
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (sum(lengths),), generator=random)
    changed = tokens.clone()
    second = slice(lengths[0], lengths[0] + lengths[1])
    changed[second] = torch.randint(vocabulary, (lengths[1],), generator=random)
    return tokens, changed, lengths


def _usable(passes: Passes, attentions: Sequence[Any], shape: Shape) -> Packing | None:
    """Use the first attention with which a short pass succeeds; return None if there is none."""
    for attention in (*attentions, None):
        packing = Packing(shape, attention or passes._usual)
        try:
            passes.use(packing)
            passes.logits(torch.arange(4), [3, 1])
        except (BadInput, *REFUSALS):
            continue
        return packing
    return None


def _difference(
    passes: Passes,
    tokens: torch.Tensor,
    changed: torch.Tensor,
    lengths: Sequence[int],
    truth: torch.Tensor,
) -> float:
    """Return the largest difference to each sequence alone, or that a neighbour's change makes."""
    together = passes.logits(tokens, lengths)
    neighbours = passes.logits(changed, lengths)
    second = slice(lengths[0], lengths[0] + lengths[1])
    moved = (neighbours - together).abs()
    moved[second] = 0
    worst = torch.maximum((together - truth).abs(), moved).detach()
    return float(worst.nan_to_num(torch.inf).max())


def _mixers(passes: Passes, tokens: torch.Tensor, lengths: Sequence[int]) -> tuple[str, ...]:
    """Return the modules of the layers through which one packed sequence reaches another."""
    seen: dict[tuple[type, str], Any] = {}
    places: dict[tuple[type, str], list[str]] = {}
    hooks = []
    for name, kind, module in layer_modules(passes.network):
        places.setdefault(kind, []).append(name)

        def note(module: Any, args: Any, kwargs: Any, kind: Any = kind) -> None:
            seen.setdefault(kind, (module, args, kwargs))

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    for attention in (PACKED, "eager", None):
        seen.clear()
        if _runs(passes, attention, tokens, lengths):
            break
    for hook in hooks:
        hook.remove()
    with packed(lengths):
        leaks = [kind for kind, (part, args, kwargs) in seen.items()
                 if _leaks(part, args, kwargs, lengths)]  # fmt: skip
    return tuple(sorted(name for kind in leaks for name in places[kind]))


def _runs(passes: Passes, attention: Any, tokens: torch.Tensor, lengths: Sequence[int]) -> bool:
    try:
        passes.use(Packing("packed", attention or passes._usual))
        passes.logits(tokens, lengths)
    except (BadInput, *REFUSALS):
        return False
    return True


def layer_modules(network: Any) -> Iterator[tuple[str, tuple[type, str], Any]]:
    """Yield the name, kind and module of each part of the network's layers."""
    if (layers := decoder_layers(network)) is None:
        return
    for number, layer in enumerate(layers[1]):
        for name, part in layer.named_children():
            yield f"{layers[0]}.{number}.{name}", (type(part), name), part


def decoder_layers(network: Any) -> tuple[str, torch.nn.ModuleList] | None:
    """Return the name and the list of a network's layers; None if it has no such list."""
    lists = [(n, m) for n, m in network.named_modules() if isinstance(m, torch.nn.ModuleList)]
    count = getattr(network.config, "num_hidden_layers", None)
    return next(((n, m) for n, m in lists if len(m) == count or isinstance(m, _Cut)), None)


class _Cut(torch.nn.ModuleList):
    """The first of a network's layers. Its config counts them all: its own code reads that."""


def cut_layers(network: Any) -> None:
    """Keep a network's first layers, at least two, up to the first one of the last new kind."""
    if (listed := decoder_layers(network)) is None:
        return
    name, layers = listed
    types = list(getattr(network.config, "layer_types", None) or [None] * len(layers))
    kinds = [(kind, *_traits(layer)) for kind, layer in zip(types, layers, strict=False)]
    kept = max(2, 1 + max(kinds.index(kind) for kind in kinds))
    owner, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(owner), leaf, _Cut(layers[:kept]))


def _traits(layer: torch.nn.Module) -> Iterator[Any]:
    """Yield what distinguishes a kind of layer: its modules, their settings, and shapes."""
    for name, part in layer.named_modules():
        settings = {k: v for k, v in vars(part).items() if isinstance(v, bool | str | float | int)}
        place = {k for k, v in settings.items() if type(v) is int and _PLACE.search(k)}
        yield name, type(part), tuple(sorted((k, v) for k, v in settings.items() if k not in place))
    yield tuple((name, tuple(one.shape)) for name, one in layer.named_parameters())


def _leaks(module: Any, args: Any, kwargs: Any, lengths: Sequence[int]) -> bool:
    """Return True if a change of the first sequence's states changes what later ones get."""
    first, tokens = lengths[0], sum(lengths)
    changed = False

    def change(value: Any) -> Any:
        nonlocal changed
        is_states = isinstance(value, torch.Tensor) and value.is_floating_point()
        if changed or not is_states or value.ndim != 3 or value.shape[:2] != (1, tokens):
            return value
        changed, other = True, value.clone()
        other[:, :first] = value[:, :first].flip(1) * 1.5
        return other

    try:
        before = _tensor(module(*args, **kwargs))
        new_args = [change(each) for each in args]
        after = _tensor(module(*new_args, **{k: change(v) for k, v in kwargs.items()}))
    except REFUSALS:
        return False
    if before is None or after is None or before.shape[:2] != (1, tokens):
        return False
    moved = (after - before)[:, first:].abs().max()
    return bool(moved > LEAK**2 * before.abs().max())


def _tensor(value: Any) -> torch.Tensor | None:
    first = value[0] if isinstance(value, tuple) else value
    return first if isinstance(first, torch.Tensor) else None


def untrained(
    network: Any, loss: Callable[[], torch.Tensor], names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return which of the names never get a gradient, and parameters that a batch may leave out.

    `loss` computes one; gradients are dropped as they come. A name counts as never reached if none
    like it in other layers, or of other experts, was reached either: so some layers speak for all.
    """
    reached: set[str] = set()
    hooks = []
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:

            def note(parameter: torch.Tensor, name: str = name) -> None:
                reached.add(name)
                parameter.grad = None

            hooks.append(parameter.register_post_accumulate_grad_hook(note))
    with torch.enable_grad():
        loss().backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    known = {_pattern(name) for name in reached}
    missing = [n for n, p in network.named_parameters() if p.requires_grad and n not in reached]
    return (
        [name for name in names if _pattern(name) not in known],
        [name for name in missing if _pattern(name) in known],
    )


def _pattern(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))
