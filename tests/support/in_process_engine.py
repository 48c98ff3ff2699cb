"""An engine in this process, in place of a replica's own process."""

import asyncio
from pathlib import Path

from cray_agents.ports import Engine
from cray_agents.runtime.pool.place import LocalPlace
from cray_agents.runtime.pool.start_phases import StartPhase


class InProcessEngine(LocalPlace):
    """A replica around an engine such as ScriptedEngine. No other process can die."""

    pid: int | None = None
    port: int | None = None

    def __init__(self, engine: Engine, lora_rank: int = 0) -> None:
        self.engine = engine
        self.lora_rank = lora_rank
        self.phases: dict[StartPhase, float] = {}

    async def start(self, checkpoint: Path, version: str) -> None:
        await self.engine.load(checkpoint, version)

    async def stop(self) -> None:
        pass

    async def check_alive(self) -> None:
        pass

    async def wait_until_dead(self) -> None:
        await asyncio.Event().wait()

    def death_reason(self) -> str:
        return ""

    def missing_resource(self, checkpoint: Path) -> str:
        return ""

    def sleep_level(self, checkpoint: Path) -> int:
        return 1
