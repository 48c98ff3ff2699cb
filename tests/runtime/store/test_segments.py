"""Segments, open or sealed: read by place and in order."""

import io
import random
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cray_agents.errors import Corrupt, StoreError
from cray_agents.records import Event
from cray_agents.runtime.disk.checksums import is_whole
from cray_agents.runtime.store.segments import reader
from cray_agents.runtime.store.segments.line_format import COMPACTED, LinePlace, event_in, line_of
from cray_agents.runtime.store.segments.reader import Moved, SegmentLine, Segments
from cray_agents.runtime.store.segments.sealed import seal, write_sealed
from tests.support.store.segment_lines import line, placed, read_all, write_open

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(body=st.dictionaries(st.text(), JSON, max_size=4), time=st.floats(0, 1e10))
def test_an_event_goes_through_its_line(body: dict[str, object], time: float) -> None:
    one = Event(id="i", run_id='r"\\', kind="run", body=body, time=time)
    written = line_of(one)
    assert b"\n" not in written
    read = event_in(written)
    assert len(read.pop("crc")) == 8
    assert read == one.model_dump()


@given(st.data())
def test_a_line_with_any_change_is_not_whole(data: st.DataObject) -> None:
    good = line(data.draw(st.integers(0, 9)), 20)
    at = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != good[at]))
    changed = good[:at] + bytes([byte]) + good[at + 1 :]
    assert is_whole(good)
    for bad in (changed, good[:at], good + b" "):
        assert not is_whole(bad)
        with pytest.raises(Corrupt):
            event_in(bad)


def test_what_is_not_json_is_not_written() -> None:
    with pytest.raises(StoreError, match="e1 is not JSON"):
        line_of(Event(id="e1", run_id="r", kind="run", body={"x": object()}))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.sampled_from([0, 50, 1000, 30_000, 70_000]), max_size=12),
    torn=st.sampled_from([b"", b"{", line(99)[:-1]]),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], torn: bytes
) -> None:
    directory = tmp_path_factory.mktemp("segments")
    lines = [line(number, size) for number, size in enumerate(sizes)]
    path = write_open(directory, "s", lines, torn)
    segments, wanted = Segments(directory), placed("s", lines)
    assert read_all(segments, "s") == (wanted, [])
    target = seal(path)
    assert [child.name for child in directory.iterdir()] == ["s.jsonl.zst"]
    assert [(s.stem, s.path, s.sealed) for s in segments.list()] == [("s", target, True)]
    assert read_all(segments, "s") == (wanted, [])
    for start in wanted:
        rest = [
            item for item in segments.read("s", start.place.offset) if isinstance(item, SegmentLine)
        ]
        assert rest == wanted[wanted.index(start) :]
    footer = segments.footer("s")
    assert footer is not None
    offset = sum(map(len, lines)) + len(lines)
    assert footer.torn == ([offset, len(torn)] if torn else None)
    assert footer.lines == len(lines)
    assert plain(target) == b"".join(each + b"\n" for each in lines)
    segments.close()


def plain(path: Path) -> bytes:
    """What any zstd reader makes of a file."""
    reader = zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO(path.read_bytes()), read_across_frames=True
    )
    with reader:
        return reader.read()


def test_places_are_fetched_in_their_order(tmp_path: Path) -> None:
    by_place: dict[LinePlace, bytes] = {}
    for stem in "abcd":
        lines = [line(number, 3000) for number in range(200)]
        path = write_open(tmp_path, stem, lines)
        by_place.update(placed(stem, lines))
        if stem in "bd":
            seal(path)
    segments = Segments(tmp_path)
    places = list(by_place) + list(by_place)[::7]
    random.Random(1).shuffle(places)
    assert segments.fetch(places) == [by_place[place] for place in places]
    assert segments.fetch(places[:50]) == [by_place[place] for place in places[:50]]
    assert segments.fetch([]) == []
    segments.close()
    assert segments.fetch(places[:5]) == [by_place[place] for place in places[:5]]
    segments.close()


def open_files(folder: Path) -> int:
    """Those of this process that are in a folder: other tests' may be closed at any time."""
    return sum(folder in file.resolve().parents for file in Path("/proc/self/fd").iterdir())


def test_files_are_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_OPEN", 3)
    places = []
    for number in range(20):
        stem = f"s{number}"
        path = write_open(tmp_path, stem, [line(number)])
        places.append(LinePlace(stem, 0, len(line(number))))
        if number % 2:
            seal(path)
    segments = Segments(tmp_path)
    assert segments.fetch(places) == [line(number) for number in range(20)]
    assert open_files(tmp_path) == 3
    segments.close()
    assert open_files(tmp_path) == 0


def test_a_wrong_place_is_no_line(tmp_path: Path) -> None:
    lines = [line(number) for number in range(4)]
    path = write_open(tmp_path, "s", lines)
    [first, *_, last] = [item.place for item in placed("s", lines)]
    wrong = [
        first._replace(offset=1),
        first._replace(length=first.length + 1),
        first._replace(length=first.length - 1),
        last._replace(offset=last.offset + last.length + 1),
        last._replace(offset=2**40),
    ]
    for _ in range(2):
        for place in wrong:
            with pytest.raises(Corrupt):
                Segments(tmp_path).fetch([place])
        path = seal(path)


def test_a_segment_that_is_gone_has_moved(tmp_path: Path) -> None:
    path = write_open(tmp_path, "s", [line(1)])
    place = LinePlace("s", 0, len(line(1)))
    segments = Segments(tmp_path / "none")
    assert segments.list() == []
    with pytest.raises(Moved):
        segments.fetch([place])
    segments = Segments(tmp_path)
    assert segments.fetch([place]) == [line(1)]
    seal(path)
    assert segments.fetch([place]) == [line(1)]  # from the file as it was
    (tmp_path / "s.jsonl.zst").unlink()
    assert segments.list() == []
    for asked in (segments.fetch, lambda _: list(segments.read("s"))):
        with pytest.raises(Moved):
            asked([place])
    assert segments.find("s") is None


def test_reading_a_segment_that_is_sealed_meanwhile(tmp_path: Path) -> None:
    lines = [line(number, 5000) for number in range(500)]
    path = write_open(tmp_path, "s", lines)
    segments = Segments(tmp_path)
    reading = segments.read("s")
    head = [next(reading) for _ in range(3)]
    seal(path)
    assert [*head, *reading] == placed("s", lines)


def test_one_segment_takes_the_place_of_others(tmp_path: Path) -> None:
    for stem in ("a", "b", "c"):
        seal(write_open(tmp_path, stem, [line(ord(stem))]))
    both = [line(ord("a")), line(ord("b"))]
    segments = Segments(tmp_path)
    with pytest.raises(ValueError, match=COMPACTED):
        write_sealed(tmp_path, "x", both, ["a", "b"])
    assert [s.stem for s in segments.list()] == ["a", "b", "c"]
    new = f"{COMPACTED}1"
    write_sealed(tmp_path, new, both, ["a", "b"])
    assert [s.stem for s in segments.list()] == ["c", new]
    assert segments.replaced_stems(new) == ["a", "b"]
    assert read_all(segments, new) == (placed(new, both), [])
    assert segments.fetch([LinePlace("a", 0, len(both[0]))]) == both[:1]  # as long as it is there
    with pytest.raises(StoreError, match="cannot write"):
        write_sealed(tmp_path, new, both, ["c"])
    assert [s.stem for s in segments.list()] == ["c", new]
    assert not list(tmp_path.glob(".*"))


def test_a_listing_agrees_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is listed while a file is renamed may show it under neither name."""
    write_open(tmp_path, "a", [line(1)])
    seal(write_open(tmp_path, "b", [line(2)]))
    both = {path.name for path in tmp_path.iterdir()}
    found = iter([{"b.jsonl.zst"}, both, both])
    monkeypatch.setattr(reader, "names_in", lambda _: next(found))
    assert [(s.stem, s.sealed) for s in Segments(tmp_path).list()] == [("a", False), ("b", True)]
