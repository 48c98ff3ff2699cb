"""`cray-agents demo` on real parts, small: vLLM, Megatron-core and, where it is installed, Slurm.

The last test kills the demo and the vLLM server, in `make soak` the training job too, at random
moments, and runs the same command again each time. Here vLLM is forked; `tests/test_up.py` starts
it as users do.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.processes import alive
from cray_agents.queries import RunQuery
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.runtime.scheduler.supervisor import descendants
from cray_agents.runtime.store import Store

pytestmark = [pytest.mark.vllm, pytest.mark.megatron]

ITERATIONS = 2
TASKS = 32  # an iteration
CLOCKS = {
    "seconds", "wall", "idle_share", "trainer_seconds", "job_id", "probe_max_logprob_diff",
    "taken_up",
}  # fmt: skip
JOBS = ITERATIONS + 1  # and the warm-up's
KILLS = int(os.environ.get("CRAY_TEST_KILLS", "2"))  # at most: a run may end before
KEYS = {
    "iteration", "holdout_success", "holdout_tasks", "test_success", "test_tasks", "runs",
    "accepted_runs", "trained_tokens", "loss_first", "loss_last", "probe_max_logprob_diff",
    "seconds", "version", "job_id", "promoted",
}  # fmt: skip


def command(home: Path) -> list[str]:
    words = ["--home", str(home), "--json", "demo", "--quick"]
    return [sys.executable, "-m", "cray_agents", *words]


def start(home: Path) -> subprocess.Popen[bytes]:
    with (
        (home.parent / "demo.log").open("ab") as log,
        (home.parent / "result.json").open("wb") as result,
    ):
        return subprocess.Popen(command(home), stdout=result, stderr=log, stdin=subprocess.DEVNULL)


def finish(home: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    code = process.wait(timeout=540)
    log = (home.parent / "demo.log").read_text(errors="replace")
    assert code == 0, log[-4000:] + (home / "logs" / "platform.log").read_text()[-2000:]
    result: dict[str, Any] = json.loads((home.parent / "result.json").read_text())
    return result


def check(home: Path, result: dict[str, Any]) -> None:
    """The result has its shape, and each thing was done once."""
    assert result["engine"]["name"] == "vllm"
    assert result["trainer"]["name"] == "megatron-core"
    assert result["scheduler"]["name"] == ("local" if missing_programs() else "slurm")
    iterations = result["iterations"]
    assert [g["iteration"] for g in iterations] == list(range(ITERATIONS + 1))
    assert all(g.keys() >= KEYS for g in iterations)
    assert iterations[0]["test_tasks"] == iterations[-1]["test_tasks"] == 24
    for iteration in iterations[1:]:
        assert iteration["runs"] == TASKS
        assert iteration["loss_last"] is not None
        assert iteration["probe_max_logprob_diff"] < 1e-3
        assert iteration["job_id"]
    runs = Store(Home(home)).runs(RunQuery())
    done = Counter(run.id.split("-")[0] for run in runs if run.task and run.error is None)
    assert set(done.values()) == {1}
    trained = [run for run in runs if run.iteration is not None and run.error is None]
    assert len(trained) == ITERATIONS * TASKS
    for run in trained:
        assert run.reward is not None
        for call in run.calls:
            assert re.fullmatch(r"calc@\d+", call.model)
            assert len(call.token_ids) == len(call.logprobs) > 0
            assert call.prompt_token_ids
    assert len(list((home / "jobs").iterdir())) == JOBS
    assert len(list((home / "datasets").glob("[!.]*"))) == JOBS  # a killed build leaves its draft
    versions = list((home / "models" / "calc").glob("*.json"))
    assert len(versions) == JOBS + 1  # and the untrained one


def left_behind(home: Path, result: dict[str, Any]) -> dict[str, Any]:
    """All that a demo comes to, but for what depends on the clock: to the token, to the bit."""
    where = Home(home)
    runs = [run for run in Store(where).runs(RunQuery()) if run.task and run.error is None]
    return {
        "iterations": [
            {name: value for name, value in iteration.items() if name not in CLOCKS}
            for iteration in result["iterations"]
        ],
        "runs": {run.id: (run.reward, [call.token_ids for call in run.calls]) for run in runs},
        "trained on": {
            path.name: sorted(
                (line["run"], line["accepted"]) for line in dataset_runs(where, path.name)
            )
            for path in where.datasets.glob("[!.]*")
        },
        "weights": {
            version.id: sha256(
                (where.checkpoint(version.checkpoint) / "model.safetensors").read_bytes()
            ).hexdigest()
            for version in Registry(where).versions("calc")
        },
    }


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, forked_servers: None
) -> tuple[Path, dict[str, Any]]:
    home = tmp_path_factory.mktemp("demo") / "home"
    return home, finish(home, start(home))


def test_demo(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    home, result = undisturbed
    check(home, result)
    log = (home.parent / "demo.log").read_text()
    assert "chat cray_agents/cli/calculator_loop.py" in log
    assert "dashboard --home" in log and "export --home" in log
    if not missing_programs():
        ids = [g["job_id"] for g in result["iterations"][1:]]
        log = (home / "slurm" / "log" / "slurmctld.out").read_text()
        assert all(f"JobId={job} " in log for job in ids)


def test_a_finished_demo_is_not_done_again(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    home, result = undisturbed
    again = finish(home, start(home))
    assert again["iterations"] == result["iterations"]


def named(pid: int, words: str) -> bool:
    try:
        return words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return False


def victim(demo: int, kind: str) -> int | None:
    """The pid to kill: the demo's own, or that of a part it runs now."""
    if kind == "demo":
        return demo
    words = {
        "vllm": "cray_agents.runtime.vllm_plugins.server",
        "job": "cray_agents.trainers.job.job",
    }[kind]
    found = [pid for pid in descendants(demo) if named(pid, words)]
    return random.choice(found) if found else None


@pytest.mark.timeout(1500)  # restarts of everything, on whatever machine
@pytest.mark.parametrize("seed", os.environ.get("CRAY_TEST_SEEDS", "7").split(","))
def test_kills_at_random_moments(
    undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path, seed: str
) -> None:
    """kill -9 of demo, vLLM and job; the same command goes on, and ends as if nothing had been."""
    draw = random.Random(int(seed))
    home = tmp_path / "home"
    kinds, killed = ["demo", "vllm", "job", "demo", "job"][:KILLS], list[str]()
    process = start(home)
    for kind in kinds:
        time.sleep(draw.uniform(5, 25))
        deadline = time.monotonic() + 180
        while (pid := victim(process.pid, kind)) is None and process.poll() is None:
            assert time.monotonic() < deadline, f"no {kind} to kill"
            time.sleep(0.05)
        if process.poll() is not None:
            break
        assert pid is not None
        family = [process.pid, *descendants(process.pid)]
        os.kill(pid, signal.SIGKILL)
        killed.append(kind)
        if kind == "demo":
            process.wait()
            deadline = time.monotonic() + 60
            while left := [pid for pid in family if alive(pid)]:
                assert time.monotonic() < deadline, f"outlived the demo: {left}"
                time.sleep(0.1)
            process = start(home)
    result = finish(home, process)
    print(f"\nseed {seed}: killed {', '.join(killed)}")
    check(home, result)
    assert left_behind(home, result) == left_behind(*undisturbed)
