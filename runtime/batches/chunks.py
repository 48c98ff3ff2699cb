"""Chunks of lines: read their requests, write and read their results, seal and join them.

A result is a line `{"line": n, "ok": ..., "usage": [...], "result": {...}, "crc": ...}`. Its
`result` is copied byte for byte to the output file. A sealed chunk is a head with counts, the
output lines and the error lines. Lines are in the order of the input. Each result line has a
checksum, and so have the head and the body of a seal (`runtime/disk/checksums.py`).

`finish` joins the seals of a batch to its output file and error file, which have fixed ids, and
ends it. Each step takes effect once. So after a worker died there, the next one repeats its steps
with the same bytes. Called by worker.py; queue.py counts the seals.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from cray_agents.errors import Corrupt, NotFound, StoreError
from cray_agents.exact_json import dump_json, load_json
from cray_agents.records import new_id
from cray_agents.runtime.batches.batch_records import (
    NO_TOKENS,
    Accepted,
    BatchEnd,
    BatchFolder,
    BatchRequest,
    BatchUsage,
    Finalizing,
    LineCounts,
    Stopped,
    Tokens,
    add_tokens,
    tokens_of,
)
from cray_agents.runtime.batches.validation import Row
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.checksums import parse, verify_crc, with_crc
from cray_agents.runtime.disk.group_commit import GroupCommit
from cray_agents.runtime.disk.journal import Journal, LineSpan, spans
from cray_agents.runtime.files.files import Files

log = logging.getLogger(__name__)

ROLL_BYTES = 256 * 2**20  # of a file of results; then another is begun
RESULT = b',"result":'
#: Characters that Python's `splitlines` takes for line ends, with their JSON escapes. Readers of
#: JSON lines often use `splitlines`. In JSON these characters occur only within strings.
BREAKS = tuple((c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029")
STOPPED: dict[Stopped, str] = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed: the batch was cancelled.",
}


class RequestLine(NamedTuple):
    """A request in the input. `number` counts the lines of the input from 1."""

    number: int
    raw: bytes


class Result(NamedTuple):
    """The outcome of a line, and the place of its result on disk."""

    ok: bool
    tokens: Tokens
    place: LineSpan


class Seal(NamedTuple):
    """The head of a sealed chunk. Sizes are in bytes; `start` is the offset of the output lines.

    `unasked` counts the failed lines that were not sent because the batch had stopped. `body` is
    the CRC-32 of the bytes after the head; None in seals older than this field.
    """

    counts: LineCounts
    unasked: int
    tokens: Tokens
    start: int
    output: int
    errors: int
    body: int | None


class ResultWriter:
    """A writer of lines to its own files `<name>-<part>.jsonl`. Use it in one event loop."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        numbers = count()
        self._journal = Journal(lambda: directory / f"{name}-{next(numbers):04d}.jsonl", ROLL_BYTES)
        self._commits = GroupCommit(self._journal.append, self._make_error)

    def submit(self, line: bytes) -> "asyncio.Future[LineSpan]":
        """Queue a line (without newline). The future is done when the line is on the disk.

        The future raises StoreError if the line could not be written.
        """
        return self._commits.submit(line)

    async def close(self) -> None:
        """Wait until everything queued is on the disk, and close the file."""
        await self._commits.close()
        self._journal.close()

    def _make_error(self, error: OSError) -> StoreError:
        return StoreError.of(f"cannot write to {self._directory}", error)


def chunk_name(chunk: int) -> str:
    """Return the name of a chunk in claims/, results/ and done/."""
    return f"{chunk:08d}"


def seal_path(folder: BatchFolder, chunk: int) -> Path:
    """Return the path of a sealed chunk."""
    return folder.done / f"{chunk_name(chunk)}.jsonl"


def requests(folder: BatchFolder, row: Row) -> list[RequestLine]:
    """Read the requests of a chunk from the input, unparsed. Raises Corrupt."""
    offset, length, first, _, crc = row
    with folder.input.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if crc is not None and zlib.crc32(data) != crc:
        raise Corrupt(f"{folder.input} is damaged: bytes {offset} to {offset + length}")
    lines = data.removesuffix(b"\n").split(b"\n")
    return [
        RequestLine(first + index, raw)
        for index, raw in enumerate(lines)
        if raw and not raw.isspace()
    ]


def line_id(batch_id: str, number: int) -> str:
    """Return the id of a line's result, which is the same for every worker and attempt."""
    return f"batch_req_{hashlib.sha256(f'{batch_id}:{number}'.encode()).hexdigest()[:24]}"


def result_line(
    batch_id: str, number: int, custom_id: str, status: int, request_id: str, body: bytes
) -> tuple[bytes, bool, Tokens]:
    """Return the stored line of a result, its success, and its tokens. Keeps the body's bytes."""
    try:
        value = load_json(body)
    except ValueError:  # not from the gateway, but a proxy's error page
        value = {"error": {"message": body[:2000].decode(errors="replace"), "code": "not_json"}}
        body = dump_json(value)
    if b"\n" in body:
        body = dump_json(value)
    response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}
    record = _record(batch_id, number, custom_id, response, None)
    ok, tokens = status < 400, tokens_of(value)
    head = orjson.dumps({"line": number, "ok": ok, "usage": tokens})
    return with_crc(head[:-1] + RESULT + record + b"}"), ok, tokens


def results_so_far(folder: BatchFolder, chunk: int) -> dict[int, Result]:
    """Return the results of a chunk under all claims, by line number. The first result counts.

    A damaged line is ignored and sent again; the gateway then repeats its recorded answer.
    """
    results: dict[int, Result] = {}
    for path in sorted(folder.results.glob(f"{chunk_name(chunk)}.*"), key=_fence):
        for place, line in spans(path):
            try:
                head, _ = _split_result(line, place)
            except Corrupt as error:
                log.error("%s; it is asked again", error)
                continue
            results.setdefault(head["line"], Result(head["ok"], _tokens(head), place))
    return results


def fetch(places: Sequence[LineSpan]) -> list[bytes]:
    """Read the lines at some places, in the given order. Opens each file once."""
    lines: dict[LineSpan, bytes] = {}
    handles: dict[str, int] = {}
    try:
        for place in places:
            handle = handles.get(place.path)
            if handle is None:
                handle = handles[place.path] = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
            lines[place] = os.pread(handle, place.length, place.offset)
    except OSError as error:
        raise StoreError(f"cannot read {place.path}: {error.strerror or error}") from error
    finally:
        for handle in handles.values():
            os.close(handle)
    return [lines[place] for place in places]


def seal(
    folder: BatchFolder,
    chunk: int,
    lines: list[RequestLine],
    results: dict[int, Result],
    stopped: Stopped | None,
) -> bool:
    """Link a chunk with one result for every line into done/. False if it was sealed before.

    Lines without a result get an error with the reason why the batch stopped. Raises Corrupt.
    """
    outputs: list[bytes] = []
    errors: list[bytes] = []
    tokens, unasked = NO_TOKENS, 0
    stored = dict(zip(results, fetch([result.place for result in results.values()]), strict=True))
    for number, raw in lines:
        result = results.get(number)
        if result is None:
            if stopped is None:
                raise Corrupt(f"{folder.id}: chunk {chunk} would be sealed without line {number}")
            errors.append(_stopped_record(folder.id, number, raw, stopped))
            unasked += 1
            continue
        (outputs if result.ok else errors).append(_split_result(stored[number], result.place)[1])
        tokens = add_tokens(tokens, result.tokens)
    head = {
        "completed": len(outputs),
        "failed": len(errors),
        "unasked": unasked,
        "usage": tokens,
        "output": sum(map(len, outputs)) + len(outputs),
        "errors": sum(map(len, errors)) + len(errors),
        "body": reduce(lambda crc, line: zlib.crc32(line + b"\n", crc), [*outputs, *errors], 0),
    }
    return _publish(seal_path(folder, chunk), [with_crc(orjson.dumps(head)), *outputs, *errors])


def read_seal(path: Path) -> Seal:
    """Read the head of a sealed chunk. Raises Corrupt."""
    with path.open("rb") as file:
        line = file.readline()
    head: dict[str, Any] = parse(line, path)
    completed, failed = head["completed"], head["failed"]
    counts = LineCounts(total=completed + failed, completed=completed, failed=failed)
    sizes = (len(line), head["output"], head["errors"])
    return Seal(counts, head["unasked"], _tokens(head), *sizes, head.get("body"))


def verify_seal(path: Path) -> Seal:
    """Read a sealed chunk whole, and return its head. Raises Corrupt."""
    seal, crc = read_seal(path), 0
    with path.open("rb") as file:
        file.seek(seal.start)
        while block := file.read(durable.BLOCK):
            crc = zlib.crc32(block, crc)
    complete = seal.start + seal.output + seal.errors == path.stat().st_size
    if not complete or seal.body not in (None, crc):
        raise Corrupt(f"{path} is damaged: its lines are not what its checksum says")
    return seal


def set_aside(path: Path) -> None:
    """Rename a damaged seal, so that its lines are sent again."""
    with contextlib.suppress(FileNotFoundError):  # another worker was faster
        path.rename(path.with_name(f".{path.name}.{new_id('damaged')}"))


def sealed_chunks(folder: BatchFolder) -> Iterator[int]:
    """Yield the numbers of the sealed chunks."""
    for name in durable.names_in(folder.done):
        if name.endswith(".jsonl") and not name.startswith("."):
            yield int(name.removesuffix(".jsonl"))


def remove_results(folder: BatchFolder, chunk: int) -> None:
    """Remove the results of a sealed chunk."""
    for path in folder.results.glob(f"{chunk_name(chunk)}.*"):
        path.unlink(missing_ok=True)


def finish(
    folder: BatchFolder, request: BatchRequest, accepted: Accepted, files: Files
) -> list[int]:
    """Publish the files of a batch whose chunks are all sealed, and end it.

    Returns the chunks with damaged seals. If there are any, nothing is published, and their lines
    are sent again.
    """
    paths = [seal_path(folder, chunk) for chunk in range(accepted.chunks)]
    try:
        if damaged := _set_damaged_aside(paths):
            return damaged
        seals = [read_seal(path) for path in paths]
        counts, tokens = LineCounts(total=accepted.lines), NO_TOKENS
        for seal in seals:
            counts = LineCounts(
                total=accepted.lines,
                completed=counts.completed + seal.counts.completed,
                failed=counts.failed + seal.counts.failed,
            )
            tokens = add_tokens(tokens, seal.tokens)
        finalizing = folder.finalize(
            Finalizing(at=int(time.time()), outcome=_outcome(folder, seals))
        )
        output = _join(files, request, paths, seals, "output") if counts.completed else None
        errors = _join(files, request, paths, seals, "error") if counts.failed else None
    except FileNotFoundError:
        if folder.end_file.exists():  # another worker published and cleaned up first
            return []
        raise
    folder.finish(
        BatchEnd(
            at=int(time.time()),
            status=finalizing.outcome,
            counts=counts,
            usage=BatchUsage.of(tokens),
            output_file_id=output,
            error_file_id=errors,
        )
    )
    folder.clean()
    return []


def _publish(path: Path, lines: list[bytes]) -> bool:
    draft = path.with_name(f".{path.name}.{new_id('draft')}")
    try:
        with draft.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    except (FileExistsError, FileNotFoundError):  # already sealed, or the batch has ended
        return False
    finally:
        draft.unlink(missing_ok=True)
    durable.sync(path.parent)
    return True


def _stopped_record(batch_id: str, number: int, raw: bytes, stopped: Stopped) -> bytes:
    error = {"code": f"batch_{stopped}", "message": STOPPED[stopped]}
    return _record(batch_id, number, load_json(raw)["custom_id"], None, error)


def _record(
    batch_id: str,
    number: int,
    custom_id: str,
    response: dict[str, Any] | None,
    error: dict[str, str] | None,
) -> bytes:
    record = orjson.dumps(
        {
            "id": line_id(batch_id, number),
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )
    for character, escape in BREAKS:
        record = record.replace(character, escape)
    return record


def _split_result(line: bytes, place: LineSpan) -> tuple[dict[str, Any], bytes]:
    """Split a stored line into its head and the line for the output file. Raises Corrupt."""
    at = f"{place.path}: byte {place.offset}"
    text = verify_crc(line, at)
    begin = text.find(RESULT)
    if begin < 0:
        raise Corrupt(f"{at} is damaged: it is no result")
    head: dict[str, Any] = parse(text[:begin] + b"}", at)
    return head, text[begin + len(RESULT) : -1]


def _tokens(head: dict[str, Any]) -> Tokens:
    a, b, c, d, e = head["usage"]
    return a, b, c, d, e


def _fence(path: Path) -> tuple[int, str]:
    return int(path.name.split(".")[1].split("-")[0]), path.name


def _set_damaged_aside(paths: Sequence[Path]) -> list[int]:
    damaged = []
    for chunk, path in enumerate(paths):
        try:
            verify_seal(path)
        except Corrupt as error:
            log.error("%s; its lines are asked again", error)
            set_aside(path)
            damaged.append(chunk)
    return damaged


def _outcome(
    folder: BatchFolder, seals: Sequence[Seal]
) -> Literal["completed", "cancelled", "expired"]:
    if folder.cancelling_file.exists():
        return "cancelled"
    return "expired" if any(seal.unasked for seal in seals) else "completed"


def _join(
    files: Files,
    request: BatchRequest,
    paths: Sequence[Path],
    seals: Sequence[Seal],
    kind: Literal["output", "error"],
) -> str:
    """Publish all output lines or all error lines as a file. Return its id."""
    file_id = f"file-{request.id}-{kind}"
    expiry = request.output_expires_after
    with files.blobs.draft() as draft:
        for path, seal in zip(paths, seals, strict=True):
            with path.open("rb") as file:
                file.seek(seal.start if kind == "output" else seal.start + seal.output)
                remaining = seal.output if kind == "output" else seal.errors
                while remaining:
                    piece = file.read(min(remaining, durable.BLOCK))
                    if not piece:
                        break
                    draft.write(piece)
                    remaining -= len(piece)
        blob = draft.publish()
    with contextlib.suppress(NotFound):  # published before, then deleted by its owner
        files.publish(
            blob,
            filename=f"{request.id}_{kind}.jsonl",
            purpose="batch_output",
            expires_at=time.time() + expiry.seconds if expiry else None,
            file_id=file_id,
            owner=request.owner,
        )
    return file_id
