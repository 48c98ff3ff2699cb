"""Records of a newer version of this package on a root: refused by name, and nothing of them lost.

Two hosts with different versions may work on one root: what the older one does not know, it leaves
as it is, and goes on with all else.
"""

import asyncio
import json
import re
import zlib
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import NewerFormat
from cray_agents.paths import Home
from cray_agents.runtime import fsck
from cray_agents.runtime.accounting.ledger import read_ledger
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.compaction import compact, plan
from cray_agents.runtime.store.loop_records import LoopRecords
from cray_agents.runtime.store.segments.line_format import line_of
from cray_agents.runtime.store.segments.sealed import TRAILER_SIZE, _trailer, write_sealed
from cray_agents.trainers.job.journal import JobJournal
from tests.support.command_line import cli, refused
from tests.support.flipped_root import make, readers
from tests.support.store.plain_reader import events_of as plain_events
from tests.support.store.writer_process import events_of
from tests.test_bit_flips import answers, kind_of

pytestmark = pytest.mark.slow

NEWER = 99
#: How each message ends: which version this is, what it reads, and what to do.
REMEDY = rf"cray-agents {version('cray-agents')} reads formats up to \w+: .*\(pip install --upgrade"
NAMED = REMEDY.replace(".*", "upgrade it here to 2.0.0 or newer ")
LINES = {"ledger", "audit", "job: events.jsonl"}  # kinds of files that have records as lines
#: Kinds of which only the names count: `fsck` alone reads them.
NAMES = {"job: pauses", "sessions: attempts", "sessions: queue"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return make(tmp_path_factory.mktemp("newer") / "root")


def newer(text: bytes, key: str = "format", value: Any = NEWER) -> bytes:
    """A record or a line as a newer version would write it."""
    content = json.loads(text)
    content.pop("crc", None)
    return checksums.with_crc(json.dumps({**content, key: value, "needs": "2.0.0"}).encode())


def test_each_kind_of_record_is_refused_by_its_format(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    asked = readers(home)
    before = answers(home, asked, caplog)
    seen, unnoticed = set(), set()
    for path in sorted(home.root.rglob("*")):
        name = path.relative_to(home.root)
        kind, whole = kind_of(name), path.read_bytes() if path.is_file() else b""
        kind = f"{kind}: {name.parts[2]}" if kind == "sessions" and len(name.parts) > 2 else kind
        *lines, last = whole.splitlines() or [b""]
        if not checksums.is_whole(last) or (lines and kind not in LINES) or kind in seen:
            continue
        if "results" in name.parts or "done" in name.parts:
            continue  # lines of a batch, whose format is in its batch.json
        seen.add(kind)
        path.write_bytes(b"".join(line + b"\n" for line in [*lines, newer(last)]))
        try:
            found = [finding.message for finding in fsck.check(home)]
            after = answers(home, asked, caplog)
        finally:
            path.write_bytes(whole)
        told = [text for text in found if path.name in text and f"has format {NEWER}" in text]
        assert told and re.search(NAMED, told[0]), (path, found)
        for reader, said in after.items():
            assert said in (None, before[reader]), f"{path}: {reader} says something else"
        if None not in after.values():
            unnoticed.add(kind)
    assert len(seen) >= 24 and unnoticed <= NAMES, (seen, unnoticed)


def written_by_a_newer_host(home: Home) -> dict[Path, bytes]:
    """Add a record of each kind of a newer version beside those of today; return them."""
    [dataset] = home.datasets.glob("ds-*")
    checkpoint = home.checkpoint(Registry(home).resolve("m@1").checkpoint)
    job = next(home.jobs.glob("*/spec.json"))
    copied = {
        home.job("job-of-a-newer-version") / "spec.json": job,
        home.datasets / "ds-of-a-newer-version" / "manifest.json": dataset / "manifest.json",
        home.checkpoint("of-a-newer-version") / "manifest.json": checkpoint / "manifest.json",
        home.models / "newer" / "1.json": home.models / "m" / "1.json",
        home.ledger / "newer.jsonl": next(home.ledger.iterdir()),
        home.iterations("faults") / "1.json": home.iterations("faults") / "0.json",
    }
    added = {path: newer(source.read_bytes()) + b"\n" for path, source in copied.items()}
    settings = home.loop("faults") / "journal" / "settings-2.json"
    added[settings] = newer(b"{}", "version")
    sealed = next(home.segments.glob("*.zst")).read_bytes()
    fields = list(_trailer.unpack(sealed[-TRAILER_SIZE:]))
    fields[2] = b"segment9"
    end = _trailer.pack(*fields)[:-4]
    crc = zlib.crc32(end).to_bytes(4, "little")
    added[home.segments / "segment_newer-0000.jsonl.zst"] = sealed[:-TRAILER_SIZE] + end + crc
    for path, text in added.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    current, unknown = (list(map(line_of, events_of(run))) for run in ("current", "unknown"))
    durable.write_file(home.segments / "segment_newer-0000.left.jsonl", b"")  # its sealer died
    lines = [current[0], *map(newer, unknown), *current[1:]]
    write_sealed(home.segments, "segment_mixed-0000", lines, ())
    durable.write_file(home.segments / "segment_open-0000.jsonl", b"\n".join([*lines, b""]))
    return added


def test_an_older_host_works_beside_a_newer_one_and_loses_nothing(home: Home) -> None:
    def command(*words: object) -> Any:
        done = cli(*words, "--home", home.root, "--json", cwd=home.root)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout)

    before = {run["id"] for run in command("runs", "list", "--limit", 100)}
    added = written_by_a_newer_host(home)
    assert {run["id"] for run in command("runs", "list", "--limit", 100)} == before | {"current"}
    with pytest.raises(NewerFormat, match=rf"has format {NEWER}, and {NAMED}"):
        JobJournal(home, "job-of-a-newer-version").spec()
    with pytest.raises(NewerFormat, match=f"has format {NEWER}, and {NAMED}"):
        Registry(home).resolve("newer")
    assert [v.number for v in Registry(home).versions("m")] == [1, 2]
    damaged: list[dict[str, str]] = []
    assert LoopRecords(home, "faults").known(damaged)[0] is not None
    assert re.search(f"has format {NEWER}, and {REMEDY}", damaged[0]["reason"])
    assert [line.holder for lines in read_ledger(home.ledger) for line in lines] == ["platform"]
    for kind in ("jobs", "dataset", "models"):
        command(kind, "list")
    # what would not know what a newer loop needs deletes no weights
    pruned = cli("maintain", "prune", "models", "--home", home.root, cwd=home.root)
    refused(pruned, f"has format {NEWER}")
    store = Store(home)
    store.seal_orphans(older_than=0)
    assert not (home.segments / "segment_open-0000.jsonl").exists()
    for group in plan(store, thorough=True):
        compact(store, group)
    asyncio.run(store.append(events_of("another")))
    asyncio.run(store.close())
    kinds = {row["path"]: row["message"] for row in command("maintain", "fsck", "--repair")}
    for path, text in added.items():
        assert path.read_bytes() == text, "it is as the newer host wrote it"
        told = [message for place, message in kinds.items() if str(path).startswith(place)]
        told += [found["reason"] for found in damaged if path.name == "settings-2.json"]
        assert told and re.search(REMEDY, told[0]), (path, told)
    ids = Counter(event["id"] for event in plain_events(home))
    assert all(ids[event.id] >= 1 for event in events_of("unknown") + events_of("another"))
    after = {run["id"] for run in command("runs", "list", "--limit", 100)}
    assert after == before | {"current", "another"}
