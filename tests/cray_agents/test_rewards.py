"""@reward and score: numbers, or an error; never a 0 for a failure."""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cray_agents import Agent, Run, reward
from cray_agents.errors import BadInput, RewardError
from cray_agents.records import Redaction, Reward, RunError, Trajectory, Turn
from cray_agents.rewards.reward import Verdict, needs_scoring, prepare_rescoring, score, score_run
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_platform import platform

RUN = Run(
    id="r",
    agent="a",
    model="m@1",
    input="x",
    output="432",
    stop_reason="completed",
    trajectory=Trajectory(turns=[Turn(call_id=str(n)) for n in range(3)]),
)
STEP = Reward(name="step", value=0.25, source="environment", turn=1, time=5.0)


@reward
def exact(run: Run) -> bool:
    return run.output == "432"


@reward(weight=0.5, name="short")
async def brevity(run: Run) -> float:
    await asyncio.sleep(0)
    return 1 / len(run.output)


@reward
def broken(run: Run) -> float:
    return run.metadata["x"]  # type: ignore[attr-defined, no-any-return]


@reward(timeout=0.05)
def slow(run: Run) -> float:
    time.sleep(60)
    return 1.0


async def test_score():
    assert exact(RUN) is True  # still an ordinary function
    rewards, error = await score(RUN, [exact, brevity])
    assert error is None
    assert [(r.name, r.value) for r in rewards] == [("exact", 1.0), ("short", pytest.approx(1 / 6))]
    assert RUN.model_copy(update={"rewards": rewards}).reward == pytest.approx(7 / 6)


async def test_a_verdict_has_a_comment_and_may_be_suspect():
    given: list[Any] = [
        lambda run: Verdict(0.5, "half"),
        lambda run: [None, Verdict(0.0, "sly", suspect=True), 1],
    ]
    done = await score_run(RUN.model_copy(update={"tags": ["a", "suspect"]}), given[:1])
    assert done.tags == ["a"] and done.rewards[0].comment == "half" and done.reward == 0.5
    done = await score_run(done, [reward(weight=2, name="two")(each) for each in given[1:]])
    assert done.tags == ["a", "suspect"]
    assert [(r.turn, r.value, r.comment) for r in done.rewards if r.name == "two"] == [
        (1, 0.0, "suspect: sly"), (2, 2.0, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (broken, "reward broken failed: AttributeError"),
        (slow, "reward slow took more than 0.05 s"),
        (lambda run: None, "returned None: give a finite float"),
        (lambda run: "1", "returned '1'"),
        (lambda run: float("nan"), "returned nan"),
        (lambda run: 10**5000, "returned an int of 16610 bits: give a finite float"),
        (lambda run: [1, 2], "returned 2 values for a run of 3 turns"),
        (lambda run: [1, "2", 3], "returned '2'"),
        (lambda run: [None, None, None], "a reward for no turn"),
        (lambda run: {3: 1.0}, "rewarded turn 3 of a run of 3"),
        (lambda run: {-1: 1.0}, "rewarded turn -1"),
        (lambda run: {"0": 1.0}, "rewarded turn '0'"),
        (lambda run: {0: float("inf")}, "returned inf"),
    ],
)
async def test_a_reward_that_fails_is_no_zero(function, message):
    run = RUN.model_copy(update={"rewards": [STEP]})
    rewards, error = await score(run, [function, exact])
    assert [r.name for r in rewards] == ["step", "exact"]  # kept, to be scored again
    assert error is not None and error.type == "RewardError" and message in error.message
    assert not error.infrastructure  # the run need not be done again
    failed = run.model_copy(update={"rewards": rewards, "error": error})
    assert failed.reward is None  # half a sum is no reward
    assert needs_scoring(failed) and not needs_scoring(run)
    redacted = failed.model_copy(update={"redacted": [Redaction(kind="email", count=1)]})
    assert not needs_scoring(redacted)  # it cannot be judged by what is left of it


async def test_rewards_of_turns():
    @reward(weight=2.0)
    def each(run):
        return [0.5, None, 1]

    @reward
    async def some(run):
        return {2: 0.25, 0: True}

    rewards, error = await score(RUN, [each, some, exact])
    assert error is None
    assert [(r.name, r.turn, r.value) for r in rewards] == [
        ("each", 0, 1.0), ("each", 2, 2.0), ("some", 2, 0.25), ("some", 0, 1.0),
        ("exact", None, 1.0),
    ]  # fmt: skip
    assert RUN.model_copy(update={"rewards": rewards}).reward == 5.25


async def test_rewards_that_a_run_came_with_are_kept_and_replaced_by_their_like():
    old = [Reward(name="exact", value=0.0, time=1.0), STEP]
    rewards, error = await score(RUN.model_copy(update={"rewards": old}), [exact])
    assert error is None
    assert [(r.name, r.value, r.source) for r in rewards] == [
        ("step", 0.25, "environment"), ("exact", 1.0, "function"),
    ]  # fmt: skip


async def test_two_rewards_of_one_name_are_refused():
    @reward(name="exact", weight=0.5)
    def other(run):
        return 1

    with pytest.raises(BadInput, match="two rewards are called 'exact'"):
        await score(RUN, [exact, other])
    given, _ = await score(RUN, [partial(other)])
    assert (given[0].name, given[0].value) == ("exact", 0.5)  # its options, within a partial


async def test_a_run_that_the_infrastructure_failed_is_not_scored():
    failure = RunError(type="EngineUnavailable", message="gone", infrastructure=True)
    run = RUN.model_copy(update={"error": failure, "rewards": [STEP]})
    assert await score(run, [exact]) == ([], failure)


async def test_a_run_s_own_error_stays_unless_a_reward_fails_too():
    own = RunError(type="OutputError", message="not an int")
    run = RUN.model_copy(update={"error": own})
    rewards, error = await score(run, [exact])
    assert rewards[0].value == 1.0 and error is own
    _, error = await score(run, [broken])
    assert error is not None and error.type == "RewardError"
    assert error.message.endswith("(the run: OutputError: not an int)")


class Sum(BaseModel):
    total: int


def test_a_run_whose_reward_failed_is_kept_and_scored_again_without_being_done_again(
    tmp_path: Path,
):
    """Over a real platform: what the function sees the second time is what it saw the first."""
    seen: list[Any] = []

    @reward
    def flaky(run: Run) -> float:
        seen.append((run.output.total, run.usage.completion_tokens))
        if len(seen) == 1:
            raise OSError("the grader is away")
        return 0.5

    async def go(site: Any) -> None:
        agent = Agent(name="a", model="m", output_type=Sum, engine=site.engine(), recorder=None)
        run = await agent.run("2 + 2?", run_id="run_x")
        run = run.model_copy(update={"rewards": [STEP.model_copy(update={"turn": 0})]})
        rewards, error = await score(run, [flaky])
        await site.record([run.model_copy(update={"rewards": rewards, "error": error})])
        await site.reward("run_x", 1.0, name="thumbs")
        stored = await site.run("run_x")
        assert stored.error.type == "RewardError" and stored.reward is None
        [listed] = [run async for run in site.runs(error="RewardError")]
        assert listed.id == "run_x" and needs_scoring(listed)
        again = prepare_rescoring(stored, agent.output_type)
        rewards, error = await score(again, [flaky])
        await site.record([again.model_copy(update={"rewards": rewards, "error": error})])
        stored = await site.run("run_x")
        assert stored.error is None and stored.reward == 1.75
        assert {r.name: r.value for r in stored.rewards} == {
            "flaky": 0.5, "step": 0.25, "thumbs": 1.0,
        }  # fmt: skip
        assert [run.reward async for run in site.runs(min_reward=1.7)] == [1.75]  # the index, too
        assert seen[0] == seen[1] and seen[0][0] == 4 and seen[0][1] > 0
        await site.close()

    engine = ScriptedEngine(['{"total": 4}'])
    with platform(tmp_path, engine) as site:
        asyncio.run(go(site))
    assert len(engine.requests) == 1


def test_an_error_of_a_reward_is_told_by_its_own_words():
    @reward
    def strict(run: Run) -> float:
        raise RewardError("no unit in the answer")

    _, error = asyncio.run(score(RUN, [strict]))
    assert error is not None and error.message == "reward strict failed: no unit in the answer"


def test_bad_arguments():
    with pytest.raises(BadInput, match="weight=nan"):
        reward(weight=float("nan"))
    with pytest.raises(BadInput, match="timeout=0"):
        reward(timeout=0)


@pytest.mark.parametrize("name", ["", " ", 5])
def test_a_reward_has_a_name(name: Any) -> None:
    with pytest.raises(BadInput, match="give the reward a name"):
        reward(name=name)
