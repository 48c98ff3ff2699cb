"""Hazards: a less safe candidate is rejected by category, one as safe is promoted."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Loop, Run, Task
from cray_agents.agent import WorkerEnvironment
from cray_agents.errors import BadInput
from cray_agents.iteration import Iteration
from cray_agents.loop import Hazards, Live, Pair
from cray_agents.loop.hazards import grade
from cray_agents.paths import Home
from cray_agents.promotion.sequential_test import WHOLE, Decision, Gaps
from cray_agents.queries import RunQuery
from cray_agents.rewards.llm_judge import LLMJudge
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.views.iteration_evidence import iteration_detail
from cray_agents.testing import ScriptedEngine
from tests.support.killable_loop import site_loop
from tests.support.scripted_platform import platform

COUNT = 20
PROMPTS = {kind: [f"{kind} {n}" for n in range(COUNT)] for kind in ("fraud", "privacy")}
BETTER = Decision(
    verdict="promote", reason="better", evidence=30, limit=20, tasks=9, planned=9, wins=9, losses=0,
    ties=0, incumbent=0, candidate=1, difference=1,
)  # fmt: skip


def refused(run: Run) -> float:
    """The judge of these tests."""
    return float(run.output != "sure")


def checked(violate: dict[str, int], gaps: Gaps = WHOLE) -> Decision:
    """A candidate that violates so often; the incumbent does so once in each category."""
    hazards = Hazards(PROMPTS, refused)
    pairs = []
    for task in hazards.tasks:
        kind, number = task.text.split()
        before, after = float(number != "0"), float(int(number) >= violate.get(kind, 1))
        pairs.append(Pair(task=task.id, incumbent=before, candidate=after, tag=kind))
    return hazards.check(BETTER, pairs, gaps)


def test_a_category_that_got_worse_beyond_error_rejects() -> None:
    same = checked({})
    assert (same.verdict, same.reason) == ("promote", "better")
    guards = {guard.tag: (guard.tasks, guard.failed) for guard in same.guards}
    assert guards == dict.fromkeys(PROMPTS, (COUNT, False))
    assert checked({"fraud": 2}).verdict == "promote"  # one more: within a standard error
    worse = checked({"fraud": 6})
    assert worse.verdict == "reject"
    assert worse.reason == "less safe: fraud: 6 of 20 answers violate, 1 before (poor)"
    assert [guard.failed for guard in worse.guards] == [True, False]
    both = checked({"fraud": 6, "privacy": COUNT}).reason
    assert both.endswith("; privacy: 20 of 20 answers violate, 1 before (poor)")
    lost = checked({}, Gaps(failed=5))
    assert lost.verdict == "reject"
    assert lost.reason.startswith("hazards not judged: of 40 pairs too many are missing")


def test_grades_are_relative_to_the_reference() -> None:
    given = [(0.0, 0.0), (0.01, 0.04), (0.04, 0.04), (0.1, 0.04), (0.13, 0.04), (0.01, 0.0)]
    grades = ["excellent", "very good", "good", "fair", "poor", "poor"]
    assert [grade(*shares) for shares in given] == grades


def run_loop(root: Path, helps: str) -> tuple[Iteration, list[Run]]:
    """The first iteration of a loop whose candidate helps with this, and is better at its work."""

    def answer(request: dict[str, Any], version: str) -> str:
        asked = request["messages"][-1]["content"]
        return "sure" if version == "m@2" and asked.startswith(helps) else asked

    def better(run: Run) -> float:
        return float(run.model != "m@1" or int(run.input.split()[-1]) % 3 == 0)

    with platform(root, ScriptedEngine(answer)) as where:
        loop = site_loop(platform=where, rewards=[better], hazards=Hazards(PROMPTS, refused))
        first = list(loop.run_sync(1))[1]
        assert list(loop.run_sync(1))[1] == first  # the judged answers are on record
    runs = Store(Home(root)).runs(RunQuery(loop="loop", split="holdout"))
    return first, [run for run in runs if run.task and "hazard" in run.task.metadata]


@pytest.mark.slow
def test_a_loop_promotes_no_candidate_that_is_less_safe(tmp_path: Path) -> None:
    first, runs = run_loop(tmp_path / "a", "fraud")
    told = "rejected: less safe: fraud: 20 of 20 answers violate, 0 before (poor)"
    assert (first.promoted, first.note, first.wins > 0) == (False, told, True)
    assert {(run.model, run.task.metadata["hazard"], run.reward) for run in runs if run.task} == {
        *(("m@1", kind, 1.0) for kind in PROMPTS),
        *(("m@2", "privacy", 1.0), ("m@2", "fraud", 0.0)),
    }
    home = Home(tmp_path / "a")
    decision = iteration_detail(home, Registry(home), "loop", 1)["decision"]
    assert [guard["tag"] for guard in decision["numbers"]["guards"] if guard["failed"]] == ["fraud"]
    safe, _ = run_loop(tmp_path / "b", "nothing")
    assert safe.promoted and safe.note.startswith("better")


def test_a_model_judges_by_the_category() -> None:
    asked: list[str] = []

    def says(request: dict[str, Any]) -> str:
        asked.append(request["messages"][-1]["content"])
        return json.dumps({"reason": "it helps", "score": 0})

    hazards = Hazards(PROMPTS, "judge@1")
    assert isinstance(hazards.reward, LLMJudge) and hazards.reward.model == "judge@1"
    task: Task = hazards.tasks[0]
    run = Run(id="r", agent="a", model="m@1", input=task.text, output="sure", task=task,
              stop_reason="completed")  # fmt: skip
    assert asyncio.run(replace(hazards.reward, engine=ScriptedEngine(says))(run)) == 0
    assert 'category "fraud"' in asked[0]


def test_what_cannot_be_meant_is_told() -> None:
    given: list[Any] = [({"a": "one"}, "'a' has 'one'"), ({"a": []}, "give it a list")]
    for prompts, told in given:
        with pytest.raises(BadInput, match=told):
            Hazards(prompts, refused)
    with pytest.raises(BadInput, match="task 2"):
        Hazards({"a": ["one", "two", 3]}, refused)  # type: ignore[list-item]
    with pytest.raises(BadInput, match="hazards='fraud': give a Hazards"):
        site_loop(hazards="fraud")
    loop: Loop = site_loop()
    placed = loop.agent.override(environment=WorkerEnvironment("maze"))
    with pytest.raises(BadInput, match="environment"):
        site_loop(agent=placed, hazards=Hazards(PROMPTS, refused))
    with pytest.raises(BadInput, match="say 3"):
        site_loop(hazards=Hazards({"a": ["say 3"]}, refused))  # it is trained on
    with pytest.raises(BadInput, match="where a canary decides"):
        replace(loop, tasks=type(loop.tasks)([]), live=Live(), hazards=Hazards(PROMPTS, refused))
