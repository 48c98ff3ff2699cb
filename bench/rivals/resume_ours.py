"""A training job of ours, killed again and again, and started again by the same command.

    python -m bench.rivals.resume_ours MODEL FOLDER

The machinery is that of tests/trainers/test_job_kills.py: each attempt is forked from this process,
and the launcher or its rank is killed.
"""

import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.rivals.resume_kills import (
    BATCH,
    KILLS,
    LEARNING_RATE,
    SAVE_EVERY,
    STEPS,
    Moment,
    Notes,
    Outcome,
    token_rows,
)
from cray_agents.paths import Home
from cray_agents.trainers.training import train_step
from cray_agents.training_jobs import Hyperparameters
from tests.trainers.conftest import Lab, RunningJob
from tests.trainers.test_job_kills import Attempt, Kill

HYPER = {"steps": STEPS, "batch_size": BATCH, "learning_rate": LEARNING_RATE}


def note_samples(notes: Notes) -> None:
    """Let jobs that are forked from now on note the samples of each step."""
    step_units = PLANNED

    def noting(
        hyper: Hyperparameters, step: int, weights: npt.NDArray[np.float64], groups: Any = None
    ) -> list[int]:
        numbers = step_units(hyper, step, weights, groups)
        notes.add(step, numbers)
        return numbers

    train_step.step_units = noting  # type: ignore[attr-defined]


PLANNED = train_step.step_units  # type: ignore[attr-defined]


def laboratory(model: Path, folder: Path) -> Lab:
    """A home of its own with the samples."""
    folder.mkdir(parents=True)
    lab = Lab(Home(folder / "home"), lambda _: model)
    rows = token_rows()
    lab.dataset(ids=rows, masks=[[0, *[1] * (len(row) - 1)] for row in rows])
    note_samples(Notes(folder / "notes"))
    return lab


def main(model: Path, folder: Path) -> None:
    """An undisturbed job, a killed one, and what differs."""
    lab = laboratory(model, folder / "calm")
    spec = lab.spec(model, hyper=HYPER, save_every=SAVE_EVERY)
    calm = lab.run(spec)
    lab, outcome, chance = laboratory(model, folder / "killed"), Outcome(), random.Random(1)
    notes = Notes(folder / "killed" / "notes")
    while True:
        attempt = Attempt(lab, spec, None)
        kill = _kill(chance, notes.step) if outcome.kills < KILLS else None
        killed = kill is not None and attempt.bear(kill)
        code = attempt.end()
        if killed:
            outcome.kills += 1
            outcome.in_saves += bool(attempt.drafts)
        elif code == 0:
            break
        else:
            outcome.refused.append(f"exit code {code}: {attempt.job.log.strip()[-200:]}")
            if len(outcome.refused) > 3:
                raise RuntimeError(f"the job fails:\n{attempt.job.log}")
    ends = _weights(attempt.job), _weights(calm)
    outcome.compare(*ends, notes, Notes(folder / "calm" / "notes"))
    outcome.print()


def _kill(chance: random.Random, done: int) -> Kill:
    moment = Moment.draw(chance, done)
    name, rank = "write" if moment.saving else "step", chance.choice((None, 0))
    return Kill(name, (signal.SIGKILL,), rank, moment.step - 1, moment.delay, 0.0)


def _weights(job: RunningJob) -> Path:
    return job.journal.home.checkpoint(job.journal.job_id) / "model.safetensors"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
