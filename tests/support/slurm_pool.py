"""A pool of replicas in a private Slurm cluster of several virtual nodes."""

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cray_agents.ports import Command, EngineCall
from cray_agents.runtime.pool.job_lease import JobLease, ReplicaSpec, attempts, read_lease
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.published_replicas import FollowedPool
from cray_agents.runtime.pool.request_router import Wanted
from cray_agents.runtime.pool.slurm_replica import JobBoard, SlurmReplica
from cray_agents.runtime.pool.vllm_process import EngineSettings
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.slurm import Slurm
from tests.support.scripted_server import PROGRAM

ROOT = Path(__file__).parents[2]
SCRIPTED = EngineSettings(program=PROGRAM, dtype="float32", start_timeout=100)


class Site:
    """A shared root at a cluster, with as many replicas as wanted."""

    def __init__(
        self, cluster: PrivateCluster, folder: Path, settings: EngineSettings = SCRIPTED
    ) -> None:
        self.cluster = cluster
        self.folder = folder
        self.settings = settings
        self.tls: Path | None = None
        self.scheduler = Slurm(folder / "slurm", cluster, root=str(folder))
        self.board = JobBoard(self.scheduler, 0.5)
        self.pools: list[Pool] = []

    def hosts(
        self,
        count: int,
        *,
        nodes: int = 1,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> list[SlurmReplica]:
        command = Command(
            name="replica", argv=[], directory="", log="",
            environment={"PYTHONPATH": str(ROOT)} | (environment or {}),
            nodes=nodes, ranks=nodes, kind="replica",
        )  # fmt: skip
        spec = ReplicaSpec(
            model="m", number=0, attempt=0, settings=self.settings, gateway=os.uname().nodename,
            package="1", interface="lo", nodes=nodes, tls=self.tls,
        )  # fmt: skip
        return [
            SlurmReplica(
                spec.model_copy(update={"number": n}), self.folder / "replicas" / str(n),
                self.board, command, **options,
            )
            for n in range(count)
        ]  # fmt: skip

    def pool(self, hosts: Sequence[SlurmReplica], **options: Any) -> Pool:
        pool = Pool(hosts, **options)
        self.pools.append(pool)
        return pool

    async def close(self) -> None:
        for pool in self.pools:
            await pool.stop()

    async def abandon(self, pool: Pool) -> None:
        """Do what a `kill -9` of a gateway does: nothing is ended, nothing is said."""
        self.pools.remove(pool)
        hosts: list[Any] = [slot.engine_host for slot in pool._slots]
        await pool._tasks.close()
        for host in hosts:
            await host._tasks.close()
        for host in hosts:
            await host._engine.close()
            await host._supervisor.close()

    def lease(self, number: int = 0) -> JobLease:
        """The newest one of a replica."""
        folder = self.folder / "replicas" / str(number)
        leases = [read_lease(folder / str(n)) for n in attempts(folder)]
        return [lease for lease in leases if lease is not None][-1]

    def run(self, *argv: str, check: bool = True) -> str:
        done = subprocess.run(
            argv, env=self.cluster.environment, capture_output=True, text=True, check=check
        )
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Those that run."""
        return self.run("squeue", "-h", "-t", "running", "-o", "%A").split()


async def ask(pool: Pool | FollowedPool, version: Wanted, text: str = "hello") -> str:
    """What is said; the answer and the samples name the version that says it."""
    request = {"messages": [{"role": "user", "content": text}]}
    call = EngineCall("/v1/chat/completions", request, os.urandom(6).hex())
    (body,) = [piece async for piece in pool.answer(version, call)]
    answer = json.loads(body)
    said = str(answer["choices"][0]["message"]["content"])
    assert answer["model"] == call.version == call.samples[0].version
    return said


class Callers:
    """Clients that ask without a pause, one after the other; every answer is counted."""

    def __init__(self, pool: Pool, version: str, count: int = 3, text: str = "hello") -> None:
        self.version = version
        self.answers: list[str] = []
        self._pool = pool
        self._text = text
        self._ended = False
        self._tasks = [asyncio.create_task(self._call()) for _ in range(count)]

    async def _call(self) -> None:
        while not self._ended:
            self.answers.append(await ask(self._pool, lambda: self.version, self._text))
            await asyncio.sleep(0.2)

    async def end(self) -> list[str]:
        """Every call was answered, or its error is raised."""
        self._ended = True
        await asyncio.gather(*self._tasks)
        return self.answers
