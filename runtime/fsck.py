"""File check: read everything under the platform's root and report damaged or missing files.

    segments/                     every line and frame, by store/segments/repair.py (also repairs)
    datasets/, checkpoints/       the manifest and every file in it; what an adapter is over
    jobs/*/megatron/*/            every file in a resume point's seal
    jobs/*/baselines/             the numbers, against the hash before them
    blobs/                        every content, against its name, which is its hash
    batches/                      input, chunk index, results line by line, sealed chunks
    all other JSON                records and lines of journals, against disk/checksums.py

Records older than the checksums only have to be JSON. Not read: logs, drafts, slurm/, and exports/,
whose files may be half written. Called by `cray-agents maintain fsck`. Changes
nothing.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

from cray_agents.errors import Corrupt, NewerFormat, NotFound, StoreError
from cray_agents.paths import HARDWARE, Home
from cray_agents.runtime.batches.batch_records import BatchFolder
from cray_agents.runtime.batches.chunks import verify_seal
from cray_agents.runtime.batches.validation import read_index
from cray_agents.runtime.datasets import reader
from cray_agents.runtime.disk import checksums, durable, journal
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.adapters import MERGED
from cray_agents.runtime.store.segments import repair as segment_repair
from cray_agents.runtime.store.segments.repair import Finding

Check = Callable[[Path], None]  # of one file; raises Corrupt

HASH = 32  # bytes of the hash before a baseline's numbers
SEAL, POINT = "SEALED.json", "point.json"  # of a resume point, as trainers/checkpointing writes it
#: Files with one record each, by their ending or their place.
RECORD = re.compile(
    r".*\.(json|deleted|revoked|validated|ended|ready|pruned|resumed)"
    r"|jobs/[^/]+/(cancelled|attempts/\d+|pauses/\d+)"
    r"|sessions/[^/]+/(current|attempts/\d+|queue/[^/]+)"
    r"|batches/[^/]+/claims/[^/]+"
)


def check(home: Home) -> Iterator[Finding]:
    """Yield all findings, folder by folder. Raises StoreError if a file cannot be read."""
    yield from segment_repair.check(home.segments)
    for path, check_path in _checks(home):
        try:
            check_path(path)
        except FileNotFoundError:  # removed just now
            continue
        except (Corrupt, NewerFormat) as error:
            if path.exists():  # else removed just now, too
                yield _finding(path, str(error))
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def _finding(path: Path, message: str) -> Finding:
    return Finding("", str(path), "damaged", 0, 0, 0, message, repairable=False, lost=None)


def _checks(home: Home) -> Iterator[tuple[Path, Check]]:
    """Yield each file or folder with its check."""
    whole: set[Path] = set()  # folders checked by their manifest
    for folder in _folders(home.datasets):
        yield folder, _check_dataset
        whole.add(folder)
    for folder in _folders(home.checkpoint("x").parent):
        yield folder, _check_checkpoint
        if (folder / MERGED).is_dir():
            yield folder / MERGED, _check_checkpoint
        whole.add(folder)
    for folder in _folders(home.jobs):
        for point in _folders(folder / "megatron"):
            yield point, _check_resume_point
            whole.add(point)
    for folder in _folders(home.batches):
        if folder.name != "workers":
            yield folder, _check_batch_input
    others = {home.slurm, home.logs, home.exports, home.drafts, home.trackers}
    unread = {home.segments, *others, *whole}
    for path in _files(home.root, unread):
        check_path = _choose_check(path.relative_to(home.root))
        if check_path is not None:
            yield path, check_path


def _choose_check(name: Path) -> Check | None:
    """Return the check for a file, by its path under the root, or None."""
    match name.parts:
        case ("blobs", _, _):
            return _check_blob
        case ("batches", _, "done", _):
            return _check_sealed_chunk
        case ("batches", _, "results", _):
            return _check_results
        case ("batches", _, "input.jsonl" | "chunks.jsonl"):
            return None  # checked with the batch
        case ("jobs", _, "events.jsonl") | ("ledger", _) | ("audit", _):
            return _check_lines
        case ("jobs" | "sessions", _, file) if file.startswith(HARDWARE):
            return _check_lines
        case ("jobs", _, "baselines", _):
            return _check_numbers
    return _check_record if RECORD.fullmatch(name.as_posix()) else None


def _check_record(path: Path) -> None:
    checksums.read_json(path)


def _check_lines(path: Path) -> None:
    for _ in journal.read(path):
        pass


def _check_results(path: Path) -> None:
    for place, line in journal.spans(path):
        checksums.parse(line, f"{path}: byte {place.offset}")


def _check_sealed_chunk(path: Path) -> None:
    verify_seal(path)


def _check_blob(path: Path) -> None:
    checksums.prove(path, path.name)


def _check_numbers(path: Path) -> None:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        expected = file.read(HASH)
        while block := file.read(durable.BLOCK):
            hasher.update(block)
    if hasher.digest() != expected:
        raise Corrupt(f"{path} is damaged: its numbers are not what their hash says")


def _check_dataset(folder: Path) -> None:
    try:
        reader.verify(folder)
    except FileNotFoundError:
        raise Corrupt(f"{folder} has no {reader.MANIFEST}") from None


def _check_checkpoint(folder: Path) -> None:
    try:
        manifest = checkpoints.verify(folder)
        for name, sha256 in checkpoints.delta_files(manifest).items():
            checksums.prove(folder / name, sha256)
    except NotFound as error:
        raise Corrupt(str(error)) from error


def _check_resume_point(folder: Path) -> None:
    try:
        seal = checksums.read_json(folder / SEAL)
    except FileNotFoundError:
        raise Corrupt(f"{folder} has no {SEAL}") from None
    # of a local point the ranks' files are on the nodes' own disks
    for name in [POINT] if folder.name.startswith(durable.LOCAL) else seal:
        checksums.prove(folder / name, seal[name])


def _check_batch_input(root: Path) -> None:
    """Check the input and the chunk index of a batch that has not ended."""
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


def _folders(parent: Path) -> list[Path]:
    """Return the folders in a folder that may not exist, without drafts."""
    return sorted(path for path in parent.glob("[!.]*") if path.is_dir())


def _files(root: Path, unread: set[Path]) -> Iterator[Path]:
    """Yield all plain files below a folder, without drafts and without the unread folders."""
    for directory, folders, files in os.walk(root):
        parent = Path(directory)
        folders[:] = sorted(f for f in folders if f[0] != "." and parent / f not in unread)
        for name in sorted(files):
            if name[0] != ".":
                yield parent / name
