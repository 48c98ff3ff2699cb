"""Resume: a training job killed at random moments, beside TRL's `resume_from_checkpoint`.

Both fine-tune the same tiny model on the same samples, in one process on the CPU, save every few
steps and are killed with -9 as often, a third of the times while they write a save. What came of it
is compared with a job of the same side that was left alone. See resume_trl.py and resume_ours.py.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from bench.rivals.environments import ROOT, Rivals, version_of
from bench.rivals.report import Report
from bench.rivals.resume_kills import SAVE_EVERY, STEPS, Outcome
from cray_agents.trainers.models.seed_model import make_seed_model

SIDES = {"cray-agents": "resume_ours", "TRL": "resume_trl"}
CORPUS = ["What is 47 + 385? The sum of the two numbers is 432.", "a b c d e f g h i j k l m n"]


async def main(home: Path) -> None:
    """Kill both, and compare each with itself."""
    python = Path(sys.executable)
    versions = {name: version_of(python, name) for name in ("trl", "transformers", "torch")}
    report = Report("resume", "A training job killed at random moments", ["what", *SIDES])
    make_seed_model(home / "model", seed=0, corpus=CORPUS)
    outcomes, seconds = [], []
    for name in SIDES.values():
        begun = time.perf_counter()
        outcomes.append(await asyncio.to_thread(_killed, name, home))
        seconds.append(time.perf_counter() - begun)
    _fill(report, outcomes)
    report.add("minutes of the campaign", *(f"{one / 60:.1f}" for one in seconds))
    report.notes.append(
        f"SFT, {STEPS} steps, a save every {SAVE_EVERY}; each side against its own job that was "
        "left alone. A start that fails is one that a person has to help: the newest save is "
        "removed by hand then."
    )
    for outcome, name in zip(outcomes, SIDES, strict=True):
        if outcome.refused:
            report.notes.append(f"{name}'s starts failed with: {outcome.refused[0]}")
    report.publish(Rivals(versions=versions))


def _fill(report: Report, outcomes: list[Outcome]) -> None:
    def ends(outcome: Outcome) -> str:
        same = f"no: {outcome.difference:.1e} at most"
        return same if outcome.difference else "yes, to the bit"

    report.add("kills -9", *(f"{one.kills}" for one in outcomes))
    report.add("of them with half a save on the disk", *(f"{one.in_saves}" for one in outcomes))
    report.add("starts that failed", *(f"{len(one.refused)}" for one in outcomes))
    report.add("weights equal the undisturbed job's", *map(ends, outcomes))
    report.add("steps with other samples", *(f"{one.other_samples}" for one in outcomes))
    report.add("samples lost, doubled", *(f"{one.lost}, {one.doubled}" for one in outcomes))
    report.add("steps done more than once", *(f"{one.redone}" for one in outcomes))


def _killed(name: str, home: Path) -> Outcome:
    argv = [sys.executable, "-m", f"bench.rivals.{name}", home / "model", home / name]
    done = subprocess.run(list(map(str, argv)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return Outcome.read(done.stdout.strip().rpartition("\n")[2])
