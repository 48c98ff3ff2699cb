"""Rendezvous: the first node's launcher tells the others where all ranks of a job connect.

It opens a free port, and writes it to the shared root, in a file of this start alone. The others
wait for the file. So nobody has to guess a port that is free, or to list nodes by Slurm's programs.
Called by launch.py.
"""

import time
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import Corrupt, SetupError
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable

POLL = 0.1  # seconds between looks for the file
MEETING_SECONDS = 600.0  # seconds to wait for the other ranks, whatever they load
SLOWEST = 2e8  # bytes a second, of a shared file system on a bad day


class Rendezvous(Record):
    """The place where a start's ranks connect. `attempt` is the start's, as a fence."""

    host: str
    port: int
    attempt: int


def announce(file: Path, rendezvous: Rendezvous) -> None:
    """Write a start's rendezvous for the other launchers."""
    durable.replace_file(file, checksums.with_crc(rendezvous.model_dump_json().encode()))


def await_rendezvous(file: Path, attempt: int, seconds: float) -> Rendezvous:
    """Wait for a start's rendezvous, of this attempt or a later one.

    A launcher that is not the first may read the number of attempts before the first one claims its
    own. A lower number than that is left from an earlier start. Raises SetupError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        if file.name in durable.names_in(file.parent):
            with suppress(FileNotFoundError, Corrupt):  # not seen whole yet from this node
                rendezvous = checksums.read_record(Rendezvous, file)
                if rendezvous.attempt >= attempt:
                    return rendezvous
        if time.monotonic() > deadline:
            raise SetupError(
                f"the first node did not say within {seconds:.0f} s where the ranks connect: {file}"
                " is missing; the end of the job's log tells how far that node is"
            )
        time.sleep(POLL)


def loading_seconds(*folders: Path | None) -> float:
    """Return the seconds that ranks may wait for each other while files in folders are loaded."""
    files = [file for folder in folders if folder is not None for file in folder.rglob("*")]
    sizes = 0
    for file in files:
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:  # another process tidies up meanwhile
            continue
    return MEETING_SECONDS + sizes / SLOWEST
