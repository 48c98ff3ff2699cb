"""Seconds that a job loses with a node: on a spare node that it holds, and queued again."""

import asyncio
import shutil
import time
from pathlib import Path

from bench.rounds import row
from cray_agents.paths import Home
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.planning.cluster_resources import Resources
from tests.support.dead_node import kill_node
from tests.support.waiting import wait_until
from tests.trainers.conftest import make_model, make_spec, write_dataset

ROUNDS = 3


def lost_seconds(folder: Path, spare_nodes: int) -> float:
    """Seconds from a node's death to the end of the next step that is new.

    The job trains on two nodes of three, with nobody else in the queue.
    """
    home = Home(folder / "home")
    write_dataset(home)
    spec = make_spec(
        make_model("qwen3", folder / "parent"), layout={"data": 2}, hyper={"steps": 10**6},
        save_every=50, spare_nodes=spare_nodes,
    )  # fmt: skip
    cluster = PrivateCluster(folder / "slurm", nodes=3, cpus=1)
    cluster.start()
    with Slurm(folder / "slurm", cluster) as scheduler:
        trainer = MegatronTrainer(home, scheduler, Resources(nodes=2))
        trainer.submit(spec)
        journal = JobJournal(home, spec.id)

        def reached(step: int) -> bool:
            trainer.status(spec.id)
            return journal.step >= step

        wait_until(lambda: reached(60), journal.log_tail)
        if spare_nodes:
            wait_until(lambda: "waits as a spare" in journal.log.read_text(), journal.log_tail)
        kill_node(cluster, "127.0.0.2")
        killed, step = time.monotonic(), journal.step
        wait_until(lambda: reached(step + 2), journal.log_tail)
        seconds = time.monotonic() - killed
        trainer.cancel(spec.id)
    return seconds


async def main(home: Path) -> None:
    """A row a round, both ways after one another."""
    for number in range(ROUNDS):
        found = []
        for spares in (1, 0):
            folder = home / f"{number}-{spares}"
            found.append(await asyncio.to_thread(lost_seconds, folder, spares))
            shutil.rmtree(folder)
        figure = f"{found[0]:.1f} / {found[1]:.1f} s"
        row("a node of a training job dies", "to the next new step: spare node / queue", figure)
