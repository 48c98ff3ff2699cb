"""Two clients that train by turns in one session: the seconds of a change, in memory and by files.

A change puts the weights and the optimizer of the other client in place. Each kind has a session of
its own. The first time that a client is taken up does not count.
"""

import os
import signal
import statistics
from pathlib import Path
from typing import Any

from bench.rounds import ROUNDS, row
from cray_agents.paths import Home
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout
from tests.support.trainers.command_client import Client, data_of
from tests.support.trainers.running_session import RunningSession

SHAPE = ModelShape(hidden=768, layers=6, heads=12, kv_heads=12, head_size=64, feed_forward=3072)
KINDS: dict[str, dict[str, Any]] = {
    "two adapters of rank 16": {"steps": 1, "lora": {"rank": 16}},
    "two trainings of all weights": {"steps": 1},
}
PARKED_GIB = {"parked": 4.0, "files": 0.0}


class Specs:
    """The specs of jobs by commands on one model."""

    def __init__(self, sha256: str) -> None:
        self._sha256 = sha256

    def spec(self, parent: Path, *, hyper: dict[str, Any], **fields: Any) -> JobSpec:
        """Return a job's spec."""
        hyperparameters = Hyperparameters(**hyper)
        sha256 = self._sha256
        return JobSpec(
            parent=str(parent), parent_sha256=sha256, hyperparameters=hyperparameters, **fields
        )


def seconds_of_changes(home: Path, model: Path, specs: Specs, hyper: Any, gib: float) -> float:
    """Return the median seconds in which a session takes up one of two clients."""
    session = RunningSession(Home(home), Layout(), parked_gib=gib)
    clients: list[Client] = []
    try:
        for name in "ab":
            clients.append(Client(specs, session, model, hyper=hyper, commands=name))
            clients[-1].trained(data_of(1))
        for step in range(ROUNDS):
            for client in clients:
                client.trained(data_of(step))
    except BaseException:
        os.kill(session.pid, signal.SIGTERM)
        raise
    if session.end() != 0:
        raise RuntimeError(session.log)
    events = [e for c in clients for e in c.job.events() if e["event"] == "taken_up"]
    sources = {event["source"] for event in events if event["attempt"] > 1}
    if sources != {"parked" if gib else "files"}:
        raise RuntimeError(f"the changes came from {sources}: is there too little memory?")
    return statistics.median(event["seconds"] for event in events if event["attempt"] > 1)


async def main(home: Path) -> None:
    """Print a row for adapters, and one for all weights."""
    from cray_agents.trainers.checkpointing.hf_export import weights_sha256

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = home / "model"
    make_seed_model(model, seed=0, corpus=["What is 1 + 1?"], shape=SHAPE)
    mib = (model / "model.safetensors").stat().st_size / 2**20
    specs = Specs(weights_sha256(model))
    for what, hyper in KINDS.items():
        parked, files = (
            seconds_of_changes(home / f"{what}, {name}", model, specs, hyper, gib)
            for name, gib in PARKED_GIB.items()
        )
        row(
            f"change between {what}, of {mib:,.0f} MiB",
            "parked / files",
            f"{parked:.3f} / {files:.3f} s ({files / parked:.0f} times)",
        )
