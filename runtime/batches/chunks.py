"""A chunk of lines: its requests, its results so far, and the seal that ends it.

A result is a line `{"line": n, "ok": ..., "usage": [...], "result": {...}, "crc": ...}`, and
`result` is, byte for byte, what the output file will hold. A sealed chunk is its counts, then its
output lines, then its error lines, each in the order of the input. Each line has a checksum, and so
have a seal's head and its body (checked.py). Called by worker.py; output.py joins the seals, and
progress.py counts.
"""

import contextlib
import hashlib
import logging
import os
import zlib
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from cray_agents.errors import Corrupt
from cray_agents.records import new_id
from cray_agents.runtime.batches.batch_records import (
    NO_TOKENS,
    LineCounts,
    Stopped,
    Tokens,
    add,
    tokens_of,
)
from cray_agents.runtime.batches.folder import BatchFolder
from cray_agents.runtime.batches.results import ResultPlace, fetch, read_lines
from cray_agents.runtime.batches.validation import Row
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.checksums import parse, proven, with_crc

log = logging.getLogger(__name__)

RESULT = b',"result":'
#: What Python's `splitlines`, by which people read JSON lines, takes for the end of one; in JSON
#: these can only stand within texts.
BREAKS = tuple((c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029")
STOPPED: dict[Stopped, str] = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed: the batch was cancelled.",
}


class RequestLine(NamedTuple):
    """A request of a batch. `number` counts the input's lines from 1."""

    number: int
    raw: bytes


class Result(NamedTuple):
    """Where a line's result lies, and what it counts for."""

    ok: bool
    tokens: Tokens
    place: ResultPlace


class Seal(NamedTuple):
    """The head of a sealed chunk; sizes in bytes, `start`: where its output lines begin.

    `unasked`: how many of the failed lines were not asked, for the batch had stopped. `body`: the
    CRC-32 of all that follows the head; None in a seal from before that was kept.
    """

    counts: LineCounts
    unasked: int
    tokens: Tokens
    start: int
    output: int
    errors: int
    body: int | None


def chunk_name(chunk: int) -> str:
    """A chunk's name in claims/, results/ and done/."""
    return f"{chunk:08d}"


def seal_path(folder: BatchFolder, chunk: int) -> Path:
    """Where a sealed chunk lies."""
    return folder.done / f"{chunk_name(chunk)}.jsonl"


def requests(folder: BatchFolder, row: Row) -> list[RequestLine]:
    """The requests of a chunk, as they stand in the input. Raises Corrupt."""
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
    """The id of a line's result: the same whoever asks it, and however often."""
    return f"batch_req_{hashlib.sha256(f'{batch_id}:{number}'.encode()).hexdigest()[:24]}"


def answered(
    batch_id: str, number: int, custom_id: str, status: int, request_id: str, body: bytes
) -> tuple[bytes, bool, Tokens]:
    """A result's line, whether it is a success, and what it used. The body stays as it is."""
    try:
        value = orjson.loads(body)
    except ValueError:  # no gateway's answer, but some proxy's page
        value = {"error": {"message": body[:2000].decode(errors="replace"), "code": "not_json"}}
        body = orjson.dumps(value)
    if b"\n" in body:
        body = orjson.dumps(value)
    response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}
    record = _record(batch_id, number, custom_id, response, None)
    ok, tokens = status < 400, tokens_of(value)
    head = orjson.dumps({"line": number, "ok": ok, "usage": tokens})
    return with_crc(head[:-1] + RESULT + record + b"}"), ok, tokens


def results_so_far(folder: BatchFolder, chunk: int) -> dict[int, Result]:
    """By line number, what earlier claims had finished of a chunk. The first result stays.

    A damaged line is no result: it is asked again, and the gateway answers with what it recorded.
    """
    found: dict[int, Result] = {}
    for path in sorted(folder.results.glob(f"{chunk_name(chunk)}.*"), key=_fence):
        for place, line in read_lines(path, 0):
            try:
                head, _ = _parts(line, place)
            except Corrupt as error:
                log.error("%s; it is asked again", error)
                continue
            found.setdefault(head["line"], Result(head["ok"], _tokens(head), place))
    return found


def seal(
    folder: BatchFolder,
    chunk: int,
    lines: list[RequestLine],
    results: dict[int, Result],
    stopped: Stopped | None,
) -> bool:
    """Link a chunk with one result for every line into done/; False if somebody was first.

    Lines without a result get the error that says why the batch stopped. Raises Corrupt.
    """
    good: list[bytes] = []
    bad: list[bytes] = []
    tokens, unasked = NO_TOKENS, 0
    found = dict(zip(results, fetch([result.place for result in results.values()]), strict=True))
    for number, raw in lines:
        result = results.get(number)
        if result is None:
            if stopped is None:
                raise Corrupt(f"{folder.id}: chunk {chunk} would be sealed without line {number}")
            bad.append(_not_asked(folder.id, number, raw, stopped))
            unasked += 1
            continue
        (good if result.ok else bad).append(_parts(found[number], result.place)[1])
        tokens = add(tokens, result.tokens)
    head = {
        "completed": len(good),
        "failed": len(bad),
        "unasked": unasked,
        "usage": tokens,
        "output": sum(map(len, good)) + len(good),
        "errors": sum(map(len, bad)) + len(bad),
        "body": reduce(lambda crc, line: zlib.crc32(line + b"\n", crc), [*good, *bad], 0),
    }
    return _publish(seal_path(folder, chunk), [with_crc(orjson.dumps(head)), *good, *bad])


def read_seal(path: Path) -> Seal:
    """The head of a sealed chunk. Raises Corrupt."""
    with path.open("rb") as file:
        line = file.readline()
    head: dict[str, Any] = parse(line, path)
    completed, failed = head["completed"], head["failed"]
    counts = LineCounts(total=completed + failed, completed=completed, failed=failed)
    sizes = (len(line), head["output"], head["errors"])
    return Seal(counts, head["unasked"], _tokens(head), *sizes, head.get("body"))


def verify_seal(path: Path) -> Seal:
    """The same, of a chunk that was read whole. Raises Corrupt."""
    seal, crc = read_seal(path), 0
    with path.open("rb") as file:
        file.seek(seal.start)
        while block := file.read(durable.BLOCK):
            crc = zlib.crc32(block, crc)
    whole = seal.start + seal.output + seal.errors == path.stat().st_size
    if not whole or seal.body not in (None, crc):
        raise Corrupt(f"{path} is damaged: its lines are not what its checksum says")
    return seal


def set_aside(path: Path) -> None:
    """Take a damaged seal away: its lines are asked again. The bytes stay beside it."""
    with contextlib.suppress(FileNotFoundError):  # another worker was faster
        path.rename(path.with_name(f".{path.name}.{new_id('damaged')}"))


def sealed(folder: BatchFolder) -> Iterator[int]:
    """The numbers of the sealed chunks."""
    try:
        names = os.listdir(folder.done)  # noqa: PTH208  names are all that is needed
    except FileNotFoundError:
        return
    for name in names:
        if name.endswith(".jsonl") and not name.startswith("."):
            yield int(name.removesuffix(".jsonl"))


def remove_results(folder: BatchFolder, chunk: int) -> None:
    """Remove the results of a sealed chunk."""
    for path in folder.results.glob(f"{chunk_name(chunk)}.*"):
        path.unlink(missing_ok=True)


def _publish(path: Path, lines: list[bytes]) -> bool:
    draft = path.with_name(f".{path.name}.{new_id('draft')}")
    try:
        with draft.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    except (FileExistsError, FileNotFoundError):  # sealed already; or the batch has even ended
        return False
    finally:
        draft.unlink(missing_ok=True)
    durable.sync(path.parent)
    return True


def _not_asked(batch_id: str, number: int, raw: bytes, stopped: Stopped) -> bytes:
    error = {"code": f"batch_{stopped}", "message": STOPPED[stopped]}
    return _record(batch_id, number, orjson.loads(raw)["custom_id"], None, error)


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
    for mark, escaped in BREAKS:
        record = record.replace(mark, escaped)
    return record


def _parts(line: bytes, place: ResultPlace) -> tuple[dict[str, Any], bytes]:
    """What a stored line says of its result, and the output file's line. Raises Corrupt."""
    at = f"{place.path}: byte {place.offset}"
    text = proven(line, at)
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
