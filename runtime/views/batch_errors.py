"""Batch errors: the failed lines of a batch by code, with the first examples of each.

Called by gateway/routes/batches.py.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from cray_agents.exact_json import load_json
from cray_agents.runtime.batches.batch_records import BatchFolder
from cray_agents.runtime.batches.chunks import seal_path, sealed_chunks, verify_seal
from cray_agents.runtime.batches.queue import BatchQueue
from cray_agents.runtime.files.files import Files

LONGEST = 500  # characters of a message


def batch_errors(batches: BatchQueue, files: Files, batch_id: str, examples: int) -> dict[str, Any]:
    """Return BatchErrors as JSON: from the error file, or from the chunks that are done.

    Raises NotFound, also where the error file was deleted; Corrupt.
    """
    batch = batches.get(batch_id)
    counts: Counter[str] = Counter()
    statuses: dict[str, int | None] = {}
    first_lines: dict[str, list[dict[str, Any]]] = {}
    if batch.error_file_id is not None:
        lines = _lines_of_file(files, batch.error_file_id)
    else:
        lines = _lines_of_chunks(batches.folder(batch_id))
    for line in lines:
        result = load_json(line)
        response = result.get("response") or {}
        body = response.get("body")
        error = result.get("error") or (body.get("error") if isinstance(body, dict) else None)
        error = error if isinstance(error, dict) else {}
        status = response.get("status_code")
        code = str(error.get("code") or error.get("type") or status or "unknown")
        counts[code] += 1
        statuses.setdefault(code, status)
        known = first_lines.setdefault(code, [])
        if len(known) < examples:
            message = str(error.get("message") or "")[:LONGEST]
            known.append({"custom_id": result.get("custom_id"), "message": message})
    done = batch.request_counts
    return {
        "id": batch_id,
        "lines": done.completed + done.failed,
        "failed": done.failed,
        "data": [
            {"code": code, "status": statuses[code], "lines": count, "examples": first_lines[code]}
            for code, count in counts.most_common()
        ],
    }


def _lines_of_file(files: Files, file_id: str) -> Iterator[bytes]:
    with files.path(file_id).open("rb") as file:
        yield from file


def _lines_of_chunks(folder: BatchFolder) -> Iterator[bytes]:
    """Yield the failed lines of the chunks that are done, without those of a batch that ended."""
    with suppress(FileNotFoundError):
        for chunk in sorted(sealed_chunks(folder)):
            path = seal_path(folder, chunk)
            seal = verify_seal(path)
            with path.open("rb") as file:
                file.seek(seal.start + seal.output)
                yield from file.read(seal.errors).splitlines()
