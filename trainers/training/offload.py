"""Offload: move a training's weights and optimizer to host memory and back, to the bit.

The storages of the tensors are emptied in place. So every view of a weight in Megatron's buffers,
and the optimizer's, stays a view of it, and nothing is built anew. Gradients are not kept: each
step begins by setting them to zero. What stays on the GPU is CUDA's context, the communicators, and
small tensors outside model and optimizer. The host memory is pinned, and kept for the next time.

session/resident.py calls this where replicas use the same GPUs by turns. On CPUs the same is done,
in ordinary memory. No GPU has run it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cray_agents.trainers.training.train_step import RankTraining


class Offload:
    """The storages of one training, and their copies in host memory.

    `nbytes`: all that was freed by the last `move_out`.
    """

    def __init__(self, training: RankTraining) -> None:
        self.training = training
        self._copies: dict[int, torch.Tensor] = {}  # by storage, kept while training goes on
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor | int]] = []
        self.nbytes = 0

    def move_out(self) -> None:
        """Copy weights and optimizer to host memory, and free theirs. Drops the gradients."""
        if self.training.shards is not None:
            self.training.shards.forget_gathered()
        storages = _movable(kept(self.training), self.training)
        dropped = _movable(gradients(self.training), self.training)
        self._copies = {key: copy for key, copy in self._copies.items() if key in storages}
        self._finish()  # other ranks' weights may be on their way here
        for key, storage in storages.items():
            dropped.pop(key, None)
            self._moved.append((storage, self._copy(key, storage)))
        self._moved += [(storage, storage.nbytes()) for storage in dropped.values()]
        self._finish()  # the copies are made before their sources are freed
        self.nbytes = sum(storage.nbytes() for storage, _ in self._moved)
        for storage, _ in self._moved:
            storage.resize_(0)

    def move_in(self) -> None:
        """Take the memory again, with weights and optimizer as they were and gradients of zero."""
        while self._moved:
            storage, source = self._moved.pop()
            if isinstance(source, int):
                storage.resize_(source)
                bytes_of(storage).zero_()
            else:
                storage.resize_(source.nbytes)
                bytes_of(storage).copy_(source, non_blocking=True)
        self._finish()

    def _finish(self) -> None:
        """Wait for all work of the GPU."""
        if not self.training.on_cpu:
            torch.cuda.synchronize()

    def _copy(self, key: int, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a host copy of a storage, in the memory of its last one if that fits."""
        copy = self._copies.get(key)
        if copy is None or copy.nbytes != storage.nbytes():
            pinned = not self.training.on_cpu
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self._copies[key] = copy
        return copy.copy_(bytes_of(storage), non_blocking=True)


def kept(training: RankTraining) -> Iterator[torch.Tensor]:
    """Yield the tensors of model and optimizer; some share a storage."""
    for chunk in training.chunks:
        if training.shards is None:
            yield from chunk.parameters()
        yield from chunk.buffers()
    yield from trained(training)


def trained(training: RankTraining) -> Iterator[torch.Tensor]:
    """Yield the trained weights, in Megatron's buffers and the optimizer's, and the moments.

    Equal builds give them in the same order, once moments are allocated.
    """
    if training.shards is not None:
        yield from training.shards.storages()
    for buffer in _ddp_buffers(training):
        yield buffer.param_data  # of adapters alone, where there are any
    for optimizer in getattr(training.optimizer, "chained_optimizers", [training.optimizer]):
        if optimizer.is_stub_optimizer:
            continue
        adam = optimizer.optimizer
        for group in adam.param_groups:
            yield from map(_local, group["params"])
        for state in adam.state.values():
            yield from (_local(each) for each in state.values() if isinstance(each, torch.Tensor))


def gradients(training: RankTraining) -> Iterator[torch.Tensor]:
    """Yield the buffers in which Megatron's data parallelism adds up gradients."""
    if training.shards is not None:
        yield from training.shards.gradients()
    yield from (buffer.grad_data for buffer in _ddp_buffers(training))


def _ddp_buffers(training: RankTraining) -> Iterator[Any]:
    for chunk in training.wrapped_chunks if training.shards is None else ():
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor, or a plain tensor itself."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def storages_of(
    tensors: Iterable[torch.Tensor], training: RankTraining
) -> dict[int, torch.UntypedStorage]:
    """Return the storages of tensors on the training's device, by address, in their order."""
    storages = {}
    for tensor in tensors:
        if tensor.device.type == training.ranks.device.type:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
    return storages


def _movable(
    tensors: Iterable[torch.Tensor], training: RankTraining
) -> dict[int, torch.UntypedStorage]:
    """Return the storages that can be emptied: on CPUs not those that were read through numpy."""
    storages = storages_of(tensors, training)
    return {key: storage for key, storage in storages.items() if storage.resizable()}


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
