"""Samples that each method takes of a task's runs: the best few, groups with advantages, pairs."""

import math
import zlib
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
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


def attempts(name: str, *rewards: float | None, iteration: int | None = 1, **more: Any) -> Any:
    """Attempts at a task: run `<name><n>` with a sample of its own and the n-th reward."""
    first = zlib.crc32(name.encode()) % 2**16 * 2**12 + 100 * (iteration or 0)
    return several(
        *(
            run_events(
                f"{name}{n}",
                [first + n],
                reward=reward,
                task=task(name),
                iteration=iteration,
                attempt=n,
                **more,
            )
            for n, reward in enumerate(rewards)
        )
    )


def taken(found: list[dict[str, Any]]) -> list[str]:
    return [row["run_id"] for row in found]


async def test_the_best_of_each_task(tmp_path: Path) -> None:
    events = [*attempts("a", 1, 3, 2, 3), *attempts("b", 1), *attempts("c", 0.5)]
    events += several(run_events("free1", [1]), run_events("free2", [2]))
    manifest, found = await build(tmp_path, events, best_of=2)
    assert taken(found) == ["free1", "free2", "a1", "a3", "b0"]
    why = reasons(Home(tmp_path), manifest["id"])
    assert (why["a0"], why["a2"], why["c0"]) == ("not_best", "not_best", "low_reward")
    _, found = made(Home(tmp_path), best_of=3, max_per_task=1)
    assert taken(found) == ["free1", "free2", "a1", "b0"]


async def test_one_that_cannot_be_used_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    lost = run_events("a9", calls=[call("x", [1], [])], reward=9, task=task("a"), attempt=9)
    manifest, found = await build(tmp_path, [*attempts("a", 1, 2, 3), *lost], best_of=2)
    assert taken(found) == ["a1", "a2"]
    assert reasons(Home(tmp_path), manifest["id"])["a9"] == "empty"
    home = await stored(
        tmp_path / "limit",
        several(
            run_events("a0", [5], task=task("a"), attempt=0),
            run_events("a1", [5], task=task("a"), attempt=1),
            run_events("a2", [6], task=task("a"), attempt=2),
            run_events("a3", [7], task=task("a"), attempt=3),
        ),
    )
    manifest, found = made(home, max_per_task=2)
    assert taken(found) == ["a0", "a2"]
    assert reasons(home, manifest["id"])["a1"] == "duplicate"


async def test_groups_have_advantages(tmp_path: Path) -> None:
    events = [*attempts("a", 0, 1, 1, 0.5), *attempts("b", 3, 5)]
    manifest, found = await build(tmp_path, events, method="grpo", loop="l")
    assert taken(found) == ["a0", "a1", "a2", "a3", "b0", "b1"]
    spread = math.sqrt(sum((x - 0.625) ** 2 for x in (0, 1, 1, 0.5)) / 3)
    half = math.sqrt(0.5)  # two runs are each so many sample deviations from their mean
    expected = [(x - 0.625) / spread for x in (0, 1, 1, 0.5)] + [-half, half]
    assert [row["advantage"] for row in found] == pytest.approx(expected)
    assert found[5]["advantages"] == pytest.approx([0, 0, half])
    assert [row["group"] for row in found] == ["a/g1"] * 4 + ["b/g1"] * 2
    assert manifest["accepted_runs"] == 6
    _, found = made(Home(tmp_path), method="grpo", loop="l", normalize=False)
    assert [row["advantage"] for row in found] == [-0.625, 0.375, 0.375, -0.125, -1, 1]
    _, found = made(Home(tmp_path), method="grpo", loop="l", max_per_task=3)
    assert taken(found) == ["a0", "a1", "a2", "b0", "b1"]
    assert [row["advantage"] for row in found] == pytest.approx([*expected[:3], -half, half])


async def test_groups_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    events = several(
        attempts("same", 0.1 + 0.2, 0.3, 0.3),  # equal but for the order of a sum
        attempts("lonely", 1, None),
        attempts("good", 0, 1),
        run_events("free", [3]),
    )
    manifest, found = await build(tmp_path, events, method="grpo")
    assert taken(found) == ["good0", "good1"]
    assert manifest["rejected"] == {"alone": 2, "no_reward": 1, "zero_variance": 3}
    why = reasons(Home(tmp_path), manifest["id"])
    assert (why["same0"], why["lonely0"], why["free"]) == ("zero_variance", "alone", "alone")


async def test_advantages_are_of_all_that_was_scored(tmp_path: Path) -> None:
    """Also of a run whose tokens are missing; one that repeats another's is a draw, and stays."""
    events = several(
        run_events("a0", [5], reward=1, task=task("a"), attempt=0),
        run_events("a1", [5], reward=1, task=task("a"), attempt=1),
        run_events("a2", [6], reward=0, task=task("a"), attempt=2),
        run_events("a3", [7], reward=2, task=task("a"), attempt=3, call_ids=["lost"]),
        run_events("a4", [], reward=9, task=task("a"), attempt=4),
    )
    manifest, found = await build(tmp_path, events, method="grpo", normalize=False)
    found_advantages = [(row["run_id"], row["advantage"]) for row in found]
    assert found_advantages == [("a0", 0), ("a1", 0), ("a2", -1)]
    assert manifest["rejected"] == {"empty": 1, "missing_call": 1}


async def test_a_group_is_of_one_iteration_and_one_loop(tmp_path: Path) -> None:
    events = several(
        run_events("r0", [1], reward=0, task=task("a"), iteration=1, attempt=0, loop="x"),
        run_events("r1", [2], reward=1, task=task("a"), iteration=1, attempt=0, loop="y"),
        run_events("r2", [3], reward=1, task=task("a"), iteration=1, attempt=1, loop="x"),
        run_events("r3", [4], reward=0, task=task("a"), iteration=1, attempt=1, loop="y"),
        run_events("r4", [5], reward=0, task=task("a"), iteration=2, attempt=0, loop="x"),
    )
    manifest, found = await build(tmp_path, events, method="grpo")
    assert [(row["run_id"], row["group"]) for row in found] == [
        ("r0", "x/a/g1"),
        ("r2", "x/a/g1"),
        ("r1", "y/a/g1"),
        ("r3", "y/a/g1"),
    ]
    assert reasons(Home(tmp_path), manifest["id"])["r4"] == "alone"


async def test_pairs_stand_side_by_side(tmp_path: Path) -> None:
    events = [*attempts("a", 0.5, 0, 1, 1), *attempts("b", 1, 1), *attempts("c", 1)]
    manifest, found = await build(tmp_path, events, method="dpo", loop="l")
    assert [(row["run_id"], row["chosen"]) for row in found] == [("a2", True), ("a1", False)]
    assert {row["pair"] for row in found} == {"a/g1"}
    assert manifest["rejected"] == {"no_pair": 3, "not_best": 2}
    assert all(row["advantage"] == 0 for row in found)


async def test_margin_and_least_reward_of_pairs(tmp_path: Path) -> None:
    events = [*attempts("a", 0, 0.2), *attempts("b", 0, 0.6), *attempts("c", 0.5, 1)]
    home = await stored(tmp_path, events)
    assert taken(made(home, method="dpo")[1]) == ["a1", "a0", "b1", "b0", "c1", "c0"]
    assert taken(made(home, method="dpo", min_margin=0.3)[1]) == ["b1", "b0", "c1", "c0"]
    manifest, found = made(home, method="dpo", min_reward=0.7)
    assert taken(found) == ["c1", "c0"]
    assert details(home, manifest["id"])["a0"] == "the best reward is 0.2"


async def test_a_pair_is_of_the_best_and_the_worst_that_can_be_used(tmp_path: Path) -> None:
    broken = [call("w1", [1, 2], [3]), call("w2", [8, 9], [4], started=2.0)]
    other = call("o", [4, 4, 4], [5])
    events = several(
        run_events("lost", reward=9, task=task("a"), call_ids=["gone"]),
        run_events("best", [5], reward=5, task=task("a")),
        run_events("mid", [6], reward=3, task=task("a")),
        run_events("worst", [7], reward=1, task=task("a")),
        run_events("broken", calls=broken, reward=0, task=task("a")),
        run_events("x1", [8], reward=1, task=task("x")),
        run_events("x0", calls=[other], reward=0, task=task("x")),
    )
    manifest, found = await build(tmp_path, events, method="dpo")
    assert taken(found) == ["best", "worst"]
    why = reasons(Home(tmp_path), manifest["id"])
    assert why == {
        "lost": "missing_call",
        "best": None,
        "mid": "not_best",
        "worst": None,
        "broken": "broken_prefix",
        "x1": "no_pair",
        "x0": "no_pair",
    }
    said = details(Home(tmp_path), manifest["id"])["x1"]
    assert said == "the best and the worst run were asked differently"


async def test_pairs_of_a_task_are_bounded_and_told_once(tmp_path: Path) -> None:
    def pair(name: str, iteration: int, tokens: list[int]) -> Any:
        about: dict[str, Any] = {"task": task("a"), "iteration": iteration}
        return several(
            run_events(f"{name}-good", [tokens[0]], reward=1, **about),
            run_events(f"{name}-bad", [tokens[1]], reward=0, **about),
        )

    events = several(
        pair("p", 1, [5, 6]), pair("q", 2, [5, 6]), pair("r", 3, [5, 7]), pair("s", 4, [8, 7])
    )
    manifest, found = await build(tmp_path, events, method="dpo", loop="l", max_per_task=2)
    assert taken(found) == ["p-good", "p-bad", "r-good", "r-bad"]
    assert [row["pair"] for row in found] == ["a/g1", "a/g1", "a/g3", "a/g3"]
    assert manifest["rejected"] == {"duplicate": 2, "over_max_per_task": 2}
    assert details(Home(tmp_path), manifest["id"])["q-bad"] == "the pair of p-good"


async def test_runs_are_desirable_or_not_each_alone(tmp_path: Path) -> None:
    broken = [call("k1", [1, 2], [3]), call("k2", [8, 9], [4], started=2.0)]
    events = several(
        attempts("a", 0, 1, 2, None),
        attempts("b", 0.5),
        run_events("again", [9], reward=0, task=task("z"), attempt=0),
        run_events("same", [9], reward=1, task=task("z"), attempt=1),
        run_events("twice", calls=broken, reward=1),
    )
    home = await stored(tmp_path, events)
    manifest, found = made(home, method="kto")
    assert [(row["run_id"], row["chosen"]) for row in found] == [
        ("twice", True),  # a template broke it into two samples
        ("twice", True),
        ("a0", False),
        ("a1", True),
        ("a2", True),
        ("b0", False),
        ("again", False),
    ]
    assert {(row["pair"], row["group"], row["advantage"]) for row in found} == {(None, "", 0.0)}
    assert (manifest["method"], manifest["accepted_runs"]) == ("kto", 6)
    assert manifest["rejected"] == {"duplicate": 1, "no_reward": 1}
    _, found = made(home, method="kto", min_reward=0.5, max_per_task=1)
    assert [(row["run_id"], row["chosen"]) for row in found[2:]] == [
        ("a0", False),
        ("b0", True),
        ("again", False),
    ]


@pytest.mark.parametrize("name", ["best_of", "min_margin", "normalize", "demonstrations"])
async def test_what_has_no_effect_on_runs_alone_is_refused(tmp_path: Path, name: str) -> None:
    value = {"normalize": False, "demonstrations": [[{"role": "user", "content": "q"}]]}
    with pytest.raises(BadInput, match=f"{name} has no effect with method 'kto'"):
        made(Home(tmp_path), method="kto", **{name: value.get(name, 1)})


async def test_a_teacher_needs_no_rewards(tmp_path: Path) -> None:
    """All runs with tokens, each alone; equal ones are draws, and stay."""
    events = several(
        attempts("a", 0, None, 1),
        run_events("again", [5], reward=None, task=task("b"), attempt=0),
        run_events("equal", [5], reward=None, task=task("b"), attempt=1),
        run_events(
            "failed", [6], reward=None, error={"type": "RewardError", "message": "it broke"}
        ),
        run_events("empty", [], reward=1),
        run_events("down", [7], error={"type": "Gone", "message": "gone", "infrastructure": True}),
        run_events("held", [8], task=task("c", "holdout")),
    )
    manifest, found = await build(tmp_path, events, method="distill")
    assert sorted(taken(found)) == ["a0", "a1", "a2", "again", "equal", "failed"]
    assert (manifest["method"], manifest["accepted_runs"]) == ("distill", 6)
    assert reasons(Home(tmp_path), manifest["id"])["held"] == "held_out"
    _, found = made(Home(tmp_path), method="distill", max_per_task=1)
    assert sorted(taken(found)) == ["a0", "again", "failed"]
    for name, value in (("min_reward", 1.0), ("rewards", {"a0": 1.0}), ("near_duplicates", 0.9)):
        with pytest.raises(BadInput, match=f"{name} has no effect with method 'distill'"):
            made(Home(tmp_path), method="distill", **{name: value})


async def test_groups_and_pairs_fall_to_a_split_as_a_whole(tmp_path: Path) -> None:
    events = several(*(attempts(f"t{n:02}", 0, 1, 2) for n in range(30)))
    home = await stored(tmp_path, events)
    for method, size in (("grpo", 3), ("dpo", 2)):
        manifest, found = made(home, method=method, validation=0.4)
        groups = [row["group"] for row in found]
        assert [groups.count(name) for name in groups] == [size] * len(groups)
        assert groups == sorted(groups) and 0 < len(groups) < 30 * size
        assert manifest["samples"] == 30 * size
