"""Scans of many runs: even samples for histograms, and an end when nobody waits any more."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest

from bench.corpus import AGENTS, START, write_corpus
from cray_agents.paths import Home
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.disk.turns import TURN, ReadGivenUp
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import run_queries

RUNS = 8000
NAMES = ("reward", "seconds", "turns", "tokens")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    home = Home(tmp_path_factory.mktemp("corpus"))
    write_corpus(home, RUNS)
    store = Store(home)
    yield store
    asyncio.run(store.close())


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)  # each is that of every fourth run
def test_histograms_of_a_sample_are_like_those_of_all(store: Store, agent: str) -> None:
    which = RunFilter(agent=agent)
    whole = store.histograms(which, NAMES, 8)
    parts = store.histograms(which, NAMES, 8, 500)
    for name in NAMES:
        every = parts[name]["every"]
        assert (whole[name]["every"], every) == (1, RUNS // 4 // 500)
        assert sum(whole[name]["counts"]) + whole[name]["missing"] == RUNS // 4
        counted = sum(parts[name]["counts"]) + parts[name]["missing"]
        assert 350 < counted < 650
    for all_of, some in zip(whole["seconds"]["counts"], parts["seconds"]["counts"], strict=True):
        assert abs(every * some - all_of) < all_of / 2
    assert store.histograms(which, NAMES, 8, RUNS) == whole


def test_histograms_count_as_one_would_by_hand(store: Store) -> None:
    runs = [*store.facts(RunQuery())]
    found = store.histograms(RunFilter(), ["turns", "seconds"], 5)
    turns = Counter(run.turns for run in runs)
    edges, counts = found["turns"]["edges"], found["turns"]["counts"]
    assert {int(edge): n for edge, n in zip(edges, counts, strict=False) if n} == dict(turns)
    edges, counts = found["seconds"]["edges"], found["seconds"]["counts"]
    last = len(counts) - 1
    for number, count in enumerate(counts):
        inside = [
            run.run_id for run in runs
            if edges[number] <= run.seconds and (number == last or run.seconds < edges[number + 1])
        ]  # fmt: skip
        assert abs(len(inside) - count) <= 1  # a value on an edge may round either way


def test_a_few_runs_of_a_time_are_counted_like_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = RunFilter(since=START + RUNS - 900, until=START + RUNS - 100)

    def counted() -> Any:
        return (
            store.stats(which, ["agent", "loop"]),
            store.facets(which, ["agent", "model", "tag"]),
            store.histograms(which, NAMES, 8),
        )

    monkeypatch.setattr(run_queries, "FEW", 1)
    few = counted()
    monkeypatch.setattr(run_queries, "FEW", 0)
    all_of = counted()
    assert sum(row["runs"] for row in few[0]) == 801
    assert few[1:] == all_of[1:]
    for one, other in zip(few[0], all_of[0], strict=True):
        assert one == pytest.approx(other, nan_ok=True)


def test_a_read_that_was_given_up_ends_and_leaves_its_connection_usable(store: Store) -> None:
    which = RunFilter()
    whole = store.stats(which, ["task"])

    def read() -> None:
        TURN.set(lambda: True)
        store.stats(which, ["task"])

    for _ in range(3):
        with pytest.raises(ReadGivenUp):
            copy_context().run(read)
    assert store.stats(which, ["task"]) == whole
