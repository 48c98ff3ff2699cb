"""Host: what keeps a replica's engine alive, and loads adapters into it.

seat.py starts, changes and revives one; adapters.py loads adapters. Read next: replica.py.
"""

import asyncio
import copy
from pathlib import Path
from typing import Protocol

from cray_agents.ports import Engine


class EngineHost(Protocol):
    """`Replica` (a vLLM process) | `Resident` (no process)."""

    @property
    def engine(self) -> Engine:
        """Raises EngineUnavailable while it is down."""
        ...

    @property
    def pid(self) -> int | None: ...

    @property
    def port(self) -> int | None: ...

    @property
    def lora_rank(self) -> int:
        """The largest rank of an adapter that it takes beside its weights; 0: it takes none."""
        ...

    async def start(self, checkpoint: Path, version: str) -> None:
        """Serve a checkpoint from scratch, whatever ran before. Raises EngineError, SetupError."""
        ...

    async def stop(self) -> None: ...

    def lacks(self, checkpoint: Path) -> str:
        """What this host has too little of to start it beside all else; "": it has enough."""
        ...

    async def died(self) -> None:
        """Return when it has ended without having been asked to."""
        ...

    async def answers(self) -> None:
        """Return when the engine itself has said something. Raises EngineError."""
        ...

    def trouble(self) -> str:
        """What its present or last process died of, in a line; "" where it said nothing."""
        ...

    async def adapt(self, checkpoint: Path, name: str) -> Engine:
        """Load a checkpoint's adapter beside the weights; returns what answers under it.

        `name` begins with the version and was never used before. Raises EngineError.
        """
        ...

    async def release(self, name: str) -> None:
        """Unload an adapter that no request is in flight under. Raises EngineError."""
        ...


class InProcessEngine:
    """An engine in this process, such as ScriptedEngine: there is no other that could die."""

    pid: int | None = None
    port: int | None = None

    def __init__(self, engine: Engine, lora_rank: int = 0) -> None:
        self.engine = engine
        self.lora_rank = lora_rank

    async def start(self, checkpoint: Path, version: str) -> None:
        """Load the checkpoint. Raises what the engine's `load` raises."""
        await self.engine.load(checkpoint, version)

    async def stop(self) -> None:
        """Nothing is to be ended."""

    def lacks(self, checkpoint: Path) -> str:
        """It is here already."""
        return ""

    async def died(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    async def answers(self) -> None:
        """It is in this process, which runs."""

    def trouble(self) -> str:
        """It has no process that could die."""
        return ""

    async def adapt(self, checkpoint: Path, name: str) -> Engine:
        """A copy of the engine that has loaded the checkpoint, and shares all else."""
        adapted = copy.copy(self.engine)
        await adapted.load(checkpoint, name.partition(" ")[0])
        return adapted

    async def release(self, name: str) -> None:
        """Nothing is to be ended."""
