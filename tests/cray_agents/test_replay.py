"""Recording and replaying a model's answers, and the guard against asking a real one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Agent
from cray_agents.agent import OpenAIEngine
from cray_agents.agent.stream_events import RunEnded
from cray_agents.config import load_config
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import (
    BadInput,
    Corrupt,
    EngineError,
    EngineTimeout,
    RealModelCall,
    ReplayMismatch,
)
from cray_agents.records import Run
from cray_agents.testing import RecordingEngine, ReplayEngine, ScriptedEngine, no_real_models
from cray_agents.tools.calculator import calculator

SCRIPT: list[Any] = [tool_call("calculator", expression="2 + 2"), "It is 4, I think."]


def agent(engine: Any, **options: Any) -> Agent:
    return Agent("a", instructions="Be brief.", tools=[calculator], engine=engine, **options)


async def ask(engine: Any, text: str = "2 + 2?", *, stream: bool = False, **options: Any) -> Run:
    if not stream:
        return await agent(engine, **options).run(text)
    *_, last = [event async for event in agent(engine, **options).stream(text)]
    assert isinstance(last, RunEnded)
    return last.run


def same(one: Run, other: Run) -> bool:
    """Whether two runs say the same: their times and ids are their own."""

    def told(run: Run) -> Any:
        calls = [call.model_dump(exclude={"started", "seconds", "run_id"}) for call in run.calls]
        return run.output, run.stop_reason, run.error, run.trajectory.messages, calls

    return bool(told(one) == told(other))


@pytest.mark.parametrize("recorded", [False, True], ids=["chat", "stream"])
@pytest.mark.parametrize("replayed", [False, True], ids=["chat", "stream"])
async def test_a_run_is_replayed_exactly(tmp_path: Path, recorded: bool, replayed: bool) -> None:
    path = tmp_path / "tests" / "answers.jsonl"
    real = ScriptedEngine(SCRIPT)
    # with a limit of tokens, a stream is asked for its usage too
    limit: dict[str, Any] = {"max_total_tokens": 10_000}
    first = await ask(RecordingEngine(real, path), stream=recorded, **limit)
    assert first.output == "It is 4, I think." and len(path.read_text().splitlines()) == 2
    assert "X-Run-Id" not in path.read_text()
    engine = ReplayEngine(path)
    assert engine.remaining == 2
    again = await ask(engine, stream=replayed, **limit)
    assert same(again, first) and engine.remaining == 0
    assert len(real.requests) == 2


async def test_what_differs_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    await ask(RecordingEngine(ScriptedEngine(SCRIPT), path), temperature=0.5)
    engine = ReplayEngine(path)
    with pytest.raises(ReplayMismatch) as caught:  # it is no CrayError, so no run hides it
        await ask(engine, "2 + 3?", temperature=0.5)
    text = str(caught.value)
    assert '-   "content": "2 + 2?",' in text and '+   "content": "2 + 3?",' in text
    assert str(path) in text and "temperature" not in text and engine.remaining == 2
    with pytest.raises(ReplayMismatch, match="temperature"):
        await ask(engine, stream=True)
    await ask(engine, temperature=0.5)
    with pytest.raises(ReplayMismatch, match="all answers were given"):
        await ask(engine, temperature=0.5)


async def test_runs_in_another_order_and_the_same_question_twice(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    recording = RecordingEngine(ScriptedEngine(["first", "other", "second"]), path)
    for question in ("a", "b", "a"):
        await ask(recording, question)
    engine = ReplayEngine(path)
    assert [(await ask(engine, text)).output for text in "baa"] == ["other", "first", "second"]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_replayed_too(tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "answers.jsonl"
    late = EngineTimeout("too late", status=504)
    odd = EngineError("odd", status=400, param="p", code="c")
    real = RecordingEngine(ScriptedEngine([late, odd]), path)
    first = [await ask(real, stream=stream) for _ in range(2)]
    engine = ReplayEngine(path)
    again = [await ask(engine, stream=stream) for _ in range(2)]
    assert [run.error for run in again] == [run.error for run in first]
    assert again[0].error is not None and again[0].error.type == "EngineTimeout"
    engine = ReplayEngine(path)
    with pytest.raises(EngineTimeout):
        await engine.chat(engine._unused[0].request)
    with pytest.raises(EngineError) as caught:
        await engine.chat(engine._unused[0].request)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "p", "c")


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="make it with RecordingEngine"):
        ReplayEngine(tmp_path / "none.jsonl")
    for text in ("no json", '{"question": 1}', "[1]"):
        (tmp_path / "odd.jsonl").write_text(text)
        with pytest.raises(Corrupt, match="no recording"):
            ReplayEngine(tmp_path / "odd.jsonl")


# ---- the guard


async def test_no_real_model_is_asked(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CRAY_AGENTS_NO_REAL_MODELS", raising=False)
    answer = await ScriptedEngine(["hello"]).chat({"messages": []})
    server.answer = lambda body: answer
    real = OpenAIEngine(server.url)
    with no_real_models():
        with no_real_models():
            pass
        for stream in (False, True):
            with pytest.raises(RealModelCall, match=r"agent\.override\(engine="):
                await ask(real, stream=stream)
        assert not server.requests
        assert (await ask(ScriptedEngine(["scripted"]))).output == "scripted"
        assert agent(ScriptedEngine(["from a thread"])).run_sync("go").output == "from a thread"
        with pytest.raises(RealModelCall):
            agent(real).run_sync("go")
        load_config()  # the variable is no setting of a platform
    assert (await ask(real)).output == "hello"
    await real.close()


async def test_the_guard_as_a_statement(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAY_AGENTS_NO_REAL_MODELS", "0")  # and put back at the end
    real = OpenAIEngine(server.url)
    no_real_models()  # as a conftest says it
    with pytest.raises(RealModelCall):
        await ask(real)
    await real.close()


@pytest.mark.slow
def test_the_guard_holds_in_processes(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("from cray_agents import Agent\nagent = Agent('a')\n")
    command = ["run", "agent.py", "go", "--url", "http://127.0.0.1:9"]
    with no_real_models():
        done = subprocess.run(
            [sys.executable, "-m", "cray_agents", *command],
            cwd=tmp_path,
            env={**os.environ},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: a model at http://127.0.0.1:9/v1 was about to be asked" in done.stderr
