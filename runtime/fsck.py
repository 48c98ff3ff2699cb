"""Reads everything under the shared root, and tells what is damaged or missing, and where.

    segments/                     every line and frame: store/segments/salvage.py, which also mends
    datasets/, checkpoints/       every file that a manifest names, and the manifest
    jobs/*/megatron/step-*/       every file that a resume point's seal names
    jobs/*/baselines/             numbers behind their hash
    blobs/                        every content by its name, which is its hash
    batches/                      input, chunk index, results line by line, sealed chunks
    everything else in JSON       records and lines of journals: their checksums (checked.py)

Records from before there were checksums must be JSON, no more is known of them. Not read: logs,
drafts, slurm/, and exports/, which holds what is half written. Called by `cray-agents runs fsck`
and `dataset fsck`; nothing is changed.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

from cray_agents.errors import Corrupt, NotFound, StoreError
from cray_agents.paths import Home
from cray_agents.runtime.batches.chunks import verify_seal
from cray_agents.runtime.batches.folder import BatchFolder
from cray_agents.runtime.batches.results import read_lines
from cray_agents.runtime.batches.validation import read_index
from cray_agents.runtime.datasets import reader
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.store.segments import salvage
from cray_agents.runtime.store.segments.salvage import Finding

Check = Callable[[Path], None]  # of one file; raises Corrupt

HASH = 32  # bytes that stand before the numbers of a baseline
SEAL = "SEALED.json"  # of a resume point, as trainers/saving.py writes it
#: Files with one record each, by how they end or where they lie.
RECORD = re.compile(
    r".*\.(json|deleted|revoked|validated|ended|ready|pruned|resumed)"
    r"|jobs/[^/]+/(cancelled|attempts/\d+|pauses/\d+)"
    r"|batches/[^/]+/claims/[^/]+"
)


def check(home: Home) -> Iterator[Finding]:
    """What is wrong with the root, folder by folder. Raises StoreError if it cannot be read."""
    yield from salvage.check(home.segments)
    for path, look in _checks(home):
        try:
            look(path)
        except FileNotFoundError:  # removed in this moment
            continue
        except Corrupt as error:
            yield _finding(path, str(error))
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def _finding(path: Path, message: str) -> Finding:
    return Finding("", str(path), "damaged", 0, 0, 0, message, repairable=False, lost=None)


def _checks(home: Home) -> Iterator[tuple[Path, Check]]:
    """Each thing that is looked at, and how."""
    whole: set[Path] = set()  # folders that are checked by their manifest
    for folder in _folders(home.datasets):
        yield folder, _dataset
        whole.add(folder)
    for folder in _folders(home.checkpoint("x").parent):
        yield folder, _checkpoint
        whole.add(folder)
    for folder in _folders(home.jobs):
        for point in _folders(folder / "megatron"):
            yield point, _resume_point
            whole.add(point)
    for folder in _folders(home.batches):
        if folder.name != "workers":
            yield folder, _batch_input
    unread = {home.segments, home.slurm, home.logs, home.exports, home.drafts, *whole}
    for path in _files(home.root, unread):
        look = _check_of(path.relative_to(home.root))
        if look is not None:
            yield path, look


def _check_of(name: Path) -> Check | None:
    """How a file is looked at, by its path under the root; None: it is not."""
    match name.parts:
        case ("blobs", _, _):
            return _blob
        case ("batches", _, "done", _):
            return _sealed_chunk
        case ("batches", _, "results", _):
            return _results
        case ("batches", _, "input.jsonl" | "chunks.jsonl"):
            return None  # looked at with the batch
        case ("jobs", _, "events.jsonl"):
            return _lines
        case ("jobs", _, "baselines", _):
            return _numbers
    return _record if RECORD.fullmatch(name.as_posix()) else None


def _record(path: Path) -> None:
    checksums.read_json(path)


def _lines(path: Path) -> None:
    for _ in checksums.read_lines(path):
        pass


def _results(path: Path) -> None:
    for place, line in read_lines(path, 0):
        checksums.parse(line, f"{path}: byte {place.offset}")


def _sealed_chunk(path: Path) -> None:
    verify_seal(path)


def _blob(path: Path) -> None:
    checksums.prove(path, path.name)


def _numbers(path: Path) -> None:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        told = file.read(HASH)
        while block := file.read(durable.BLOCK):
            hasher.update(block)
    if hasher.digest() != told:
        raise Corrupt(f"{path} is damaged: its numbers are not what their hash says")


def _dataset(folder: Path) -> None:
    try:
        reader.verify(folder)
    except FileNotFoundError:
        raise Corrupt(f"{folder} has no {reader.MANIFEST}") from None


def _checkpoint(folder: Path) -> None:
    try:
        checkpoints.verify(folder)
    except NotFound as error:
        raise Corrupt(str(error)) from error


def _resume_point(folder: Path) -> None:
    try:
        told = checksums.read_json(folder / SEAL)
    except FileNotFoundError:
        raise Corrupt(f"{folder} has no {SEAL}") from None
    for name, sha256 in told.items():
        checksums.prove(folder / name, sha256)


def _batch_input(root: Path) -> None:
    """The input that a batch still needs, and where its chunks begin."""
    folder = BatchFolder(root)
    request = folder.request()
    if folder.end_file.exists():
        return
    if request.input_sha256:
        checksums.prove(folder.input, request.input_sha256)
    accepted = folder.accepted()
    if accepted is not None:
        try:
            read_index(folder.index, accepted.index_sha256)
        except orjson.JSONDecodeError as error:
            raise Corrupt(f"{folder.index} is damaged: {error}") from error


def _folders(place: Path) -> list[Path]:
    """The folders in one that may not be there; drafts are none."""
    return sorted(path for path in place.glob("[!.]*") if path.is_dir())


def _files(root: Path, unread: set[Path]) -> Iterator[Path]:
    """All plain files below a folder, but for drafts and what lies in those folders."""
    for here, folders, files in os.walk(root):
        place = Path(here)
        folders[:] = sorted(f for f in folders if f[0] != "." and place / f not in unread)
        for name in sorted(files):
            if name[0] != ".":
                yield place / name
