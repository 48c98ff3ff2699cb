"""GRPO's two kinds of supervision, against the paper's formulas written out by hand."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.records import Event
from cray_agents.runtime.datasets.selection import Steps, outcome_advantages, step_advantages
from tests.support.datasets.dataset_runs import (
    build,
    call,
    details,
    made,
    reasons,
    run_events,
    several,
    stored,
    task,
)


def written_out(group: list[dict[int, float]], turns: list[int], gamma: float) -> list[list[float]]:
    """arXiv 2402.03300, 4.1.3: R = {r_i^index(j)}; A_i,t = sum over index(j) >= t of
    (r_i^index(j) - mean(R)) / std(R); here each times gamma to the turns between."""
    rewards = np.array([r for run in group for r in run.values()])
    mean, std = np.mean(rewards), np.std(rewards, ddof=1)
    return [
        [
            float(sum(gamma ** (j - t) * (r - mean) / std for j, r in run.items() if j >= t))
            for t in range(count)
        ]
        for run, count in zip(group, turns, strict=True)
    ]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.25])
def test_steps_are_the_formula_of_the_paper(gamma: float) -> None:
    rng = random.Random(3)
    for _ in range(50):
        turns = [rng.randrange(1, 7) for _ in range(rng.randrange(2, 6))]
        group = [
            {t: rng.uniform(-2, 2) for t in range(n) if t == n - 1 or rng.random() < 0.6}
            for n in turns
        ]
        steps = [Steps(n, run) for n, run in zip(turns, group, strict=True)]
        found = step_advantages(steps, "sample", gamma)
        for mine, theirs in zip(found, written_out(group, turns, gamma), strict=True):
            assert mine == pytest.approx(theirs)


def test_outcomes_are_the_formula_of_the_paper() -> None:
    values = [0.0, 1.0, 1.0, 0.25]
    each = np.array(values)
    over = [("sample", each.std(ddof=1)), ("population", each.std())]
    for deviation, scale in over:
        expected = list((each - each.mean()) / scale)
        assert outcome_advantages(values, deviation) == pytest.approx(expected)  # type: ignore[arg-type]
    assert outcome_advantages(values, None) == pytest.approx(list(each - each.mean()))


def test_one_reward_at_the_end_is_the_outcome_for_all_turns() -> None:
    values = [0.0, 1.0, 0.5]
    steps = [Steps(n + 1, {n: value}) for n, value in enumerate(values)]
    for advantages, outcome in zip(
        step_advantages(steps, "sample", 1.0), outcome_advantages(values, "sample"), strict=True
    ):
        assert advantages == [outcome] * len(advantages)


def turns_of(name: str, tokens: list[list[int]], broken: int | None = None) -> list[dict[str, Any]]:
    """A run's calls: each reads all before it and a token of its own; at `broken` the prefix does
    not hold, so that a new sample begins."""
    prompt, found = [1, 2], []
    for n, sampled in enumerate(tokens):
        if n == broken:
            prompt = [9, *prompt]
        found.append(call(f"{name}-{n}", prompt, sampled, started=float(n + 1)))
        prompt = [*prompt, *sampled, 3]
    return found


def rewarded(run_id: str, value: float, turn: int | None, name: str = "step") -> Event:
    body = {"name": name, "value": value, "source": "environment", "turn": turn, "time": 1.0}
    return Event(id=f"{run_id}-{name}-{turn}", run_id=run_id, kind="reward", body=body)


def attempt(
    n: int, tokens: list[list[int]], rewards: dict[int | None, float], broken: int | None = None
) -> list[Event]:
    name = f"a{n}"
    told = run_events(name, calls=turns_of(name, tokens, broken), reward=None, task=task("a"),
                      iteration=1, attempt=n)  # fmt: skip
    return [*told, *(rewarded(name, value, turn) for turn, value in rewards.items())]


GROUP: list[tuple[Any, Any]] = [  # tokens of each turn; rewards by turn, None: of the run
    ([[11], [12, 13], [14]], {0: 0.5, 2: 1.0}),
    ([[21, 22], [23]], {None: 0.25}),
    ([[31], [32], [33, 34]], {1: -1.0, None: 0.75}),
]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
async def test_each_turn_s_tokens_have_their_own_advantage(tmp_path: Path, gamma: float) -> None:
    events = several(*(attempt(n, *each) for n, each in enumerate(GROUP)))
    manifest, found = await build(tmp_path, events, method="grpo", loop="l", discount=gamma)
    expected = written_out([{0: 0.5, 2: 1.0}, {1: 0.25}, {1: -1.0, 2: 0.75}], [3, 2, 3], gamma)
    assert [row["reward"] for row in found] == [1.5, 0.25, -0.25]
    for row, advantages, (tokens, _) in zip(found, expected, GROUP, strict=True):
        wanted = [0.0, 0.0]
        for advantage, sampled in zip(advantages, tokens, strict=True):
            wanted += [advantage] * len(sampled) + [0.0]  # what the tool said is not trained on
        assert row["advantages"] == pytest.approx(wanted[:-1], rel=1e-6)
        trained = [a for a, mask in zip(wanted, row["loss_mask"], strict=False) if mask]
        assert row["advantage"] == pytest.approx(sum(trained) / len(trained))
    assert manifest["recipe"]["discount"] == gamma


async def test_turns_are_counted_over_the_samples_of_a_run(tmp_path: Path) -> None:
    events = several(
        attempt(0, [[11], [12], [13]], {0: 1.0, 1: 0.0, 2: 3.0}, broken=1),
        attempt(1, [[21]], {0: -4.0}),
    )
    _, found = await build(tmp_path, events, method="grpo", loop="l", normalize=False)
    assert [row["run_id"] for row in found] == ["a0", "a0", "a1"]
    assert [a for a in found[0]["advantages"] if a] == [4.0]  # 1 + 0 + 3, of a mean of 0
    assert [a for a in found[1]["advantages"] if a] == [3.0, 3.0]
    assert [row["advantage"] for row in found] == [4.0, 3.0, -4.0]


async def test_without_rewards_of_turns_nothing_changes(tmp_path: Path) -> None:
    """Not a bit of it: the name, a hash of all, is what it was before turns could be rewarded."""
    events = several(
        *(attempt(n, tokens, {None: [0.0, 1.0, 0.3][n]}) for n, (tokens, _) in enumerate(GROUP))
    )
    home = await stored(tmp_path, events)
    as_before: Any = {"method": "grpo", "loop": "l", "deviation": "population"}
    manifest, found = made(home, **as_before)
    assert manifest["id"] == "ds-47fe44f3138a3325"
    each = outcome_advantages([0.0, 1.0, 0.3], "population")
    assert [row["advantage"] for row in found] == each
    for row, advantage in zip(found, each, strict=True):
        assert row["advantages"] == [float(np.float32(advantage)) * m for m in row["loss_mask"]]
    _, again = made(home, **as_before, discount=0.5)
    assert [row["advantages"] for row in again] == [row["advantages"] for row in found]
    other, sample = made(home, method="grpo", loop="l")
    assert other["id"] != manifest["id"], "other advantages are another dataset"
    each = outcome_advantages([0.0, 1.0, 0.3], "sample")
    assert [row["advantage"] for row in sample] == each


async def test_rewards_of_the_recipe_are_of_whole_runs(tmp_path: Path) -> None:
    events = several(*(attempt(n, *each) for n, each in enumerate(GROUP)))
    home = await stored(tmp_path, events)
    control = {"a0": 0.0, "a1": 1.0, "a2": 0.3}
    _, found = made(home, method="grpo", loop="l", rewards=control)
    assert [row["advantage"] for row in found] == outcome_advantages([0.0, 1.0, 0.3], "sample")
    del control["a0"]
    _, found = made(home, method="grpo", loop="l", rewards=control)
    expected = written_out([{0: 0.5, 2: 1.0}, {1: 1.0}, {2: 0.3}], [3, 2, 3], 1.0)
    assert found[0]["advantages"][2] == pytest.approx(expected[0][0], rel=1e-6)
    assert found[2]["advantages"][-1] == pytest.approx(expected[2][2], rel=1e-6)


async def test_groups_whose_steps_are_all_alike_say_nothing(tmp_path: Path) -> None:
    events = several(attempt(0, [[11], [12]], {0: 1.0, 1: 1.0}), attempt(1, [[21]], {0: 1.0}))
    home = await stored(tmp_path, [*events, *run_events("other", [5], reward=0, task=task("b")),
                                   *run_events("more", [6], reward=1, task=task("b"))])  # fmt: skip
    manifest, _ = made(home, method="grpo", loop="l")
    assert reasons(home, manifest["id"])["a0"] == "zero_variance"
    events = several(
        attempt(0, [[11], [12]], {0: 1.0, 1: 0.0}), attempt(1, [[21], [22]], {0: 0.0, 1: 1.0})
    )
    _, found = await build(tmp_path / "b", events, method="grpo", loop="l")
    assert [row["reward"] for row in found] == [1.0, 1.0]  # alike as outcomes, not as steps
    third = 0.75**0.5  # four steps, half of them 0: over their sample deviation
    assert found[0]["advantages"][2:] == pytest.approx([0.0, 0.0, -third])
    assert found[1]["advantages"][2:] == pytest.approx([0.0, 0.0, third])


async def test_a_turn_that_is_not_there_and_a_reward_that_failed(tmp_path: Path) -> None:
    failed = run_events("f", [7], task=task("a"), iteration=1, attempt=7,
                        error={"type": "RewardError", "message": "no"})  # fmt: skip
    events = several(
        attempt(0, [[11], [12]], {0: 1.0, 2: 5.0}),
        attempt(1, [[21], [22]], {0: 0.0}),
        attempt(2, [[31], [32]], {0: 1.0}),
        failed,
    )
    manifest, found = await build(tmp_path, events, method="grpo", loop="l")
    home = Home(tmp_path)
    why = reasons(home, manifest["id"])
    assert (why["a0"], why["f"]) == ("no_such_turn", "reward_error")
    assert details(home, manifest["id"])["a0"] == "2 of 2"
    assert [row["run_id"] for row in found] == ["a1", "a2"]
    half = 0.5**0.5
    assert found[0]["advantages"][2:] == pytest.approx([-half, 0.0, 0.0])  # of two steps alone
    manifest, found = made(home, loop="l", min_reward=1.0)
    assert [row["run_id"] for row in found] == ["a0", "a2"]  # to imitate, a sum is enough


async def test_a_reward_that_comes_later_is_in_the_next_dataset(tmp_path: Path) -> None:
    """The newest of one name, source and turn counts; what was built stays what it is."""
    events = several(attempt(0, [[11]], {None: 0.0}), attempt(1, [[21]], {None: 1.0}))
    home = await stored(tmp_path, events)
    first, _ = made(home, method="grpo", loop="l", step=1)
    body = {"name": "step", "value": 3.0, "source": "environment", "turn": None, "time": 9.0}
    late = [
        Event(id="late", run_id="a0", kind="reward", body=body),
        rewarded("a1", 0.5, 0, "thumbs"),
    ]
    await stored(tmp_path, late)
    again, found = made(home, method="grpo", loop="l", step=1)
    assert again["id"] == first["id"] and [row["reward"] for row in found] == [0.0, 1.0]
    _, found = made(home, method="grpo", loop="l", step=2)
    assert [row["reward"] for row in found] == [3.0, 1.5]


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
async def test_discount_is_of_grpo(tmp_path: Path, method: str) -> None:
    with pytest.raises(BadInput, match=f"discount has no effect with method '{method}'"):
        await build(tmp_path, run_events("r"), method=method, discount=0.9)
    for wrong in (0.0, -1.0, 1.1):
        with pytest.raises(ValueError, match="discount"):
            await build(tmp_path, run_events("r"), method="grpo", discount=wrong)
