"""Environments of Inspect, verifiers and OpenEnv, unchanged, each in a Python of its own."""

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Agent, TaskSet
from cray_agents.agent import WorkerEnvironment
from cray_agents.engines.scripted import tool_call
from cray_agents.loop import rollouts
from cray_agents.records import Run, Task
from cray_agents.testing import ScriptedEngine
from tests.support.environments.pythons import venv
from tests.support.environments.workers import HERE, command, openenv_server, worker
from tests.support.scripted_platform import platform
from tests.test_env_worker import carried_out

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]


def numbers(request: dict[str, Any]) -> tuple[int, int]:
    a, b = map(int, re.findall(r"\d+", request["messages"][-1]["content"])[-2:])
    return a, b


def played(
    root: Path,
    adapter: str,
    env: str,
    python: Path,
    engine: Any,
    *options: str,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Run]:
    """The runs of an environment's own tasks, by input or seed."""
    monkeypatch.setattr(rollouts, "RETRIES", 0)
    words = [word for option in options for word in ("--option", option)]
    file = root / "tasks.jsonl"
    listing = command(adapter, env, "--tasks", file, *words, venv=python)
    done = subprocess.run(listing, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    tasks: list[Task] = list(TaskSet.from_jsonl(file, holdout=0.0))
    agent = Agent(name="a", model="m", max_tokens=40, environment=WorkerEnvironment("theirs"))
    with (
        platform(root / "home", ScriptedEngine(engine)) as where,
        worker(where, adapter, env, *words, "--name", "theirs", "--slots", 1, venv=python),
    ):
        runs = asyncio.run(carried_out(where, agent, tasks))
    assert {run.calls[0].sampling["max_tokens"] for run in runs if run.calls} == {40}
    assert all(call.token_ids for run in runs for call in run.calls)
    return {str(run.task.metadata.get("seed", run.input)): run for run in runs}


def rewards(run: Run) -> dict[str, float]:
    return {reward.name: reward.value for reward in run.rewards}


def test_tasks_of_inspect_with_their_tools_and_scorers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(request: dict[str, Any], version: str) -> Any:
        last = request["messages"][-1]
        if last["role"] == "tool":
            return f"It is {last['content']}."
        a, b = numbers(request)
        return tool_call("add", a=a, b=b + (a == 1))

    runs = played(tmp_path, "inspect", f"{HERE / 'inspect_tasks.py'}:sums", venv("inspect"), add,
                  "count=2", monkeypatch=monkeypatch)  # fmt: skip
    right, wrong = runs["What is 0 + 1?"], runs["What is 1 + 2?"]
    assert rewards(right) == {"includes": 1.0, "short.characters": 0.5, "short.nice": 1.0}
    assert rewards(wrong) == {"includes": 0.0, "short.characters": 0.5, "short.nice": 1.0}
    assert (right.output, right.target, len(right.calls)) == ("It is 1.", "1", 2)
    assert right.calls[0].messages[0] == {"role": "system", "content": "Add."}
    failed, odd = runs["raise 1 + 1"], runs["word 1 + 1"]
    assert (failed.error.type, failed.error.infrastructure) == ("EnvironmentFailed", True)
    assert "no score today" in failed.error.message
    assert odd.error.message == "score short is 'brilliant': no number"
    assert not failed.rewards and not odd.rewards


def test_tasksets_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(request: dict[str, Any], version: str) -> str:
        a, b = numbers(request)
        return f"It is {a + b if a != 1 else 'many, more than I can say'}"

    runs = played(tmp_path, "verifiers", str(HERE / "vf_sums.py"), venv("verifiers"), add,
                  "agent.harness.id=null", "taskset.count=4", monkeypatch=monkeypatch)  # fmt: skip
    assert rewards(runs["What is 0 + 1?"]) == {"right": 2.0, "short": 0.5}  # by their weights
    assert rewards(runs["What is 1 + 2?"]) == {"right": 0.0, "short": 0.0}
    assert runs["What is 2 + 3?"].output == "It is 5"
    failed = runs["What is 3 + 4?"]
    assert failed.error.type == "EnvironmentFailed" and "no score today" in failed.error.message
    assert not failed.rewards and len(failed.calls) == 1


@pytest.mark.parametrize("kind", ["tools", "act", "text"])
def test_environments_of_openenv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def add(request: dict[str, Any], version: str) -> Any:
        first, last = request["messages"][0]["content"], request["messages"][-1]["content"]
        a, b = map(int, re.findall(r"\d+", first))
        guess = a + b + (a == 1 and last != "again")  # the second guess is right
        if kind == "text":
            return str(guess)
        return tool_call("submit" if kind == "tools" else "act", number=guess)

    options = ["seeds=4", *(["text=number"] if kind == "text" else [])]
    with openenv_server("tools" if kind == "tools" else "number") as url:
        runs = played(
            tmp_path, "openenv", url, venv("openenv"), add, *options, monkeypatch=monkeypatch
        )
    assert rewards(runs["0"]) == rewards(runs["2"]) == {"return": 1.0}
    assert rewards(runs["1"]) == {"return": 0.0 if kind == "tools" else 1.0}
    assert len(runs["1"].calls) == (1 if kind == "tools" else 2)
    if kind != "tools":
        assert runs["3"].error.type == "EnvironmentFailed"
        assert "no world today" in runs["3"].error.message and not runs["3"].calls
    if kind == "act":
        schema = runs["0"].calls[0].tools[0]["function"]
        assert (schema["name"], [*schema["parameters"]["properties"]]) == ("act", ["number"])
