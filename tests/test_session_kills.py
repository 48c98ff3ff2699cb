"""Kill -9 of ranks, launcher, client and gateway of a training session: all ends are as calm ones.

Every command has one result, and results, versions and weights are those of a session that nothing
happened to, to the bit. Some kills of rank or launcher are aimed at a publish: at the time between
the first and the last of its files. `CRAY_TEST_KILLS`, `CRAY_TEST_SEED` and `CRAY_TEST_RANKS` make
other campaigns of it.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.trainers.session.command_journal import CommandJournal
from cray_agents.trainers.session.session_journal import sessions
from tests.support.killable_session import ONE_STEP, STEPS

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).parents[1]
KILLS = int(os.environ.get("CRAY_TEST_KILLS", "2"))
SEED = int(os.environ.get("CRAY_TEST_SEED", "1"))
PER_SESSION = 12  # kills, so that a long campaign sees many beginnings and ends
TARGETS = ("rank", "launcher", "publish", "client", "gateway")


@dataclass
class Site:
    """A platform and a client of it, as processes."""

    root: Path
    port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make_seed_model(self.root / "model", seed=0, corpus=["What is 1 + 1?"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def home(self) -> Home:
        return Home(self.root / "home")

    def start(self, name: str) -> None:
        words = {
            "gateway": ["gateway", str(self.home.root), str(self.port)],
            "client": ["client", f"http://127.0.0.1:{self.port}", str(self.root / "versions")],
        }[name]
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.support.killable_session", *words],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "TEST_PARENT": str(os.getpid())},
            )

    def kill(self, target: str, chance: random.Random) -> str:
        """Kill one of the processes; return what was hit, "" if nothing was there."""
        if target in self.processes:
            self.processes[target].kill()
            self.processes[target].wait()
            self.start(target)
            return target
        drafts: set[str] = set()
        if target == "publish":
            drafts, target = self.wait_for_draft(), chance.choice(("rank", "launcher"))
            time.sleep(chance.uniform(0, 0.004))
        pids = self.session_pids()
        if len(pids) < 2:
            return ""
        try:
            os.kill(pids[0] if target == "launcher" else pids[-1], signal.SIGKILL)
        except ProcessLookupError:
            return ""
        return f"{target} in a publish" if drafts & self.drafts() else target

    def drafts(self) -> set[str]:
        """Return the folders of checkpoints that are being written, or were left half-written."""
        return {path.name for path in self.home.checkpoint("x").parent.glob(".job-*")}

    def wait_for_draft(self) -> set[str]:
        """Wait until another checkpoint is being written, or the client has ended; return it."""
        before = self.drafts()
        while not (begun := self.drafts() - before) and not self.ended():
            time.sleep(0.0005)
        return begun

    def session_pids(self) -> list[int]:
        """Return the pids of the session's launcher and of its ranks, as far as they run."""
        for session in sessions(self.home):
            claim = session.folder / "attempts" / str(session.attempts)
            try:
                pid = checksums.read_json(claim)["pid"]
                ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            except OSError:
                continue
            return [pid, *map(int, ranks)]
        return []

    def wait_for(self, commands: int) -> None:
        """Wait until that many commands have results, or the client has ended."""
        while self.done() < commands and not self.ended():
            time.sleep(0.005)

    def done(self) -> int:
        jobs = list(self.home.jobs.glob("job-*"))
        return CommandJournal(jobs[0]).done if jobs else 0

    def ended(self) -> bool:
        code = self.processes["client"].poll()
        log = (self.root / "client.log").read_text()
        assert code in (None, 0), f"the client ended with {code}: {log[-3000:]}"
        assert self.processes["gateway"].poll() is None, (self.root / "gateway.log").read_text()
        return code == 0

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def state(self) -> dict[str, Any]:
        """Return all that the session leaves behind, but for what depends on the clock."""
        [job] = [path.name for path in self.home.jobs.iterdir()]
        journal = CommandJournal(self.home.job(job))
        results = [journal.result(number) for number in range(1, STEPS * len(ONE_STEP) + 2)]
        versions = Registry(self.home).versions("m")
        manifests = [read_manifest(self.home.checkpoint(v.checkpoint)) for v in versions]
        return {
            "job": job,
            "state": read_status(self.home, job).state,
            "results": [r and r.model_dump(exclude={"seconds"}) for r in results],
            "client": json.loads((self.root / "versions").read_text()),
            "versions": [(version.id, version.checkpoint) for version in versions],
            "files": [manifest.files for manifest in manifests],
            "commands": [manifest.metrics.get("commands_sha256") for manifest in manifests],
            "drafts": self.drafts(),
        }


def run(root: Path, chance: random.Random | None, kills: Counter[str], enough: int) -> Any:
    """Train on a site of its own, with kills at moments drawn from `chance`."""
    root.mkdir()
    site = Site(root)
    try:
        site.start("gateway")
        site.start("client")
        last = STEPS * len(ONE_STEP)
        if chance is not None:
            count = min(enough - kills.total(), PER_SESSION)
            for moment in sorted(chance.randint(0, last) for _ in range(count)):
                site.wait_for(moment)
                time.sleep(chance.uniform(0, 0.05))
                target = chance.choice(TARGETS)
                if not site.ended() and (hit := site.kill(target, chance)):
                    kills[hit] += 1
        site.wait_for(last + 2)
        return site.state()
    finally:
        site.stop()


@pytest.mark.timeout(3600)
def test_killed_sessions_end_as_a_calm_one(tmp_path: Path) -> None:
    kills: Counter[str] = Counter()
    expected = run(tmp_path / "calm", None, kills, 0)
    assert expected["state"] == "succeeded" and None not in expected["results"]
    assert len(expected["versions"]) == 1 + STEPS // 2 + 1 and not expected["drafts"]
    number = 0
    while kills.total() < KILLS:
        number += 1
        found = run(tmp_path / str(number), random.Random(f"{SEED} {number}"), kills, KILLS)
        assert found == expected, f"seed {SEED}, session {number}"
    print(f"\nseed {SEED}: {kills.total()} kills {dict(kills)} of {number} sessions")
