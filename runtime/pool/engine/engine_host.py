"""Engine host: start, stop and watch a replica's engine, and load adapters into it.

replica_slot.py starts, changes and revives one; lora_adapters.py loads adapters. Read next:
vllm_replica.py, a process of this host; slurm_replica.py, a Slurm job.
"""

import asyncio
import copy
import socket
from pathlib import Path
from typing import Protocol

from cray_agents.ports import Engine


class EngineHost(Protocol):
    """`Replica` (a vLLM process) | `SlurmReplica` (a job) | `InProcessEngine` (no process).

    An engine runs on a place: cores, memory and GPUs. A local host always has one. A Slurm job may
    wait for its place, lose it, and leave it for another one.
    """

    @property
    def engine(self) -> Engine:
        """The running engine. Raises EngineUnavailable while it is down."""
        ...

    @property
    def pid(self) -> int | None: ...

    @property
    def port(self) -> int | None: ...

    @property
    def host(self) -> str:
        """The name of the machine that the engine runs on; "" without a place."""
        ...

    @property
    def job(self) -> str | None:
        """The id of the Slurm job that the engine runs in, or that waits for a place."""
        ...

    @property
    def joules(self) -> float | None:
        """The energy of a job's GPUs since it began; None: not measured there, or no job."""
        ...

    @property
    def placed(self) -> bool:
        """True while there is a place to start an engine on."""
        ...

    @property
    def taken_over(self) -> bool:
        """True if the last start took over an engine of an earlier platform."""
        ...

    @property
    def lora_rank(self) -> int:
        """The largest rank of an adapter that the engine can load; 0: it loads none."""
        ...

    @property
    def load_note(self) -> str:
        """Say why the last load read files, where weights were to come directly; "": no reason."""
        ...

    async def allocate(self) -> None:
        """Return when there is a place. Raises EngineUnavailable, SchedulerError."""
        ...

    async def release(self, *, drain: bool = False) -> None:
        """End the engine and give its place back; with `drain` its requests end first."""
        ...

    async def wait_until_leaving(self) -> None:
        """Return when the place will be lost: a successor is to be ready before."""
        ...

    async def wait_until_ending(self) -> None:
        """Return when the place is about to be lost: no more requests are to be sent there."""
        ...

    def successor(self) -> "EngineHost":
        """Return a host for another place, which takes this one's part."""
        ...

    async def start(self, checkpoint: Path, version: str) -> None:
        """Serve a checkpoint from scratch, whatever ran before. Raises EngineError, SetupError."""
        ...

    async def stop(self) -> None:
        """End the engine's process; its place stays."""
        ...

    def missing_resource(self, checkpoint: Path) -> str:
        """Name the resource that this machine lacks to start one more engine; "": none."""
        ...

    def sleep_level(self, checkpoint: Path) -> int:
        """Return 1 if host memory has room for the weights during a sleep, else 2."""
        ...

    async def wait_until_dead(self) -> None:
        """Return when the process has ended and `stop` was not called."""
        ...

    async def check_alive(self) -> None:
        """Return when the engine itself has answered. Raises EngineError."""
        ...

    def death_reason(self) -> str:
        """Say in one line why the present or last process died; "" where it left no reason."""
        ...

    async def load_adapter(self, checkpoint: Path, name: str) -> Engine:
        """Load a checkpoint's adapter beside the weights; return the engine that answers with it.

        `name` begins with the version and was never used before. Raises EngineError.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that has no request in flight. Raises EngineError."""
        ...


class LocalHost:
    """The place of an engine on this host: always there, and never left."""

    host = socket.gethostname()
    job: str | None = None
    joules: float | None = None
    placed = True
    taken_over = False

    async def allocate(self) -> None:
        """Return at once."""

    async def release(self, *, drain: bool = False) -> None:
        """End the engine's process."""
        await self.stop()

    async def stop(self) -> None:
        """End the engine's process."""
        raise NotImplementedError

    async def wait_until_leaving(self) -> None:
        """Never return."""
        await asyncio.Event().wait()

    async def wait_until_ending(self) -> None:
        """Never return."""
        await asyncio.Event().wait()

    def successor(self) -> EngineHost:
        """Never called, as this place is never left."""
        raise NotImplementedError


class InProcessEngine(LocalHost):
    """An engine in this process, such as ScriptedEngine. No other process can die."""

    pid: int | None = None
    port: int | None = None
    load_note = ""

    def __init__(self, engine: Engine, lora_rank: int = 0) -> None:
        self.engine = engine
        self.lora_rank = lora_rank

    async def start(self, checkpoint: Path, version: str) -> None:
        """Load the checkpoint. Raises what the engine's `load` raises."""
        await self.engine.load(checkpoint, version)

    async def stop(self) -> None:
        """Do nothing: there is no process to end."""

    def missing_resource(self, checkpoint: Path) -> str:
        """Return "": starting costs nothing."""
        return ""

    def sleep_level(self, checkpoint: Path) -> int:
        """Return 1: nothing is kept on a GPU."""
        return 1

    async def wait_until_dead(self) -> None:
        """Never return."""
        await asyncio.Event().wait()

    async def check_alive(self) -> None:
        """Return at once: this process runs."""

    def death_reason(self) -> str:
        """Return "": no process can die."""
        return ""

    async def load_adapter(self, checkpoint: Path, name: str) -> Engine:
        """Return a copy of the engine that has loaded the checkpoint and shares all else."""
        adapted = copy.copy(self.engine)
        await adapted.load(checkpoint, name.partition(" ")[0])
        return adapted

    async def unload_adapter(self, name: str) -> None:
        """Do nothing: the copy is garbage-collected."""
