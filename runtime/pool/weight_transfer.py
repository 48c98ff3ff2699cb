"""Weight transfer: fetch a version's weights from the trainer's ranks instead of its files.

vllm_engine.py calls `fetch_weights` while the server is paused, also while the files are still
being written. The ranks of a training session offer their latest weights
(registry/weight_offers.py). This module holds the two sides together: it
asks a rank to send, and vLLM's routes to receive. The golden probe decides afterwards, as after
every load. The data go from GPU to GPU by an engine of vLLM's own: `nccl` between GPUs, `ipc`
within one that replica and trainer use by turns. Neither was run on a GPU.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import CrayError, EngineTimeout, SetupError, SwapError
from cray_agents.runtime.registry.foreign_model import read_weights
from cray_agents.runtime.registry.weight_offers import WeightOffer, find_offers

FILES = "files"
STUCK = "engine_stuck"  # the code of a SwapError after which only a new process helps
CONNECT = 5.0  # seconds to reach a rank
GRACE, REASON = 10.0, 1.0  # seconds for vLLM to see that a rank is gone; for a rank to say why
CHUNK = 1 << 30  # bytes that a rank sends at a time, or one larger tensor
_LONGEST = 256 << 20  # bytes of a message, which may list all tensors of a model
_LAYER = re.compile(r".*?\.\d+\.")
#: The stored types that vLLM's engines are told, by safetensors' names.
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

#: Ask the server for a route; see `VllmEngine._control`.
Control = Callable[[str, dict[str, Any] | None], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class TransferSettings:
    """The engine to transfer weights by, and the folder of the sessions that offer them.

    `timeout`: seconds to wait for a rank's answer.
    """

    backend: str
    sessions: Path
    timeout: float = 300.0


def check_transfer(wanted: str, *, gpu: bool, turns: bool, here: bool) -> None:
    """Raise SetupError for an engine that this placement of GPUs cannot use.

    `gpu`: the installed vLLM computes on GPUs. `turns`: replicas and jobs share GPUs by turns.
    `here`: jobs run on this host.
    """
    if wanted == FILES:
        return
    if not gpu:
        why = "goes from GPU to GPU, and the installed vLLM computes on the CPU: set 'files'"
    elif wanted == "ipc" and not (turns and here):
        why = "shares one GPU, and here replicas have GPUs of their own: set 'nccl' or 'files'"
    elif wanted == "nccl" and turns:
        why = "needs two GPUs, and here replicas share the trainer's: set 'ipc' or 'files'"
    else:
        return
    raise SetupError(f"weight_transfer = {wanted!r} {why}")


@dataclass(frozen=True)
class OfferedTensor:
    """A tensor that the rank of number `sender` sends."""

    sender: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.itemsize * prod(self.shape)


async def fetch_weights(
    checkpoint: Path, offers: Sequence[WeightOffer], settings: TransferSettings, control: Control
) -> None:
    """Replace the weights of a paused server by offered ones, shaped as those of a checkpoint.

    Raises EngineError, SwapError, OSError or ValueError if it fails; vLLM is then ready to load
    files. Raises SwapError with the code STUCK where it waits for a rank that is gone.
    """
    gpus = [str(uuid) for uuid in await _call_workers(control, "gpu_uuid")]
    async with AsyncExitStack() as connections:
        senders = [
            await connections.enter_async_context(_connect(offer, gpus, settings.timeout))
            for offer in offers
        ]
        tensors = [one for number, sender in enumerate(senders) for one in sender.tensors(number)]
        stored = await asyncio.to_thread(read_weights, checkpoint)
        _check_complete(
            tensors, {name: (_DTYPES.get(t.dtype, ""), t.shape) for name, t in stored.items()}
        )
        begun = False
        try:
            for number, sender in enumerate(senders):
                if sender.init is not None:
                    sender.say({"join": True})
                    init = control("/init_weight_transfer_engine", {"init_info": sender.init})
                    await sender.during(init)
                    if settings.backend == "nccl":
                        await _call_workers(control, "hold_sender", number=number)
            begun = True
            await control("/start_weight_update", None)
            await _send_all(tensors, senders, settings.backend, control)
            await control("/finish_weight_update", None)
        except BaseException as error:
            stuck = isinstance(error, EngineTimeout) or getattr(error, "code", "") == STUCK
            if not stuck:
                await _abandon(control, begun)
            raise
        if settings.backend == "nccl":
            await _call_workers(control, "release_senders")


async def is_offered(sessions: Path, weights: str) -> bool:
    """Tell whether all ranks of a session offer these weights, and live."""
    offers = await asyncio.to_thread(find_offers, sessions, weights)
    for offer in offers:
        try:
            async with asyncio.timeout(CONNECT):
                _, writer = await asyncio.open_connection(offer.host, offer.port)
        except OSError:  # TimeoutError as well
            return False
        writer.close()
    return bool(offers)


async def _abandon(control: Control, begun: bool) -> None:
    """Make vLLM ready to load files after half a transfer. Raises SwapError, code STUCK."""
    try:
        await _call_workers(control, "abandon_update", begun=begun)
    except CrayError as error:
        raise SwapError(f"vLLM did not give a transfer up: {error}", code=STUCK) from error


async def _send_all(
    tensors: Sequence[OfferedTensor],
    senders: "Sequence[_Sender]",
    backend: str,
    control: Control,
) -> None:
    current = None
    for chunk in in_chunks(tensors):
        sender = senders[chunk[0].sender]
        if backend == "nccl" and chunk[0].sender != current:
            current = chunk[0].sender
            await _call_workers(control, "use_sender", number=current)
        answer = await sender.ask({"send": [one.name for one in chunk]})
        update = {
            "names": [one.name for one in chunk],
            "dtype_names": [one.dtype for one in chunk],
            "shapes": [list(one.shape) for one in chunk],
            **answer["update"],
        }
        if backend == "ipc":  # vLLM's own route takes handles as a pickle alone
            body = {"method": "load_handles", "kwargs": {"update": update}}
            await sender.during(control("/collective_rpc", body))
        else:
            await sender.during(control("/update_weights", {"update_info": update}))


def in_chunks(tensors: Sequence[OfferedTensor], limit: int = CHUNK) -> list[list[OfferedTensor]]:
    """Divide tensors into chunks of one sender each, layer by layer.

    vLLM keeps a layer's tensors until it has all of them. So a layer that several ranks send comes
    from one after the other before the next layer begins. In a chunk larger types go first, which
    keeps each tensor aligned in a buffer.
    """

    def order(one: OfferedTensor) -> Any:
        match = _LAYER.match(one.name)
        layer = match[0] if match else ""  # those of no layer first
        words = [(int(word), "") if word.isdigit() else (-1, word) for word in layer.split(".")]
        return words, one.sender, -one.itemsize, one.name

    chunks: list[list[OfferedTensor]] = []
    room = 0
    for one in sorted(tensors, key=order):
        last = chunks[-1][-1] if chunks else None
        fits = last is not None and last.sender == one.sender and one.nbytes <= room
        if not fits or last is None or last.itemsize < one.itemsize:
            chunks.append([])
            room = limit
        chunks[-1].append(one)
        room -= one.nbytes
    return chunks


def _check_complete(
    tensors: Sequence[OfferedTensor], stored: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Raise SwapError unless the offered tensors are those of the checkpoint, each once."""
    offered = {one.name: (one.dtype, one.shape) for one in tensors}
    wrong = sorted(name for name in offered.keys() | stored.keys()
                   if offered.get(name) != stored.get(name))  # fmt: skip
    if wrong or len(tensors) != len(offered):
        names = ", ".join(wrong[:3]) or "some twice"
        raise SwapError(f"the trainer's ranks offer other tensors than the checkpoint has: {names}")


async def _call_workers(control: Control, method: str, **kwargs: Any) -> list[Any]:
    """Call a method of vllm_plugins/worker.py on every worker; return their results."""
    answer = await control("/collective_rpc", {"method": method, "kwargs": kwargs})
    return list(answer.get("results") or [])


class _Sender:
    """A connection to one rank."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: str, timeout: float
    ) -> None:
        self._reader, self._writer, self._place, self._timeout = reader, writer, place, timeout
        self._coming: asyncio.Task[bytes] | None = None
        self._offered: list[Any] = []
        self.init: dict[str, Any] | None = None

    async def greet(self, hello: dict[str, Any]) -> None:
        """Present the token, and take note of what is offered."""
        answer = await self.ask(hello)
        self.init, self._offered = answer["init"], answer["tensors"]

    def tensors(self, number: int) -> list[OfferedTensor]:
        """Return the tensors that the rank sends."""
        return [
            OfferedTensor(number, str(name), str(dtype), tuple(map(int, shape)))
            for name, dtype, shape in self._offered
        ]

    def say(self, message: dict[str, Any]) -> None:
        """Send a message that has no answer."""
        self._writer.write(orjson.dumps(message) + b"\n")

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message, and return the answer. Raises SwapError, TimeoutError, OSError."""
        self.say(message)
        async with asyncio.timeout(self._timeout):
            await self._writer.drain()
            return self._parse(await self._next_line())

    async def during(self, work: Awaitable[Any]) -> None:
        """Await the server's part while the rank does its own.

        The rank has nothing to say meanwhile, but that it failed. Raises SwapError then, with the
        code STUCK if the server waits for it all the same.
        """
        task, line = asyncio.ensure_future(work), self._next_line()
        try:
            await asyncio.wait({task, line}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is None:
                return
            await asyncio.wait({line}, timeout=REASON)  # the rank knows more than the server
            if not line.done():
                await task
            await asyncio.wait({task}, timeout=GRACE)
            stuck = not task.done() or isinstance(task.exception(), EngineTimeout)
            raise SwapError(self._why(line), code=STUCK if stuck else None)
        finally:
            task.cancel()

    def _why(self, line: "asyncio.Task[bytes]") -> str:
        try:
            self._parse(line.result())
        except (CrayError, OSError, ValueError) as error:
            return str(error)
        return f"{self._place} broke the protocol"

    def _next_line(self) -> "asyncio.Task[bytes]":
        if self._coming is None:
            self._coming = asyncio.create_task(self._reader.readline())
        return self._coming

    def _parse(self, line: bytes) -> dict[str, Any]:
        self._coming = None
        if not line.endswith(b"\n"):
            raise ConnectionError(f"{self._place} hung up")
        answer = orjson.loads(line)
        if not isinstance(answer, dict) or "error" in answer:
            raise SwapError(f"{self._place}: {answer.get('error') if answer else answer}")
        return answer

    async def close(self) -> None:
        """Hang up."""
        if self._coming is not None:
            self._coming.cancel()
            with suppress(asyncio.CancelledError, OSError, ValueError):
                await self._coming
        self._writer.close()


@asynccontextmanager
async def _connect(offer: WeightOffer, gpus: list[str], timeout: float) -> AsyncIterator[_Sender]:
    place = f"rank {offer.rank} of the trainer ({offer.host}:{offer.port})"
    try:
        async with asyncio.timeout(CONNECT):
            reader, writer = await asyncio.open_connection(offer.host, offer.port, limit=_LONGEST)
    except OSError as error:  # TimeoutError as well
        raise SwapError(f"{place} cannot be reached: {error or 'no answer'}") from error
    sender = _Sender(reader, writer, place, timeout)
    try:
        await sender.greet({"token": offer.token, "weights": offer.weights, "gpus": gpus})
        yield sender
    finally:
        await sender.close()
