"""The index: filters, orders and pages; progress, compaction, damage; statistics."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput, NotFound
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store.index import Index, Places, RunFacts
from cray_agents.runtime.store.segments.line_format import Fact, LinePlace
from cray_agents.runtime.store.segments.reader import Damage
from tests.support.store.made_up_facts import call, described, expected_runs, forget, placed, reward

ORDERS = ("id", "newest", "oldest", "task")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path / "index.sqlite")
    yield index
    index.close()


def fill(index: Index, facts: list[Fact], segment: str = "segment_a") -> None:
    start = index.progress().get(segment, 0)
    end = start + 100 * len(facts)
    assert index.add(segment, start, end, placed(facts, segment, start)) == len(facts)


def many(count: int, rnd: random.Random) -> list[Fact]:
    """Runs of all sorts, described, called, rewarded or not."""
    facts = []
    for number in range(count):
        run_id = f"run_{rnd.getrandbits(40):010x}"
        model = f"{rnd.choice(['calc', 'base'])}@{rnd.randint(1, 3)}"
        started = float(rnd.randint(0, 50))
        tags = rnd.sample(["a", "b", "c"], rnd.randint(0, 2))
        if rnd.random() < 0.9:
            about: dict[str, Any] = {
                "model": model,
                "agent": rnd.choice(["solver", "writer"]),
                "loop": rnd.choice([None, "school", "gym"]),
                "generation": rnd.choice([None, -2, 0, 1, 2]),
                "attempt": rnd.choice([None, 0, 1]),
                "task": rnd.choice([None, "t1", "t2", "t3"]),
                "split": rnd.choice([None, "train", "holdout"]),
                "stop_reason": rnd.choice(["completed", "error", "timeout"]),
                "error": rnd.choice([None, None, "ToolError", "EngineError"]),
                "tags": tags,
                "started": started,
                "seconds": float(number % 20),
            }
            facts.append(described(f"run-{number}", run_id, started, **about))
        if rnd.random() < 0.7:
            facts.append(call(f"call-{number}", run_id, started, model=model, tags=tags))
        if rnd.random() < 0.7:
            facts.append(reward(f"reward-{number}", run_id, rnd.choice([0.0, 0.5, 1.0])))
    return facts


def matches(run: RunFacts, query: RunFilter) -> bool:
    """A plain reading of RunFilter."""
    plain = ("loop", "iteration", "agent", "task", "split", "stop_reason")
    if any(getattr(query, f) not in (None, getattr(run, f)) for f in plain):
        return False
    if query.iterations is not None and run.iteration not in query.iterations:
        return False
    names = {*run.models, *(model.partition("@")[0] for model in run.models)}
    if query.model is not None and query.model not in names:
        return False
    low = float("-inf") if run.reward is None else run.reward
    high = float("inf") if run.reward is None else run.reward
    return (
        (query.min_reward is None or low >= query.min_reward)
        and (query.max_reward is None or high <= query.max_reward)
        and (query.error in (None, run.error) or (query.error == "*" and bool(run.error)))
        and (query.since is None or run.started >= query.since)
        and (query.until is None or run.started <= query.until)
        and set(query.tags) <= set(run.tags)
    )


def in_order(runs: list[RunFacts], order: str) -> list[RunFacts]:
    if order == "id":
        return sorted(runs, key=lambda run: run.run_id)
    if order == "task":

        def key(run: RunFacts) -> tuple[Any, ...]:
            numbers = (run.iteration, run.attempt)
            ranks = [(n is not None and n >= 0, n is not None, n or 0) for n in numbers]
            ranks = [(r[0], not r[1], r[2]) for r in ranks]  # below zero, none, from zero on
            return (run.task or "", *ranks, run.run_id)

        return sorted(runs, key=key)
    found = sorted(runs, key=lambda run: (run.started, run.run_id))
    return found[::-1] if order == "newest" else found


def queries(rnd: random.Random, count: int) -> Iterator[dict[str, Any]]:
    values: dict[str, list[Any]] = {
        "loop": ["school", "gym", "none"],
        "iteration": [-2, 0, 1, 7],
        "iterations": [[], [0], [1, 2, 9]],
        "agent": ["solver", "", "nobody"],
        "task": ["t1", "t9", ""],
        "split": ["train", "test"],
        "stop_reason": ["error", "completed"],
        "model": ["calc", "calc@2", "calc@9"],
        "min_reward": [0.5, 2.0],
        "max_reward": [0.5, -1.0],
        "error": ["*", "ToolError", "Other"],
        "since": [10.0, 99.0],
        "until": [40.0, -1.0],
        "tags": [["a"], ["a", "b"], ["z"]],
    }
    for name, several in values.items():
        yield from ({name: value} for value in several)
    for _ in range(count):
        names = rnd.sample(list(values), rnd.randint(2, 3))
        yield {name: rnd.choice(values[name]) for name in names}


@pytest.mark.slow
def test_filters_orders_and_pages_are_what_a_plain_reading_says(index: Index) -> None:
    rnd = random.Random(4)
    facts = many(300, rnd)
    fill(index, facts)
    runs = list(expected_runs(facts).values())
    found = 0
    for given in queries(rnd, 60):
        matching = [run for run in runs if matches(run, RunFilter(**given))]
        found += len(matching)
        assert index.count(RunFilter(**given)) == len(matching), given
        for order in ORDERS:
            wanted = in_order(matching, order)
            query = RunQuery(**given, order=order, limit=17)
            assert list(index.iterate(query)) == wanted[:17], query
            paged, after = [], None
            while page := list(index.iterate(query.model_copy(update={"after": after}))):
                paged += page
                after = page[-1].run_id
            assert paged == wanted, query
    assert found > 1000


def test_a_tag_that_a_thousand_sets_hold_is_found_too(index: Index) -> None:
    facts = [
        described(f"e{n}", f"run_{n:04}", tags=["all", f"own-{n}", *(["odd"] * (n % 2))])
        for n in range(1200)
    ]
    fill(index, facts)
    assert index.count(RunFilter(tags=["all"])) == 1200
    assert index.count(RunFilter(tags=["odd", "all"])) == 600
    assert [r.run_id for r in list(index.iterate(RunQuery(tags=["own-7", "odd"])))] == ["run_0007"]


@pytest.mark.parametrize("order", ORDERS)
def test_pages_stay_in_step_while_runs_are_added(index: Index, order: str) -> None:
    rnd = random.Random(order)
    before = many(120, rnd)
    fill(index, before)
    wanted = [run.run_id for run in in_order(list(expected_runs(before).values()), order)]
    later = [fact._replace(id=f"late-{fact.id}") for fact in many(120, rnd)]
    seen: list[str] = []
    query = RunQuery(order=order, limit=9)
    while page := list(index.iterate(query)):
        seen += [run.run_id for run in page]
        query = query.model_copy(update={"after": page[-1].run_id})
        fill(index, later[: len(page)])
        del later[: len(page)]
    assert len(seen) == len(set(seen))
    assert [run_id for run_id in seen if run_id in set(wanted)] == wanted
    assert len(seen) > len(wanted)


def test_a_page_may_go_on_after_a_forgotten_run_but_not_after_an_unknown_one(index: Index) -> None:
    fill(index, [described(f"e{n}", f"run_{n}", time=float(n)) for n in range(4)])
    fill(index, [forget("f", "run_1", 9.0)])
    query = RunQuery(order="oldest", after="run_1")
    assert [run.run_id for run in list(index.iterate(query))] == ["run_2", "run_3"]
    with pytest.raises(NotFound, match="run_x"):
        list(index.iterate(RunQuery(order="newest", after="run_x")))
    assert [run.run_id for run in index.iterate(RunQuery(after="run_1x"))] == ["run_2", "run_3"]


def test_what_is_read_must_follow_on_what_was_read(index: Index) -> None:
    one, two, three = placed([call(f"c{n}", "run_a") for n in range(3)])
    assert index.add("segment_a", 100, 200, [two]) == -1
    assert not index.known("c1")
    assert index.add("segment_a", 0, 100, [one]) == 1
    assert index.add("segment_a", 0, 200, [one, two]) == 1
    assert index.add("segment_a", 0, 100, [one]) == 0
    assert index.progress() == {"segment_a": 200}
    assert index.add("segment_a", 200, 300, [three]) == 1
    facts = index.run("run_a")
    assert facts is not None and facts.calls == 3


def test_compaction_moves_events_and_leaves_out_the_forgotten(index: Index) -> None:
    fill(index, [described("d1", "run_a"), described("d2", "run_b")], "segment_a")
    fill(index, [call("c1", "run_a"), forget("f1", "run_b", 2.0)], "segment_b")
    kept = [described("d1", "run_a"), call("c1", "run_a"), call("c2", "run_c")]
    old = ["segment_a", "segment_b"]
    assert index.add("segment_c", 0, 300, placed(kept, "segment_c"), old) == 1
    index.drop(old)
    assert index.progress() == {"segment_c": 300}
    assert index.places(["run_a", "run_b", "run_c"]) == {
        "run_a": Places(LinePlace("segment_c", 0, 99), (LinePlace("segment_c", 100, 99),), ()),
        "run_c": Places(None, (LinePlace("segment_c", 200, 99),), ()),
    }
    assert index.stale() == [] and not index.known("d2")


def test_what_lay_twice_is_read_again_when_one_of_them_is_gone(index: Index) -> None:
    event = described("d1", "run_a")
    fill(index, [event], "segment_a")
    assert index.add("segment_b", 0, 100, placed([event], "segment_b")) == 0
    index.drop(["segment_a"])
    assert index.run("run_a") is None
    assert index.progress() == {"segment_b": 0}
    assert index.add("segment_b", 0, 100, placed([event], "segment_b")) == 1
    assert index.place("d1") == LinePlace("segment_b", 0, 99)


def test_damage_is_noted_once_and_goes_with_its_segment(index: Index) -> None:
    index.note("segment_a", 10, 4096, 7, "bad checksum")
    index.note("segment_a", 10, 4096, 7, "bad checksum")
    index.note("segment_b", 0, -1, 9, "not an event")
    assert index.problems() == [
        Damage("segment_a", 10, 4096, 7, "bad checksum"),
        Damage("segment_b", 0, -1, 9, "not an event"),
    ]
    index.drop(["segment_a"])
    assert [problem.segment for problem in index.problems()] == ["segment_b"]


def test_only_the_newest_conversations_are_kept(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite", conversations=50)
    numbers = list(range(400))
    random.Random(1).shuffle(numbers)
    for n in numbers:
        fill(index, [call(f"c{n}", f"r{n}", float(n), asked=f"h{n}", said=[[f"i{n}"], "x"])])
    assert list(index.conversations()) == [
        (n, f"h{n}", f"r{n}", [f"i{n}"], "x") for n in range(350, 400)
    ]
    index.close()


def test_statistics_by_group(index: Index) -> None:
    facts = []
    for n in range(100):
        about: dict[str, Any] = {"loop": "school" if n % 4 else None}
        about |= {"seconds": float(n), "started": 86400.0 * n}
        facts.append(described(f"d{n}", f"r{n}", **about, error="ToolError" if n < 10 else None))
        facts.append(call(f"c{n}", f"r{n}"))
        if n % 2:
            facts.append(reward(f"w{n}", f"r{n}", n / 100))
    fill(index, facts)
    (row,) = index.stats(RunFilter())
    assert row == {
        "runs": 100,
        "rewarded": 50,
        "success": 0.0,
        "mean_reward": pytest.approx(0.5),
        "min_reward": 0.01,
        "max_reward": 0.99,
        "calls": 100,
        "prompt_tokens": 1000,
        "sampled_tokens": 500,
        "cached_tokens": 400,
        "errors": 10,
        "infrastructure": 0,
        "mean_seconds": 49.5,
        "seconds": 4950.0,
        "last": 99 * 86400.0,
        "p50_seconds": 49.0,
        "p95_seconds": 94.0,
    }
    grouped = index.stats(RunFilter(since=86400.0), ["loop", "iteration"])
    assert [(g["loop"], g["iteration"], g["runs"]) for g in grouped] == [
        ("school", None, 75),
        (None, None, 24),
    ]
    assert index.stats(RunFilter(until=0.0), ["day", "task"])[0]["day"] == "1970-01-01"
    assert index.stats(RunFilter(loop="none")) == index.stats(RunFilter(since=1e12)) == []
    with pytest.raises(BadInput, match="colour"):
        index.stats(RunFilter(), ["colour"])


def test_absurd_numbers_are_no_error(index: Index) -> None:
    fill(index, [described("d1", "r1", generation=2**63, attempt=-(2**63), task="t\0t")])
    assert next(index.iterate(RunQuery(iteration=2**63, order="task"))).iteration == 2**63
    assert index.count(RunFilter(iteration=2**80, iterations=[10**30])) == 1
    assert index.count(RunFilter(task="t\0t")) == 1
