"""The segment writer: acknowledged lines are on the disk, in the index, and sealed."""

import asyncio
import os
from pathlib import Path

import pytest

from cray_agents.errors import StoreError
from cray_agents.runtime.store.segments.line_format import LinePlace, Placed
from cray_agents.runtime.store.segments.reader import Segments
from cray_agents.runtime.store.segments.repair import seal_orphans
from cray_agents.runtime.store.segments.sealed import seal
from cray_agents.runtime.store.segments.writer import SegmentWriter
from tests.support.store.segment_lines import fact, line, placed, read_all, write_open


async def put(writer: SegmentWriter, *numbers: int, size: int = 100) -> list[LinePlace]:
    lines = [line(number, size) for number in numbers]
    return await writer.submit(lines, [fact(number, size) for number in numbers])


async def test_what_is_submitted_is_there_and_told(tmp_path: Path) -> None:
    announced: list[Placed] = []
    writer = SegmentWriter(tmp_path / "new", "w", announced.extend)
    found = await asyncio.gather(*(put(writer, n, n + 1000) for n in range(300)), put(writer))
    segments = Segments(tmp_path / "new")
    places = [place for each in found for place in each]
    wanted = [line(n) for pair in range(300) for n in (pair, pair + 1000)]
    assert segments.fetch(places) == wanted
    [segment] = segments.list()
    assert not segment.sealed
    assert writer.holds(segment.stem)
    assert not writer.holds("other")
    await writer.close()
    assert not writer.holds(segment.stem)
    assert [each.place for each in announced] == places
    assert [each.fact.id for each in announced[:3]] == ["e0", "e1000", "e1"]
    assert [s.sealed for s in segments.list()] == [True]
    assert read_all(segments, segment.stem) == (placed(segment.stem, wanted), [])


async def test_files_are_left_when_they_are_large_or_old(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w", roll=5000)
    places = [(await put(writer, n))[0] for n in range(60)]
    await writer.close()
    assert len(Segments(tmp_path).list()) == len({p.segment for p in places}) > 2
    assert Segments(tmp_path).fetch(places) == [line(n) for n in range(60)]
    assert all(segment.sealed for segment in Segments(tmp_path).list())

    writer = SegmentWriter(tmp_path, "idle", idle=0.0)
    assert [(await put(writer, n))[0] for n in range(2)] == [
        LinePlace("idle-0000", 0, len(line(0))),
        LinePlace("idle-0001", 0, len(line(1))),
    ]
    await writer.close()


async def test_an_error_while_indexing_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    announced: list[Placed] = []

    def indexed(group: list[Placed]) -> None:
        if not announced:
            announced.append(group[0])
            raise ValueError("the index has gone")
        announced.extend(group)

    writer = SegmentWriter(tmp_path, "w", indexed)
    places = [(await put(writer, n))[0] for n in range(3)]
    await writer.close()
    assert [each.place for each in announced] == places
    assert Segments(tmp_path).fetch(places) == [line(n) for n in range(3)]
    assert "the index has gone" in caplog.text


async def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    announced: list[Placed] = []
    directory = tmp_path / "segments"
    directory.write_text("a file where the folder should be")
    writer = SegmentWriter(directory, "w", announced.extend)
    failed = await asyncio.gather(put(writer, 1), put(writer, 2), return_exceptions=True)
    assert [type(error) for error in failed] == [StoreError, StoreError]
    assert str(directory) in str(failed[0])
    directory.unlink()
    assert (await put(writer, 3))[0].offset == 0
    await writer.close()
    assert [each.fact.id for each in announced] == ["e3"]


async def test_a_file_that_failed_is_left(tmp_path: Path) -> None:
    """With a limit on the size of files: a group is cut off in its middle, as by a full disk."""
    import resource
    import signal

    writer = SegmentWriter(tmp_path, "w")
    before = await put(writer, *range(10))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[-1].offset + 500, limits[1]))
    try:
        with pytest.raises(StoreError, match="File too large"):
            await put(writer, *range(10, 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    after = await put(writer, *range(20, 30))
    await writer.close()
    assert {place.segment for place in after} == {"w-0001"}
    wanted = [line(n) for n in (*range(10), *range(20, 30))]
    assert Segments(tmp_path).fetch([*before, *after]) == wanted
    footer = Segments(tmp_path).footer("w-0000")
    assert footer is None or footer.torn is None  # half a line is cut off at once
    seal_orphans(tmp_path, writer.holds)  # the limit may have stood in the way of sealing, too
    assert Segments(tmp_path).fetch([*before, *after]) == wanted


async def test_a_segment_that_was_sealed_as_an_orphan_is_not_written_on(tmp_path: Path) -> None:
    announced: list[Placed] = []
    writer = SegmentWriter(tmp_path, "w", announced.extend)
    places = [(await put(writer, n))[0] for n in range(3)]
    assert seal_orphans(tmp_path, writer.holds, -60.0) == []
    assert seal_orphans(tmp_path, lambda stem: False) == []  # it is young
    [sealed] = seal_orphans(tmp_path, lambda stem: False, -60.0)
    assert sealed.name == "w-0000.jsonl.zst"
    places += [(await put(writer, n))[0] for n in range(3, 6)]
    await writer.close()
    assert [place.segment for place in places] == ["w-0000"] * 3 + ["w-0001"] * 3
    assert [each.place for each in announced] == places
    segments = Segments(tmp_path)
    assert segments.fetch(places) == [line(n) for n in range(6)]
    assert {path.name for path in tmp_path.iterdir()} == {"w-0000.jsonl.zst", "w-0001.jsonl.zst"}


async def test_a_name_that_is_taken_is_passed_over(tmp_path: Path) -> None:
    seal(write_open(tmp_path, "w-0000", [line(1)]))
    write_open(tmp_path, "w-0001", [line(2)]).rename(tmp_path / "w-0001.left.jsonl")
    write_open(tmp_path, "w-0002", [line(3)])
    writer = SegmentWriter(tmp_path, "w")
    assert (await put(writer, 3))[0].segment == "w-0003"
    await writer.close()
    with pytest.raises(StoreError, match="closed"):
        await put(writer, 4)


async def test_cancelling_one_who_waits_is_nothing_to_the_others(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w")
    waits = [asyncio.ensure_future(put(writer, n)) for n in range(10)]
    await asyncio.sleep(0)
    waits[4].cancel()
    done = await asyncio.gather(*waits, return_exceptions=True)
    assert isinstance(done.pop(4), asyncio.CancelledError)
    places = [place for each in done if isinstance(each, list) for place in each]
    assert len(places) == 9
    await put(writer, 10)
    await writer.close()
    lines, damage = read_all(Segments(tmp_path), "w-0000")
    assert {each.data for each in lines} == {line(n) for n in range(11)}
    assert damage == []


async def test_many_submits_share_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, commits = os.fdatasync, []
    monkeypatch.setattr(os, "fdatasync", lambda file: (commits.append(file), real(file))[1])
    writer = SegmentWriter(tmp_path, "w")
    await asyncio.gather(*(put(writer, n) for n in range(2000)))
    await writer.close()
    assert len(commits) <= 3
