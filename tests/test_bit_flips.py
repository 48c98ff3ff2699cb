"""One flipped bit in any file of a root: noticed by who reads it, or by fsck, or without effect.

The root is what a scripted platform, a loop, files, uploads, a batch, fine-tuning and jobs leave
(flipped_root.py). After each flip it is read by every reader there is, and by fsck. A reader may
fail with a typed error, or log what it left out; it must never answer anything else than before.
CRAY_TEST_FLIPS: how many bits (`make soak`: 1000), CRAY_TEST_SEEDS the first seed.
"""

import logging
import os
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import CrayError
from cray_agents.paths import Home
from cray_agents.runtime import fsck
from tests.support.flipped_root import Reader, Told, make, readers

pytestmark = pytest.mark.slow

FLIPS = int(os.environ.get("CRAY_TEST_FLIPS", "60"))
SEED = int(os.environ.get("CRAY_TEST_SEEDS", "1").split(",")[0])
UNREAD = {"logs", "slurm", "exports", "first"}  # nothing depends on them


def kind_of(path: Path) -> str:
    """What the table of results calls a file."""
    match path.parts:
        case ("segments", _):
            return "segment"
        case ("datasets" | "checkpoints" as place, _, name):
            return f"{place[:-1]}: {name if name in KNOWN else path.suffix}"
        case ("jobs", _, "megatron", _, _):
            return "resume point"
        case ("jobs", _, name, *_):
            return f"job: {name}"
        case ("batches", _, name, *rest):
            return f"batch: {name}{'/' if rest else ''}"
        case ("uploads", _, *_):
            return "upload"
        case ("blobs", *_):
            return "blob"
        case ("loops", _, name, *_):
            return f"loop: {name}"
        case (place, _, *_):
            return place
    return path.name


KNOWN = {"manifest.json", "runs.parquet", "recipe.json"}


def answers(home: Home, asked: dict[str, Reader], caplog: pytest.LogCaptureFixture) -> Any:
    """By reader: what it says; a typed error or a logged one is `noticed`."""
    found: dict[str, str | None] = {}
    for name, read in asked.items():
        caplog.clear()
        try:
            said = repr(read(home))
        except (CrayError, Told):
            found[name] = None
        else:
            found[name] = None if _complained(caplog) else said
    return found


def _complained(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.levelno >= logging.ERROR for record in caplog.records)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return make(tmp_path_factory.mktemp("flips") / "root")


def test_every_flipped_bit_is_noticed_or_harmless(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    asked = readers(home)
    before = answers(home, asked, caplog)
    assert None not in before.values(), before
    assert not list(fsck.check(home)), "the root is whole"
    paths: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(home.root.rglob("*")):
        name = path.relative_to(home.root)
        drafts = any(part.startswith(".") for part in name.parts)
        if path.is_file() and path.stat().st_size and name.parts[0] not in UNREAD and not drafts:
            paths[kind_of(name)].append(path)
    drawn, table = random.Random(SEED), defaultdict[str, Counter[str]](Counter)
    try:
        for number in range(FLIPS):
            kind = sorted(paths)[number % len(paths)]
            path = drawn.choice(paths[kind])
            whole = path.read_bytes()
            at, bit = drawn.randrange(len(whole)), drawn.randrange(8)
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            try:
                found = list(fsck.check(home))
                after = answers(home, asked, caplog)
            finally:
                path.write_bytes(whole)
            where = f"{path}, byte {at} of {len(whole)}, bit {bit}"
            for name, said in after.items():
                assert said in (None, before[name]), f"{where}: {name} says something else"
            noticed = None in after.values()
            table[kind]["reader" if noticed else "fsck" if found else "harmless"] += 1
            table[kind]["by fsck"] += bool(found)
    finally:
        _print(table)


def _print(table: dict[str, Counter[str]]) -> None:
    """The table for BENCHMARKS.md; `pytest -s` shows it."""
    print("\n| kind of file | flips | noticed by a reader | by fsck | by neither: same answers |")
    print("|---|---|---|---|---|")
    total = Counter[str]()
    for kind, counts in [*sorted(table.items()), ("all", total)]:
        flips = counts["reader"] + counts["fsck"] + counts["harmless"]
        print(f"| {kind} | {flips} | {counts['reader']} | {counts['by fsck']} |"
              f" {counts['harmless']} |")  # fmt: skip
        total += counts
