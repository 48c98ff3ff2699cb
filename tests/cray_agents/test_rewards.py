"""@reward and score: numbers, or an error; never a 0 for a failure."""

import asyncio
import time

import pytest

from cray_agents import Run, reward
from cray_agents.errors import BadInput
from cray_agents.records import RunError
from cray_agents.rewards import score

RUN = Run(id="r", agent="a", model="m@1", input="x", output="432", stop_reason="completed")


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
    time.sleep(10)
    return 1.0


async def test_score():
    assert exact(RUN) is True  # still an ordinary function
    rewards, error = await score(RUN, [exact, brevity])
    assert error is None
    assert [(r.name, r.value) for r in rewards] == [("exact", 1.0), ("short", pytest.approx(1 / 6))]
    assert RUN.model_copy(update={"rewards": rewards}).reward == pytest.approx(7 / 6)


async def test_an_undecorated_function_will_do():
    rewards, _ = await score(RUN, [lambda run: 0.25])
    assert rewards[0].value == 0.25


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (broken, "reward broken failed: AttributeError"),
        (slow, "reward slow took more than 0.05 s"),
        (lambda run: None, "returned None: give a finite float"),
        (lambda run: "1", "returned '1'"),
        (lambda run: float("nan"), "returned nan"),
    ],
)
async def test_a_reward_that_fails_is_no_zero(function, message):
    rewards, error = await score(RUN, [exact, function])
    assert rewards == []  # nor is half a sum a reward
    assert error is not None and error.type == "RewardError" and message in error.message
    assert error.infrastructure


async def test_a_run_that_the_infrastructure_failed_is_not_scored():
    failure = RunError(type="EngineUnavailable", message="gone", infrastructure=True)
    run = RUN.model_copy(update={"error": failure})
    assert await score(run, [exact]) == ([], failure)
    own = RunError(type="OutputError", message="not an int")
    rewards, error = await score(run.model_copy(update={"error": own}), [exact])
    assert rewards[0].value == 1.0 and error is None


def test_bad_arguments():
    with pytest.raises(BadInput, match="weight=nan"):
        reward(weight=float("nan"))
    with pytest.raises(BadInput, match="timeout=0"):
        reward(timeout=0)
