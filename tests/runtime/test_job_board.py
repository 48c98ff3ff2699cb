"""The states of a thousand jobs, from one squeue a poll."""

import asyncio
import os
from pathlib import Path

import pytest

from cray_agents.errors import SchedulerError
from cray_agents.ports import CommandStatus
from cray_agents.runtime.background import FAILURES
from cray_agents.runtime.pool.slurm_replica import JobBoard
from cray_agents.runtime.scheduler import slurm as slurm_scheduler
from cray_agents.runtime.scheduler.slurm import SEPARATOR, Slurm

JOBS, REPLICAS = 1000, 200


class Listing:
    """A squeue on PATH that prints a file, and is counted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls, self._rows = folder / "calls", folder / "rows"
        squeue = folder / "squeue"
        squeue.write_text(f"#!/bin/sh\necho >> {self._calls}\nexec cat {self._rows}\n")
        squeue.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        names = [f"job-{n}" for n in range(JOBS)] + [f"replica-{n}-1" for n in range(REPLICAS)]
        self._states = dict.fromkeys(names, "RUNNING")
        self.set("job-0", "PENDING")

    def set(self, name: str, state: str) -> None:
        self._states[name] = state
        columns = [
            (str(n), s, "None", name, "") for n, (name, s) in enumerate(self._states.items())
        ]
        self._rows.write_text("".join(f"{SEPARATOR.join(row)}\n" for row in columns))

    @property
    def calls(self) -> int:
        return self._calls.stat().st_size


async def test_all_who_watch_share_one_squeue_and_hear_of_changes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = Listing(tmp_path, monkeypatch)
    monkeypatch.setattr(slurm_scheduler, "QUEUE_SECONDS", 3600.0)
    with Slurm(tmp_path / "slurm") as scheduler:
        board, heard = JobBoard(scheduler, 0.01), list[str]()

        async def watch(name: str) -> CommandStatus:
            seen = await board.status(name)
            assert seen.state == "running"
            while (now := await board.status(name, seen)).state == "running":
                heard.append(name)
            return now

        watching = [asyncio.create_task(watch(f"replica-{n}-1")) for n in range(REPLICAS)]
        states = [
            (await asyncio.to_thread(scheduler.status, f"job-{n}")).state for n in range(JOBS)
        ]
        assert states == ["queued"] + ["running"] * (JOBS - 1)
        for _ in range(3):  # polls
            await board.status("job-1")
        assert listing.calls == 1 and board.watched >= REPLICAS
        listing.set("replica-7-1", "REQUEUED")
        scheduler._queue_time = float("-inf")  # its time is over
        (one,) = (await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED))[0]
        assert watching.index(one) == 7 and one.result().state == "queued"
        assert listing.calls == 2 and not heard
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def test_a_listing_that_is_not_slurms_is_an_error_for_who_asks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = Listing(tmp_path, monkeypatch)
    rows = listing._rows.read_text()
    with Slurm(tmp_path / "slurm") as scheduler:
        board = JobBoard(scheduler, 0.01)
        for text in ("squeue: error: Invalid job id\n", SEPARATOR * 5, "\n", "\x00\n"):
            listing._rows.write_text(text)
            with pytest.raises(SchedulerError, match="not Slurm's"):
                await board.status("job-1")
        listing._rows.write_text(rows)
        assert (await board.status("job-1")).state == "running"


async def test_a_poll_that_fails_unforeseen_is_asked_again(tmp_path: Path) -> None:
    class Scheduler:
        asked = 0

        def status(self, name: str) -> CommandStatus:
            self.asked += 1
            if self.asked == 1:
                raise KeyError(name)
            return CommandStatus(state="running", id="1")

    board = JobBoard(Scheduler(), 0.01)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        statuses = await asyncio.gather(board.status("a"), board.status("b"))
    assert {status.state for status in statuses} == {"running"}
    assert FAILURES.by_task.pop("job board").number == 1
