"""A platform over several nodes under random faults: nothing is lost, doubled or served unproven.

Four replicas are Slurm jobs on four virtual nodes. Two gateways share a port, and a standby waits
for the end of whoever controls the root. Clients ask, agents call a tool, a batch is in the queue,
and versions are promoted or refused meanwhile. The engines are scripted servers.

CRAY_TEST_FAULT_MINUTES: the length, in place of four faults. Each host then sees the shared root
through caches of its own, and a training session over two nodes goes on meanwhile.
CRAY_TEST_SEED: of the faults' order. CRAY_TEST_LINES: of the first batch.
CRAY_TEST_FAULTS: the kinds of faults to choose from, by the names of the methods of Faults.
CRAY_TEST_ENGINES=vllm: the replicas are real vLLMs.
"""

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.runtime import fsck
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.runtime.store import Store
from cray_agents.trainers.job.journal import JobJournal
from tests.support.faults import root_views
from tests.support.faults.clients import Agents, Batches, Client, Training
from tests.support.faults.cluster import PATIENCE, VLLM, Cluster, cluster
from tests.support.faults.faults import Faults

MINUTES = float(os.environ.get("CRAY_TEST_FAULT_MINUTES", "0"))
SEED = int(os.environ.get("CRAY_TEST_SEED", "1"))
LINES = int(os.environ.get("CRAY_TEST_LINES", "300"))
CLIENTS = 4

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing_programs()), reason="Slurm is not installed"),
]


def test_faults(tmp_path: Path) -> None:
    chance, cached = random.Random(SEED), bool(MINUTES) and not root_views.missing()
    print(f"caches of each host: {cached} {root_views.missing()}", flush=True)
    with cluster(tmp_path, cached=cached) as site:
        training = None
        if MINUTES:
            site.add_trained_model()
            training = Training(site)
            site.until(lambda: training.ends or training.failure, "a session without faults")
        batches = Batches(site, LINES)
        clients = [Client(site, number) for number in range(CLIENTS)]
        agents = Agents(site) if not VLLM else None
        threads: list[Any] = [one for one in (*clients, agents, training) if one is not None]
        faults, end = Faults(site, chance, training), time.monotonic() + 60 * MINUTES
        while faults.some_left or time.monotonic() < end:
            faults.strike()
            check_threads(threads)
            if MINUTES:
                batches.keep_one()
        for thread in threads:
            thread.ended.set()
        for thread in threads:
            thread.join(3 * PATIENCE)
            assert not thread.is_alive()
        check_threads(threads)
        batches.finish()
        batches.check()
        answers = {text: said for client in clients for text, said in client.answers.items()}
        check_answers(answers)
        check_store(site.home, answers, batches.texts())
        runs = agents.runs if agents is not None else {}
        check_agents(site.home, runs)
        check_jobs(site)
        print(f"\n{len(answers)} questions answered, {sum(c.retries for c in clients)} sent again")
        print(f"{sum(batches.lines)} lines of {len(batches.lines)} batches answered")
        if agents is not None:
            print(f"{len(runs)} runs of agents, {agents.cut_off} cut off")
        if training is not None:
            print(f"{len(training.ends)} sessions, {training.retries} calls sent again")
            assert all(end == training.ends[0] for end in training.ends)
        print("\n".join(faults.table()), flush=True)
        check_end(site)


def check_threads(threads: list[Any]) -> None:
    """None has ended early."""
    for thread in threads:
        if thread.failure is not None:
            raise thread.failure


def check_answers(answers: dict[str, tuple[str, str, str]]) -> None:
    """Each names the version that gave it."""
    assert answers
    for text, (said, version, _) in answers.items():
        assert VLLM or said == f"{version}: {text}"


def check_store(home: Home, answers: dict[str, tuple[str, str, str]], lines: list[str]) -> None:
    """Each question and line is recorded once, with the answer that its client got.

    All were answered by promoted versions.
    """
    recorded: Counter[str] = Counter()
    history = Registry(home).history("m")
    promoted = {f"m@{event.version}" for event in history if event.kind == "promoted"}
    for run in Store(home).stream(RunQuery()):
        for call in run.calls:
            text = call.messages[-1]["content"]
            recorded[text] += 1
            assert call.model in promoted, (call.model, promoted)
            if text in answers:
                said, version, run_id = answers[text]
                assert (call.message["content"], call.model, run.id) == (said, version, run_id)
    assert {text: recorded[text] for text in answers} == dict.fromkeys(answers, 1)
    in_batches = {text: count for text, count in recorded.items() if text.startswith("batch ")}
    assert in_batches == dict.fromkeys(lines, 1)
    asked = [text for text in recorded if text.startswith("client ")]
    assert set(asked) == set(answers)


def check_agents(home: Home, runs: dict[str, Any]) -> None:
    """Each run is recorded once, as the agent has it."""
    recorded = [run for run in Store(home).stream(RunQuery()) if run.id in runs]
    assert len(recorded) == len(runs)
    for run in recorded:
        mine = runs[run.id]
        assert (run.output, len(run.calls), run.stop_reason) == (mine.output, 2, mine.stop_reason)


def check_jobs(site: Cluster) -> None:
    """Each training has succeeded."""
    for folder in site.home.jobs.glob("job-*"):
        status = JobJournal(site.home, folder.name).status()
        assert status is not None and status.state == "succeeded", (folder.name, status)


def check_end(site: Cluster) -> None:
    """`down` ends all: the platform's processes, and every job of Slurm; the root is whole."""
    assert site.down() == [0, 0]
    live = ("squeue", "-h", "-a", "-t", "pending,running,suspended,completing", "-o", "%j %T %r")
    site.until(lambda: not site.command(*live), "the end of all jobs")
    states = Counter(
        tuple(line.split()) for line in
        site.command("squeue", "-h", "-a", "-t", "all", "-o", "%j %T").splitlines()
    )  # fmt: skip
    ended = Counter((name.partition("-")[0], state) for name, state in states.elements())
    print(f"Slurm's jobs: {sorted(ended.items())}", flush=True)
    left = {"not_sealed"}  # the newest segment of a process that was killed
    assert [found for found in fsck.check(site.home) if found.kind not in left] == []
