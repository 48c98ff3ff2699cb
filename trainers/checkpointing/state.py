"""What training changes, on this rank: boxes of weights, and the stretches it keeps moments of.

Megatron knows of every weight where this rank's tensor lies in the whole one, and its distributed
optimizer (ZeRO-1, arXiv 1910.02054) which flat stretch of that tensor this rank updates. Both are
read here, and nothing of it is communicated. Frozen weights (under LoRA) are not among it: they are
the parent's. Called by saving.py, which writes it, and resume.py, which reads it back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from cray_agents.errors import JobError
from cray_agents.trainers.training.train_step import Training

NUMBERS = ("param", "exp_avg", "exp_avg_sq")  # of each element, in float32: weight and moments


@dataclass(frozen=True)
class TensorSlice:
    """A block of a weight: `shape` at `offset` in a whole tensor, whatever the layout calls it."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class TensorRange:
    """A box that is the elements `begin` .. `begin + box.size` of a flattened local parameter."""

    box: TensorSlice
    begin: int
    padded: bool  # whole[0] depends on the layout: a vocabulary, filled up for tensor ranks
    copy: bool  # another tensor or pipeline rank has the same


@dataclass(frozen=True)
class OwnedRange:
    """What this rank's optimizer owns of a box: its elements `first` .. `first + count`.

    `tensors`: a view for each of NUMBERS, [n] float32, which training goes on changing.
    """

    part: TensorRange
    first: int
    tensors: tuple[torch.Tensor, ...]

    @property
    def count(self) -> int:
        """How many elements: n."""
        return len(self.tensors[0])


def parts_of(training: Training) -> dict[torch.Tensor, list[TensorRange]]:
    """Where each trainable parameter of this rank lies; SwiGLU's two halves lie apart."""
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    metadata = {
        "singleton_local_shards": True,  # each layer and expert under its own name
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
    }
    found: dict[torch.Tensor, list[TensorRange]] = {}
    for chunk in training.inner:
        for place in chunk.sharded_state_dict(metadata=metadata).values():
            parameter = getattr(place, "data", None)
            if not isinstance(parameter, torch.nn.Parameter) or not parameter.requires_grad:
                continue
            tensors = place.build() if isinstance(place, ShardedTensorFactory) else [place]
            if not all(tensor.data.is_contiguous() for tensor in tensors):
                raise JobError(f"{place.key}: its shards are no stretches of a flat tensor")
            found[parameter] = [_part(parameter, tensor) for tensor in tensors]
    return found


def _part(parameter: torch.Tensor, place: Any) -> TensorRange:
    box = TensorSlice(
        key=place.key,
        whole=tuple(place.global_shape),
        offset=tuple(place.global_offset),
        shape=(1,) * place.prepend_axis_num + tuple(place.local_shape),
    )
    begin = (place.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
    return TensorRange(box, begin, place.allow_shape_mismatch, copy=any(place.replica_id[:-1]))


def owned(training: Training, parts: dict[torch.Tensor, list[TensorRange]]) -> Iterator[OwnedRange]:
    """What this rank's optimizer owns, of which no other data rank has anything."""
    for optimizer in optimizers(training):
        for parameter, start, stop in _stretches(optimizer):
            state = optimizer._get_main_param_and_optimizer_states(parameter)
            for part in parts[parameter]:
                low = max(start, part.begin)
                high = min(stop, part.begin + part.box.size)
                if low < high:
                    views = tuple(
                        state[name].detach().view(-1)[low - start : high - start]
                        for name in NUMBERS
                    )
                    yield OwnedRange(part, low - part.begin, views)


def optimizers(training: Training) -> list[Any]:
    """Megatron's distributed optimizers: experts have one of their own; a rank can have none."""
    chained = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
    return [one for one in chained if not one.is_stub_optimizer]


def _stretches(optimizer: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


# ---- how often the moments were updated: Adam corrects their bias by it
def adam_steps(training: Training) -> int:
    """The optimizer's count of steps, which an inherited optimizer does not begin at 0."""
    for optimizer in optimizers(training):
        adam = optimizer.optimizer
        if isinstance(adam, torch.optim.Adam):
            return max((int(state["step"]) for state in adam.state.values()), default=0)
        return max(int(group.get("step", 0)) for group in adam.param_groups)
    return 0


def allocate_moments(training: Training, steps: int) -> None:
    """Give Adam, which fills its state at its first step, moments of zero and a count of steps.

    torch's keeps the count with each parameter, Transformer Engine's and Apex's with each group.
    """
    for optimizer in optimizers(training):
        adam = optimizer.optimizer
        torchs = isinstance(adam, torch.optim.Adam)
        for group in adam.param_groups:
            if not torchs:
                group["step"] = steps
            for parameter in group["params"]:
                state = adam.state[parameter]
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                if torchs:
                    state["step"] = torch.tensor(float(steps))
