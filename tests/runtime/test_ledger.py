"""Ledger: who held a node, what came of it, and what is still known after a kill."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cray_agents import ScriptedEngine
from cray_agents.cli import app
from cray_agents.paths import Home
from cray_agents.runtime import fsck
from cray_agents.runtime.scaling.goodput import HOUR, GroupedBy, goodput
from cray_agents.runtime.scaling.ledger import (
    LedgerFile,
    LedgerLine,
    holding,
    keep_ledger,
    read_ledger,
)
from cray_agents.trainers.job.job_ledger import holding_node
from tests.support.scripted_pool import Mortal, ask, says_version, serving

T = 1_000_000.0


def line(hours: float, event: str, holder: str, **values: Any) -> LedgerLine:
    kind = "job" if holder.startswith("job") else holder.split("-")[0]
    return LedgerLine(time=T + hours * HOUR, event=event, kind=kind, holder=holder, **values)


def write(home: Home, *lines: LedgerLine) -> Path:
    file = LedgerFile(home.ledger, "w")
    file.write(lines)
    file.close()
    return sorted(home.ledger.iterdir())[-1]


def rows(home: Home, by: GroupedBy = "kind", **span: float) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in goodput(home, by=by, **span)}


def hours(row: dict[str, Any]) -> tuple[float, ...]:
    names = ("held_hours", "useful_hours", "idle_hours", "lost_hours", "other_hours")
    return tuple(round(row[name], 6) for name in names)


def test_a_replica_is_useful_while_it_answers_and_idle_while_it_could(tmp_path: Path) -> None:
    home, two = Home(tmp_path), ("0", "1")
    place = {"node": "a", "gpus": two, "what": "m@1"}
    write(
        home,
        line(0, "hold", "replica-0", state="starting", **place),
        line(1, "hold", "replica-0", state="serving", **place),
        line(4, "busy", "replica-0", seconds=HOUR, **place),
        line(4, "served", "platform", tokens=700),
        line(5, "leave", "replica-0", **place),
    )
    row = rows(home)["replica"]
    assert hours(row) == (10.0, 2.0, 6.0, 0.0, 2.0)
    assert (row["goodput"], row["tokens_served"]) == (0.2, 700)
    assert hours(rows(home, since=T + 2 * HOUR)["total"]) == (6.0, 2.0, 4.0, 0.0, 0.0)
    assert hours(rows(home, until=T + 2 * HOUR)["total"]) == (4.0, 0.0, 2.0, 0.0, 2.0)
    assert set(rows(home, "node")) == {"a", "platform", "total"}


def test_hours_asleep_are_told_apart(tmp_path: Path) -> None:
    home, place = Home(tmp_path), {"node": "a", "gpus": ("0",), "what": "m@1"}
    write(
        home,
        line(0, "hold", "replica-0", state="serving", **place),
        line(1, "hold", "replica-0", state="asleep", **place),
        line(4, "hold", "replica-0", state="starting", **place),
        line(5, "leave", "replica-0", **place),
    )
    row = rows(home)["replica"]
    assert hours(row) == (5.0, 0.0, 1.0, 0.0, 1.0) and row["asleep_hours"] == 3.0


def test_steps_that_were_trained_again_are_lost(tmp_path: Path) -> None:
    """A job on two nodes reached step 10, was killed, and went on from step 6 to 20."""
    home = Home(tmp_path)
    for node in "ab":
        write(home, line(0, "hold", "job-1", attempt=1, node=node, state="training"))
        write(
            home,
            line(4, "hold", "job-1", attempt=2, node=node, state="training"),
            line(10, "leave", "job-1", attempt=2, node=node, state="training"),
        )
    steps = {"seconds": 2 * HOUR, "tokens": 50}
    first = line(4, "steps", "job-1", attempt=1, first=0, last=10, **steps)
    write(home, first, first)  # the same fact twice is one
    write(
        home,
        line(8, "steps", "job-1", attempt=2, first=6, last=12, seconds=HOUR, tokens=30),
        line(10, "steps", "job-1", attempt=2, first=6, last=20, seconds=4 * HOUR, tokens=70),
    )
    home.job("job-1").mkdir(parents=True)
    events = home.job("job-1") / "events.jsonl"
    events.touch()
    os.utime(events, (T + 9 * HOUR, T + 9 * HOUR))  # of the second attempt, which came later
    row = rows(home)["job"]
    assert hours(row) == (20.0, 10.4, 0.0, 1.6, 8.0)
    assert (row["steps"], row["steps_lost"], row["tokens_trained"]) == (20, 4, 120)
    assert hours(rows(home, "node")["b"]) == (10.0, 5.2, 0.0, 0.8, 4.0)
    assert rows(home, "node")["total"]["steps"] == 20


def test_a_session_has_the_nodes_and_its_jobs_the_steps(tmp_path: Path) -> None:
    home = Home(tmp_path)
    held = {"attempt": 3, "node": "a", "gpus": ("0", "1", "2", "3")}
    write(home, line(0, "hold", "session-x", **held), line(2, "leave", "session-x", **held))
    within = {"within": "session-x", "within_attempt": 3, "seconds": HOUR / 2}
    for name in ("job-1", "job-2"):
        write(home, line(1, "steps", name, attempt=1, first=0, last=5, **within))
    row = rows(home)["session"]
    assert hours(row) == (8.0, 4.0, 0.0, 0.0, 4.0) and row["steps"] == 10
    assert set(rows(home, "holder")) == {"session-x", "total"}


def test_of_a_holder_that_was_killed_the_last_sign_counts(tmp_path: Path) -> None:
    home = Home(tmp_path)
    write(home, line(0, "hold", "job-1", attempt=1, node="a"))
    home.job("job-1").mkdir(parents=True)
    events = home.job("job-1") / "events.jsonl"
    events.touch()
    os.utime(events, (T + 3 * HOUR, T + 3 * HOUR))
    write(
        home,
        line(0, "hold", "replica-0", state="serving", node="b"),
        line(1.5, "served", "platform", tokens=1),
    )
    assert hours(rows(home)["job"])[0] == 3.0
    assert hours(rows(home)["replica"])[0] == 1.5


def test_damage_is_left_out_and_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = Home(tmp_path)
    path = write(home, *(line(n, "served", "platform", tokens=n) for n in range(1, 4)))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"tokens":2', b'"tokens":9') + b'{"time":1')
    assert [each.tokens for lines in read_ledger(home.ledger) for each in lines] == [1, 3]
    assert "line 2" in caplog.text
    assert any("line 2" in finding.message for finding in fsck.check(home))
    assert rows(home)["total"]["tokens_served"] == 4


def test_a_ledger_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ledger").write_text("a file, not a folder")
    with holding(tmp_path / "ledger", kind="job", holder="job-1") as ledger:
        ledger.note(event="steps", kind="job", holder="job-1")
    assert "lacks 1 lines" in caplog.text


def test_of_a_nodes_launchers_the_first_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    for number in "012":
        monkeypatch.setenv("SLURM_LOCALID", number)
        monkeypatch.setenv("SLURMD_NODENAME", "n7")
        with holding_node(home, "job", "job-1", 2, "checkpoints/x"):
            pass
    (lines,) = read_ledger(home.ledger)
    assert [(each.event, each.node, each.attempt) for each in lines] == [
        ("hold", "n7", 2), ("leave", "n7", 2)]  # fmt: skip


async def test_a_platforms_replicas_are_written_as_they_change(tmp_path: Path) -> None:
    home, host = Home(tmp_path), Mortal(ScriptedEngine(says_version))
    sampled = [0]
    async with serving(tmp_path, host) as pool:
        file = LedgerFile(home.ledger, "platform")
        keeping = asyncio.create_task(
            keep_ledger(file, pool.status, lambda: sampled[0], [["3"]], every=0.01, beat=0.05)
        )

        async def seen(state: str) -> None:
            def states() -> list[str]:
                lines = [each for lines in read_ledger(home.ledger) for each in lines]
                return [each.state for each in lines if each.event == "hold"]

            while states()[-1:] != [state]:  # noqa: ASYNC110 - another task writes
                await asyncio.sleep(0.01)

        await seen("serving")
        await ask(pool, "m@1")
        sampled[0] = 5
        host.broken = True
        host.die()
        await seen("down")
        host.broken = False
        await seen("serving")
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    (lines,) = read_ledger(home.ledger)
    assert lines[0].what == "m@1" and lines[0].gpus == ("3",) and lines[-1].event == "leave"
    row = rows(home)["replica"]
    assert row["held_hours"] > row["useful_hours"] > 0 and row["tokens_served"] == 5


def test_the_command_shows_a_row_for_each(tmp_path: Path) -> None:
    home = Home(tmp_path)
    write(home, line(0, "hold", "job-1", node="a"), line(1, "leave", "job-1", node="a"))
    arguments = ["goodput", "--home", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert [row["name"] for row in json.loads(result.stdout)] == ["job", "total"]
    result = CliRunner().invoke(app, [*arguments, "--since", "7d", "--by", "node"])
    assert [row["held_hours"] for row in json.loads(result.stdout)] == [0.0]
    for wrong in (["--since", "7 days"], ["--by", "colour"]):
        assert CliRunner().invoke(app, [*arguments, *wrong]).exception is not None
