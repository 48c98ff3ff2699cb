"""Replica supervisor: the process of a replica's Slurm job, which runs vLLM as the gateway orders.

    python -m cray_agents.runtime.pool.replica_supervisor <root>/replicas/<n>/<attempt>

It writes the lease (job_lease.py) and listens beside vLLM, on the same address. Who wants anything
of it must send the lease's secret:

    GET  /state?seen=N   the state, once its serial is not N; otherwise after `wait` seconds
    POST /start          start vLLM on a checkpoint, from scratch
    POST /note           note the version and weights that the gateway has loaded
    POST /stage          copy a checkpoint to this node: weight_copies.py
    POST /stop           end vLLM, and keep the place
    POST /exit           end vLLM and the job

Where a server spreads over several nodes, srun starts this on each of them. The first one is as
above. The other ones follow its state, and start and end their nodes' shares of vLLM with it.

vLLM dies with this process, and this process with the job's script. On SIGTERM, which Slurm sends
before it takes the place away, it says so and serves on. Without a gateway it ends after
`keep_minutes`. slurm_replica.py is its client.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from cray_agents.errors import CrayError, EngineError, SetupError
from cray_agents.processes import die_with_parent, end_group
from cray_agents.runtime.background import BackgroundTasks, ChangeNotifier
from cray_agents.runtime.pool.job_lease import (
    HEARTBEAT_INTERVAL,
    SECRET,
    STATE_SECONDS,
    TERM_HEADER,
    JobLease,
    ReplicaSpec,
    SupervisorState,
    create_secret,
    own_address,
    read_lease,
    read_spec,
    write_lease,
)
from cray_agents.runtime.pool.private_folder import PrivateFolder
from cray_agents.runtime.pool.vllm_http import CA, Http, TlsFiles, client_context
from cray_agents.runtime.pool.vllm_process import (
    EngineSettings,
    NodeShare,
    VllmProcess,
    bind,
    command,
    environment,
)
from cray_agents.runtime.scheduler.batch_script import REFUSED
from cray_agents.runtime.scheduler.gpu_placement import host_gpus
from cray_agents.runtime.scheduler.nvml import EnergyTotal, nvml
from cray_agents.runtime.scheduler.sampler import memory_of_job
from cray_agents.runtime.vllm_plugins import proof
from cray_agents.runtime.vllm_plugins.wire import HEADER, VARIABLE

_PATIENCE = 20.0  # seconds that the first node may take to answer a further one

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ReplicaSupervisor:
    """The engine of a job, and what the gateway may know of it.

    `serial` grows with each change. `starts` counts the engines, so that the death of a former one
    is never taken for that of the present one.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        folder: Path,
        address: str,
        secret: str,
        tls: TlsFiles | None = None,
        energy: EnergyTotal | None = None,
    ) -> None:
        self.spec = spec
        self._energy = energy
        log_file = folder / "engine.txt"
        self.replica = VllmProcess(spec.model, spec.settings, log_file, address=address, tls=tls)
        self.replica.shielded = True  # a warning of Slurm to all processes would end it at once
        self.ended = asyncio.Event()
        self._folder = folder
        self._secret = secret.encode()
        self._serial = 0
        self._news = ChangeNotifier()
        self._starts = 0
        self._share: dict[str, Any] | None = None  # of the other nodes; None: nothing runs there
        self._alive = False
        self._why = ""
        self._started_on = self._version = self._weights = ""
        self._asleep = 0  # level, as the gateway notes it before the engine sleeps
        self._leaving = False
        self._beat = self._term = 0
        self._began, self._ends_at = time.time(), end_of_job(spec.minutes)
        self._last_word = time.monotonic()  # of a gateway
        self._changing = asyncio.Lock()
        self._tasks = BackgroundTasks()

    def routes(self) -> web.Application:
        """Return the application that answers the gateway."""
        application = web.Application(middlewares=[self._lock], client_max_size=1 << 20)
        application.router.add_get(proof.PATH, self._prove)
        application.router.add_get("/state", self._state)
        for name in ("start", "note", "stage", "stop", "exit"):
            application.router.add_post(f"/{name}", getattr(self, f"_{name}"))
        return application

    @web.middleware
    async def _lock(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == proof.PATH:
            return await handler(request)
        if not secrets.compare_digest(request.headers.get(HEADER, "").encode(), self._secret):
            return _refusal(403, "only the platform that submitted this job may use it")
        try:
            term = int(request.headers.get(TERM_HEADER, self._term))  # its other nodes name none
            if term < self._term:
                why = f"a controller with term {self._term} has taken this replica over"
                return _refusal(409, why)
            self._term = term
            self._last_word = time.monotonic()
            return await handler(request)
        except CrayError as error:
            return _refusal(503, str(error))
        except (LookupError, TypeError, ValueError) as error:
            return _refusal(400, f"{request.path}: {error!r}")

    async def _prove(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        place, nonce = request.transport.get_extra_info("sockname"), request.query.get("nonce", "")
        if (answer := proof.proof_of(self._secret.decode(), nonce, *place[:2])) is None:
            return _refusal(400, "nonce must be 64 hexadecimal digits")
        compact = json.dumps({"proof": answer}, separators=(",", ":"))
        return web.json_response(text=compact)

    async def _state(self, request: web.Request) -> web.Response:
        if request.query.get("seen") == str(self._serial):
            with contextlib.suppress(TimeoutError):
                wait = float(request.query.get("wait", STATE_SECONDS))
                await asyncio.wait_for(self._news.wait(), wait)
        self._last_word = time.monotonic()
        return web.json_response(self.state())

    def state(self) -> dict[str, Any]:
        """Return the state. Times are spans, since the clocks of two hosts differ."""
        server, now = self.replica.server, time.time()
        return {
            "serial": self._serial,
            "starts": self._starts,
            "alive": self._alive,
            "why": self._why,
            "url": server.url if server else "",
            "alias": server.model if server else "",
            "secret": server.secret if server else "",
            "pid": self.replica.pid,
            "port": self.replica.port,
            "share": self._share,
            "started_on": self._started_on,
            "version": self._version,
            "weights": self._weights,
            "asleep": self._asleep,
            "leaving": self._leaving,
            "joules": self._energy.read() if self._energy else None,
            "seconds_left": None if self._ends_at is None else self._ends_at - now,
            "seconds": None if self._ends_at is None else self._ends_at - self._began,
            "phases": self.replica.phases,
            "memory_left": memory_of_job(),
        }

    async def _start(self, request: web.Request) -> web.Response:
        """Body: checkpoint, version, weights (their hash), lora_rank."""
        body = await request.json()
        async with self._changing:
            await self.end_engine()
            self._starts += 1
            self.replica.lora_rank = int(body.get("lora_rank", self.replica.lora_rank))
            self._spread(str(body["checkpoint"]))
            await self.replica.start(Path(body["checkpoint"]), str(body["version"]))
            self._started_on = str(body["checkpoint"])
            self._version, self._weights = str(body["version"]), str(body["weights"])
            self._alive, self._why = True, ""
            self._tasks.keep("engine", self._watch)
        self._tell()
        return web.json_response(self.state())

    def _spread(self, checkpoint: str) -> None:
        """Let the other nodes start their shares."""
        if self.spec.nodes == 1:
            return
        address = self.replica.address
        with bind(address) as free:  # torch binds it anew
            share = NodeShare(self.spec.nodes, 0, address, free.getsockname()[1])
        self.replica.share = share
        rank = self.replica.lora_rank
        self._share = {"checkpoint": checkpoint, "port": share.port, "lora_rank": rank}
        self._tell()

    async def _note(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._version, self._weights = str(body["version"]), str(body["weights"])
        self._asleep = int(body.get("asleep", 0))
        if "checkpoint" in body:
            await self.replica.copies.keep(Path(body["checkpoint"]))
        return web.json_response({})

    async def _stage(self, request: web.Request) -> web.Response:
        copy, why = await self.replica.copies.make(Path((await request.json())["checkpoint"]))
        return web.json_response({"path": str(copy), "why": why})

    async def _stop(self, request: web.Request) -> web.Response:
        async with self._changing:
            await self.end_engine()
        return web.json_response({})

    async def _exit(self, request: web.Request) -> web.Response:
        self.ended.set()
        return web.json_response({})

    async def _watch(self) -> None:
        await self.replica.wait_until_dead()
        self._alive, self._why = False, self.replica.death_reason()
        self._version, self._weights, self._share, self._asleep = "", "", None, 0
        self._tell()
        if self._leaving:
            self.ended.set()

    async def end_engine(self) -> None:
        """End vLLM, and its shares on other nodes."""
        await self._tasks.close()
        self._alive, self._version, self._weights, self._asleep = False, "", "", 0
        if self._share is not None:
            self._share = None
            self._tell()
        await self.replica.stop()

    def leave(self) -> None:
        """Say that Slurm takes the place away; end at once if no engine answers anybody."""
        self._leaving = True
        self._tell()
        if not self._alive:
            self.ended.set()

    def _tell(self) -> None:
        self._serial += 1
        self._news.notify()

    async def keep_lease(self, port: int) -> None:
        """Write a heartbeat every HEARTBEAT_INTERVAL; go on when the root fails for a while."""
        while True:
            self._beat += 1
            lease = JobLease(
                address=self.replica.address,
                port=port,
                host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
                pid=os.getpid(),
                attempt=self.spec.attempt,
                job=os.environ.get("SLURM_JOB_ID"),
                gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
                version=self._version,
                asleep=self._asleep,
                beat=self._beat,
                time=time.time(),
                ends_at=self._ends_at,
                tls=self.replica.tls is not None,
            )
            try:
                await asyncio.to_thread(write_lease, self._folder, lease)
            except OSError as error:
                log.warning("the lease was not renewed: %s", error)
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    async def end_unwatched(self) -> None:
        """Return when no gateway has said a word for `keep_minutes`."""
        left = 60 * self.spec.keep_minutes
        while left > 0:
            await asyncio.sleep(left)
            left = self._last_word + 60 * self.spec.keep_minutes - time.monotonic()
        log.warning("no gateway came for %g minutes: the job ends", self.spec.keep_minutes)
        self.ended.set()


def end_of_job(minutes: int | None) -> float | None:
    """Return when Slurm ends this job, in unix seconds: by its own word, else by `minutes`."""
    with contextlib.suppress(ValueError):
        return float(os.environ.get("SLURM_JOB_END_TIME", ""))
    return time.time() + 60 * minutes if minutes else None


async def supervise(spec: ReplicaSpec, folder: Path) -> int:
    """Run the job to its end; return its exit code. Raises SetupError."""
    address, secret = own_address(spec.interface, spec.gateway), secrets.token_urlsafe(32)
    if not create_secret(folder, secret):
        print(f"{folder} has a supervisor already: refused", flush=True)
        return REFUSED
    tls = None
    if spec.tls is not None:
        from cray_agents.runtime.pool.replica_certificates import server_files

        tls = server_files(spec.tls, address, folder)
    with nvml() as driver:
        # of a replica over several nodes one node's energy would be too little
        energy = EnergyTotal(driver, host_gpus() if spec.nodes == 1 else ())
        await _serve(ReplicaSupervisor(spec, folder, address, secret, tls, energy))
    return 0


async def _serve(supervisor: ReplicaSupervisor) -> None:
    """Answer the gateway until the job is to end."""
    address, tls = supervisor.replica.address, supervisor.replica.tls
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, supervisor.leave)
    runner = web.AppRunner(supervisor.routes(), access_log=None)
    await runner.setup()
    context = None if tls is None else tls.server_context()
    site = web.TCPSite(runner, address, 0, shutdown_timeout=1.0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    tasks = BackgroundTasks()
    tasks.keep("lease", partial(supervisor.keep_lease, port))
    tasks.keep("end of an unwatched job", supervisor.end_unwatched)
    await supervisor.ended.wait()
    await tasks.close()
    await supervisor.end_engine()
    await supervisor.replica.copies.close()
    await runner.cleanup()


async def follow(spec: ReplicaSpec, folder: Path, rank: int) -> int:
    """Run a further node's share of each engine that the first node starts.

    Returns the exit code: 1 if a share died, by which srun ends the whole job; 0 if the first node
    is gone.
    """
    while (lease := read_lease(folder)) is None:  # noqa: ASYNC110 - of another node
        await asyncio.sleep(HEARTBEAT_INTERVAL)
    tls = None if spec.tls is None else client_context(spec.tls / CA)
    http = Http(lease.url, (folder / SECRET).read_text(), _PATIENCE, tls)
    private = PrivateFolder()
    process, starts, serial = None, 0, -1
    try:
        while process is None or process.returncode is None:
            async with http.answer("GET", f"/state?seen={serial}") as response:
                state = SupervisorState.model_validate_json(await response.read())
            serial, share = state.serial, state.share
            if process is not None and (share is None or state.starts != starts):
                await end_group(process)
                process = None
            if process is None and share is not None:
                starts = state.starts
                place = NodeShare(spec.nodes, rank, lease.address, share.port)
                checkpoint = Path(share.checkpoint)
                settings = replace(spec.settings, max_lora_rank=share.lora_rank)
                process = await _start_share(
                    spec.model, settings, folder, checkpoint, place, private
                )
        print(f"the share of node {rank} ended with {process.returncode}", flush=True)
        return 1
    except EngineError as error:
        print(f"the first node is gone: {error}", flush=True)
        return 0
    finally:
        if process is not None:
            await end_group(process)
        private.close()
        await http.close()


async def _start_share(
    model: str,
    settings: EngineSettings,
    folder: Path,
    checkpoint: Path,
    share: NodeShare,
    private: PrivateFolder,
) -> asyncio.subprocess.Process:
    with (folder / f"engine-{share.rank}.txt").open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command(checkpoint, (model,), settings, share=share),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(settings) | private.variables | {VARIABLE: secrets.token_urlsafe(32)},
            start_new_session=True,
        )


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def main() -> int:
    """Run the job of the folder in `argv[1]`."""
    die_with_parent(os.getppid())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder = Path(sys.argv[1])
    spec = read_spec(folder)
    if spec is None:
        print(f"{folder} has no spec.json that can be read", flush=True)
        return 1
    rank = int(os.environ.get("SLURM_NODEID", "0")) if spec.nodes > 1 else 0
    try:
        return asyncio.run(follow(spec, folder, rank) if rank else supervise(spec, folder))
    except SetupError as error:
        print(error, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
