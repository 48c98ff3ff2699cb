"""LoRA (arXiv 2106.09685): W x + alpha / rank * B A x, where only A and B are trained.

backends.py calls `add_lora` after loading the parent's weights. The linears are
Megatron's column and row parallel ones, torch's or Transformer Engine's. Matrices that Megatron
keeps as one (q, k and v; gate and up) share one A. Tensor ranks split an adapter like its linear:

    column (qkv, fc1)   A [rank, in] whole on every rank; B [out, rank] split like the output
    row (proj, fc2)     A [rank, in] split like the input; B [out, rank] whole on every rank

Read next: checkpointing/peft_adapter.py, which writes the adapters in PEFT's layout.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)

from cray_agents.errors import BadInput
from cray_agents.records import digest
from cray_agents.runtime.registry.adapters import SavedAdapter
from cray_agents.runtime.registry.checkpoints import base_of, read_manifest
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.transformers_backend.linear_adapter import (
    MIXER,
    NAMES,
    LinearAdapter,
)
from cray_agents.trainers.models.weights import Origin, pack
from cray_agents.training_jobs import JobSpec, Lora

Target = Literal["qkv", "proj", "fc1", "fc2"]

_PLACES: dict[Target, tuple[str, str]] = {
    "qkv": ("self_attention", "linear_qkv"),
    "proj": ("self_attention", "linear_proj"),
    "fc1": ("mlp", "linear_fc1"),
    "fc2": ("mlp", "linear_fc2"),
}
_COLUMN = ("qkv", "fc1")


class LoraLinear(torch.nn.Module):
    """A frozen parallel linear `base` with its adapter: `a` and `b`, this rank's share.

    `merged` returns the equivalent single weight of an `a` and a `b`. `place` is the linear's layer
    and name.
    """

    def __init__(
        self, base: Any, target: Target, config: Any, lora: Lora, place: tuple[int, str]
    ) -> None:
        from megatron.core import parallel_state as ps

        super().__init__()
        self.base, self.place = base, place
        self.column = target in _COLUMN
        self.gated = target == "fc1" and config.gated_linear_unit
        self.sequence_parallel = config.sequence_parallel
        self.norm_eps = config.layernorm_epsilon
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        self.group = ps.get_tensor_model_parallel_group()
        out, inner = base.weight.shape
        self.a = torch.nn.Parameter(base.weight.new_empty(lora.rank, inner))
        self.b = torch.nn.Parameter(base.weight.new_empty(out, lora.rank))
        self._mark()

    def _mark(self) -> None:
        """Mark for Megatron which gradients count once per tensor rank, and which are summed."""
        whole, split = (self.a, self.b) if self.column else (self.b, self.a)
        split.tensor_model_parallel = True  # type: ignore[attr-defined]
        split.partition_dim = 0 if self.column else 1  # type: ignore[attr-defined]
        split.partition_stride = 1  # type: ignore[attr-defined]
        # with sequence parallelism each rank sees only its share of the tokens
        whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Draw A from PEFT's distribution, the same under every layout; set B to zero."""
        rank, size = self.group.rank(), self.group.size()
        ranks, inner = self.a.shape
        whole = torch.empty(ranks, inner if self.column else inner * size)
        own_seed = int(digest([seed, *self.place], 15), 16)
        random = torch.Generator().manual_seed(own_seed)
        torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=random)
        self.a.copy_(whole if self.column else whole.chunk(size, 1)[rank])
        self.b.zero_()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Map [tokens, batch, in] to ([tokens, batch, out], bias), each this rank's share."""
        from megatron.core.tensor_parallel import mappings

        out, bias = self.base(x, *args, **kwargs)
        hidden = F.linear(self._dropout(self._norm(x)), self.a)  # [tokens, batch, rank]
        if self.column and self.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden, group=self.group)
        elif self.column:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=self.group)
        elif self.sequence_parallel:
            hidden = mappings.reduce_scatter_to_sequence_parallel_region(hidden, group=self.group)
        else:
            hidden = mappings.reduce_from_tensor_model_parallel_region(hidden, group=self.group)
        return out + F.linear(hidden * self.scale, self.b), bias

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """Return the linear's input after the norm, which Transformer Engine fuses into it."""
        weight = getattr(self.base, "layer_norm_weight", None)
        return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, self.norm_eps)

    def _dropout(self, x: torch.Tensor) -> torch.Tensor:
        """Apply dropout; tensor ranks with the same input drop the same elements."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        if not (self.training and self.dropout):
            return x
        if self.column and not self.sequence_parallel:
            return F.dropout(x, self.dropout)
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)

    @torch.no_grad()
    def merged(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the weight [out, in] with an adapter added, this rank's share, in float32."""
        weight: torch.Tensor = self.base.weight
        return weight.float() + b.float() @ a.float() * self.scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Describe this rank's shards in the form of Megatron's distributed checkpoints."""
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"a": self.a, "b": self.b},
            prefix,
            {"b": 0} if self.column else {"a": 1},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        state |= self.base.sharded_state_dict(f"{prefix}base.", sharded_offsets, metadata)
        if self.gated:  # gate and up are separate on disk, so that any layout can load them
            singly = metadata.get("singleton_local_shards", False)
            for name in (f"{prefix}b", f"{prefix}base.weight"):
                state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets, singly)
        return state


def choose_targets(model: Architecture, lora: Lora) -> list[Target]:
    """Return the targets that get adapters: only the attention's in a mixture of experts.

    Raises BadInput if there are none, or if the rank is larger than a matrix.
    """
    heads, groups = model.heads * model.head_size, model.kv_heads * model.head_size
    sizes: dict[Target, tuple[int, int]] = {
        "qkv": (heads + 2 * groups, model.hidden),
        "proj": (model.hidden, heads),
    }
    if not model.experts:
        sizes |= {"fc1": (2 * model.ffn, model.hidden), "fc2": (model.hidden, model.ffn)}
    targets = [target for target in sizes if target in lora.targets]
    if not targets:
        raise BadInput(
            f"lora targets {lora.targets}, but the experts of a {model.kind} model get no adapters:"
            " add 'qkv' or 'proj'",
            param="lora",
        )
    for target in targets:
        if lora.rank > min(sizes[target]):
            raise BadInput(
                f"lora has rank {lora.rank}, and {target} is a matrix of {sizes[target]}: the rank"
                f" can be {min(sizes[target])} at most",
                param="lora",
            )
    return targets


def continued_base(parent: Path, lora: Lora | None) -> Path | None:
    """Return the base of a parent whose adapters a job of this `lora` goes on with.

    None: the job begins with whole weights, those of an adapter version merged. Raises NotFound,
    Corrupt.
    """
    if lora is None or (base := base_of(parent)) is None:
        return None
    saved, targets = SavedAdapter(parent), {MIXER, *(n for one in lora.targets for n in NAMES[one])}
    known = saved.modules <= {name.rpartition(".")[2] for name in targets}
    return base if known and (saved.rank, saved.alpha) == (lora.rank, lora.alpha) else None


@dataclass(frozen=True)
class AdapterBase:
    """The weights that adapters are over: their path, as a JobSpec names it, and their hash."""

    path: str
    sha256: str

    @classmethod
    def of_job(cls, spec: JobSpec, parent: Path) -> "AdapterBase | None":
        """Return what a job's adapters begin over; None: weights of no file, or it has no adapters.

        `parent`: the directory of `spec.parent`. Weights of no file are random, or an adapter
        version's, merged. If the job goes on with that version's adapters, its base is returned.
        Raises NotFound, Corrupt.
        """
        hyper = spec.hyperparameters
        if hyper.lora is None or hyper.init != "parent":
            return None
        if (base := continued_base(parent, hyper.lora)) is None:
            merged = base_of(parent) is not None
            return None if merged else cls(spec.parent, spec.parent_sha256)
        path = str(Path(spec.parent).with_name(base.name))
        return cls(path, read_manifest(base).weights_sha256)


def add_lora(chunks: list[Any], model: Architecture, lora: Lora, seed: int) -> None:
    """Freeze a model's chunks and add adapters to its linears. Raises BadInput as `choose_targets`.

    Names of adapters' parameters end in `.a` and `.b`; the linear's `weight` becomes `base.weight`.
    """
    targets = choose_targets(model, lora)
    for chunk in chunks:
        chunk.requires_grad_(False)
        for layer in chunk.decoder.layers:
            for target in targets:
                place, name = _PLACES[target]
                owner = getattr(layer, place)
                linear = LoraLinear(
                    getattr(owner, name), target, chunk.config, lora, (layer.layer_number, name)
                )
                linear.start(seed)
                setattr(owner, name, linear)
        if chunk.pre_process and chunk.config.recompute_granularity:
            # without a gradient of its input, a recomputed block would compute none for its weights
            chunk.embedding.register_forward_hook(lambda _, __, out: out.requires_grad_())


@torch.no_grad()
def load_adapters(chunks: list[Any], model: Architecture, parent: Path) -> None:
    """Fill this rank's adapters with an adapter version's; a layer without one keeps its own.

    Raises Corrupt, and BadInput for adapters that were not made by this module.
    """
    saved = SavedAdapter(parent)
    for chunk, name, adapter in adapters(chunks):
        if isinstance(adapter, LoraLinear):
            origin = Origin(chunk, f"{name}.weight", model)
            layers, how = [one.removesuffix(".weight") for one in origin.names], origin.how
        else:
            layers, how = [adapter.saved_as.tensors], "whole"
        pairs = [pair for pair in map(saved.pair, layers) if pair is not None]
        if not pairs:
            continue
        a, bs = pairs[0][0], [b for _, b in pairs]
        if len(pairs) < len(layers) or any(not torch.equal(a, other) for other, _ in pairs):
            raise BadInput(f"{parent}: the adapters of {', '.join(layers)} do not share one A")
        if isinstance(adapter, LoraLinear) and (size := adapter.group.size()) > 1:
            rank = adapter.group.rank()
            a = a if adapter.column else a.chunk(size, 1)[rank]
            bs = [b.chunk(size)[rank] for b in bs] if adapter.column else bs
        adapter.a.copy_(a)
        adapter.b.copy_(pack(how, bs, model))


def adapters(chunks: list[Any]) -> Iterator[tuple[Any, str, LoraLinear | LinearAdapter]]:
    """Yield (chunk, name, adapter) of every adapted linear of this rank, in the model's order."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, LoraLinear | LinearAdapter):
                yield chunk, name, module


Adapted = dict[torch.Tensor, LoraLinear | LinearAdapter]  # by the weight under the adapter


def merged_weight(adapter: LoraLinear | LinearAdapter) -> torch.Tensor:
    """Return the weight with its adapter added, in the type of the weight."""
    return adapter.merged(adapter.a, adapter.b).to(adapter.base.weight.dtype)


@contextmanager
def without_adapters(chunks: list[Any]) -> Iterator[Adapted]:
    """Put plain linears in the adapters' places within the context; their weights stay."""
    taken = []
    for chunk, name, adapter in list(adapters(chunks)):
        path, _, last = name.rpartition(".")
        taken.append((chunk.get_submodule(path), last, adapter))
        setattr(*taken[-1][:2], adapter.base)
    try:
        yield {adapter.base.weight: adapter for _, _, adapter in taken}
    finally:
        for owner, last, adapter in taken:
            setattr(owner, last, adapter)
