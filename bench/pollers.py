"""Pollers: what 1,000 jobs and 200 replicas in Slurm cost a platform that only watches them.

The jobs are records on a root and jobs of a private Slurm, which holds all of them back. Each
replica has a lease and a supervisor that answers its long polls, in one process for all; no engine.
"""

import asyncio
import contextlib
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop
from aiohttp import web

from bench.rounds import row
from cray_agents.paths import Home
from cray_agents.ports import Command
from cray_agents.runtime.pool.job_lease import (
    ReplicaSpec,
    create_secret,
    new_attempt,
    read_spec,
)
from cray_agents.runtime.pool.replica_supervisor import ReplicaSupervisor
from cray_agents.runtime.pool.slurm_replica import JobBoard, SlurmReplica
from cray_agents.runtime.pool.vllm_process import EngineSettings
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import search_path
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.trainers.job.job_state import Handover, note_handover, restart_unfinished_jobs
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout

JOBS, REPLICAS, SECONDS, STEPS = 1000, 200, 60.0, 200
SECRET = "s3cret"


class CountedCluster(PrivateCluster):
    """A private cluster whose squeue is the real one, behind a script that counts its calls."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, nodes=1, gpus=[])
        self.calls = directory / "squeue-calls"
        self._bin = directory / "bin"
        self._bin.mkdir(parents=True)
        real = subprocess.run(
            ["which", "squeue"], env={"PATH": search_path()}, capture_output=True, text=True
        ).stdout.strip()
        script = self._bin / "squeue"
        script.write_text(f'#!/bin/sh\necho >> {self.calls}\nexec {real} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    @property
    def environment(self) -> dict[str, str]:
        """A client's environment, with the counting squeue first."""
        own = super().environment
        return own | {"PATH": f"{self._bin}:{own['PATH']}"}

    @property
    def squeues(self) -> int:
        """Calls of squeue so far."""
        return self.calls.stat().st_size if self.calls.exists() else 0


def job_record(home: Home, number: int, steps: int) -> str:
    """Write a job's folder as a platform leaves it that has handed the job over."""
    spec = JobSpec(
        dataset=f"ds-{number}", parent="p", parent_sha256="0" * 64,
        hyperparameters=Hyperparameters(learning_rate=1e-3, steps=steps), layout=Layout(),
    )  # fmt: skip
    journal = JobJournal(home, spec.id)
    journal.write_spec(spec)
    note_handover(journal, Handover(id=str(number)))
    for step in range(steps):
        values = {"loss": 0.5, "lr": 1e-4, "grad_norm": 1.0, "tokens": 4096, "seconds": 1.0}
        journal.event("step", step=step + 1, **values)
    journal.close()
    return spec.id


def hold(scheduler: Slurm, cluster: PrivateCluster, names: list[str]) -> None:
    """Submit a held job of each name."""
    for name in names:
        subprocess.run(
            ["sbatch", "--hold", "-J", scheduler.job_name(name), "--wrap", "true"],
            env=cluster.environment, capture_output=True, check=True,
        )  # fmt: skip


def replica_spec(number: int) -> ReplicaSpec:
    """A replica's order, as its gateway writes it."""
    return ReplicaSpec(
        model="m", number=number, attempt=0, settings=EngineSettings(), gateway=os.uname().nodename,
        package="1", minutes=600,
    )  # fmt: skip


@contextlib.contextmanager
def supervisors(folder: Path, count: int) -> Iterator[None]:
    """Run the supervisors of all replicas in another process."""
    argv = [sys.executable, "-m", "bench.pollers", str(folder), str(count)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()


async def supervise_all(folder: Path, count: int) -> None:
    """Answer for all supervisors until the input ends."""
    kept = []
    for number in range(count):
        attempt = folder / str(number) / "1"
        spec = read_spec(attempt)
        assert spec is not None and create_secret(attempt, SECRET)
        supervisor = ReplicaSupervisor(spec, attempt, "127.0.0.1", SECRET)
        runner = web.AppRunner(supervisor.routes(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        kept.append(asyncio.create_task(supervisor.keep_lease(runner.addresses[0][1])))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


def cpu_seconds() -> tuple[float, float]:
    """Return the time of this process, and of its ended children."""
    both = []
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        both.append(usage.ru_utime + usage.ru_stime)
    return both[0], both[1]


async def watch(
    home: Home, cluster: CountedCluster, scheduler: Slurm, replicas: int, seconds: float
) -> tuple[float, float, float]:
    """Run the pollers; return squeues a second, and the shares of a core: own, and clients'."""
    board = JobBoard(scheduler)
    command = Command(name="replica", argv=[], directory="", log="")
    hosts = [
        SlurmReplica(replica_spec(number), home.replicas / str(number), board, command)
        for number in range(replicas)
    ]
    await asyncio.gather(*(host.allocate() for host in hosts))
    trainer = MegatronTrainer(home, scheduler)
    restarting = asyncio.create_task(restart_unfinished_jobs(home, trainer))
    while len(await asyncio.to_thread(trainer.unchanged)) < JOBS:  # noqa: ASYNC110
        await asyncio.sleep(1.0)  # the first round looks at every job
    before, count, began = cpu_seconds(), cluster.squeues, time.monotonic()
    await asyncio.sleep(seconds)
    lasted, after = time.monotonic() - began, cpu_seconds()
    restarting.cancel()
    for host in hosts:  # as a kill would leave them: the jobs stay
        await host._tasks.close()
        await host._supervisor.close()
    own, clients = ((b - a) / lasted for a, b in zip(before, after, strict=True))
    return (cluster.squeues - count) / lasted, own, clients


async def main(folder: Path) -> None:
    """Row: calls of squeue in a second, and the shares of a core."""
    home = Home(folder / "home")
    with contextlib.closing(CountedCluster(folder / "slurm")) as cluster:
        cluster.start()
        os.environ |= cluster.environment
        scheduler = Slurm(home.slurm, root="bench")  # as a site's, which answers for longer
        names = [job_record(home, number, STEPS) for number in range(JOBS)]
        for number in range(REPLICAS):
            new_attempt(home.replicas / str(number), replica_spec(number))
        names += [f"replica-{number}-1" for number in range(REPLICAS)]
        await asyncio.to_thread(hold, scheduler, cluster, names)
        with supervisors(home.replicas, REPLICAS):
            watching = watch(home, cluster, scheduler, REPLICAS, SECONDS)
            rate, own, clients = await asyncio.to_thread(uvloop.run, watching)
    row(
        f"{JOBS:,} jobs and {REPLICAS} replicas watched for {SECONDS:g} s",
        "calls of squeue; a core's time of the platform, and of Slurm's clients",
        f"{rate:.2f} a second; {own:.1%}, {clients:.1%}",
    )


if __name__ == "__main__":
    asyncio.run(supervise_all(Path(sys.argv[1]), int(sys.argv[2])))
