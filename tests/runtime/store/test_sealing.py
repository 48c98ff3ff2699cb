"""Sealing while others seal, write, read or are killed: every line stays, and stays where it is."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from cray_agents.errors import Corrupt, StoreError
from cray_agents.runtime.store.segments import sealed as sealing
from cray_agents.runtime.store.segments.line_format import COMPACTED
from cray_agents.runtime.store.segments.reader import Moved, Segments
from cray_agents.runtime.store.segments.repair import check, remove_replaced, repair, seal_orphans
from cray_agents.runtime.store.segments.sealed import seal, write_sealed
from tests.support.store.segment_lines import line, placed, read_all, write_open


def nobody(_: str) -> bool:
    return False


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def at_once(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("turn", range(5))
def test_two_seal_at_once_while_a_third_reads(tmp_path: Path, turn: int) -> None:
    lines = [line(number, 20_000) for number in range(60)]
    path = write_open(tmp_path, "s", lines, b"torn")
    segments, failed = Segments(tmp_path), []
    wanted = placed("s", lines)
    done = threading.Event()

    def sealer(pause: float) -> None:
        time.sleep(pause)
        try:
            seal(path)
        except BaseException as error:
            failed.append(error)
            raise

    def reader() -> None:
        try:
            while not done.is_set():
                assert [s.stem for s in segments.list()] == ["s"]
                assert segments.fetch([w.place for w in wanted]) == lines
                assert read_all(segments, "s") == (wanted, [])
        except BaseException as error:
            failed.append(error)
            raise

    reading = threading.Thread(target=reader)
    reading.start()
    at_once(*(lambda pause=pause: sealer(pause) for pause in (0, 0, turn / 200)))
    done.set()
    reading.join()
    assert failed == []
    assert names(tmp_path) == {"s.jsonl.zst"}
    assert read_all(segments, "s") == (wanted, [])
    assert list(check(tmp_path)) == []


WRITER = """
import asyncio, sys
from pathlib import Path
from cray_agents.runtime.store.segments.writer import SegmentWriter
from tests.support.store.segment_lines import fact, line

async def one(writer, lane):
    for number in range(lane, 100_000_000, 8):
        await writer.submit([line(number)], [fact(number)])
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()

async def main():
    writer = SegmentWriter(Path(sys.argv[1]), sys.argv[2], roll=50_000)
    await asyncio.gather(*(one(writer, lane) for lane in range(8)))

asyncio.run(main())
"""


def start_writer(directory: Path, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), name], stdout=subprocess.PIPE, text=True
    )


def test_what_a_live_writer_acknowledges_survives_sealers(tmp_path: Path) -> None:
    """Two take it for dead again and again; then it is killed."""
    writer = start_writer(tmp_path, "w")
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline())]
    done, sealed = threading.Event(), []

    def sealer() -> None:
        while not done.is_set():
            sealed.extend(seal_orphans(tmp_path, nobody, -1.0))

    sealers = [threading.Thread(target=sealer) for _ in range(2)]
    for thread in sealers:
        thread.start()
    while len(set(sealed)) < 12:
        acknowledged.append(int(writer.stdout.readline()))
    writer.kill()
    acknowledged += [int(each) for each in writer.stdout if each.endswith("\n")]
    writer.wait()
    done.set()
    for thread in sealers:
        thread.join()
    seal_orphans(tmp_path, nobody, -1.0)
    segments, found = Segments(tmp_path), set()
    for segment in segments.list():
        assert segment.sealed
        lines, damage = read_all(segments, segment.stem)
        assert damage == []
        found |= {each.data for each in lines}
    assert found >= {line(number) for number in acknowledged}
    assert list(check(tmp_path)) == []


SEALER = """
import os, signal, sys
from pathlib import Path
from cray_agents.runtime.store.segments.sealed import seal

def kill_at(last):
    steps = iter(range(1, last))
    def hook(event, arguments):
        if event in ("open", "os.link", "os.remove") and str(arguments[0]).startswith(sys.argv[1]):
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for last in sys.stdin:
    child = os.fork()
    if not child:
        kill_at(int(last))
        seal(Path(sys.argv[1]) / "s.jsonl")
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.slow
def test_kill_at_every_step_of_sealing(tmp_path: Path) -> None:
    """Before each file it opens, links or removes."""
    lines = [line(number, 4000) for number in range(100)]
    path = write_open(tmp_path, "s", lines, b"torn")
    data, wanted, seen = path.read_bytes(), placed("s", lines), []
    process = subprocess.Popen(
        [sys.executable, "-c", SEALER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    segments, status = Segments(tmp_path), signal.SIGKILL.value
    while status == signal.SIGKILL:
        process.stdin.write(f"{len(seen) + 1}\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        seen.append(frozenset(name.split("draft_")[0] for name in names(tmp_path)))
        assert [segment.stem for segment in segments.list()] == ["s"]
        assert segments.fetch([each.place for each in wanted]) == lines
        assert read_all(segments, "s") == (wanted, [])
        for draft in tmp_path.glob(".*"):
            os.utime(draft, (1, 1))
        seal_orphans(tmp_path, nobody)
        assert read_all(segments, "s") == (wanted, [])
        (tmp_path / "s.jsonl.zst").unlink(missing_ok=True)
        path.write_bytes(data)
    process.communicate()
    assert status == 0
    both = {"s.jsonl", "s.jsonl.zst"}
    for state in ({"s.jsonl", ".s.jsonl.zst."}, {*both, ".s.jsonl.zst."}, both, {"s.jsonl.zst"}):
        assert frozenset(state) in seen


def test_orphans_by_the_file_systems_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    young = write_open(tmp_path, "young", [line(1)])
    old = write_open(tmp_path, "old", [line(2)], b"torn")
    os.utime(old, (young.stat().st_mtime - 4000,) * 2)
    write_open(tmp_path, "left", [line(3)]).rename(tmp_path / "left.left.jsonl")
    os.utime(write_open(tmp_path, "mine", [line(4)]), (1, 1))
    fresh, stale = tmp_path / ".a.jsonl.zst.draft_1", tmp_path / ".b.jsonl.zst.draft_2"
    fresh.touch()
    stale.touch()
    os.utime(stale, (1, 1))
    monkeypatch.setattr(time, "time", lambda: 0.0)  # this host's clock is nobody's
    found = {f.path.rsplit("/", 1)[1]: f.kind for f in check(tmp_path)}
    assert found == {"left.left.jsonl": "unfinished"}
    sealed = seal_orphans(tmp_path, lambda stem: stem == "mine")
    assert {path.name for path in sealed} == {"old.jsonl.zst", "left.jsonl.zst"}
    assert names(tmp_path) == {
        *("young.jsonl", "old.jsonl.zst", "left.jsonl.zst", "mine.jsonl", fresh.name)
    }
    assert seal_orphans(tmp_path / "none", nobody) == []


def test_a_half_done_seal_is_finished(tmp_path: Path) -> None:
    lines = [line(number) for number in range(20)]
    open_path = write_open(tmp_path, "s", lines)
    data = open_path.read_bytes()
    target = seal(open_path)
    good = target.read_bytes()

    open_path.write_bytes(data)  # as it stands between publishing the one and removing the other
    [finding] = check(tmp_path)
    assert (finding.kind, finding.repairable) == ("unfinished", True)
    inode = target.stat().st_ino
    repair(tmp_path, finding)
    assert names(tmp_path) == {"s.jsonl.zst"}
    assert target.stat().st_ino == inode

    open_path.write_bytes(data)  # and the sealed one is damaged before somebody looks
    target.write_bytes(good[:50] + b"#" + good[51:])
    assert seal_orphans(tmp_path, nobody) == [target]
    assert target.read_bytes() == good
    assert names(tmp_path) == {"s.jsonl.zst"}

    open_path.write_bytes(data + line(20) + b"\n")  # a group that was never acknowledged
    seal(open_path)
    lines.append(line(20))
    assert read_all(Segments(tmp_path), "s") == (placed("s", lines), [])

    write_open(tmp_path, "s", [line(7)])  # what cannot be, is kept
    with pytest.raises(Corrupt, match="keep both"):
        seal(open_path)
    assert names(tmp_path) == {"s.jsonl.zst", "s.jsonl"}
    assert seal_orphans(tmp_path, nobody) == []


@pytest.mark.parametrize("after", [0xFD2FB528, sealing.FOOTER, sealing.TRAILER])
def test_a_draft_that_reads_back_wrong_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    path = write_open(tmp_path, "s", [line(1)])
    real = os.fsync

    def rot(file: int) -> None:
        real(file)
        for draft in tmp_path.glob(".*"):
            data = bytearray(draft.read_bytes())
            data[data.index(after.to_bytes(4, "little")) + 20] ^= 1
            draft.write_bytes(data)

    monkeypatch.setattr(os, "fsync", rot)
    with pytest.raises(Corrupt):
        seal(path)
    assert names(tmp_path) == {"s.jsonl"}


def test_what_is_compacted_meanwhile_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sealer that stood still while another sealed, and a third compacted."""
    path = write_open(tmp_path, "s", [line(1)])
    real = sealing._write_draft

    def slow(*arguments: Any, **more: Any) -> Any:
        footer = real(*arguments, **more)
        monkeypatch.undo()
        seal(path).unlink()
        return footer

    monkeypatch.setattr(sealing, "_write_draft", slow)
    seal(path)
    assert names(tmp_path) == set()


def test_a_disk_that_is_full_leaves_the_open_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_open(tmp_path, "s", [line(1)])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        seal(path)
    assert names(tmp_path) == {"s.jsonl"}
    assert seal_orphans(tmp_path, nobody, -1.0) == []
    monkeypatch.undo()
    assert seal_orphans(tmp_path, nobody, -1.0) == [tmp_path / "s.jsonl.zst"]


def test_a_compaction_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    for stem in ("a", "b", "c"):
        seal(write_open(tmp_path, stem, [line(ord(stem))]))
    first, second = f"{COMPACTED}1", f"{COMPACTED}2"
    write_sealed(tmp_path, first, [line(ord("a")), line(ord("b"))], ["a", "b"])
    write_sealed(tmp_path, second, [line(ord("a")), line(ord("b"))], [first])
    segments = Segments(tmp_path)
    assert [segment.stem for segment in segments.list()] == ["c", second]
    kinds = {finding.segment: finding.kind for finding in check(tmp_path)}
    assert kinds == dict.fromkeys(["a", "b", first], "leftover")
    gone = remove_replaced(tmp_path)
    assert (sorted(gone[:2]), gone[2]) == (["a", "b"], first)  # the oldest go before it
    assert names(tmp_path) == {"c.jsonl.zst", f"{second}.jsonl.zst"}
    assert list(check(tmp_path)) == []


def test_what_is_replaced_stays_if_the_new_one_is_damaged(tmp_path: Path) -> None:
    seal(write_open(tmp_path, "a", [line(1, 1000)]))
    new = write_sealed(tmp_path, f"{COMPACTED}1", [line(1, 1000)], ["a"])
    data = bytearray(new.read_bytes())
    data[100] ^= 4
    new.write_bytes(data)
    assert remove_replaced(tmp_path) == []
    assert seal_orphans(tmp_path, nobody) == []
    assert names(tmp_path) == {"a.jsonl.zst", new.name}


def test_findings_of_what_a_dead_writer_left(tmp_path: Path) -> None:
    lines = [line(number) for number in range(5)]
    path = write_open(tmp_path, "s", [*lines[:2], b"not a line", *lines[2:]], b'{"id":')
    assert [f.kind for f in check(tmp_path)] == ["lost"]
    assert not next(check(tmp_path)).repairable
    assert repair(tmp_path, next(check(tmp_path))) == "left as it is"
    os.utime(path, (1, 1))
    findings = list(check(tmp_path))
    assert [f.kind for f in findings] == ["lost", "unfinished", "unfinished"]
    assert all(finding.repairable for finding in findings)
    for finding in findings:
        repair(tmp_path, finding)
    assert list(check(tmp_path)) == []
    segments = Segments(tmp_path)
    [segment] = segments.list()
    assert [each.data for each in read_all(segments, segment.stem)[0]] == lines
    with pytest.raises(Moved):
        segments.fetch([placed("s", lines)[0].place])
    [kept] = (tmp_path / "damaged").iterdir()
    with zstandard.open(kept) as damaged:
        assert b"not a line\n" in damaged.read()
