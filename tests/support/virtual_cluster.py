"""A platform's pool, trainer and controller on a private Slurm cluster of several virtual nodes.

Slurm, pool, admission, trainer and controller are real. Engines and jobs are scripted processes. A
node has one core, which a replica takes, and so does a rank of a job.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from cray_agents.paths import Home
from cray_agents.runtime.gateway.model_calls.admission import Admission, GatewayShares
from cray_agents.runtime.pool.job_lease import JOB_PREFIX
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.scaling.decision import ScalingRules
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.server.cluster_view import ClusterView
from cray_agents.server.replica_count import PlatformLoad, ReplicaController
from cray_agents.trainers.job.job_state import restart_unfinished_jobs
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout
from tests.support.scripted_job import ScriptedJobs
from tests.support.scripted_pool import checkpoint, probe
from tests.support.slurm_pool import Site, ask
from tests.support.waiting import until as until


class VirtualCluster:
    """Replicas and training on a cluster; `controller` decides when its `step` is called."""

    def __init__(self, cluster: PrivateCluster, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder)
        self.site = Site(cluster, folder)
        self.trainer = ScriptedJobs(self.home, self.site.scheduler, Resources(nodes=8, ranks=8))
        self.pool: Pool
        self.admission: Admission
        self.slots = 1
        self.jobs: dict[str, str] = {}  # name -> id
        self._parent = folder / "parent"
        self._requests: list[asyncio.Task[Any]] = []

    def submit(self, name: str, nodes: int = 1, steps: int = 10**6, nice: int = 0) -> str:
        """Submit a job. Its name is that of its dataset."""
        if not self._parent.exists():
            make_seed_model(self._parent, seed=0, corpus=["What is 1 + 1?"])
        spec = JobSpec(
            dataset=name, parent=str(self._parent), parent_sha256="0" * 64,
            hyperparameters=Hyperparameters(steps=steps), layout=Layout(data=nodes),
            slurm_options=[f"--nice={nice}"] if nice else [],
        )  # fmt: skip
        self.jobs[name] = self.trainer.submit(spec).id
        return self.jobs[name]

    def journal(self, name: str) -> JobJournal:
        return JobJournal(self.home, self.jobs[name])

    @property
    def training(self) -> set[str]:
        """The jobs whose steps go on."""
        live = self.site.scheduler.live()
        return {
            name for name, job_id in self.jobs.items()
            if job_id in live and live[job_id].state == "running"
            and self.site.scheduler.preemption(job_id, live[job_id].id) is None
        }  # fmt: skip

    async def open(self, replicas: int, slots: int, started: int = 0, slow: float = 1e6) -> None:
        """Start the pool, so that `started` replicas serve. `slow`: seconds of an answer."""
        self.slots = slots
        hosts = self.site.hosts(replicas, environment={"CRAY_TEST_SLOW": str(slow)})
        self.pool = self.site.pool(hosts, wait_timeout=600.0)
        await self.pool.start(checkpoint(self.folder, 1), "m@1", probe(1), max(1, started))
        self.admission = Admission(
            lambda: slots * self.pool.serving, 10**6, serves=self.pool.serves, outage=600.0
        )
        if not started:
            self.pool.give_back()
            await until(lambda: not self._places_of_replicas)

    def controller(self, rules: ScalingRules, clock: Callable[[], float] | None = None,
                   **options: Any) -> ReplicaController:  # fmt: skip
        replica = self.site.hosts(1)[0]._command
        view = ClusterView(self.home, self.site.scheduler, self.trainer.resources, replica)
        clocks = {} if clock is None else {"clock": clock}
        load = PlatformLoad(self.pool, self.admission, GatewayShares(), rules, **clocks)
        return ReplicaController(self.pool, load, rules, view, **options)

    async def ask(self) -> float:
        """Ask for an answer that takes its time; return the seconds until it began."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with self.admission.enter(model="m@1"):
            waited = loop.time() - begun
            await ask(self.pool, lambda: "m@1", "slow answer")
        return waited

    async def hold(self, count: int) -> None:
        """Let so many requests be under way, each of which lasts until fewer are wanted."""
        while len(self._requests) < count:
            self._requests.append(asyncio.create_task(self.ask()))
        gone, self._requests = self._requests[count:], self._requests[:count]
        for request in gone:
            request.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        inside, waiting = self.admission.inside, self.admission.waiting
        await until(
            lambda: (
                inside() + waiting() == count
                and inside() == min(count, self.slots * self.pool.serving)
            )
        )

    @property
    def _places_of_replicas(self) -> list[str]:
        """The states of the replicas that have a node, or could have one soon."""
        return [one["state"] for one in self.pool.status() if one["state"] != "away" or one["host"]]

    async def moving(self) -> dict[str, Any]:
        """What has not come to rest; the controller decides again once nothing is left of it."""
        scheduler = self.site.scheduler

        def look() -> tuple[int, dict[str, Any], list[str], list[str]]:
            live = scheduler.live()  # first: a node whose job leaves after this look is free
            free = sum(room.free_cores for room in scheduler.room("replica"))
            leaving = [
                name for name, job in live.items()
                if job.state == "running" and scheduler.preemption(name, job.id)
            ]  # fmt: skip
            unbegun = [name for name in self.training if not self.journal(name).attempts]
            return free, live, leaving, unbegun

        free, live, leaving, unbegun = await asyncio.to_thread(look)  # asks Slurm's commands
        queued = {name for name, job in live.items() if job.state == "queued"}
        places = self._places_of_replicas
        calls = sum(name.startswith(JOB_PREFIX) for name in queued)
        found = {
            "jobs not begun": unbegun,
            "jobs that leave": leaving,
            "jobs to be started again": set(self.jobs.values()) - live.keys(),
            "replicas": set(places) - {"serving", "waiting"},
            "replicas that wait without a job": places.count("waiting") - calls,
            "jobs that wait beside free cores": free and queued,
        }
        return {what: names for what, names in found.items() if names}

    async def settled(self) -> None:
        """Wait until nothing moves."""
        deadline = time.monotonic() + 300
        while moving := await self.moving():
            if time.monotonic() > deadline:
                jobs = self.site.run("squeue", "--all", "--long")
                nodes = self.site.run("sinfo", "--long", "--Node")
                raise AssertionError(f"still moving: {moving}\n{jobs}\n{nodes}")
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self.hold(0)
        await self.site.close()
        for job_id in self.jobs.values():
            self.trainer.cancel(job_id)


@asynccontextmanager
async def virtual_cluster(folder: Path, nodes: int) -> AsyncIterator[VirtualCluster]:
    """A cluster of virtual nodes, with a platform whose jobs go on by themselves."""
    slurm = PrivateCluster(folder / "slurm", nodes=nodes, cpus=1, gpus=[])
    await asyncio.to_thread(slurm.start)
    cluster = VirtualCluster(slurm, folder)
    restarting = asyncio.create_task(
        restart_unfinished_jobs(cluster.home, cluster.trainer, every=0.2)
    )
    try:
        yield cluster
    finally:
        restarting.cancel()
        with suppress(asyncio.CancelledError):
            await restarting
        await cluster.close()
        await asyncio.to_thread(slurm.close)


def names_of(ids: Iterable[str], cluster: VirtualCluster) -> list[str]:
    """The jobs' names of their ids."""
    names = {job_id: name for name, job_id in cluster.jobs.items()}
    return [names.get(job_id, job_id) for job_id in ids]
