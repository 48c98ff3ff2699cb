"""Ledger: who held a node, what came of it, and what is still known after a kill."""

import asyncio
import json
import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from cray_agents.cli import app
from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.paths import Home
from cray_agents.runtime import fsck
from cray_agents.runtime.accounting.holdings import HOUR, GroupedBy, goodput, read_holdings
from cray_agents.runtime.accounting.ledger import (
    HeldDevices,
    LedgerFile,
    LedgerLine,
    holding,
    keep_ledger,
    read_ledger,
)
from cray_agents.trainers.job.launch import holding_node
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
    assert hours(rows(home, since=T + 2 * HOUR)["total"]) == (6.0, 1.333333, 4.666667, 0.0, 0.0)
    assert hours(rows(home, until=T + 2 * HOUR)["total"]) == (4.0, 0.666667, 1.333333, 0.0, 2.0)
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
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", "6")
        with holding_node(home, "job", "job-1", 2, "checkpoints/x", 4):
            pass
    (lines,) = read_ledger(home.ledger)
    assert [(each.event, each.node, each.attempt, each.cores) for each in lines] == [
        ("hold", "n7", 2, 6), ("leave", "n7", 2, 6)]  # fmt: skip


def test_what_came_of_the_hours_adds_up_to_them(tmp_path: Path) -> None:
    """Ledgers by chance, which also claim more than was held: busy seconds, steps."""
    for seed in range(60):
        home, chance = Home(tmp_path / str(seed)), random.Random(seed)
        facts = []
        for number in range(chance.randint(1, 3)):
            holder = f"{chance.choice(['replica', 'job', 'session'])}-{number}"
            place = {
                "node": chance.choice("ab"),
                "gpus": tuple("01"[: chance.randint(0, 2)]),
                "attempt": chance.randint(0, 1),
            }
            for _ in range(chance.randint(1, 12)):
                event = chance.choice(["hold", "hold", "leave", "busy", "steps", "served"])
                facts.append(
                    line(
                        chance.random() * 8,
                        event,
                        holder,
                        state=chance.choice(["serving", "starting", "asleep"]),
                        seconds=chance.random() * 4 * HOUR,
                        first=0,
                        last=chance.randint(1, 5),
                        **place,
                    )
                )
        write(home, *sorted(facts, key=lambda fact: fact.time))
        parts = ("useful_hours", "idle_hours", "asleep_hours", "lost_hours", "other_hours")
        begin = T + chance.random() * 8 * HOUR
        for by in get_args(GroupedBy):
            spans = ((0.0, T + 99 * HOUR), (0.0, begin), (begin, T + 99 * HOUR))
            whole, before, after = (goodput(home, *span, by) for span in spans)
            for row in (*whole, *before, *after):
                assert sum(row[part] for part in parts) == pytest.approx(row["held_hours"])
                assert all(row[part] >= 0 for part in parts)
            held = [table[-1]["held_hours"] for table in (whole, before, after)]
            assert held[0] == pytest.approx(held[1] + held[2])
        pieces = read_holdings(home).pieces
        assert whole[-1]["held_hours"] == pytest.approx(_held(home))
        assert all(0 < piece.seconds <= piece.end - piece.begin + 1e-6 for piece in pieces)


def _held(home: Home) -> float:
    """The hours held by a plain reading: each hold lasts to its holder's next line of its place."""
    (lines,) = read_ledger(home.ledger)
    total = 0.0
    for at, each in enumerate(lines):
        if each.event != "hold":
            continue
        ends = [
            later.time
            for later in lines[at + 1 :]
            if later.event in ("hold", "leave")
            and (later.holder, later.node) == (each.holder, each.node)
        ]
        end = ends[0] if ends else lines[-1].time
        total += (end - each.time) / HOUR * max(1, len(each.gpus))
    return total


def test_energy_counts_where_it_was_measured(tmp_path: Path) -> None:
    home, place = Home(tmp_path), {"node": "a", "gpus": ("0",), "state": "serving"}
    write(
        home,
        line(0, "hold", "replica-0", **place),
        line(1, "busy", "replica-0", seconds=HOUR / 4, joules=100.0, **place),
        line(2, "hold", "replica-0", **(place | {"state": "starting"})),
        line(3, "busy", "replica-0", seconds=HOUR, joules=60.0, **place),
        line(5, "leave", "replica-0", **place),
    )
    pieces = read_holdings(home).pieces
    joules: dict[str, float] = defaultdict(float)
    for piece in pieces:
        joules[piece.use] += piece.joules
    assert joules == pytest.approx({"serving": 25.0 + 30.0, "idle": 75.0, "other": 30.0})
    assert sum(piece.measured for piece in pieces) == pytest.approx(3 * HOUR)


async def test_a_platforms_replicas_are_written_as_they_change(tmp_path: Path) -> None:
    home, host = Home(tmp_path), Mortal(ScriptedEngine(says_version))
    sampled = [0]
    async with serving(tmp_path, host) as pool:
        file = LedgerFile(home.ledger, "platform")
        keeping = asyncio.create_task(
            keep_ledger(
                file,
                pool.status,
                lambda: sampled[0],
                [HeldDevices(("3",), "nvidia_x", 2)],
                every=0.01,
                beat=0.05,
            )
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
    arguments = ["usage", "goodput", "--home", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert [row["name"] for row in json.loads(result.stdout)] == ["job", "total"]
    result = CliRunner().invoke(app, [*arguments, "--since", "7d", "--by", "node"])
    assert [row["held_hours"] for row in json.loads(result.stdout)] == [0.0]
    for wrong in (["--since", "7 days"], ["--by", "colour"]):
        assert CliRunner().invoke(app, [*arguments, *wrong]).exception is not None
