"""The estimates of `plan` beside published runs: docs/planning.md, and how good they are."""

import json

from tests.support.trainers.published_runs import (
    FILE,
    MEMORY_OFF,
    PAGE,
    TIME_OFF,
    PublishedRun,
    read_runs,
    table,
    with_summary,
)


def test_the_summary_of_the_page_is_computed() -> None:
    """`python -m tests.support.trainers.published_runs` writes it anew."""
    page = PAGE.read_text()
    assert with_summary(page, read_runs()) == page


def test_the_table_has_each_run() -> None:
    runs = read_runs()
    rows = table(runs).splitlines()[2 : len(runs) + 2]
    assert all(row.startswith(f"| {run.name}") for row, run in zip(rows, runs, strict=True))


def test_estimates_are_close_or_the_note_says_why() -> None:
    runs = read_runs()
    assert len({run.source for run in runs}) >= 8 and len(runs) >= 40

    def off(run: PublishedRun) -> bool:
        return abs(run.time_off) > TIME_OFF or abs(run.memory_off or 0.0) > MEMORY_OFF + 0.01

    far = [run for run in runs if off(run)]
    assert all(run.note for run in far), [run.name for run in far]
    assert len(far) <= 6
    dense = [run for run in runs if run.held_out and run not in far]
    assert len(dense) >= 14


def test_each_run_has_a_public_source() -> None:
    data = json.loads(FILE.read_text())
    assert {run["source"] for run in data["runs"]} == data["sources"].keys()
    assert {run["model"] for run in data["runs"]} == data["models"].keys()
    assert all(url.startswith("https://") for _, url in data["sources"].values())
