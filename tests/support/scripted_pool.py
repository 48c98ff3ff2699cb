"""A pool of scripted engines whose golden probes follow from their checkpoints: no vLLM needed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineUnavailable
from cray_agents.ports import EngineCall
from cray_agents.records import Manifest, ProbePrompt
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.request_router import Wanted
from tests.support.in_process_engine import InProcessEngine
from tests.support.waiting import until as until

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "who?"}]}


def says_version(request: dict[str, Any], version: str) -> str:
    return version


class Mortal(InProcessEngine):
    """An InProcessEngine that can be made to die, as a process does."""

    engine: ScriptedEngine

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.starts = 0
        self.broken = False
        self._ended = asyncio.Event()

    async def start(self, checkpoint: Path, version: str) -> None:
        if self.broken:
            raise EngineUnavailable("it does not come up")
        self.starts += 1
        self._ended.clear()
        await super().start(checkpoint, version)

    async def wait_until_dead(self) -> None:
        await self._ended.wait()

    def die(self) -> None:
        self._ended.set()


def checkpoint(folder: Path, number: int, job: str | None = "job-1") -> Path:
    directory = folder / f"c{number}"
    directory.mkdir(exist_ok=True)
    manifest = Manifest(files={}, weights_sha256=str(number), job=job, probe=probe(number))
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return directory


def probe(number: int) -> list[ProbePrompt]:
    return [ProbePrompt(token_ids=[1, 2, 3 + number], logprobs=[-1.0, -2.0 - number])]


@asynccontextmanager
async def serving(folder: Path, *hosts: InProcessEngine, **settings: Any) -> AsyncIterator[Pool]:
    pool = Pool(hosts, **settings)
    await pool.start(checkpoint(folder, 1), "m@1", probe(1))
    try:
        yield pool
    finally:
        await pool.stop()


def exchange(**fields: Any) -> EngineCall:
    return EngineCall("/v1/chat/completions", ASK | fields, "x1")


async def ask(pool: Pool, version: Wanted) -> str:
    """What is said, and by whom: the answer and the exchange agree about that."""
    asked = exchange()
    (body,) = [piece async for piece in pool.answer(version, asked)]
    answer = json.loads(body)
    (sample,) = asked.samples
    said = str(answer["choices"][0]["message"]["content"])
    assert answer["model"] == asked.version and answer["id"] == "chatcmpl-x1"
    assert bytes(sample.token_ids).decode() == said and len(sample.logprobs) == len(said)
    assert sample.prompt_token_ids and sample.finish_reason == "stop"
    return said
