"""A training job without a model: steps of a set length, and a save when it is told to leave.

    python -m tests.support.scripted_job HOME/jobs/ID/spec.json

`CRAY_TEST_STEP`: seconds of a step, `CRAY_TEST_SAVE`: of a save. `ScriptedJobs` is the trainer
whose jobs they are; all else of it is real.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from cray_agents.paths import Home
from cray_agents.ports import Command
from cray_agents.trainers.job.job_state import describe
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import EX_TEMPFAIL, holding_node, note_steps
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.training_jobs import JobSpec

ROOT = Path(__file__).parents[2]
STEP = float(os.environ.get("CRAY_TEST_STEP", "0.5"))
SAVE = float(os.environ.get("CRAY_TEST_SAVE", "0"))


class ScriptedJobs(MegatronTrainer):
    """A trainer whose jobs run this module."""

    def _command(self, name: str, log: Path, module: str, argument: Path, spec: JobSpec) -> Command:
        command = super()._command(name, log, module, argument, spec)
        argv = [sys.executable, "-m", "tests.support.scripted_job", str(argument.resolve())]
        variables = command.environment | {"PYTHONPATH": str(ROOT)} | {
            name: os.environ[name] for name in ("CRAY_TEST_STEP", "CRAY_TEST_SAVE")
            if name in os.environ
        }  # fmt: skip
        return command.model_copy(update={"argv": argv, "environment": variables})


def main() -> int:
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    path = Path(sys.argv[1])
    journal = JobJournal(Home(path.parents[2]), path.parent.name)
    spec, attempt = journal.spec(), journal.claim_attempt()
    step = max((int(p.name.removeprefix("step-")) for p in journal.resume_points), default=0)
    world = spec.layout.world
    with holding_node(journal.home, "job", spec.id, attempt, spec.parent, world) as ledger:
        journal.rewind(step)
        journal.event("started", attempt=attempt, from_step=step, left_out=0, layers="")
        while step < spec.hyperparameters.steps and not leave.wait(STEP):
            step += 1
            journal.event("step", step=step, loss=1.0, lr=0.0, grad_norm=1.0, tokens=1,
                          seconds=STEP)  # fmt: skip
        time.sleep(SAVE)
        (journal.folder / "megatron" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        journal.event("saved", step=step, seconds=SAVE)
        note_steps(ledger, journal)
    if step < spec.hyperparameters.steps:
        return EX_TEMPFAIL
    journal.write_status(describe(journal, spec, "succeeded"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
