"""The history of metrics: exact, bounded, over restarts, and honest about damage."""

import asyncio
import math
from pathlib import Path

import pytest

from cray_agents.runtime.observability import metrics_history
from cray_agents.runtime.observability.metrics_history import (
    FILE_SECONDS,
    KEPT,
    WHOLE,
    HistoryWriter,
    keep_history,
    known_names,
    parse_series,
    read_curves,
    read_samples,
    series_name,
)

BEGUN = 1_700_000_000.0


def sample(number: int) -> dict[str, float]:
    """Some series change always, some never, one comes late, and one goes."""
    values = {"a_total": float(number), "still": 7.5, 'g{"x":"1"}': number / 3}
    if number > 100:
        values["late"] = 1.0
    if number < 150:
        values["early"] = -1.0
    return values


def write(folder: Path, numbers: range, every: float = 10.0) -> None:
    writer = HistoryWriter(folder)
    for number in numbers:
        writer.write(BEGUN + number * every, sample(number))
    writer.close()


def test_what_was_sampled_is_read_over_hours_and_restarts(tmp_path: Path) -> None:
    write(tmp_path, range(500))
    write(tmp_path, range(500, 900))  # another process
    read = list(read_samples(tmp_path, 0, math.inf))
    assert read == [(BEGUN + 10 * n, sample(n)) for n in range(900)]
    part = list(read_samples(tmp_path, BEGUN + 4000, BEGUN + 4100))
    assert [at for at, _ in part] == [BEGUN + 4000 + 10 * n for n in range(11)]
    assert all(path.stat().st_size < 60_000 for path in tmp_path.iterdir())
    assert known_names(tmp_path, BEGUN + 9000) == ["a_total", "g", "late", "still"]


def test_curves_have_as_many_points_as_were_asked_for(tmp_path: Path) -> None:
    write(tmp_path, range(300))
    end = BEGUN + 3000
    (curve,) = read_curves(tmp_path, ["a"], BEGUN, end, 30)
    assert (curve.name, curve.labels) == ("a_total", {})
    assert len(curve.points) == 30
    assert curve.points[-1] == (BEGUN + 2990, 299.0)
    assert curve.points == sorted(curve.points)
    (labelled,) = read_curves(tmp_path, ["g"], BEGUN, end, 10_000)
    assert labelled.labels == {"x": "1"}
    assert labelled.points == [(BEGUN + 10 * n, n / 3) for n in range(300)]
    assert read_curves(tmp_path, ["none"], BEGUN, end, 10) == []


def test_labels_keep_every_character() -> None:
    labels = {"b": 'a "quote" {brace} \n \u202e', "a": ""}
    assert parse_series(series_name("n", labels)) == ("n", labels)
    assert series_name("n", {"b": "1", "a": "2"}) == series_name("n", {"a": "2", "b": "1"})


def test_any_flipped_bit_loses_a_few_samples_and_makes_none_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, range(2 * WHOLE))
    (path,) = tmp_path.iterdir()
    text = path.read_bytes()
    true = {(at, tuple(sorted(v.items()))) for at, v in read_samples(tmp_path, 0, math.inf)}
    for place in range(0, len(text), 397):
        path.write_bytes(text[:place] + bytes([text[place] ^ 4]) + text[place + 1 :])
        read = {(at, tuple(sorted(v.items()))) for at, v in read_samples(tmp_path, 0, math.inf)}
        assert read <= true
        assert len(true - read) <= WHOLE
    assert "left out" in caplog.text


def test_a_killed_writers_last_line(tmp_path: Path) -> None:
    write(tmp_path, range(10))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    assert len(list(read_samples(tmp_path, 0, math.inf))) == 9


def test_old_files_go_and_too_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for hour in range(30):
        begin = hour * int(FILE_SECONDS / 10)
        write(tmp_path, range(begin, begin + 3))
    now = BEGUN + 29 * FILE_SECONDS
    oldest = min(at for at, _ in read_samples(tmp_path, 0, math.inf))
    assert now - KEPT - FILE_SECONDS <= oldest <= now - KEPT
    size = next(tmp_path.iterdir()).stat().st_size
    monkeypatch.setattr(metrics_history, "MOST_BYTES", 3 * size)
    metrics_history.delete_old(tmp_path, now)
    assert len(list(tmp_path.iterdir())) <= 3


def test_series_beyond_the_bound_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_history, "MOST_SERIES", 5)
    writer = HistoryWriter(tmp_path)
    writer.write(BEGUN, {f"s{number}": 1.0 for number in range(9)})
    ((_, values),) = read_samples(tmp_path, 0, math.inf)
    assert list(values) == ["s0", "s1", "s2", "s3", "s4"]


async def test_it_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    folder, numbers = tmp_path / "metrics", iter(range(1000))
    folder.write_text("where the directory would be")

    async def take() -> dict[str, float]:
        number = next(numbers)
        if number == 3:
            folder.unlink()
        return {"n": float(number)}

    task = asyncio.create_task(keep_history(folder, take, every=0.001))
    async with asyncio.timeout(120):
        while len(list(read_samples(folder, 0, math.inf))) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [v["n"] for _, v in read_samples(folder, 0, math.inf)][:3] == [3.0, 4.0, 5.0]
