"""Place and engine process: where a replica runs, and the engine that is started there.

replica.py starts, changes and revives one; lora_adapters.py loads adapters. Read next:
vllm_process.py, a process of this host; slurm_replica.py, a Slurm job.
"""

import asyncio
import socket
from pathlib import Path
from typing import Any, Protocol

from cray_agents.ports import Engine
from cray_agents.runtime.pool.start_phases import StartPhase

KILLED = "it was ended by"  # begins the reason of an engine's death by a signal


class Place(Protocol):
    """Cores, memory and GPUs to run an engine on: of this host, or of a Slurm job.

    A Slurm job may wait for its place, lose it, and leave it for another one.
    """

    host: str  # the machine's name; "" without a place
    job: str | None  # the id of the Slurm job that the engine runs in, or that waits for a place

    @property
    def joules(self) -> float | None:
        """The energy of a job's GPUs since it began; None: not measured there, or no job."""
        ...

    @property
    def placed(self) -> bool:
        """True while there is a place to start an engine on."""
        ...

    async def allocate(self) -> None:
        """Return when there is a place. Raises EngineUnavailable, SchedulerError."""
        ...

    async def release(self, *, drain: bool = False) -> None:
        """End the engine and give its place back; with `drain` its requests end first."""
        ...

    async def successor(self) -> "EngineHost":
        """Return, when the place will be lost, a host for another one, to be ready before."""
        ...

    async def wait_until_ending(self) -> None:
        """Return when the place is about to be lost: no more requests are to be sent there."""
        ...


class EngineProcess(Protocol):
    """The process of a replica's engine: `VllmProcess` | `SlurmReplica`.

    `lora_rank`: the largest rank of an adapter that the engine can load; 0: it loads none. A
    larger one is that of the next start.
    `taken_over`: true if the last start took over an engine of an earlier platform.
    `phases`: seconds of the last start by phase, those that were seen: see start_phases.py.
    """

    pid: int | None
    port: int | None
    taken_over: bool
    lora_rank: int
    phases: dict[StartPhase, float]

    @property
    def engine(self) -> Engine:
        """The running engine. Raises EngineUnavailable while it is down."""
        ...

    async def start(self, checkpoint: Path, version: str) -> None:
        """Serve a checkpoint from scratch, whatever ran before. Raises EngineError, SetupError."""
        ...

    async def stop(self) -> None:
        """End the engine's process; its place stays."""
        ...

    async def stage(self, checkpoint: Path) -> None:
        """Copy a checkpoint to its host, if that may be, for the next load: weight_copies.py."""
        ...

    async def check_alive(self) -> None:
        """Return when the engine itself has answered. Raises EngineError."""
        ...

    async def wait_until_dead(self) -> None:
        """Return when the process has ended and `stop` was not called."""
        ...

    def death_reason(self) -> str:
        """Say in one line why the present or last process died; "" where it left no reason."""
        ...

    def missing_resource(self, checkpoint: Path) -> str:
        """Name the resource that this machine lacks to start one more engine; "": none."""
        ...

    def sleep_level(self, checkpoint: Path) -> int:
        """Return 1 if host memory has room for the weights during a sleep, else 2."""
        ...


class EngineHost(Place, EngineProcess, Protocol):
    """An engine's process on its place."""


class LocalPlace:
    """A place on this host: always there, and never left. A mixin of an EngineProcess."""

    host: str = socket.gethostname()
    job: str | None = None
    joules: float | None = None
    placed = True
    taken_over = False

    async def allocate(self) -> None:
        """Return at once."""

    async def stage(self, checkpoint: Path) -> None:
        """Copy nothing."""

    async def release(self: EngineProcess, *, drain: bool = False) -> None:
        """End the engine's process."""
        await self.stop()

    async def successor(self) -> Any:
        """Never return."""
        await asyncio.Event().wait()

    async def wait_until_ending(self) -> None:
        """Never return."""
        await asyncio.Event().wait()
