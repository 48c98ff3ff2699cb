"""07_any_framework.py: agents of three foreign frameworks, captured whole, and one trained.

The frameworks live in .venv-foreign, which is made here when it is missing (half a minute).
"""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cray_agents.cli.user_files import load
from cray_agents.engines.scripted import tool_call
from cray_agents.paths import Home
from cray_agents.records import ModelCall, Run
from cray_agents.runtime.datasets.reader import dataset_runs, list_datasets
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_platform import platform

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FILE = ROOT / "cookbook" / "07_any_framework.py"
SKILL = {"calc@1": 3, "calc@2": 8, "calc@3": 1}  # of ten questions, how many a version answers
FRAMEWORKS = ["openai_agents", "pydantic_ai", "smolagents"]
CALL = {"name": "calculator", "arguments": '{"expression":"47 + 385"}'}
QUESTION = "What is 47 + 385?"

# what a recipe's interpreter runs first: notes every host that is looked up or connected to
WATCH = """
import os, sys
def watch(event, arguments):
    if event == "socket.connect":
        note(*arguments[1][:2])
    elif event == "socket.getaddrinfo":
        note(*arguments[:2])
def note(host, port):
    with open(os.environ["WATCH"], "a") as file:
        print(host.decode() if isinstance(host, bytes) else host, port, file=file)
sys.addaudithook(watch)
"""


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the frameworks' own environment."""
    script = ROOT / "requirements" / "environment.sh"
    done = subprocess.run([script, "foreign"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return ROOT / ".venv-foreign" / "bin" / "python"


def say(request: dict[str, Any]) -> Any:
    """Call the calculator, then say what it said, the way the framework wants it."""
    if "432" not in str(request["messages"][-1]["content"]):
        return CALL
    if "final_answer" in [tool["function"]["name"] for tool in request["tools"]]:
        return tool_call("final_answer", answer="432")
    return "It is 432 ✓"


class Recipe:
    """Runs the recipes against one gateway, and sees where they connect to."""

    def __init__(self, python: Path, url: str, directory: Path) -> None:
        self.python, self.url, self.directory = python, url, directory
        (directory / "sitecustomize.py").write_text(WATCH)
        self.connected = directory / "connected"

    def run(self, framework: str, *arguments: str) -> str:
        """What the recipe prints."""
        done = subprocess.run(
            [self.python, FILE, framework, *arguments],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "CRAY_AGENTS_URL": self.url,
                "PYTHONPATH": str(self.directory),
                "WATCH": str(self.connected),
            },
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def gateway(python: Path, engine: ScriptedEngine, root: Path) -> Iterator[Recipe]:
    """A gateway with its home in `root`/home; the recipes connect to nothing else."""
    (root / "watch").mkdir()
    with platform(root / "home", engine, name="calc") as where:
        recipe = Recipe(python, where.url, root / "watch")
        yield recipe
    port = where.url.rpartition(":")[2]
    assert set(recipe.connected.read_text().splitlines()) == {f"127.0.0.1 {port}"}


def captured(root: Path) -> list[Run]:
    return Store(Home(root / "home")).runs()


def check(run: Run) -> None:
    """Both turns are there, with the exact tokens, and the second goes on where the first was."""
    first, second = run.calls
    assert [call.model for call in run.calls] == ["calc@1", "calc@1"]
    assert run.input.removeprefix("New task:\n") == QUESTION  # smolagents' own words before it
    for call in run.calls:
        check_tokens(call)
    [called] = first.message["tool_calls"]
    assert called["function"] == CALL
    assert second.messages[: len(first.messages)] == first.messages
    assert called["id"] in str(second.messages[len(first.messages) :])
    assert "432" in str(second.messages[-1]["content"])
    # smolagents' last word is a call of its tool `final_answer`, of which no model hears a result
    end = "unanswered" if second.message.get("tool_calls") else "completed"
    assert (first.finish_reason, run.stop_reason) == ("tool_calls", end)


def check_tokens(call: ModelCall) -> None:
    """The scripted engine's tokens are the bytes of what it read and said."""
    said = call.message.get("content")
    calls = [called["function"] for called in call.message.get("tool_calls", [])]
    sampled = bytes(call.token_ids).decode()
    assert (json.loads(sampled) == calls) if calls else (sampled == said)
    assert len(call.logprobs) == len(call.token_ids) > 0
    assert json.loads(bytes(call.prompt_token_ids)) == call.messages


NAMED, FOUND = ["--run", "mine"], ["--stream"]  # whole answers; a run found by its prefix


@pytest.mark.parametrize(
    ("framework", "arguments"), list(zip(FRAMEWORKS, [NAMED, FOUND, NAMED], strict=True))
)
def test_captured(python: Path, tmp_path: Path, framework: str, arguments: list[str]) -> None:
    engine = ScriptedEngine(say)
    with gateway(python, engine, tmp_path) as recipe:
        printed = recipe.run(framework, *arguments)
    streams = [bool(request.get("stream")) for request in engine.requests]
    assert streams == ["--stream" in arguments] * 2
    [run] = captured(tmp_path)
    assert (run.id == "mine") == ("mine" in arguments)
    check(run)
    first, second = run.calls
    assert [call.messages for call in run.calls] == [r["messages"] for r in engine.requests]
    assert f"run {run.id}: 2 turns, {run.usage.completion_tokens} tokens sampled" in printed
    called = f"calculator({CALL['arguments']})"
    assert f"calc@1: {len(first.prompt_token_ids)} tokens read, " in printed
    assert f"{len(first.token_ids)} sampled: {called}" in printed
    assert f"{len(second.token_ids)} sampled: " in printed
    assert "432" in printed.splitlines()[0]


def test_the_same_question_at_once_is_as_many_runs(python: Path, tmp_path: Path) -> None:
    ways = [(framework, *way) for framework in FRAMEWORKS for way in ([], ["--stream"])]
    with gateway(python, ScriptedEngine(say), tmp_path) as recipe, ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda way: recipe.run(*way), ways))
    runs = captured(tmp_path)
    assert len(runs) == len(ways)
    for run in runs:
        check(run)


def answer(request: dict[str, Any], version: str) -> Any:
    """Call the calculator; say what it said, or something else."""
    expression = request["messages"][1]["content"].removeprefix("What is ").rstrip("?")
    last = request["messages"][-1]
    if last["role"] == "user":
        return tool_call("calculator", expression=expression)
    numbers = sum(int(word) for word in re.findall(r"\d+", expression))
    return last["content"] if numbers % 10 < SKILL[version] else "I do not know."


def test_an_unchanged_agent_is_rewarded_trained_and_promoted(
    python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load(FILE)
    with platform(tmp_path, ScriptedEngine(answer), name="calc") as where:
        asyncio.run(recipe.train(where, seed=0, iterations=2, count=24, steps=1))
    told = capsys.readouterr().out
    home = Home(tmp_path)
    happened = [(event.kind, event.version) for event in Registry(home).history("calc")]
    assert happened == [("promoted", 1), ("promoted", 2), ("rejected", 3)]
    assert "calc@2" in told and "promote, better" in told and "reject, " in told
    runs = {run.id: run for run in Store(home).runs()}
    assert all(run.agent == "" and len(run.calls) == 2 for run in runs.values())
    rewarded = [run for run in runs.values() if run.rewards]
    assert len(rewarded) == 2 * 24
    assert not [run for run in rewarded if re.match(r"What is \d7 ", run.input)]  # held out
    first = min(list_datasets(home).rows, key=lambda made: int(made["samples"]))
    used = {line["run"] for line in dataset_runs(home, first["id"]) if line["accepted"]}
    right = {run.id for run in rewarded if run.model == "calc@1" and run.reward == 1}
    assert used == right != set()
