"""Trackers: mirror the numbers of jobs and loops to TensorBoard, Weights & Biases or trackio.

The platform reads what jobs and loops record on the shared root, and a process of each tracker
(tracker_worker.py) writes it. So a tracker that hangs, fails or has no network harms no job: its
failure is told once in the log and in the health warnings, and what it missed follows later.

A job is the run of its id, with `train/<measure>` and `validation/<measure>` by step; a loop is
`loop-<name>`, with `iteration/<field>` by iteration. `trackers/<tracker>.json` under the root holds
the steps that were handed over. compose.py starts `follow`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cray_agents.config import Config
from cray_agents.errors import CrayError, SetupError
from cray_agents.paths import Home
from cray_agents.processes import SAFE_IMPORTS, end_child
from cray_agents.records import canonical
from cray_agents.runtime.disk import checksums, durable, journal
from cray_agents.runtime.store.loop_records import LoopRecords
from cray_agents.trainers.job.journal import JobJournal, measures

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
WORKER = Path(__file__).with_name("tracker_worker.py")
EVERY = 5.0  # seconds between two looks at the records
PATIENCE = 300.0  # seconds that a tracker may take for the news of one run
STOP = 20.0  # seconds that it has to end in
_PREFIX = {"step": "train", "evaluation": "validation"}
Line = dict[str, Any]


def check_trackers(config: Config) -> None:
    """Raise SetupError for a tracker that this Python, or the one it names, does not have."""
    for setting in config.trackers:
        name, _, program = setting.partition(":")
        if program and not os.access(program, os.X_OK):
            raise SetupError(f"trackers: {program}, the Python for {name}, cannot be run")
        if not program and find_spec(PACKAGES[name]) is None:
            raise SetupError(
                f"trackers: {name} needs the package {PACKAGES[name]}, which is not installed. "
                f"Install it, or name a Python that has it, as in {name}:/opt/{name}/bin/python"
            )


async def follow(home: Home, setting: str, every: float = EVERY) -> None:
    """Mirror all that is recorded, until cancelled. Raises SetupError where the tracker fails."""
    name, _, program = setting.partition(":")
    log, records = home.logs / f"tracker-{name}.log", _Records(home, name)
    with log.open("ab") as output:
        worker = await asyncio.create_subprocess_exec(
            *(program or sys.executable, str(WORKER), name, str(home.trackers / name)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            env=os.environ | SAFE_IMPORTS,
        )
    assert worker.stdin is not None and worker.stdout is not None
    try:
        for number in range(sys.maxsize):
            news = records.news()
            while lines := await asyncio.to_thread(next, news, None):
                async with asyncio.timeout(PATIENCE):
                    for line in [*lines, {"flush": number}]:
                        worker.stdin.write(json.dumps(line).encode() + b"\n")
                        await worker.stdin.drain()
                    if await worker.stdout.readline() != b"%d\n" % number:
                        raise ConnectionError
                await asyncio.to_thread(records.save)
            await asyncio.sleep(every)
    except (ConnectionError, TimeoutError, RuntimeError):  # uvloop's of a pipe that was closed
        raise SetupError(f"the tracker {name} failed, see {log}: no job needs it") from None
    finally:
        worker.stdin.close()
        try:
            async with asyncio.timeout(STOP):
                await worker.wait()
        except TimeoutError:
            await end_child(worker, 0)


class _Records:
    """What jobs and loops have recorded, and how far a tracker has it."""

    def __init__(self, home: Home, tracker: str) -> None:
        self._home = home
        self._file = home.trackers / f"{tracker}.json"
        known = checksums.read_json(self._file) if self._file.exists() else {}
        self._steps: dict[str, int] = known.get("steps", {})  # by run and prefix
        self._ended = set[str](known.get("ended", ()))
        self._tails: dict[str, journal.Tail] = {}

    def save(self) -> None:
        """Record that the tracker has all that `news` gave so far."""
        self._file.parent.mkdir(exist_ok=True)
        place = {"steps": self._steps, "ended": sorted(self._ended)}
        durable.replace_file(self._file, checksums.with_crc(canonical(place)))

    def news(self) -> Iterator[list[Line]]:
        """Yield the new lines of each run. What cannot be read is left to `maintain fsck`."""
        for kind, folder in (("job", self._home.jobs), ("loop", self._home.loops)):
            for name in sorted(durable.names_in(folder)):
                lines: list[Line] = []
                try:
                    (self._add_job if kind == "job" else self._add_loop)(name, lines)
                except (CrayError, OSError):
                    continue
                finally:
                    if lines:
                        yield lines

    def _add_job(self, job_id: str, lines: list[Line]) -> None:
        record, run = JobJournal(self._home, job_id), job_id
        ended = record.ended
        if ended and run in self._ended:
            return
        tail = self._tails.setdefault(run, journal.Tail(record.events_file))
        config: Line = {}
        for text in tail.read():
            event = journal.parse_line(text, record.events_file)
            if prefix := _PREFIX.get(event["event"]):
                config = config or record.spec().model_dump(mode="json", exclude_none=True)
                found = self._line(run, prefix, event["step"], event["time"], measures(event))
                lines += [found | {"config": config}] if found else []
        self._ended.discard(run)
        if ended:
            lines.append({"run": run, "ended": True})
            self._ended.add(run)
            del self._tails[run]

    def _add_loop(self, name: str, lines: list[Line]) -> None:
        records, run = LoopRecords(self._home, name), f"loop-{name}"
        for number in records.numbers():
            if number > self._steps.get(f"{run}/iteration", -1):
                content = records.content(number)
                found = self._line(run, "iteration", number, records.ended(number), content)
                lines += [found | {"config": {}}] if found else []

    def _line(
        self, run: str, prefix: str, step: int, time: float, values: dict[str, Any]
    ) -> Line | None:
        """Return a step's numbers, with those one level down; None if the tracker has the step."""
        if step <= self._steps.get(f"{run}/{prefix}", -1):  # a job that goes on wrote it again
            return None
        self._steps[f"{run}/{prefix}"] = step
        flat = values | {
            f"{name}/{key}": value
            for name, inner in values.items()
            if isinstance(inner, dict)
            for key, value in inner.items()
        }
        numbers = {f"{prefix}/{n}": float(x) for n, x in flat.items() if isinstance(x, int | float)}
        return {"run": run, "step": step, "time": time, "values": numbers}
