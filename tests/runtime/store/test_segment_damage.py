"""Damage anywhere: never a wrong line, all that is intact is read, and what is not is told."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cray_agents.errors import Corrupt
from cray_agents.runtime.store.segments import sealed
from cray_agents.runtime.store.segments.reader import SegmentLine, Segments
from cray_agents.runtime.store.segments.repair import Finding, check, repair
from cray_agents.runtime.store.segments.sealed import seal
from tests.support.store.segment_lines import line, placed, read_all, write_open

COUNT = 40


class Sealed(NamedTuple):
    """A sealed segment of several frames, and what is in it."""

    data: bytes
    lines: list[SegmentLine]
    frames: list[sealed.Frame]
    end: int  # of the last frame


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Sealed:
    directory = tmp_path_factory.mktemp("intact")
    lines = [line(number, 300) for number in range(COUNT)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed, "FRAME", 1500)
        target = seal(write_open(directory, "s", lines))
    file = os.open(target, os.O_RDONLY)
    table = sealed.read_table(file)
    os.close(file)
    found = [table[number] for number in range(len(table))]
    assert len(found) == 14
    return Sealed(target.read_bytes(), placed("s", lines), found, table.end)


def damaged(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> tuple[Path, Segments]:
    directory = tmp_path_factory.mktemp("damaged")
    (directory / "s.jsonl.zst").write_bytes(data)
    return directory, Segments(directory)


def in_frames(lines: list[SegmentLine], broken: list[sealed.Frame]) -> list[SegmentLine]:
    """The lines that do not stand in one of these frames."""
    return [
        each
        for each in lines
        if not any(f.offset <= each.place.offset < f.offset + f.length for f in broken)
    ]


@pytest.mark.slow
@settings(max_examples=100)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(where=0.0, bit=0)
def test_a_flipped_bit(
    tmp_path_factory: pytest.TempPathFactory, intact: Sealed, where: float, bit: int
) -> None:
    at = int(where * len(intact.data))
    data = bytearray(intact.data)
    data[at] ^= 1 << bit
    directory, segments = damaged(tmp_path_factory, bytes(data))
    broken = [f for f in intact.frames if f.at <= at < f.at + f.size]
    lines, damage = read_all(segments, "s")
    lost = [each for each in intact.lines if each not in lines]
    assert lines == [each for each in intact.lines if each not in lost]
    assert not lost or lost == [
        each for each in intact.lines if each not in in_frames([each], broken)
    ]
    assert sum(item.length for item in damage) == (broken[0].length if lost else 0)
    for item in damage:
        assert item.segment == "s"
        assert item.at <= at
    _fetched(segments, intact, lines)

    findings = list(check(directory))
    assert [finding.kind for finding in findings] == ["lost" if lost else "damaged"]
    assert [finding.lost for finding in findings] == [len(lost)]
    _repaired(directory, findings, lines)


@pytest.mark.slow
@settings(max_examples=100)
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file(
    tmp_path_factory: pytest.TempPathFactory, intact: Sealed, where: float
) -> None:
    end = int(where * len(intact.data))
    directory, segments = damaged(tmp_path_factory, intact.data[:end])
    broken = [f for f in intact.frames if f.at + f.size > end]
    lines, damage = read_all(segments, "s")
    assert lines == in_frames(intact.lines, broken)
    assert len(damage) == 1
    assert damage[0].at <= end
    _fetched(segments, intact, lines)
    findings = list(check(directory))
    assert [finding.kind in ("lost", "damaged") for finding in findings] == [True]
    if broken:
        assert (findings[0].kind, findings[0].lost) == ("lost", None)
    _repaired(directory, findings, lines)


@settings(max_examples=100)
@given(
    cut=st.floats(0.3, 1),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=4),
)
def test_several_damages_at_once(
    tmp_path_factory: pytest.TempPathFactory,
    intact: Sealed,
    cut: float,
    flips: list[tuple[float, int]],
) -> None:
    data = bytearray(intact.data[: int(cut * len(intact.data))])
    hit = set()
    for where, bit in flips:
        at = int(where * len(data))
        hit.add(at)
        data[at] ^= 1 << bit
    directory, segments = damaged(tmp_path_factory, bytes(data))
    broken = [
        f
        for f in intact.frames
        if f.at + f.size > len(data) or any(f.at <= at < f.at + f.size for at in hit)
    ]
    lines, _ = read_all(segments, "s")
    read, whole = [each.data for each in lines], [each.data for each in intact.lines]
    assert {each.data for each in in_frames(intact.lines, broken)} <= set(read) <= set(whole)
    assert read == sorted(read, key=whole.index) and lines == sorted(lines)
    assert segments.fetch([each.place for each in lines]) == read
    _repaired(directory, list(check(directory)), lines)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=3),
    cut=st.floats(0, 1),
    seal_it=st.booleans(),
)
def test_an_open_segment(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[float, int]],
    cut: float,
    seal_it: bool,
) -> None:
    """Damage goes with the lines into the sealed segment, and what is intact stays readable."""
    directory = tmp_path_factory.mktemp("open")
    lines = [line(number, 100) for number in range(COUNT)]
    path = write_open(directory, "s", lines)
    data = bytearray(path.read_bytes())[: int(cut * path.stat().st_size)]
    hit = [int(where * len(data)) for where, _ in changes if data]
    for at, (_, change) in zip(hit, changes, strict=False):
        data[at] = data[at] ^ change or 1  # a zero would be what is not written yet
    path.write_bytes(data)
    if seal_it:
        seal(path)
    segments, whole = Segments(directory), placed("s", lines)
    read, damage = read_all(segments, "s")
    good = [
        each
        for each in whole
        if data[each.place.offset :][: each.place.length + 1] == each.data + b"\n"
        and (each.place.offset == 0 or data[each.place.offset - 1 : each.place.offset] == b"\n")
    ]
    assert read == good
    torn = len(data) - data.rfind(b"\n") - 1
    assert (
        sum(item.length for item in damage) + sum(len(i.data) + 1 for i in read) == len(data) - torn
    )
    assert segments.fetch([each.place for each in good]) == [each.data for each in good]
    if seal_it:
        footer = segments.footer("s")
        assert footer is not None
        assert footer.torn == ([len(data) - torn, torn] if torn else None)
        assert [length + 1 for _, length in footer.bad] == [item.length for item in damage]
        findings = list(check(directory))
        assert [(f.kind, f.offset) for f in findings] == [("lost", d.offset) for d in damage]
        _repaired(directory, findings, read)


def test_a_header_that_asks_for_all_memory_is_damage() -> None:
    header = b"\x28\xb5\x2f\xfd" + b"\xe4" + (2**50).to_bytes(8, "little")
    with pytest.raises(Corrupt):
        sealed.Unpacker().unpack(header + bytes(20), 100)


def test_what_is_not_written_yet_is_no_damage(tmp_path: Path) -> None:
    """A host may see the end of a file before what stands in front of it: as zeros."""
    lines = [line(number) for number in range(4)]
    path = write_open(tmp_path, "s", [lines[0], b"\0" * len(lines[1]), *lines[2:]])
    segments = Segments(tmp_path)
    assert read_all(segments, "s") == (placed("s", lines)[:1], [])
    write_open(tmp_path, "s", lines)
    assert read_all(segments, "s") == (placed("s", lines), [])
    write_open(tmp_path, "s", [lines[0], b"\0" * len(lines[1]), *lines[2:]])
    seal(path)  # now it stays so
    read, [damage] = read_all(segments, "s")
    assert [each.data for each in read] == [lines[0], *lines[2:]]
    assert (damage.offset, damage.length) == (len(lines[0]) + 1, len(lines[1]) + 1)


def _fetched(segments: Segments, intact: Sealed, readable: list[SegmentLine]) -> None:
    """By place, exactly the lines that are read in order."""
    assert segments.fetch([each.place for each in readable]) == [each.data for each in readable]
    for each in intact.lines:
        if each not in readable:
            with pytest.raises(Corrupt):
                segments.fetch([each.place])


def _repaired(directory: Path, findings: list[Finding], lines: list[SegmentLine]) -> None:
    """All that was readable is there, nothing is wrong any more, and the damaged file is kept."""
    before = {path.read_bytes() for path in directory.iterdir()}
    for finding in findings:
        assert finding.repairable
        repair(directory, finding)
    assert list(check(directory)) == []
    segments = Segments(directory)
    [segment] = segments.list()
    found, damage = read_all(segments, segment.stem)
    assert ([each.data for each in found], damage) == ([each.data for each in lines], [])
    if findings:
        assert {path.read_bytes() for path in (directory / "damaged").iterdir()} == before
