"""Weight links: the ways of tensors from a trainer's rank to the GPUs of one replica.

`ipc` shares a buffer on a GPU that both processes use by turns. `nccl` broadcasts to the GPUs of
another process. The other ends are vLLM's own engines (vllm/distributed/weight_transfer of vLLM
0.32), whose formats these follow. None of this was run on a GPU. Called by weight_sender.py.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from cray_agents.errors import SetupError

Batch = Sequence[tuple[str, torch.Tensor]]  # by name; in host memory, as stored


class WeightLink(Protocol):
    """A link to one replica: NcclLink | IpcLink. `init` is what vLLM's engine is opened with."""

    init: dict[str, Any]

    def join(self) -> None:
        """Return when the replica has been opened, too."""
        ...

    def describe(self, batch: Batch) -> dict[str, Any]:
        """Return the fields of vLLM's update for a batch, beside names, types and shapes."""
        ...

    def push(self, batch: Batch) -> None:
        """Send a batch, while the replica receives it."""
        ...

    def close(self) -> None:
        """Free what the link takes."""
        ...


class BroadcastGroup(Protocol):
    """This rank, first, and the replica's workers."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast one after the other; return when all have left."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class NcclGroup:
    """A group of GPUs, by vLLM's NCCL bindings: `identity` is an ncclUniqueId."""

    def __init__(self, identity: bytes, world: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        device = torch.cuda.current_device()
        self._communicator = uid_init_process_group(identity, 0, world, device)
        # training goes on in the others
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast one after the other; return when all have left."""
        with torch.cuda.stream(self._stream):
            on_gpu = [tensor.to("cuda", non_blocking=True) for tensor in tensors]
            for tensor in on_gpu:
                self._communicator.broadcast(tensor, src=0, stream=self._stream)
            self._stream.synchronize()

    def close(self) -> None:
        """Leave the group."""
        self._communicator.destroy()


def new_nccl_identity() -> bytes:
    """Return a new ncclUniqueId."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId())


class NcclLink:
    """Broadcasts to a replica's workers, tensor by tensor.

    The workers learn the group's id over the platform's connections. vLLM's other way, a store that
    the trainer opens, carries pickles.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        new_identity: Callable[[], bytes] = new_nccl_identity,
        group: Callable[[bytes, int], BroadcastGroup] = NcclGroup,
    ) -> None:
        self._identity, self._world = new_identity(), 1 + len(gpus)
        self._make_group = group
        self._group: BroadcastGroup | None = None
        self.init: dict[str, Any] = {
            "nccl_unique_id_b64": base64.b64encode(self._identity).decode(),
            "rank_offset": 1,
            "world_size": self._world,
            "packed": False,
        }

    def join(self) -> None:
        """Return when the replica's workers have joined, too."""
        self._group = self._make_group(self._identity, self._world)

    def describe(self, batch: Batch) -> dict[str, Any]:
        """Return nothing: names, types and shapes say all."""
        return {}

    def push(self, batch: Batch) -> None:
        """Broadcast a batch."""
        assert self._group is not None, "join comes first"
        self._group.send([tensor for _, tensor in batch])

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()


class IpcLink:
    """Shares a buffer on each GPU of a replica, whose processes copy out of it.

    CUDA shares memory within one GPU alone, so this process must see the replica's GPUs.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        visible = {
            str(torch.cuda.get_device_properties(number).uuid): number
            for number in range(torch.cuda.device_count())
        }
        if unseen := [gpu for gpu in gpus if gpu not in visible]:
            raise SetupError(
                f"the replica uses GPU {', '.join(unseen)}, which this rank does not see: 'ipc' is"
                " for GPUs that trainer and replicas use by turns"
            )
        self._devices = {gpu: visible[gpu] for gpu in gpus}
        self._buffers: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {}
        self._size = 0
        self.init: dict[str, Any] = {"packed": True}

    def join(self) -> None:
        """Return at once: nothing is joined."""

    def describe(self, batch: Batch) -> dict[str, Any]:
        """Copy a batch into the buffers, and return their handles."""
        flat = [tensor.reshape(-1).view(torch.uint8) for _, tensor in batch]
        sizes = [len(one) for one in flat]
        if sum(sizes) > self._size:
            self._buffers, self._size = {}, sum(sizes)
            self._buffers = {gpu: _shared_buffer(self._size, d) for gpu, d in self._devices.items()}
        for buffer, _ in self._buffers.values():
            for one, room in zip(flat, torch.split(buffer[: sum(sizes)], sizes), strict=True):
                room.copy_(one)
            torch.cuda.synchronize(buffer.device)
        handles = {gpu: handle for gpu, (_, handle) in self._buffers.items()}
        return {"ipc_handles": handles, "tensor_sizes": sizes}

    def push(self, batch: Batch) -> None:
        """Do nothing: the replica copies."""

    def close(self) -> None:
        """Free the buffers."""
        self._buffers = {}
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _shared_buffer(size: int, device: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a buffer on a GPU, and its handle as plain numbers: worker.py reads them."""
    from torch.multiprocessing.reductions import reduce_tensor

    buffer = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    _, fields = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    (_, _, _, offset, _, _, _, handle, storage_bytes, storage_offset, _, counter, counter_offset,
     event, event_sync) = fields  # fmt: skip
    return buffer, {
        "size": size,
        "offset": offset,
        "handle": handle.hex(),
        "storage_bytes": storage_bytes,
        "storage_offset": storage_offset,
        "counter": counter.hex(),
        "counter_offset": counter_offset,
        "event": event.hex(),
        "event_sync": event_sync,
    }


LINKS: dict[str, Callable[[Sequence[str]], WeightLink]] = {"nccl": NcclLink, "ipc": IpcLink}
