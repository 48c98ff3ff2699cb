"""The test of promotion: its error levels, looked at after each batch as the loop does."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.promotion.e_process import Deadline, Stream
from cray_agents.promotion.figures import Pair
from cray_agents.promotion.sequential_test import (
    HIDDEN,
    Decision,
    PromotionTest,
    decide,
    deciding_tasks,
    plan,
    probe_tasks,
)
from cray_agents.records import Task

TAGS = ("a", "b", "c", "d")
TASKS = [Task(input=f"task {n}", metadata={"level": TAGS[n % 4]}) for n in range(204)]

Success = Callable[[str], float]  # by tag


def trial(
    seed: int,
    incumbent: Success,
    candidate: Success,
    test: PromotionTest,
    *,
    kinship: float = 0.5,
    tasks: Sequence[Task] = TASKS,
) -> Decision:
    """An evaluation as the loop makes it: batch by batch, a look after each, the probes at the end.

    `kinship`: probability that both meet a task with the same luck, as parent and child do.
    """
    rng = random.Random(seed)
    wanted = deciding_tasks(tasks, test)
    rng.shuffle(wanted)
    planned, pairs = plan(wanted, test), list[Pair]()

    def pair(task: Task) -> Pair:
        tag, luck = task.metadata["level"], rng.random()
        other = luck if rng.random() < kinship else rng.random()
        return Pair(
            task=task.id,
            incumbent=float(luck < incumbent(tag)),
            candidate=float(other < candidate(tag)),
            tag=tag if test.guard else None,
        )

    while True:
        pairs += [pair(task) for task in wanted[len(pairs) : len(pairs) + test.batch]]
        exhausted = len(pairs) == len(wanted)
        decision = decide(pairs, test, planned=planned, exhausted=exhausted)
        if decision.verdict == "promote":
            hidden = [pair(task) for task in probe_tasks(tasks, seed, test)]
            decision = decide(pairs, test, planned=planned, exhausted=exhausted, hidden=hidden)
        if decision.verdict != "continue":
            return decision


def promoted(tries: int, incumbent: Success, candidate: Success, **options: Any) -> int:
    test = PromotionTest(guard="level", **options)
    return sum(
        trial(seed, incumbent, candidate, test).verdict == "promote" for seed in range(tries)
    )


def always(success: float) -> Success:
    return lambda tag: success


@pytest.mark.slow
@pytest.mark.parametrize(("success", "alpha"), [(0.5, 0.05), (0.9, 0.2)])
def test_unchanged_candidates_are_promoted_at_most_at_the_stated_level(
    success: float, alpha: float
) -> None:
    unchanged = always(success), always(success)
    assert promoted(200, *unchanged, alpha=alpha, batch=24) <= 200 * alpha


def test_a_candidate_that_is_the_incumbent_is_never_promoted() -> None:
    pairs = [Pair(task=str(n), incumbent=n % 2, candidate=n % 2) for n in range(200)]
    decision = decide(pairs, PromotionTest(), planned={None: 200}, exhausted=True)
    assert (decision.verdict, decision.ties, decision.evidence) == ("reject", 200, 1.0)


def test_damaged_candidates_are_never_promoted() -> None:
    assert promoted(20, always(0.8), always(0.5)) == 0
    assert promoted(20, always(0.8), lambda tag: 0.2 if tag == "c" else 0.8) == 0


def test_one_that_is_better_but_for_one_tag_is_not_promoted() -> None:
    worse_in_one: Success = lambda tag: 0.1 if tag == "c" else 0.9  # noqa: E731
    decisions = [
        trial(seed, always(0.6), worse_in_one, PromotionTest(guard="level")) for seed in range(20)
    ]
    assert not [d for d in decisions if d.verdict == "promote"]
    assert all("c (-" in d.reason for d in decisions)
    unguarded = [trial(seed, always(0.6), worse_in_one, PromotionTest()) for seed in range(20)]
    assert len([d for d in unguarded if d.verdict == "promote"]) > 10  # so it is the guard


@pytest.mark.slow
def test_what_rises_is_usually_promoted_and_a_leap_early() -> None:
    assert promoted(100, always(0.5), always(0.62)) >= 75
    assert promoted(100, always(0.85), always(0.92)) >= 60
    leap = [trial(seed, always(0.1), always(0.8), PromotionTest()) for seed in range(20)]
    assert all(d.verdict == "promote" and d.tasks <= 64 for d in leap)


def test_what_is_worse_is_given_up_early_and_what_is_better_seldom() -> None:
    worse = [trial(seed, always(0.8), always(0.4), PromotionTest()) for seed in range(20)]
    assert all(d.verdict == "reject" and d.tasks <= 96 for d in worse)
    assert "futile" in worse[0].reason
    better = [trial(seed, always(0.5), always(0.53), PromotionTest()) for seed in range(100)]
    assert sum("futile" in d.reason for d in better) <= 5


def test_the_looks_do_not_change_the_verdict() -> None:
    for seed in range(20):
        found = {
            trial(seed, always(0.6), always(0.7), PromotionTest(batch=size)).verdict
            for size in (8, 204)
        }
        assert len(found) == 1


def test_a_margin_must_be_exceeded() -> None:
    rises = always(0.5), always(0.65)
    assert promoted(40, *rises, margin=0.3) == 0
    assert promoted(40, *rises, margin=-0.1) > promoted(40, *rises)


def test_rewards_in_another_range() -> None:
    test = PromotionTest(low=-1, high=3)
    pairs = [Pair(task=str(n), incumbent=0.0, candidate=1.0) for n in range(200)]
    decision = decide(pairs, test, planned={None: 200}, exhausted=True)
    assert (decision.verdict, decision.difference) == ("promote", 0.25)
    with pytest.raises(BadInput, match=r"reward 3.5 of task 7 .*low=…, high=…"):
        decide([Pair(task="7", incumbent=0, candidate=3.5)], test, planned={}, exhausted=True)
    with pytest.raises(ValueError, match="must be less"):
        PromotionTest(low=1, high=1)


def test_hidden_probes_decide_nothing_but_can_forbid() -> None:
    test = PromotionTest()
    hidden = [probe_tasks(TASKS, iteration, test) for iteration in range(4)]
    ids = [{task.id for task in part} for part in hidden]
    assert (ids[0], ids[1]) == (ids[2], ids[3]) and ids[0] and ids[1] and not ids[0] & ids[1]
    rest = {task.id for task in deciding_tasks(TASKS, test)}
    assert rest | ids[0] | ids[1] == {task.id for task in TASKS} and not rest & (ids[0] | ids[1])
    fewer = {task.id for task in TASKS[:100]}
    # by the task alone
    assert {task.id for task in deciding_tasks(TASKS[:100], test)} == rest & fewer
    assert probe_tasks(TASKS[:19], 0, test) == [] and len(deciding_tasks(TASKS[:19], test)) == 19

    better = [Pair(task=str(n), incumbent=0, candidate=1) for n in range(100)]
    worse = [Pair(task=task.id, incumbent=1, candidate=0) for task in hidden[0]]
    ask = {"planned": {None: 180}, "exhausted": False}
    assert decide(better, test, **ask).verdict == "promote"  # type: ignore[arg-type]
    decision = decide(better, test, **ask, hidden=worse)  # type: ignore[arg-type]
    assert decision.verdict == "reject" and HIDDEN in decision.reason
    assert decision.difference == 1.0 and decision.tasks == 100
    assert not any(task.id in decision.model_dump_json() for task in hidden[0])


def test_a_promotion_never_says_that_the_evidence_falls_short() -> None:
    steps = [0, 0, 1, 1, 1, 1, 1, -1, 1, 1]  # whose wealth is 19.999999999999996
    pairs = [Pair(task=f"{n}", incumbent=d < 0, candidate=d > 0) for n, d in enumerate(steps)]
    decision = decide(pairs, PromotionTest(hidden=0), planned={None: 10}, exhausted=True)
    assert decision.reason == "better: evidence 20, 20 needed"


def test_a_stream_finds_a_difference_and_keeps_its_level() -> None:
    def evidence(seed: int, success: float, margin: float) -> float:
        rng, stream = random.Random(seed), Stream(margin)
        for n in range(300):
            stream.add((rng.random() < success) - (rng.random() < 0.5))
            if n == 150:  # as after a restart
                kept, stream = stream.state(), Stream(margin)
                stream.restore(kept)
        return stream.evidence

    assert sum(evidence(seed, 0.52, 0.02) >= 20 for seed in range(100)) <= 5
    assert all(evidence(seed, 0.9, 0.02) >= 20 for seed in range(20))


def test_small_differences_add_up_to_a_promotion() -> None:
    gambler = Deadline(20, 107, 0.0)
    for _ in range(40):
        gambler.add(0.5)
    assert gambler.reached
