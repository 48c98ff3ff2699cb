"""A server with vLLM's routes for weights, and a model whose logprobs follow from every tensor.

Weights come by files or over gloo, which stands in for NCCL: the same calls in the same order, on
CPU. Like vLLM's own loader it cannot load files after half an update, unless this is given up.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from torch._C._distributed_c10d import TCPStore

from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.weight_transfer import TransferSettings
from cray_agents.runtime.vllm_plugins.lock import VersionGuard
from cray_agents.runtime.vllm_plugins.wire import GUARD
from cray_agents.trainers.checkpointing.weight_sender import NcclLink
from tests.support.in_process_engine import InProcessEngine
from tests.support.unix_servers import at_socket

Tensors = dict[str, torch.Tensor]
SECRET = "s3cret"
_PATIENCE = timedelta(seconds=60)


# ---- gloo in place of NCCL
class GlooGroup:
    """A BroadcastGroup over gloo; its identity is the address of its store."""

    stores: dict[bytes, Any] = {}  # noqa: RUF012 - a store lives from the identity to the join

    def __init__(self, identity: bytes, world: int, rank: int = 0) -> None:
        host, _, port = identity.rstrip(b"\0").decode().partition(":")
        store = self.stores.pop(identity, None) if rank == 0 else None
        store = store or TCPStore(host, int(port), timeout=_PATIENCE)
        self._group: Any = torch.distributed.ProcessGroupGloo(store, rank, world, _PATIENCE)

    @classmethod
    def new_identity(cls) -> bytes:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
        identity = f"127.0.0.1:{store.port}".encode().ljust(128, b"\0")
        cls.stores[identity] = store
        return identity

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        self._group.broadcast([torch.cat(parts)]).wait()

    def receive(self, size: int) -> torch.Tensor:
        packed = torch.empty(size, dtype=torch.uint8)
        self._group.broadcast([packed]).wait()
        return packed

    def close(self) -> None:
        self._group = None


gloo_link = partial(NcclLink, new_identity=GlooGroup.new_identity, group=GlooGroup)


# ---- the model
def logprobs(weights: Tensors, token_ids: list[int]) -> list[float]:
    """Logprobs of all tokens but the first: any other tensor gives other ones."""
    total = sum(place * float(weights[name].double().sum())
                for place, name in enumerate(sorted(weights), 1))  # fmt: skip
    return [-1.0 - (total * token) % 1.0 for token in token_ids[1:]]


class ScriptedVllm:
    """One vLLM process. `calls` are its routes and workers' methods in their order.

    `faults`: `drop` loses a tensor that came; `die` ends the process in the second update; `hang`
    makes this update last until the server ends.
    """

    def __init__(self, faults: Collection[str] = ()) -> None:
        self.faults = set(faults)
        self.calls: list[str] = []
        self.came: list[str] = []  # the tensors that came directly
        self.guard = VersionGuard()
        self.weights: Tensors = {}
        self.dead = True
        self._ended = asyncio.Event()
        self._coming: Tensors | None = None
        self._torn = False
        self._updates = 0
        self._group: GlooGroup | None = None
        self._groups: dict[int, GlooGroup | None] = {}

    def boot(self, checkpoint: Path) -> None:
        """Start a process from files."""
        self.dead, self._torn, self._coming = False, False, None
        self._group, self._groups = None, {}
        self.calls.append("boot")
        self._read(checkpoint)

    def end(self) -> None:
        self._ended.set()

    def _read(self, checkpoint: Path) -> None:
        self.weights = {}
        for file in checkpoint.glob("*.safetensors"):
            self.weights |= load_file(file)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if self.dead:
            request.transport and request.transport.abort()
        if request.headers.get("x-cray-secret") != SECRET:
            return web.json_response({"error": {"message": "not yours"}}, status=403)
        if request.path == GUARD:
            return web.json_response(self.guard.follow(body))
        name = request.path.strip("/")
        name = body["method"] if name == "collective_rpc" else name
        self.calls.append(name)
        handler = getattr(self, f"_{name.replace('/', '_')}", None)
        try:
            return web.json_response(await handler(**body.get("kwargs", body)) if handler else {})
        except (RuntimeError, AssertionError) as error:
            if self.dead and request.transport is not None:
                request.transport.abort()
            return web.json_response({"error": {"message": str(error)}}, status=500)

    # ---- routes
    async def _reset_prefix_cache(self) -> Any:
        return {"success": True}

    async def _init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

        told = NCCLWeightTransferInitInfo(**init_info)
        assert told.packed and told.rank_offset == 1
        identity = base64.b64decode(init_info["nccl_unique_id_b64"], validate=True)
        assert len(identity) == 128
        self._group = await asyncio.to_thread(GlooGroup, identity, init_info["world_size"], 1)
        return {}

    async def _start_weight_update(self) -> Any:
        assert self._coming is None, "an update is under way"
        self._coming, self._torn = {}, True
        return {}

    async def _update_weights(self, update_info: dict[str, Any]) -> Any:
        assert self._coming is not None and self._group is not None
        self._updates += 1
        if self._updates == 2 and self.faults & {"die", "hang"}:
            if "hang" in self.faults:
                await self._ended.wait()
            self.faults -= {"die"}
            self.dead, self._group, self._groups = True, None, {}
            raise RuntimeError("killed")
        try:
            await asyncio.to_thread(self._receive, **update_info)
        except RuntimeError:
            self._coming = None
            raise
        return {}

    def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

        assert self._coming is not None and self._group is not None
        dtypes = [getattr(torch, dtype) for dtype in dtype_names]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        packed = self._group.receive(sum(sizes))
        for name, tensor in unpack_tensor(packed, names, shapes, dtypes, sizes):
            self.came.append(name)
            if "drop" in self.faults:
                self.faults -= {"drop"}
            else:
                self._coming[name] = tensor

    async def _finish_weight_update(self) -> Any:
        assert self._coming is not None, "no update is under way"
        self.weights |= self._coming  # what did not come stays as it was
        self._coming, self._torn = None, False
        return {}

    async def _v1_completions(self, prompt: list[list[int]], **_: Any) -> Any:
        return {"choices": [{"index": number, "prompt_logprobs": [None, *(
            {str(token): {"logprob": value, "rank": 1}}
            for token, value in zip(ids[1:], logprobs(self.weights, ids), strict=True)
        )]} for number, ids in enumerate(prompt)]}  # fmt: skip

    # ---- methods of vllm_plugins/worker.py
    async def _gpu_uuid(self) -> Any:
        return {"results": [""]}

    async def _hold_sender(self, number: int) -> Any:
        self._groups[number], self._group = self._group, None
        return {"results": [None]}

    async def _use_sender(self, number: int) -> Any:
        self._group = self._groups[number]
        return {"results": [None]}

    async def _release_senders(self) -> Any:
        self._group, self._groups = None, {}
        return {"results": [None]}

    async def _abandon_update(self, begun: bool) -> Any:
        self._coming, self._torn = None, False
        return await self._release_senders()

    async def _reload_weights(self, weights_path: str) -> Any:
        assert not self._torn, "'Parameter' object has no attribute 'weight_loader'"
        self._read(Path(weights_path))
        return {"results": [None]}


class ScriptedVllmHost(InProcessEngine):
    """An EngineHost whose process is a ScriptedVllm."""

    engine: VllmEngine

    def __init__(self, engine: VllmEngine, vllm: ScriptedVllm) -> None:
        super().__init__(engine)
        self.vllm = vllm

    @property
    def load_note(self) -> str:  # type: ignore[override]
        return self.engine.load_note

    async def start(self, checkpoint: Path, version: str) -> None:
        self.vllm.boot(checkpoint)
        await self.engine.prepare(checkpoint, version)


@asynccontextmanager
async def scripted_host(
    sessions: Path, faults: Collection[str] = (), *, secret: str = SECRET
) -> AsyncIterator[ScriptedVllmHost]:
    """A replica that fetches weights from these sessions."""
    vllm = ScriptedVllm(faults)
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", vllm.answer)
    async with at_socket(application) as url:
        settings = TransferSettings("nccl", sessions, timeout=60)
        engine = VllmEngine(url, "m", secret, timeout=60, load_timeout=60, transfer=settings)
        try:
            yield ScriptedVllmHost(engine, vllm)
        finally:
            vllm.end()
            await engine.close()
