"""Held-out evaluation of a loop: missing runs, and the iterations that are evaluated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cray_agents import GRPO, RFT, SFT, PromotionTest
from cray_agents.agent.hooks import Hooks
from cray_agents.errors import HookError, NotFound, SwapError
from cray_agents.iteration import Iteration
from cray_agents.loop import Curriculum
from cray_agents.loop.methods import Method
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import Run
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.views.iteration_evidence import iteration_detail, pairs_page
from cray_agents.testing import ScriptedEngine
from cray_agents.trainers.models.seed_model import make_seed_model
from tests.support.killable_loop import echo, lucky, site_loop
from tests.support.scripted_platform import platform

pytestmark = pytest.mark.slow

ALL = PromotionTest(hidden=0, batch=60)
ON_POLICY: dict[str, Any] = {"method": GRPO, "group_size": 2}


def number_of(run: Run) -> int:
    return int(run.input.split()[-1])


def is_judged(run: Run, version: int) -> bool:
    """Whether it is a held-out run of a version."""
    return run.task is not None and run.task.split == "holdout" and run.model == f"m@{version}"


def even_where(run: Run) -> float:
    """The first version solves odd tasks, the next ones even ones: none is better."""
    return float((number_of(run) % 2 == 0) != (run.model == "m@1"))


def first_iteration(root: Path, reward: Callable[[Run], float], **changes: Any) -> Iteration:
    engine = ScriptedEngine(changes.pop("answer", echo))
    with platform(root, engine) as where:
        loop = site_loop(platform=where, rewards=[reward], promotion=ALL, **changes)
        return list(loop.run_sync(1))[1]


@pytest.mark.parametrize(("lost", "onward"), [(5, "m@2"), (20, None)])
def test_a_policy_goes_on_from_what_is_lower_by_chance_alone(
    tmp_path: Path, lost: int, onward: str | None
) -> None:
    def some(run: Run) -> float:
        if is_judged(run, 1) or is_judged(run, 2):
            low, high = (0, 40) if is_judged(run, 1) else (lost, 43)
            return float(low <= number_of(run) - 1000 < high)
        return number_of(run) % 2 if run.attempt else 0.5

    first = first_iteration(tmp_path, some, **ON_POLICY)
    assert (first.wins, first.losses, first.promoted, first.onward) == (3, lost, False, onward)


def test_the_pairs_behind_a_decision_are_on_record_with_their_runs(tmp_path: Path) -> None:
    first = first_iteration(tmp_path, even_where)
    home, registry = Home(tmp_path), Registry(Home(tmp_path))
    detail = iteration_detail(home, registry, "loop", 1)
    decision, curve = detail["decision"], detail["curve"]
    assert decision["kind"] == "rejected" and decision["who"] == "loop loop"
    assert (detail["incumbent"], detail["record"]["version"]) == ("m@1", "m@2")
    assert curve["points"][0] == [0, 1.0] and curve["limit"] == pytest.approx(20)
    assert curve["points"][-1] == [detail["pairs"], pytest.approx(first.evidence)]
    runs = {run.id: run for run in Store(home).runs(RunQuery(loop="loop", split="holdout"))}
    count = {"won": first.wins, "lost": first.losses, "even": first.ties}
    for outcome in ("won", "lost", "even"):
        page = pairs_page(home, "loop", 1, outcome, 0, 100)
        assert page["total"] == len(page["data"]) == count[outcome] and page["next"] is None
        for pair in page["data"]:
            ours, theirs = runs[pair["candidate_run"]], runs[pair["incumbent_run"]]
            assert ours.task is not None and theirs.task is not None
            assert ours.task.id == theirs.task.id == pair["task"]
            assert (ours.model, theirs.model) == ("m@2", "m@1")
            assert (ours.reward, theirs.reward) == (pair["candidate"], pair["incumbent"])
    assert pairs_page(home, "loop", 1, None, 0, 7)["next"] == 7
    assert iteration_detail(home, registry, "loop", 0)["decision"] is None
    with pytest.raises(NotFound, match="noted no pairs"):
        pairs_page(home, "loop", 0, None, 0, 7)


def test_what_makes_the_reward_fail_counts_as_the_worst(tmp_path: Path) -> None:
    def strict(run: Run) -> float:
        if is_judged(run, 2) and number_of(run) % 2:
            raise ValueError("this is garbage")
        return even_where(run)

    first = first_iteration(tmp_path, strict)
    assert not first.promoted
    assert (first.wins, first.losses, first.ties, first.unscored) == (30, 30, 0, 30)
    assert first.note.endswith("; 30 could not be scored and count as the worst")
    runs = Store(Home(tmp_path)).runs(RunQuery(loop="loop", split="holdout", model="m@2"))
    assert [run.reward for run in runs].count(None) == 30


def test_what_makes_a_hook_fail_counts_as_the_worst(tmp_path: Path) -> None:
    async def reads(run: Run, context: Any) -> None:
        if is_judged(run, 2) and number_of(run) % 2:
            raise HookError("this is garbage")

    hooked = site_loop().agent.override(hooks=[Hooks(after_run=reads)])
    first = first_iteration(tmp_path, even_where, agent=hooked)
    assert (first.promoted, first.wins, first.losses, first.unscored) == (False, 30, 30, 30)


def test_where_the_incumbent_has_no_reward_there_is_no_pair(tmp_path: Path) -> None:
    def strict(run: Run) -> float:
        if is_judged(run, 1) and number_of(run) % 2:
            raise ValueError("this is garbage")
        return even_where(run)

    first = first_iteration(tmp_path, strict)
    assert (first.promoted, first.wins, first.losses, first.unpaired) == (True, 30, 0, 30)
    assert "30 are left out, for the incumbent has no reward" in first.note


@pytest.mark.parametrize(("broken", "promoted"), [(6, True), (7, False)])
def test_what_the_infrastructure_failed_is_left_out_and_too_much_of_it_is_no_judgement(
    tmp_path: Path, broken: int, promoted: bool
) -> None:
    def answer(request: dict[str, Any], version: str) -> Any:
        number = int(request["messages"][-1]["content"].split()[-1])
        down = version == "m@2" and 1000 <= number < 1000 + broken
        return SwapError("it will not") if down else echo(request)

    def better(run: Run) -> float:
        return float(run.model != "m@1" or number_of(run) % 3 == 0)

    first = first_iteration(tmp_path, better, answer=answer)
    assert (first.promoted, first.failed_pairs, first.unscored) == (promoted, broken, 0)
    if not promoted:
        assert first.note.startswith("rejected: not judged: of 60 pairs too many are missing; 7 ")


def test_hidden_tasks_take_turns_by_the_decisions(tmp_path: Path) -> None:
    def even(run: Run) -> float:
        return float((run.attempt or 0) % 2)

    with platform(tmp_path, ScriptedEngine(echo)) as where:
        for iterations in (2, 4):  # the second goes on where the first one ended
            loop = site_loop(platform=where, rewards=[even], evaluate_every=2, **ON_POLICY)
            done = list(loop.run_sync(iterations))
    assert [g.evidence is not None for g in done] == [False, False, True, False, True]
    runs = Store(Home(tmp_path)).runs(RunQuery(loop="loop", split="holdout", model="m@1"))
    assert len({run.task.id for run in runs if run.task}) == 60  # both parts of what is hidden


def test_a_loop_ends_with_its_schedule(tmp_path: Path) -> None:
    def stages(last: int) -> list[Method]:
        return [RFT(iterations=1), GRPO(iterations=last, group_size=2, evaluate_every=2)]

    with platform(tmp_path, ScriptedEngine(echo)) as where:
        done = list(site_loop(method=stages(3), platform=where, max_staleness=1).run_sync(9))
        assert [g.stopped for g in done] == [None] * 4 + ["schedule: all 4 iterations are done"]
        assert [g.evidence is not None for g in done[1:]] == [True, False, True, True]
        assert (
            list(site_loop(method=stages(3), platform=where, max_staleness=1).run_sync(9)) == done
        )
        more = list(site_loop(method=stages(5), platform=where, max_staleness=1).run_sync(9))
    assert more[:5] == done and len(more) == 7


def test_the_curriculum_knows_the_range_of_rewards(tmp_path: Path) -> None:
    def of_five(run: Run) -> float:
        return 1.0 + 4.0 * lucky(run)

    drawn = []
    for name, changes in (
        ("a", {"rewards": [lucky], "promotion": ALL}),
        ("b", {"rewards": [of_five], "promotion": PromotionTest(hidden=0, batch=60, low=1, high=5),
               "min_reward": 5.0}),
    ):  # fmt: skip
        with platform(tmp_path / name, ScriptedEngine(echo)) as where:
            loop = site_loop(platform=where, curriculum=Curriculum(revisit=1.0), **changes)
            list(loop.run_sync(2))
        journal = Home(tmp_path / name).loop("loop") / "journal"
        drawn.append(json.loads((journal / "draw-2-0.json").read_text()))
    assert drawn[0] == drawn[1]


def test_hidden_and_test_tasks_are_held_before_they_are_run(tmp_path: Path) -> None:
    make_seed_model(tmp_path / "model", seed=0, corpus=["say 1", "2"])
    inputs = [f"say {n}" for n in (*range(1000, 1060), *range(2000, 2004), 3000)]
    answer = {"role": "assistant", "content": "ok"}
    shown: list[Any] = [([{"role": "user", "content": text}, answer], {}) for text in inputs]
    with platform(tmp_path / "home", ScriptedEngine(echo), model=tmp_path / "model") as where:
        (_, first) = list(site_loop(method=SFT, demonstrations=shown, platform=where).run_sync(1))
    home = Home(tmp_path / "home")
    ran = Store(home).runs(RunQuery(loop="loop", split="holdout", model="m@1"))
    lines = dataset_runs(home, first.dataset or "")
    assert [line["reason"] for line in lines] == ["contaminated"] * 64 + [None]
    assert len({run.input for run in ran}) < 60  # some are for later decisions
