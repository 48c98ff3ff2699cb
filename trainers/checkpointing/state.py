"""Training state of a rank: its slices of the weights, and the ranges that its optimizer owns.

Megatron knows the position of this rank's tensor within every whole weight. Its distributed
optimizer (ZeRO-1, arXiv 1910.02054) knows the flat range of it that this rank updates, and so does
its FSDP (ZeRO-3). Both are read here without communication. Frozen weights (under LoRA) are left
out: they equal the parent's. Called by save.py, which writes the state, and resume.py, which reads
it back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from cray_agents.errors import JobError
from cray_agents.trainers.training.train_step import RankTraining

NUMBERS = ("param", "exp_avg", "exp_avg_sq")  # of each element, in float32: weight and moments


@dataclass(frozen=True)
class TensorSlice:
    """A block of a weight: `shape` at `offset` in the whole tensor. `key` is layout-independent."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class TensorRange:
    """A slice's place in a flattened local parameter: elements `begin` .. `begin + size`."""

    slice_: TensorSlice
    begin: int
    padded: bool  # whole[0] depends on the layout: a vocabulary, filled up for tensor ranks
    copy: bool  # another tensor or pipeline rank has the same


@dataclass(frozen=True)
class OwnedRange:
    """Elements `first` .. `first + count` of a slice, owned by this rank's optimizer.

    `tensors`: a view for each of NUMBERS, [count] float32, which training goes on changing.
    `weights`: a view of what the model computes with in their place, of `parameter`.
    """

    range_: TensorRange
    first: int
    tensors: tuple[torch.Tensor, ...]
    parameter: torch.Tensor
    weights: torch.Tensor

    @property
    def count(self) -> int:
        """The number of elements."""
        return len(self.tensors[0])


def local_ranges(training: RankTraining) -> dict[torch.Tensor, list[TensorRange]]:
    """Map each trainable parameter of this rank to its ranges: two for SwiGLU's two halves."""
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    metadata = {
        "singleton_local_shards": True,  # each layer and expert under its own name
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
    }
    ranges: dict[torch.Tensor, list[TensorRange]] = {}
    if training.model.backend == "transformers":  # data ranks alone divide them
        for name, parameter in training.chunks[0].network.named_parameters():
            if parameter.requires_grad:
                shape = tuple(parameter.shape) or (1,)
                whole = TensorSlice(name, shape, (0,) * len(shape), shape)
                ranges[parameter] = [TensorRange(whole, 0, padded=False, copy=False)]
        return ranges
    for chunk in training.chunks:
        for place in chunk.sharded_state_dict(metadata=metadata).values():
            parameter = getattr(place, "data", None)
            if not isinstance(parameter, torch.nn.Parameter) or not parameter.requires_grad:
                continue
            tensors = place.build() if isinstance(place, ShardedTensorFactory) else [place]
            if not all(tensor.data.is_contiguous() for tensor in tensors):
                raise JobError(f"{place.key}: its shards are no stretches of a flat tensor")
            ranges[parameter] = [_range_of(parameter, tensor) for tensor in tensors]
    return ranges


def _range_of(parameter: torch.Tensor, place: Any) -> TensorRange:
    slice_ = TensorSlice(
        key=place.key,
        whole=tuple(place.global_shape),
        offset=tuple(place.global_offset),
        shape=(1,) * place.prepend_axis_num + tuple(place.local_shape),
    )
    begin = (place.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
    return TensorRange(slice_, begin, place.allow_shape_mismatch, copy=any(place.replica_id[:-1]))


def owned_ranges(
    training: RankTraining, ranges: dict[torch.Tensor, list[TensorRange]]
) -> Iterator[OwnedRange]:
    """Yield the ranges that this rank's optimizer owns; in an instance ranks do not overlap."""
    if (shards := training.shards) is not None:
        moments = training.optimizer.optimizer.state
        for parameter, (range_,) in ranges.items():
            shard = shards.of(parameter)
            if shard is not None and len(shard.main):
                state = moments[shard.optimized]
                rest = (state[name].to_local().view(-1) for name in NUMBERS[1:])
                numbers = (shard.main, *rest)
                yield OwnedRange(range_, shard.begin, numbers, parameter, shard.weights)
        return
    for optimizer in optimizers(training):
        for parameter, start, stop in _optimizer_ranges(optimizer):
            state = optimizer._get_main_param_and_optimizer_states(parameter)
            for range_ in ranges[parameter]:
                low = max(start, range_.begin)
                high = min(stop, range_.begin + range_.slice_.size)
                if low < high:
                    views = tuple(
                        state[name].detach().view(-1)[low - start : high - start]
                        for name in NUMBERS
                    )
                    weights = parameter.detach().view(-1)[low:high]
                    yield OwnedRange(range_, low - range_.begin, views, parameter, weights)


def optimizers(training: RankTraining) -> list[Any]:
    """Return Megatron's distributed optimizers: experts have their own; a rank can have none."""
    chained = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
    return [one for one in chained if not one.is_stub_optimizer]


def _optimizer_ranges(optimizer: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield (parameter, start, stop) of the flat ranges that this rank updates."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


# ---- Adam's count of steps, with which it corrects the moments' bias
def adam_steps(training: RankTraining) -> int:
    """Return the optimizer's count of steps; an inherited optimizer does not start at 0."""
    for optimizer in optimizers(training):
        adam = optimizer.optimizer
        if isinstance(adam, torch.optim.Adam):
            counts = [state["step"] for state in adam.state.values()]
            return int(torch.stack(counts).max()) if counts else 0  # one wait for a GPU
        return max(int(group.get("step", 0)) for group in adam.param_groups)
    return 0


def allocate_moments(training: RankTraining, steps: int) -> None:
    """Give Adam moments of zero and a count of steps, which it would else create at its first step.

    torch keeps the count with each parameter, Transformer Engine and Apex with each group. The
    fused kernel of torch reads it where the parameter is, the others on the host.
    """
    for optimizer in optimizers(training):
        adam = optimizer.optimizer
        is_torch = isinstance(adam, torch.optim.Adam)
        for group in adam.param_groups:
            if not is_torch:
                group["step"] = steps
            for parameter in group["params"]:
                state = adam.state[parameter]
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                if is_torch:
                    place = parameter.device if group["fused"] else None
                    state["step"] = torch.tensor(float(steps), device=place)
