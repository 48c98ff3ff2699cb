"""A platform over several nodes under random faults: nothing is lost, doubled or served unproven.

Four replicas are Slurm jobs on four virtual nodes. Two gateways share a port, and a standby waits
for the end of whoever controls the root. Clients ask, agents call a tool, a batch is in the queue,
and versions are promoted meanwhile. The engines are scripted servers.

CRAY_TEST_FAULT_MINUTES: the length, in place of four faults. Each host then sees the shared root
through caches of its own, and a training session over two nodes goes on meanwhile.
CRAY_TEST_SEED: of the faults' order. CRAY_TEST_ENGINES=vllm: one replica, which is a real vLLM.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.runtime.scheduler.programs import missing_programs
from cray_agents.runtime.store import Store
from tests.support.faults import root_views
from tests.support.faults.clients import Agents, Client, Training
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


def submit(cluster: Cluster) -> str:
    """Put a batch into the queue; return its id."""
    line: Callable[[int], dict[str, Any]] = lambda n: {  # noqa: E731
        "custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": f"line {n}"}]},
    }  # fmt: skip
    content = b"\n".join(orjson.dumps(line(n)) for n in range(LINES))
    client = cluster.client()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


def test_faults(tmp_path: Path) -> None:
    chance, cached = random.Random(SEED), bool(MINUTES) and not root_views.missing()
    print(f"caches of each host: {cached} {root_views.missing()}", flush=True)
    with cluster(tmp_path, cached=cached) as site:
        training = None
        if MINUTES:
            site.add_trained_model()
            training = Training(site)
            site.until(lambda: training.ends or training.failure, "a session without faults")
        batch = submit(site)
        clients: list[Client | Agents] = [Client(site, number) for number in range(CLIENTS)]
        agents = Agents(site)
        clients += [agents] if not VLLM else []
        threads = [*clients, *([training] if training is not None else [])]
        faults, end = Faults(site, chance, training), time.monotonic() + 60 * MINUTES
        while faults.some_left or time.monotonic() < end:
            faults.strike()
            check_threads(threads)
        for thread in threads:
            thread.ended.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        check_threads(threads)

        def ended() -> bool:
            with suppress(openai.OpenAIError):
                return site.client().batches.retrieve(batch).status == "completed"
            return False

        site.until(ended, "the batch's end")
        answers = {text: said for client in clients if isinstance(client, Client)
                   for text, said in client.answers.items()}  # fmt: skip
        check_answers(answers, site.models)
        check_store(site.home, answers)
        check_agents(site.home, agents)
        check_batch(site.client(), batch)
        if training is not None:
            assert all(end == training.ends[0] for end in training.ends)
            print(f"{len(training.ends)} sessions alike, {training.retries} calls sent again")
        retries = sum(c.retries for c in clients if isinstance(c, Client))
        print(f"\n{len(answers)} questions answered, {retries} sent again")
        print(f"{len(agents.runs)} runs of agents, {agents.cut_off} cut off")
        print("\n".join(faults.table()))


def check_threads(threads: list[Any]) -> None:
    """None has ended early."""
    for thread in threads:
        if thread.failure is not None:
            raise thread.failure


def check_answers(answers: dict[str, tuple[str, str, str]], versions: int) -> None:
    """Each names the version that gave it, a known one."""
    assert answers
    for text, (said, version, _) in answers.items():
        assert VLLM or said == f"{version}: {text}"
        assert version in {f"m@{number}" for number in range(1, versions + 1)}


def check_store(home: Home, answers: dict[str, tuple[str, str, str]]) -> None:
    """Each question is recorded once, with the answer that its client got."""
    recorded: Counter[str] = Counter()
    for run in Store(home).stream(RunQuery()):
        for call in run.calls:
            text = call.messages[-1]["content"]
            recorded[text] += 1
            if text in answers:
                said, version, run_id = answers[text]
                assert (call.message["content"], call.model, run.id) == (said, version, run_id)
    assert {text: recorded[text] for text in answers} == dict.fromkeys(answers, 1)
    lines = {text: count for text, count in recorded.items() if text.startswith("line ")}
    assert lines == {f"line {n}": 1 for n in range(LINES)}
    asked = [text for text in recorded if text.startswith("client ")]
    assert set(asked) == set(answers)


def check_agents(home: Home, agents: Agents) -> None:
    """Each run is recorded once, as the agent has it."""
    store = Store(home)
    recorded = [run for run in store.stream(RunQuery()) if run.id in agents.runs]
    assert len(recorded) == len(agents.runs)
    for run in recorded:
        mine = agents.runs[run.id]
        assert (run.output, len(run.calls), run.stop_reason) == (mine.output, 2, mine.stop_reason)


def check_batch(client: openai.OpenAI, batch: str) -> None:
    """Each line has one answer."""
    output = client.batches.retrieve(batch).output_file_id
    assert output is not None
    lines = [orjson.loads(line) for line in client.files.content(output).content.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(f"c{n}" for n in range(LINES))
