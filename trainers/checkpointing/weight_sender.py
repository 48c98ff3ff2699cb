"""Weight sender: one rank's share of the latest published weights, sent to replicas that ask.

A rank of a training session keeps a copy in host memory of the tensors that it writes of a
checkpoint, and offers them (runtime/registry/weight_offers.py has the protocol). A thread sends
them while the rank writes its files, and while it goes on to its next job. A replica serves them
only once the checkpoint is on disk, so a rank may die at any moment: replicas then read files.
Called by session/resident.py and hf_export.py.

The tensors take one of two links to the GPUs of a replica. `ipc` shares a buffer on a GPU that both
processes use by turns. `nccl` broadcasts to the GPUs of another process. The other ends are vLLM's
own engines (vllm/distributed/weight_transfer of vLLM 0.32), whose formats these follow.
"""

import base64
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Protocol

import torch

from cray_agents.errors import CrayError, NotFound, SetupError
from cray_agents.runtime.registry.weight_offers import WeightOffer, drop_offers, write_offer

BUSY = 120.0  # seconds that a replica waits while another one is sent to
SILENCE = 600.0  # seconds without a word from the platform
JOIN = 120.0  # seconds for a replica's workers to join; the platform waits longer
PUSH = 120.0  # seconds for them to receive one batch
LOOK = 0.05  # seconds between two looks if the platform is there, while they join or receive
_LONGEST = 256 << 20  # bytes of a message
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
        """Broadcast their bytes as one message; return when it has left."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class NcclGroup:
    """A group of GPUs, by vLLM's NCCL bindings: `identity` is an ncclUniqueId.

    Training goes on in the communicators of its own. Its kernels never wait for this one's, whose
    other ends are workers that wait for nobody else: so the two need no common order.
    """

    def __init__(self, identity: bytes, world: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        device = torch.cuda.current_device()
        self._communicator = uid_init_process_group(identity, 0, world, device)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(0, dtype=torch.uint8)  # copies from pageable memory are slow
        self._on_gpu = torch.empty(0, dtype=torch.uint8, device="cuda")

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast their bytes as one message; return when it has left."""
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        size = sum(map(len, parts))
        if size > len(self._pinned):
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            # of the memory that training uses again: what a stream takes for itself, it keeps
            self._on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
            self._stream.wait_stream(torch.cuda.current_stream())  # training may still write there
        torch.cat(parts, out=self._pinned[:size])
        with torch.cuda.stream(self._stream):
            on_gpu = self._on_gpu[:size].copy_(self._pinned[:size], non_blocking=True)
            self._communicator.broadcast(on_gpu, src=0, stream=self._stream)
            self._stream.synchronize()

    def close(self) -> None:
        """Leave the group."""
        self._communicator.destroy()


def new_nccl_identity() -> bytes:
    """Return a new ncclUniqueId."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId())


class NcclLink:
    """Broadcasts to a replica's workers, a batch at a time.

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
            "packed": True,
            "packed_buffer_size_bytes": 1 << 62,  # one message for a batch, however large
            "packed_num_buffers": 1,
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


@dataclass(frozen=True)
class _Offered:
    """The tensors of one checkpoint, and the token that a replica's platform must know."""

    token: str
    tensors: Mapping[str, torch.Tensor]


class WeightSender:
    """The offers of one rank. `session` is its folder.

    `link`: makes the link to a replica with these GPUs. `host`: the address to offer; this machine
    alone can reach "127.0.0.1". `early`: offer weights before their files are whole, too.
    """

    def __init__(
        self,
        session: Path,
        rank: int,
        world: int,
        link: Callable[[Sequence[str]], WeightLink],
        host: str = "127.0.0.1",
        *,
        early: bool = False,
    ) -> None:
        self._session, self._rank, self._world = session, rank, world
        self._link, self._host, self._early = link, host, early
        self._token = secrets.token_urlsafe(32)  # of one checkpoint
        self._unpublished = False
        self._kept: dict[str, torch.Tensor] = {}
        self._offered: _Offered | None = None
        self._busy = threading.Lock()
        # a thread begins on GPU 0, wherever its process is
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        drop_offers(session, rank)
        everywhere = "" if host != "127.0.0.1" else host
        self._listener = socket.create_server((everywhere, 0))
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self) -> None:
        """Take the present offer back, before the next checkpoint is written."""
        self._offered, self._unpublished = None, False
        self._token = secrets.token_urlsafe(32)
        self._kept = {}
        drop_offers(self._session, self._rank)

    def keep(
        self,
        tensors: Iterator[tuple[str, torch.Tensor]],
        dtypes: Mapping[str, torch.dtype],
        job: str = "",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on, as stored in host memory, and keep them for the next `offer`.

        With `job` all are kept before the first one is passed on, and offered by the job's name if
        the sender is `early`.
        """
        early = bool(job) and self._early and not self._unpublished
        for name, tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=dtypes[name])
            copy.copy_(tensor)
            self._kept[name] = copy
            if not early:
                yield name, copy
        if early:
            self._unpublished = True
            self._offer(job)
            yield from self._kept.items()

    def offer(self, weights_sha256: str) -> None:
        """Offer what was kept: it is this rank's share of a published checkpoint."""
        self._unpublished = False
        self._offer(weights_sha256)

    def take_back_unpublished(self) -> None:
        """Offer nothing of a checkpoint that was not published."""
        if self._unpublished:
            self.begin()

    def _offer(self, weights: str) -> None:
        self._offered = _Offered(self._token, self._kept)
        port = self._listener.getsockname()[1]
        offer = WeightOffer(
            weights=weights,
            rank=self._rank,
            world=self._world,
            host=self._host,
            port=port,
            token=self._token,
        )
        try:
            write_offer(self._session, offer)
        except OSError as error:  # such as a full disk: replicas read files
            print(f"weights are not offered: {error}", flush=True)

    def close(self) -> None:
        """Offer nothing any more."""
        self.begin()
        self._listener.shutdown(socket.SHUT_RDWR)  # `accept` would outlive `close`
        self._listener.close()

    # ---- the threads
    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(SILENCE)
        with connection, connection.makefile("rwb") as lines:
            try:
                self._transfer(lines, connection)
            except (CrayError, OSError, RuntimeError, ValueError, LookupError) as error:
                print(f"a transfer of weights ended: {type(error).__name__}: {error}", flush=True)
                try:
                    _write(lines, {"error": f"{type(error).__name__}: {error}"})
                except (OSError, ValueError):  # the platform is gone
                    return

    def _transfer(self, lines: BufferedRWPair, connection: socket.socket) -> None:
        """Send to one replica. Raises CrayError, OSError, and what CUDA raises."""
        hello = _read(lines)
        if hello is None:  # somebody looked if this rank lives
            return
        offered = self._offered
        token = str(hello.get("token", ""))
        if offered is None or not secrets.compare_digest(token.encode(), offered.token.encode()):
            raise NotFound("these weights are not offered, or not any more")
        if not self._busy.acquire(timeout=BUSY):
            raise CrayError(f"another transfer has not ended in {BUSY:g} s")
        try:
            self._set_device()
            self._serve(lines, connection, offered, [str(gpu) for gpu in hello["gpus"]])
        finally:
            self._busy.release()

    def _set_device(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def _serve(
        self,
        lines: BufferedRWPair,
        connection: socket.socket,
        offered: _Offered,
        gpus: Sequence[str],
    ) -> None:
        described = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in offered.tensors.items()
        ]
        if not described:
            _write(lines, {"tensors": [], "init": None})
            return
        with ExitStack() as ending:
            link = self._link(gpus)
            ending.callback(link.close)
            _write(lines, {"tensors": described, "init": link.init})
            if _read(lines) is None:  # another rank could not be had
                return
            if not self._together(link.join, link, connection, JOIN):
                ending.pop_all()  # the thread that joins closes it
                raise CrayError(f"the replica did not join in {JOIN:g} s, or its platform is gone")
            while (request := _read(lines)) is not None:
                batch = [(str(name), offered.tensors[name]) for name in request["send"]]
                _write(lines, {"update": link.describe(batch)})
                if not self._together(partial(link.push, batch), link, connection, PUSH):
                    ending.pop_all()  # the thread that sends closes it
                    problem = f"the replica did not receive in {PUSH:g} s, or its platform is gone"
                    raise CrayError(problem)

    def _together(
        self, step: Callable[[], None], link: WeightLink, connection: socket.socket, seconds: float
    ) -> bool:
        """Do a step with the replica; return False if it takes no part, which NCCL never notices.

        NCCL then holds a thread for ever, which must not be the one that others wait for.
        """
        done: Future[None] = Future()

        def run() -> None:
            try:
                self._set_device()
                step()
            except Exception as error:  # noqa: BLE001 - raised again by `result`
                report = partial(done.set_exception, error)
            else:
                report = partial(done.set_result, None)
            try:
                report()
            except InvalidStateError:  # cancelled meanwhile
                link.close()

        hung_up = select.poll()
        hung_up.register(connection, select.POLLRDHUP)
        threading.Thread(target=run, daemon=True).start()
        until = time.monotonic() + seconds
        while not wait([done], LOOK).done:
            if (hung_up.poll(0) or time.monotonic() > until) and done.cancel():
                return False
        done.result()
        return True


def _read(lines: BufferedRWPair) -> dict[str, Any] | None:
    """Return the next message; None at the end."""
    line = lines.readline(_LONGEST)
    return dict(json.loads(line)) if line.endswith(b"\n") else None


def _write(lines: BufferedRWPair, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message).encode() + b"\n")
    lines.flush()
