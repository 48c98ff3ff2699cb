"""`cray-agents jobs`, over folders that the real journal and the scripted trainer wrote."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.paths import Home
from cray_agents.server.platform_process import SUBMITTER
from cray_agents.trainers.job.job_state import Handover, note_handover
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training import Hyperparameters
from cray_agents.training_jobs import JobSpec, JobStatus, Layout, Policy
from tests.support.command_line import bystander, claimed, cli
from tests.support.scripted_platform import bare_model, platform
from tests.support.scripted_trainer import ScriptedTrainer

# a trainer's process that dies in the middle of a line
DIES = """
import os, sys
from pathlib import Path
from cray_agents.paths import Home
from cray_agents.trainers.job.journal import JobJournal
journal = JobJournal(Home(Path(sys.argv[1])), sys.argv[2])
journal.claim_attempt()
journal.event("started", attempt=1, from_step=0, left_out=2, layout={"data": 2})
journal.log.write_text("attempt 1 starts at step 0\\n")
for step in range(1, 5):
    journal.event("step", step=step, loss=3.0 - step, lr=0.001, grad_norm=1.0, tokens=10,
                  tokens_per_second=100.0, seconds=0.1)
    if step == 2:
        journal.event("evaluation", step=2, loss=1.5, tokens=70)
        journal.event("saved", step=2, seconds=0.25)
os.write(journal._events, b'{"event":"step","step":5,"lo')
os.kill(os.getpid(), 9)
"""


def spec(number: int = 0, **more: Any) -> JobSpec:
    given = {
        "dataset": f"ds-{number}",
        "parent": "checkpoints/first",
        "parent_sha256": "0" * 64,
        "hyperparameters": Hyperparameters(learning_rate=1e-3, steps=4),
    }
    return JobSpec.model_validate(given | more)


@dataclass
class Root:
    """A shared root with jobs, and the command line that looks at it, in this process."""

    home: Home

    def jobs(self, *words: object) -> "subprocess.CompletedProcess[str]":
        return cli("jobs", *words, "--home", self.home.root, cwd=self.home.root.parent)

    def refused(self, *words: object) -> str:
        done = self.jobs(*words)
        assert (done.returncode, done.stdout) == (2, ""), done
        return " ".join(done.stderr.split())

    def started(self, what: JobSpec) -> JobJournal:
        journal = JobJournal(self.home, what.id)
        journal.write_spec(what)
        journal.claim_attempt()
        return journal

    @contextmanager
    def following(self, *words: object) -> "Iterator[subprocess.Popen[str]]":
        argv = [sys.executable, "-m", "cray_agents", "jobs", "logs", "-f", *map(str, words)]
        argv += ["--home", str(self.home.root)]
        with subprocess.Popen(argv, text=True, stdout=-1, stderr=-1) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    bare_model(tmp_path / "home" / "checkpoints" / "first")
    return Root(Home(tmp_path / "home"))


def steps(journal: JobJournal, *numbers: int, **measures: Any) -> None:
    for step in numbers:
        values = {name: value(step) for name, value in measures.items()}
        journal.event("step", step=step, lr=1e-3, grad_norm=1.0, tokens=10, seconds=0.5,
                      tokens_per_second=20.0, **{"loss": 2.0 / step, **values})  # fmt: skip


def test_what_there_is_needs_no_platform(root: Root) -> None:
    trainer = ScriptedTrainer(root.home, failures={1: "the loss is nan: lower the learning rate"})
    done, failed = trainer.submit(spec()).id, trainer.submit(spec(1)).id
    os.utime(root.home.job(done) / "spec.json", (0, 0))  # long ago
    rows = json.loads(root.jobs("list", "--json").stdout)
    assert [(r["id"], r["state"], r["done"]) for r in rows] == [
        (done, "succeeded", "4/4"), (failed, "failed", "4/4")]  # fmt: skip
    assert rows[0]["method"] == "sft" and rows[0]["metrics"]["lr"] == 1e-3
    assert done in root.jobs("list").stdout
    assert "the loss is nan" in root.jobs("show", failed).stdout
    page = json.loads(root.jobs("show", done.removeprefix("job-")[:9], "--json").stdout)
    assert page["status"]["state"] == "succeeded" and page["progress"]["seconds_left"] is None
    assert page["checkpoint"] == str(root.home.checkpoint(done))
    assert [attempt["number"] for attempt in page["attempts"]] == [1]


def test_the_page_of_a_running_job(root: Root) -> None:
    asked = spec(
        method="grpo", layout=Layout(data=2, tensor=2), evaluate_every=10,
        hyperparameters=Hyperparameters(learning_rate=1e-3, steps=40, policy=Policy(kl=0.5)),
    )  # fmt: skip
    journal = root.started(asked)
    why = ["a rank holds the whole model", "data=2: all ranks"]
    journal.event("layout", layout={"data": 2}, recompute="none", reasons=why)
    for tokens, most in ((5, 0.5), (1234, 0.0031)):
        journal.event("agreement", tokens=tokens, max_difference=most, mean_difference=1e-4,
                      limit=0.01, run_id="run_a", place=7, ours=-1.0, theirs=-1.5)  # fmt: skip
    steps(journal, *range(1, 31), ratio=lambda step: 1 + step / 1000)
    journal.event("evaluation", step=30, loss=0.625, tokens=99)
    point = journal.folder / "megatron" / "step-00000030"
    point.mkdir(parents=True)
    (point / "part").write_bytes(bytes(2**20))
    (journal.folder / "megatron" / ".step-00000031.1").mkdir()  # being written: none yet
    page = json.loads(root.jobs("show", asked.id, "--json").stdout)
    assert page["layout_reasons"] == why
    assert page["progress"]["seconds_left"] == 5.0 and page["agreement"]["tokens"] == 1234
    assert [p["step"] for p in page["resume_points"]] == [30]
    said = root.jobs("show", asked.id).stdout
    assert "running after step 30 of 40, about 0:05 left" in said
    assert "(limit 0.01; the most at token 7 of run_a)" in said


def test_logs_tell_events_and_the_log(root: Root) -> None:
    journal = root.started(spec(layout=Layout(data=2)))
    journal.event("layout", layout={"data": 2}, recompute="full", reasons=["so", "there"])
    journal.event("started", attempt=1, from_step=0, left_out=3, layout={"data": 2, "tensor": 1})
    steps(journal, 1, kl=lambda step: math.inf, clip_fraction=lambda step: 0.25)
    journal.event("evaluation", step=1, loss=0.5, tokens=1000)
    journal.event("started", attempt=2, from_step=1, layers="of torch")
    journal.event("corrupt", message="resume point 7: a file is missing")
    journal.event("relocated", place="elsewhere")  # of newer code
    journal.event("moved", checkpoint="job-1", changed_share=0.01, update_ratio=0.25)
    journal.event("warning", message="the parent is of another step")
    journal.event("failed", message="the gradient norm is nan")
    journal.log.write_text("\x1b[31mone\ntwo\n")
    rank = journal.folder / "logs" / "rank-1.txt"
    rank.parent.mkdir()
    rank.write_text("".join(f"line {n}\n" for n in range(200)))
    said = root.jobs("logs", journal.job_id).stdout.splitlines()
    assert len(said) == 12 and said[5].endswith("is missing: set aside, the one before it is used")
    assert said[10:] == ["│ ␛[31mone", "│ two"]  # what is logged does not drive the terminal
    lines = root.jobs("logs", journal.job_id, "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == journal.events()
    assert root.jobs("logs", journal.job_id, "--tail", 1).stdout.splitlines() == [said[9], said[11]]
    told = root.jobs("logs", journal.job_id, "--rank", 1, "--tail", 2).stdout
    assert told == "line 198\nline 199\n"
    assert "its ranks are 0 to 1" in root.refused("logs", journal.job_id, "--rank", 2)


@pytest.mark.slow
def test_following_goes_through_a_kill_and_a_restart(root: Root) -> None:
    journal = JobJournal(root.home, spec().id)
    journal.write_spec(spec())
    with root.following(journal.job_id) as process:
        assert process.stdout is not None

        def line() -> str:
            return str(process.stdout.readline()).rstrip("\n").split("  ", 1)[-1]

        argv = [sys.executable, "-c", DIES, str(root.home.root), journal.job_id]
        died = subprocess.run(argv, capture_output=True, text=True)
        assert died.returncode == -9, died.stderr
        first = [line() for _ in range(8)]
        first.remove("│ attempt 1 starts at step 0")  # where the log was looked at
        assert first[0].startswith("attempt 1 starts after step 0 on data 2; 2 samples")
        assert [words.split("  ")[0] for words in first[1:]] == [
            "step 1/4", "step 2/4", "evaluation after step 2: loss 1.5000 over 70 tokens",
            "resume point after step 2 saved in 0.25 s", "step 3/4", "step 4/4",
        ]  # fmt: skip
        journal.claim_attempt()
        journal.rewind(2)
        journal.event("started", attempt=2, from_step=2, left_out=0)
        assert line() == "attempt 2 starts after step 2"  # and nothing of before it again
        steps(journal, 3)
        assert line().startswith("step 3/4  loss 0.6667")
        with journal.log.open("a") as log:
            log.write("half a li")
            log.flush()
            steps(journal, 4)
            assert line().startswith("step 4/4  loss 0.5000")
            log.write("ne\n")
        journal.event("succeeded", checkpoint="job-x")
        journal.write_status(JobStatus(id=journal.job_id, state="succeeded", step=4, steps=4))
        rest = process.communicate()
    assert sorted(words.split("  ")[-1] for words in rest[0].splitlines()) == [
        "succeeded: checkpoint job-x", "│ half a line"]  # fmt: skip
    assert process.returncode == 0 and "succeeded" in rest[1]
    assert [e["step"] for e in journal.events() if e["event"] == "step"] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_following_says_by_its_exit_that_a_job_did_not_succeed(root: Root, how: str) -> None:
    journal = root.started(spec())
    log = journal.folder / "logs" / "rank-0.txt"
    log.parent.mkdir()
    log.write_text("of the first attempt, which said a lot\n")
    with root.following(journal.job_id, "--rank", 0) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("of the first")
        log.write_text("again\n")  # a restart empties it
        assert process.stdout.readline() == "again\n"
        if how == "cancelled":
            journal.cancel()
        else:
            status = JobStatus(id=journal.job_id, state="failed", steps=4, error="rank 0 died")
            journal.write_status(status)
        _, told = process.communicate()
    assert process.returncode == 1
    assert ("rank 0 died" if how == "failed" else "cancelled") in " ".join(told.split())


def test_jobs_are_named_briefly_but_not_too_briefly(root: Root) -> None:
    first, second = spec(1), spec(2)
    root.started(first)
    root.started(second)
    there = root.refused("show", "job-none")
    assert first.id in there and second.id in there
    for words in ("show", "show --hardware", "show --script", "logs -f", "cancel"):
        assert "no job 'x'" in root.refused(*words.split(), "x")
    assert "give more" in root.refused("show", "job-")
    os.utime(root.home.job(first.id) / "spec.json", (0, 0))
    for job in (first.id, second.id):
        note_handover(JobJournal(root.home, job), Handover(id="1"))
    shown = root.jobs("show", "1")
    assert f"this is the last, {second.id}" in " ".join(shown.stderr.split())
    assert second.id in shown.stdout and first.id not in shown.stdout


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_without_a_platform_it_says_what_works(root: Root, verb: str) -> None:
    journal = root.started(spec(1))
    told = root.refused(verb, journal.job_id)
    assert f"no platform runs on {root.home.root}" in told
    assert f"nothing trains {journal.job_id} now" in told and "`cray-agents up --home " in told
    root.home.slurm.mkdir(parents=True)
    with bystander() as submitting:
        (root.home.slurm / SUBMITTER).write_text(str(submitting))
        assert f"kill -INT {submitting}" in root.refused(verb, journal.job_id)
    journal.write_status(JobStatus(id=journal.job_id, state="succeeded", steps=4))
    assert "has succeeded already" in root.refused(verb, journal.job_id)


def test_pausing_resuming_and_cancelling_ask_the_platform(tmp_path: Path) -> None:
    root = Root(Home(tmp_path / "home"))
    with platform(root.home.root, ScriptedEngine([]), by_hand=True) as where:
        job = spec(parent=str(bare_model(tmp_path / "parent")))
        ScriptedTrainer(root.home, by_hand=True).submit(job)
        with claimed(root.home, where.url):
            said = [root.jobs(act, job.id).stdout for act in ("pause", "resume", "cancel")]
            ended = root.refused("pause", job.id)
        why = cli("why", job.id, "--home", root.home.root, cwd=tmp_path).stdout
    assert said == [
        f"{job.id} is {state} at step 0 of 4\n" for state in ("paused", "queued", "cancelled")
    ]
    assert "has ended (cancelled)" in ended and "cancelled it at 20" in why
