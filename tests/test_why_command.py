"""`cray-agents why`: a loop's rejection, jobs that ended, a replica's state, unknown names."""

import re
from pathlib import Path
from typing import Any

import pytest

from cray_agents.cli.why import explain
from cray_agents.errors import NotFound
from cray_agents.iteration import Iteration
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.telemetry.audit_log import AuditLog
from cray_agents.testing import ScriptedEngine
from tests.support.command_line import claimed, cli
from tests.support.scripted_platform import bare_model, platform
from tests.support.scripted_trainer import ScriptedTrainer
from tests.test_jobs_command import spec


def note(home: Home, loop: str, **values: Any) -> None:
    record = Iteration.model_validate({"holdout_success": 0.5, "holdout_tasks": 20, **values})
    folder = home.loop(loop) / "generations"
    folder.mkdir(parents=True, exist_ok=True)
    text = checksums.with_crc(record.model_dump_json().encode())
    (folder / f"{record.iteration}.json").write_bytes(text)


def test_a_rejection_is_told_with_its_evidence(tmp_path: Path) -> None:
    home = Home(tmp_path)
    note(home, "sums", iteration=0, version="calc@1")
    note(home, "sums", iteration=2, version="calc@2")
    figures = {"promoted": False, "evidence": 1.25, "wins": 4, "losses": 5, "ties": 11}
    stopped = "3 iterations in a row brought nothing"
    note(home, "sums", iteration=10, version="calc@3", stopped=stopped, **figures)
    told = explain(home, "sums")
    assert (told["what"], told["state"]) == ("loop", "stopped")
    text = " ".join(told["why"])
    assert "Iteration 10 of sums, calc@3, was not promoted." in text
    assert "better in 4, worse in 5 and equal in 11 pairs" in text and "is 1.25" in text
    assert "3 iterations in a row brought nothing" in text
    assert "Next: " in cli("why", "sums", "--home", tmp_path, cwd=tmp_path).stdout
    note(home, "sums", iteration=11, version="calc@4", stopped="its target is reached")
    assert explain(home, "sums")["next"] == "nothing, or change the setting that ended it to go on"
    with pytest.raises(NotFound, match=r"no job 'other'.*loops: sums; replicas: replica-0"):
        explain(home, "other")


def test_a_job_that_succeeded_and_one_that_was_cancelled(tmp_path: Path) -> None:
    home, parent = Home(tmp_path), str(bare_model(tmp_path / "parent"))
    done = ScriptedTrainer(home).submit(spec(parent=parent)).id
    told = explain(home, done)
    assert told["why"] == [f"{done} is succeeded after step 4 of 4."]
    assert told["next"].startswith(f"nothing: it is done; `cray-agents jobs show {done}")
    trainer, audit = ScriptedTrainer(home, by_hand=True), AuditLog(home.audit)
    gone = trainer.submit(spec(1, parent=parent)).id
    for who, status in (("eve", 409), ("ann", 200), ("bob", 200)):
        audit.note(who=who, action="POST", path=f"/v1/jobs/{gone}/cancel", status=status)
    audit.close()
    trainer.cancel(gone)
    assert re.search(r"ann cancelled it at 20\S+ \S+, for good", explain(home, gone)["why"][1])


def test_a_replica_is_explained_by_the_platform(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert explain(home, "replica-0")["state"] == "none"
    with platform(home.root, ScriptedEngine([])) as where, claimed(home, where.url):
        told = explain(home, "replica-0")
        with pytest.raises(NotFound, match="there are 1 replicas"):
            explain(home, "replica-1")
    assert told["state"] == "serving" and "replica-0 is serving with m@1" in told["why"][0]
