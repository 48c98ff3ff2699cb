"""Result files: join sealed chunks to an output and an error file, and end the batch.

The files have fixed ids, and each step takes effect once. So after a worker died here, the next one
repeats its steps with the same bytes. Called by worker.py.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cray_agents.errors import Corrupt, NotFound
from cray_agents.runtime.batches.batch_records import (
    NO_TOKENS,
    Accepted,
    BatchEnd,
    BatchRequest,
    BatchUsage,
    Finalizing,
    LineCounts,
    add_tokens,
)
from cray_agents.runtime.batches.chunks import (
    Seal,
    read_seal,
    seal_path,
    set_aside,
    verify_seal,
)
from cray_agents.runtime.batches.folder import BatchFolder
from cray_agents.runtime.files.files import Files

PIECE = 1 << 20  # bytes copied at a time

log = logging.getLogger(__name__)


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
                    piece = file.read(min(remaining, PIECE))
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
