"""Sessions: what was said is there in the next run, and only whole conversations are kept."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Agent
from cray_agents.agent import FileSession, MemorySession, PlatformSession
from cray_agents.errors import BadInput, Corrupt, EngineError, StoreError
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.calculator import calculator
from tests.support.model_scripts import SUM, agent, asks, script
from tests.support.scripted_platform import platform


def spoken(request: dict[str, Any]) -> list[Any]:
    return [message.get("content") for message in request["messages"]]


async def converses(engine: ScriptedEngine, a: Agent, again: Any) -> None:
    """Two runs; `again` makes the session anew, as a second process would."""
    first = await a.run("1", session=again())
    second = await a.run("2", session=again())
    assert (first.output, second.output) == ("432", "two")
    assert spoken(engine.requests[-1]) == ["Be brief.", "1", None, "432", "432", "2"]
    assert len(await again().history()) == 6
    assert first.tags == second.tags == [f"session:{again().id}"]


async def test_a_session_in_memory():
    engine = script(asks(SUM), "432", "two", "three")
    a = agent(engine, instructions="Be brief.", tools=[calculator])
    session = MemorySession()
    await converses(engine, a, lambda: session)
    events = [event async for event in a.stream("3", session=session)]
    assert events[-1].run.output == "three" and len(session.messages) == 8
    assert MemorySession().id != session.id


async def test_a_session_in_a_file(tmp_path: Path):
    engine = script(asks(SUM), "432", "two")
    a = agent(engine, instructions="Be brief.", tools=[calculator])
    path = tmp_path / "talks" / "ada.jsonl"
    await converses(engine, a, lambda: FileSession(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["messages"]) for line in lines] == [4, 2]
    assert FileSession(path).id == "ada" and FileSession(path, "x").id == "x"


def test_a_session_on_a_platform(tmp_path: Path):
    engine = ScriptedEngine([asks(SUM), "432", "two", "three"])

    async def talk(place: Any) -> None:
        a = agent(place.engine(), model="m", instructions="Be brief.", tools=[calculator])
        await converses(engine, a, lambda: PlatformSession("ada", place))
        # also where the agent's runs are recorded nowhere else
        quiet = a.override(recorder=None)
        run = await quiet.run("3", session=PlatformSession("ada", place))
        assert len(await PlatformSession("ada", place).history()) == 8
        assert await PlatformSession("bob", place).history() == []
        stored = [r async for r in place.runs(tag="session:ada", order="newest")]
        assert len(stored) == 3 and stored[0].id == run.id
        await place.close()

    with platform(tmp_path / "home", engine) as place:
        asyncio.run(talk(place))


@pytest.mark.parametrize(
    "options", [{"max_turns": 1}, {"output_type": int, "output_retries": 0}, {"timeout": 0.05}]
)
async def test_a_run_without_an_answer_leaves_the_session_as_it_was(options):
    async def say(request: dict[str, Any]) -> Any:
        if "timeout" in options:
            await asyncio.Event().wait()
        return asks(SUM) if "max_turns" in options else "x"

    session = MemorySession([{"role": "user", "content": "hi"}])
    run = await agent(script(say), tools=[calculator], **options).run("go", session=session)
    assert run.stop_reason != "completed" and len(session.messages) == 1
    failed = await agent(script(EngineError("gone"))).run("go", session=session)
    assert failed.stop_reason == "error" and len(session.messages) == 1


async def test_an_answer_at_a_limit_is_kept():
    session = MemorySession()
    a = agent(script(asks(SUM), "432"), tools=[calculator], max_turns=1, on_limit="answer")
    assert (await a.run("go", session=session)).stop_reason == "max_turns"
    assert session.messages[-1]["content"] == "432"


# ---- the file


async def test_a_line_that_a_crash_left_unfinished(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    session, a = FileSession(path), agent(script("one", "two", "three"))
    await a.run("1", session=session)
    whole = path.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        assert len(await session.history()) == 2
    await a.run("2", session=session)
    assert len(await session.history()) == 4 and len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("line", [b"\xff\n", b"[]\n", b'{"run": "r"}\n', b'{"messages": 1}\n'])
async def test_a_file_that_is_no_session(tmp_path: Path, line: bytes):
    path = tmp_path / "s.jsonl"
    path.write_bytes(line)
    with pytest.raises(Corrupt, match=r"s\.jsonl has a line"):
        await FileSession(path).history()
    run = await agent(script("ok")).run("go", session=FileSession(path))
    assert run.error is not None and (run.error.type, run.stop_reason) == ("Corrupt", "error")
    assert path.read_bytes() == line


async def test_a_session_that_cannot_be_kept(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be written"):
        await agent(script("ok")).run("go", session=FileSession(tmp_path / "file" / "s.jsonl"))


async def test_a_session_and_a_history():
    with pytest.raises(BadInput, match="not both"):
        await agent(script("ok")).run("go", session=MemorySession(), history=[{"role": "user"}])
