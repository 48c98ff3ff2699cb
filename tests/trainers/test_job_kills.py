"""Jobs of every method killed again and again: each ends as the one that nothing happened to.

At random moments (starting, in a step, while a resume point or the checkpoint is written) the
launcher or a rank gets SIGKILL, SIGTERM, SIGUSR1, or SIGTERM and then SIGKILL; then the job is
started again at once, now and then under another layout, or with resume points on its node's own
disk first. Prints what was seen.
"""

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.paths import SCRATCH, Home
from cray_agents.processes import alive
from cray_agents.records import Manifest
from cray_agents.runtime.disk.durable import replace_file
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import EX_TEMPFAIL
from cray_agents.training_jobs import JobSpec, Layout
from tests.support.campaign import Campaign, kills
from tests.trainers.test_faults import ranks_of

pytestmark = pytest.mark.megatron

KILLS = kills(6)
STEPS = 6
RTOL = 1e-5  # of losses, in another layout
HANGS = 180.0  # seconds in which nothing that is waited for comes


@dataclass(frozen=True)
class Course:
    """A kind of job. `others`: layouts that it may go on under; none where losses would differ."""

    model: str
    method: str = "sft"
    layout: dict[str, Any] = field(default_factory=dict)
    others: tuple[dict[str, Any], ...] = ()
    hyper: dict[str, Any] = field(default_factory=dict)


TENSOR = {"tensor": 2, "sequence_parallel": True}
COURSES = {
    "sft": Course("qwen3", others=({"data": 2}, {"context": 2}), hyper={"weigh_loss": True}),
    "dpo": Course("qwen3-tied", "dpo", others=({"data": 2}, TENSOR)),
    "kto": Course("qwen2", "kto", {"data": 2}, ({}, TENSOR)),
    "grpo": Course("llama", "grpo", {"pipeline": 2}, ({}, {"data": 2}), {"policy": {"kl": 0.1}}),
    "lora": Course(
        "qwen3", "dpo", TENSOR, hyper={"lora": {"rank": 4, "dropout": 0.2}, "dtype": "bfloat16"}
    ),
    "moe": Course("mixtral", "sft", {"data": 2, "expert": 2}, ({},), {"order": "weighted"}),
}
RIGHT = ("jobs equal to the bit", f"jobs in several layouts, losses within {RTOL:g}")
HOW = (
    (signal.SIGKILL,),
    (signal.SIGKILL,),
    (signal.SIGTERM,),
    (signal.SIGUSR1,),
    (signal.SIGTERM, signal.SIGKILL),  # as of a scheduler whose grace period is over
)


@dataclass(frozen=True)
class Kill:
    """What is done to a process, and when. `delay`: seconds after the moment has come."""

    moment: str
    signals: tuple[signal.Signals, ...]
    rank: int | None  # None: the launcher
    step: int
    delay: float
    grace: float  # between two signals

    @classmethod
    def draw(cls, chance: random.Random, world: int) -> "Kill":
        moment = chance.choice(("start", "step", "step", "write", "write", "export"))
        return cls(
            moment,
            chance.choice(HOW),
            chance.choice([None, *range(world)]),
            chance.randrange(STEPS - 1),
            chance.uniform(0, {"start": 0.5, "step": 0.02}.get(moment, 0.002)),
            chance.uniform(0, 0.05),
        )

    def __str__(self) -> str:
        return ", ".join(number.name for number in self.signals)


class Attempt:
    """A start of a job, which may be killed."""

    def __init__(self, lab: Any, spec: JobSpec, scratch: Path | None) -> None:
        self.folder: Path = lab.home.job(spec.id)
        self.checkpoints: Path = lab.home.checkpoint(spec.id).parent
        points = self.points
        self.newest = points[-1] if points else 0  # it has to go on from here, or later
        self.before = JobJournal(lab.home, spec.id).attempts
        self.job = lab.start(spec, **({} if scratch is None else {SCRATCH: str(scratch)}))
        self.ranks: list[int] = []
        self.hit, self.went_on = "", False

    @property
    def points(self) -> list[int]:
        """The steps of the resume points that are published."""
        return sorted(int(p.name[5:]) for p in (self.folder / "megatron").glob("step-*"))

    @property
    def drafts(self) -> list[Path]:
        return list((self.folder / "megatron").glob(".step-*"))

    @property
    def half_checkpoints(self) -> list[Path]:
        return list(self.checkpoints.glob(".job-*"))

    @property
    def ended(self) -> bool:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.job.pid, how) is not None

    def until(self, what: Callable[[], Any]) -> bool:
        """Wait for a moment; False if the job ended, or hung, before."""
        deadline = time.monotonic() + HANGS
        while not what():
            if self.ended or time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def bear(self, kill: Kill) -> bool:
        """Kill it at the moment; False if it had ended."""
        moments: dict[str, Callable[[], Any]] = {
            "start": lambda: True,
            "step": lambda: self.job.journal.step > kill.step,
            "write": lambda: self.job.journal.step > kill.step and self.drafts,
            "export": lambda: self.half_checkpoints,
        }
        if not self.until(moments[kill.moment]):
            return False
        time.sleep(kill.delay)
        self.ranks = ranks_of(self.job)
        there = kill.rank is not None and kill.rank < len(self.ranks)
        pid = self.ranks[kill.rank or 0] if there else self.job.pid
        self.hit = f"{kill} of {'a rank' if there else 'the launcher'}"
        for number in kill.signals:
            again = number != kill.signals[0]
            if again:
                time.sleep(kill.grace)
            if self.ended:
                return again
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # a rank that ended by itself
                return again
        return True

    def end(self) -> int | None:
        """Its exit code; None if it hangs, which ends it."""
        hung = not self.until(lambda: self.ended)
        if hung and not self.ended:
            self.job.kill()
            return None
        code = int(self.job.wait())
        step, deadline = self.job.journal.step, time.monotonic() + HANGS
        while any(alive(pid) for pid in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.0005)
        self.went_on = self.job.journal.step > step + 1  # its ranks, without their launcher
        return code


@dataclass
class Jobs:
    """Kills jobs, and counts what was seen."""

    lab: Any
    folder: Path
    seen: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0  # relative difference of a loss, in another layout
    whole: dict[str, Any] = field(default_factory=dict)  # by course: the undisturbed job

    @contextmanager
    def begin(self, folder: Path, chance: random.Random) -> Iterator["Disturbed"]:
        """Choose the next course."""
        self.seen["jobs"] += 1
        names = list(COURSES)
        name = names[self.seen["jobs"] % len(names)]
        yield Disturbed(name, self.laboratory(folder.name, COURSES[name]))

    def laboratory(self, folder: str, course: Course) -> Any:
        """A home of its own with a course's dataset."""
        lab = type(self.lab)(Home(self.folder / folder), self.lab.models)
        lab.dataset(method=course.method)
        return lab

    def spec(self, lab: Any, course: Course) -> JobSpec:
        hyper = {"steps": STEPS, "batch_size": 4, "max_tokens_per_microbatch": 128, **course.hyper}
        spec: JobSpec = lab.spec(
            course.model,
            method=course.method,
            hyper=hyper,
            layout=course.layout,
            save_every=1 if course.method == "sft" else 3,
        )
        return spec

    def undisturbed(self, name: str) -> Any:
        if name not in self.whole:
            lab = self.laboratory(f"whole-{name}", COURSES[name])
            self.whole[name] = lab.run(self.spec(lab, COURSES[name]))
        return self.whole[name]

    def disturb(self, job: "Disturbed", chance: random.Random, enough: int) -> Counter[str]:
        """Kill one job some times, and let it end."""
        course = COURSES[job.name]
        spec, told = self.spec(job.lab, course), list[str]()
        own, hits = spec.layout, Counter[str]()
        left = chance.randint(1, max(1, KILLS // len(COURSES)))
        while True:
            scratch = self.folder if chance.random() < 0.5 else None
            attempt = job.attempt = Attempt(job.lab, spec, scratch)
            job.moved = job.moved or spec.layout != own
            kill = Kill.draw(chance, spec.layout.world) if left else None
            killed = kill is not None and attempt.bear(kill)
            code = attempt.end()
            left -= killed
            told.append(f"{attempt.hit if killed else 'nothing'} in {spec.layout}: exit {code}")
            problem = self.look(attempt, kill if killed else None, code)
            assert problem is None, "\n".join([job.name, problem, *told])
            hits[attempt.hit] += killed
            if code == 0:
                return +hits
            if course.others and chance.random() < 0.5:
                other = chance.choice([own, *(Layout(**layout) for layout in course.others)])
                self.seen["starts under another layout than before"] += other != spec.layout
                spec = spec.model_copy(update={"layout": other})
                replace_file(attempt.folder / "spec.json", spec.model_dump_json().encode())

    def check(self, job: "Disturbed") -> None:
        problem = self.compare(job.attempt, self.undisturbed(job.name), job.moved)
        assert problem is None, f"{job.name}: {problem}"

    def look(self, attempt: Attempt, kill: Kill | None, code: int | None) -> str | None:
        """Count an attempt; what is wrong with how it began or ended."""
        job = attempt.job
        if code is None:
            return f"hung\n{job.log}"
        if attempt.went_on or any(alive(pid) for pid in attempt.ranks):
            return f"{attempt.hit}: its ranks {attempt.ranks} went on"
        for start in job.journal.events():
            if start["event"] != "started" or start["attempt"] <= attempt.before:
                continue
            since = start["from_step"]
            if since < attempt.newest:
                return f"went on from step {since}, and there was a point of {attempt.newest}"
            self.seen["starts from a resume point"] += since > 0
            self.seen["starts from a point on the node's own disk"] += since > attempt.newest
        if kill is None:
            return None if code == 0 else f"died of itself: exit code {code}\n{job.log}"
        self.seen["kills that left half a resume point"] += bool(attempt.drafts)
        self.seen["kills that left half a checkpoint"] += bool(attempt.half_checkpoints)
        first, last = kill.signals[0], kill.signals[-1]
        good = {0} | ({1, -9} if last == signal.SIGKILL else set())
        good |= {EX_TEMPFAIL, -first} if first != signal.SIGKILL else set()
        status = job.journal.status()  # of one that had just ended, "succeeded"
        if code not in good or (status is not None and status.state != "succeeded"):
            return f"{attempt.hit} ended it with exit code {code}\n{job.log}"
        if code == EX_TEMPFAIL and f"saved at step {job.journal.step}" in job.journal.log_tail(1):
            self.seen["kills that let it save"] += 1
            if attempt.points[-1:] != [job.journal.step]:
                return f"said that it saved at {job.journal.step}, but has {attempt.points}"
        return None

    def compare(self, attempt: Attempt, whole: Any, moved: bool) -> str | None:
        """What the finished job has that the undisturbed one has not, or the other way round."""
        job = attempt.job
        steps = [e["step"] for e in job.journal.events() if e["event"] == "step"]
        if steps != list(range(1, STEPS + 1)):
            return f"its events tell of steps {steps}"
        if job.journal.status().trained_tokens != whole.journal.status().trained_tokens:
            return "did not count its tokens on"
        losses, expected = np.array(job.losses), np.array(whole.losses)
        difference = float(np.max(np.abs(losses / expected - 1)))
        if moved:
            self.worst = max(self.worst, difference)
        if difference > (RTOL if moved else 0):
            return f"losses {losses}, not {expected}"
        if not moved and checkpoint_of(job) != checkpoint_of(whole):
            return "the same losses, but another checkpoint"
        self.seen[RIGHT[moved]] += 1
        notes = (attempt.folder / "megatron").glob("*local-*")
        litter = [*attempt.drafts, *attempt.half_checkpoints, *notes]
        return f"left {[path.name for path in litter]}" if litter else None

    def table(self) -> str:
        lines = [f"| {what} | {count:,} |" for what, count in sorted(self.seen.items())]
        worst = f"| largest relative difference of a loss, other layouts | {self.worst:.1e} |"
        return "\n".join(["", "| what | |", "|---|---|", *lines, worst, ""])


@dataclass
class Disturbed:
    """A job of a course that is killed. `moved`: it went on under another layout."""

    name: str
    lab: Any
    attempt: Attempt | None = None
    moved: bool = False


def checkpoint_of(job: Any) -> dict[str, str]:
    """The hashes of a job's published files."""
    path = job.journal.home.checkpoint(job.journal.job_id) / "manifest.json"
    return Manifest.model_validate_json(path.read_bytes()).files


def test_killed_jobs_end_as_if_nothing_had_happened(lab: Any, tmp_path: Path) -> None:
    jobs = Jobs(lab, tmp_path)
    try:
        Campaign(jobs.begin, jobs.disturb, jobs.check).run(tmp_path, KILLS)
    finally:
        sys.stdout.write(jobs.table())
    assert jobs.seen["starts from a resume point"] >= KILLS // 10
