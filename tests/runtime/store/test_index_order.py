"""The same events tell the same runs, in whatever order, how often and in what pieces they come."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cray_agents.queries import RunQuery
from cray_agents.runtime.store.index import Index
from cray_agents.runtime.store.segments.line_format import Fact, Placed
from tests.support.store.made_up_facts import call, described, expected_runs, forget, live, placed

pytestmark = pytest.mark.slow

RUNS = ("run_a", "run_b", "run_c")
TIMES = st.integers(0, 5).map(float)
MODELS = st.sampled_from(["calc@1", "calc@2", "base"])
TAGS = st.lists(st.sampled_from(["x", "y", "z"]), max_size=2)
VALUES = st.sampled_from([0.0, 0.5, 1.0])
SOON = st.integers(0, 1).map(float)  # so that rewards are often given at the same time
NAMES = st.sampled_from(["correct", "brief"])
GIVERS = st.sampled_from(["", "ann", "ops"])
OWNERS = st.sampled_from(["", "key_1", "key_2"])
PLACES = st.sampled_from([None, 0, 1])  # turns that are rewarded, or the run


@st.composite
def rewards(draw: st.DrawFn) -> list[list[Any]]:
    one = st.tuples(NAMES, st.just("function"), VALUES, SOON, PLACES, GIVERS).map(list)
    return draw(st.lists(one, max_size=2))


@st.composite
def events(draw: st.DrawFn) -> list[Fact]:
    """Some events, each once."""
    found = []
    for number in range(draw(st.integers(1, 12))):
        event_id, run_id, time = f"event_{number}", draw(st.sampled_from(RUNS)), draw(TIMES)
        kind = draw(st.sampled_from(["call", "call", "run", "run", "reward", "forget"]))
        if kind == "call":
            about = {
                "model": draw(MODELS),
                "started": draw(TIMES),
                "ending": draw(st.sampled_from(["completed", "cancelled", "unanswered", "error"])),
                "tags": draw(TAGS),
                "redacted": draw(st.booleans()),
                "prompt": draw(st.integers(0, 9)),
                "owner": draw(OWNERS),
            }
            if draw(st.booleans()):
                about |= {"asked": f"hash_{number}", "said": [[f"id_{number}"], "text"]}
            found.append(call(event_id, run_id, time, **about))
        elif kind == "run":
            about = {
                "model": draw(MODELS),
                "loop": draw(st.sampled_from([None, "school"])),
                "generation": draw(st.sampled_from([None, 0, 1])),
                "task": draw(st.sampled_from([None, "t1", "t2"])),
                "error": draw(st.sampled_from([None, "ToolError", "RewardError"])),
                "tags": draw(TAGS),
                "rewards": draw(rewards()),
                "turns": draw(st.integers(0, 2)),
                "started": draw(TIMES),
                "owner": draw(OWNERS),
            }
            found.append(described(event_id, run_id, time, **about))
        elif kind == "reward":
            about = {"name": draw(NAMES), "source": "function", "value": draw(VALUES)}
            about |= {"time": draw(SOON), "turn": draw(PLACES), "giver": draw(GIVERS)}
            found.append(Fact(event_id, run_id, kind, time, about))
        else:
            found.append(forget(event_id, run_id, time))
    return found


def retell(index: Index, at: dict[str, Placed]) -> None:
    """What the store does for runs of which a part was forgotten."""
    by_place = {one.place: one for one in at.values()}
    for run_id in index.stale():
        assert index.rebuild_run(run_id, [by_place[place] for place in index.live(run_id)])
    assert not index.stale()


def check(index: Index, facts: list[Fact], at: dict[str, Placed]) -> None:
    """The index says of these events what a plain reading of the rules does."""
    runs = expected_runs(facts)
    left = live(facts)
    ids = {fact.id for fact in left} | {fact.id for fact in facts if fact.kind == "forget"}
    for fact in facts:
        assert index.known(fact.id)
        assert index.has(fact.id) == (fact.id in ids)
        if fact.id in ids:
            assert index.place(fact.id) == at[fact.id].place
    for run_id in RUNS:
        assert index.run(run_id) == runs.get(run_id)
    assert list(index.iterate(RunQuery())) == [runs[run_id] for run_id in sorted(runs)]
    assert list(index.iterate(RunQuery(order="newest"))) == sorted(
        runs.values(), key=lambda run: (run.started, run.run_id), reverse=True
    )
    for run_id, places in index.places(RUNS).items():
        mine = [fact for fact in left if fact.run_id == run_id]
        newest = max(
            (fact for fact in mine if fact.kind == "run"),
            key=lambda fact: (fact.time, fact.id),
            default=None,
        )
        assert places.run == (at[newest.id].place if newest else None)
        for kind, found in (("call", places.calls), ("reward", places.rewards)):
            assert set(found) == {at[fact.id].place for fact in mine if fact.kind == kind}
    asked = [fact for fact in left if "asked" in fact.about]
    assert {said[1:3] for said in index.conversations()} == {
        (fact.about["asked"], fact.run_id) for fact in asked
    }


@settings(max_examples=80)
@given(events(), st.randoms(use_true_random=False))
def test_order_pieces_and_repeats_do_not_matter(facts: list[Fact], rnd: random.Random) -> None:
    with TemporaryDirectory() as directory:
        index = Index(Path(directory) / "index.sqlite")
        try:
            told_twice = [*facts, *rnd.sample(facts, rnd.randint(0, len(facts)))]
            rnd.shuffle(told_twice)
            at: dict[str, Placed] = {}
            for number, one in enumerate(pieces(told_twice, rnd)):
                segment = f"segment_{number}"
                some = placed(one, segment)
                for found in some:
                    at.setdefault(found.fact.id, found)
                new = index.add(segment, 0, 100 * len(some), some)
                assert new == sum(at[i] in some for i in {found.fact.id for found in some})
                if rnd.random() < 0.3:
                    retell(index, at)
            retell(index, at)
            check(index, facts, at)
        finally:
            index.close()


@settings(max_examples=40)
@given(events(), st.randoms(use_true_random=False))
def test_dropped_events_leave_as_if_they_had_never_come(
    facts: list[Fact], rnd: random.Random
) -> None:
    with TemporaryDirectory() as directory:
        index = Index(Path(directory) / "index.sqlite")
        try:
            at: dict[str, Placed] = {}
            for number, one in enumerate(pieces(facts, rnd)):
                segment = f"segment_{number}"
                some = placed(one, segment)
                at |= {found.fact.id: found for found in some}
                index.add(segment, 0, 100 * len(some), some)
            gone = {name for name in index.progress() if rnd.random() < 0.5}
            index.drop(sorted(gone))
            assert gone.isdisjoint(index.progress())
            retell(index, at)
            check(index, [fact for fact in facts if at[fact.id].place.segment not in gone], at)
        finally:
            index.close()


def pieces(facts: list[Fact], rnd: random.Random) -> list[list[Fact]]:
    """The facts, cut at some places."""
    found: list[list[Fact]] = [[]]
    for fact in facts:
        if found[-1] and rnd.random() < 0.4:
            found.append([])
        found[-1].append(fact)
    return found
