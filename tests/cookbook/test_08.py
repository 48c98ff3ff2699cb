"""08_foreign_agent.py: an unchanged agent of openai-agents is captured, rewarded, and promoted."""

import asyncio
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents.cli.user_files import load
from cray_agents.engines.scripted import tool_call
from cray_agents.paths import Home
from cray_agents.runtime.datasets import dataset_runs, list_datasets
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from cray_agents.trainers.models.seed_model import make_seed_model
from tests.support.scripted_platform import platform

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
recipe = load(ROOT / "cookbook" / "08_foreign_agent.py")
SKILL = {"calc@1": 3, "calc@2": 8, "calc@3": 1}  # of ten questions, how many a version answers


def say(request: dict[str, Any], version: str) -> Any:
    """Call the calculator; say what it said, or something else."""
    expression = request["messages"][1]["content"].removeprefix("What is ").rstrip("?")
    last = request["messages"][-1]
    if last["role"] == "user":
        return tool_call("calculator", expression=expression)
    numbers = sum(int(word) for word in re.findall(r"\d+", expression))
    return last["content"] if numbers % 10 < SKILL[version] else "I do not know."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a tokenizer, for the demonstrations."""
    folder = tmp_path_factory.mktemp("model") / "seed"
    make_seed_model(folder, seed=0, corpus=["What is 47 + 385?"])
    return folder


def test_a_foreign_agent_is_trained_as_it_is(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [str(ROOT / "requirements" / "environment.sh"), "foreign"]
    subprocess.run(script, check=True, capture_output=True, timeout=600)
    size = replace(recipe.book.QUICK, per_iteration=24, evaluated=36, steps=1)
    engine = ScriptedEngine(say)
    with platform(tmp_path, engine, model=model, name="calc") as where:
        warmed = recipe.book.make_loop(quick=True)
        shown = warmed.data.demonstrations[:7]  # as a warm-up leaves it
        data = warmed.data.model_copy(update={"demonstrations": shown})
        warmed = replace(warmed, data=data)
        asyncio.run(recipe.main(where, warmed, size, iterations=2))
    told = capsys.readouterr().out
    home = Home(tmp_path)
    happened = [(event.kind, event.version) for event in Registry(home).history("calc")]
    assert happened == [("promoted", 1), ("promoted", 2), ("rejected", 3)]
    assert "calc@2" in told and "promote: better" in told and "reject: " in told
    runs = {run.id: run for run in Store(home).runs()}
    assert all(run.agent == "" and len(run.calls) == 2 for run in runs.values())
    rewarded = [run for run in runs.values() if run.rewards]
    assert len(rewarded) == 2 * size.per_iteration
    asked = {question.input for question in recipe.book.questions(0, "holdout", size.evaluated)}
    assert not asked & {run.input for run in rewarded}
    first = min(list_datasets(home).rows, key=lambda made: int(made["samples"]))
    lines = [*dataset_runs(home, first["id"])]
    used = {line["run"] for line in lines if line["accepted"] and line["run"] in runs}
    right = {run.id for run in rewarded if run.model == "calc@1" and run.reward == 1}
    assert used == right != set()
    shown = [line for line in lines if line["run"] not in runs]
    assert len(shown) == len(warmed.data.demonstrations)
