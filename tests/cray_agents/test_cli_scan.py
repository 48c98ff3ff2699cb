"""`scan`: findings beside the rewards of stored runs, the tags they give, and what uses these."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Run, judge, scanner
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import Reward, StopReason
from cray_agents.rewards.reward import Verdict
from cray_agents.rewards.scanner import scan, scanner_name
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index.run_merge import RunFacts
from cray_agents.testing import ScriptedEngine
from tests.support.command_line import cli, refused
from tests.support.datasets.dataset_runs import call, made, reasons, run_events, several, stored
from tests.support.scripted_platform import platform

CODE = """
from cray_agents import judge, scanner

@scanner
def shouts(run):
    if run.output is None:
        raise ValueError("it says nothing")
    return run.output.isupper()

@scanner(name="by_turn")
def turns(run):
    return [n for n, _ in enumerate(run.trajectory.turns)]

def plain(run):
    return 1.0

rude = scanner(judge("Is it rude?", model="m", engine=None), name="rude")
"""
KEY = "sk-" + "a1" * 12


def said(run_id: str, text: str | None, **more: Any) -> Any:
    message = {"role": "assistant", "content": text or ""}
    calls = [call(f"{run_id}-c", [1], [5, 6], message=message)]
    return run_events(run_id, calls=calls, output=text, **more)


@pytest.fixture
async def home(tmp_path: Path) -> Home:
    (tmp_path / "scanners.py").write_text(CODE)
    two = [call("c-1", [1], [2]), call("c-2", [1, 2], [3])]
    return await stored(
        tmp_path / "home",
        several(
            said("a", f"the key is {KEY}, write to me@example.com"),
            said("b", "HELLO"),
            said("d", None),
            run_events("c", calls=two, output="fine"),
        ),
    )


def ran(home: Home, *words: object) -> dict[str, Any]:
    done = cli("scan", *words, "--home", home.root, "--json", cwd=home.root.parent)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report | {row["scanner"]: row for row in report["scanners"]}


def facts(home: Home, **query: Any) -> dict[str, RunFacts]:
    store = Store(home)
    try:
        return {row.run_id: row for row in store.facts(RunQuery(**query))}
    finally:
        asyncio.run(store.close())


def test_findings_stand_beside_rewards_and_count_in_no_sum(home: Home) -> None:
    dry = ran(home, "secrets", "--dry-run")
    assert (dry["secrets"]["scanned"], dry["secrets"]["found"]) == (4, 1)
    assert facts(home)["a"].tags == ()
    assert ran(home, "secrets")["secrets"]["found"] == 1
    rows = facts(home)
    assert {name: row.tags for name, row in rows.items()} == {
        "a": ("scan:secrets",), "b": ("clear:secrets",), "c": ("clear:secrets",),
        "d": ("clear:secrets",),
    }  # fmt: skip
    assert {(row.reward, row.rewards) for row in rows.values()} == {
        (1.0, (("correct", "function", 1.0, None),))
    }
    assert list(facts(home, tags=["scan:secrets"])) == ["a"]
    store = Store(home)
    run = store.run("a")
    asyncio.run(store.close())
    assert (run.reward, run.tags) == (1.0, ["scan:secrets"])
    (finding,) = [each for each in run.rewards if each.source == "scan:secrets"]
    assert (finding.name, finding.value) == ("secrets", 2.0)
    assert finding.comment == "1 api_key, 1 email"  # never the text itself


def test_a_run_is_scanned_once_and_failures_are_told(home: Home) -> None:
    first = ran(home, "scanners.py:shouts", "scanners.py:turns")
    assert (first["shouts"]["scanned"], first["shouts"]["found"]) == (3, 1)
    assert first["shouts"]["failed"] == 1 and "d: " in first["shouts"]["failures"][0]
    assert "it says nothing" in first["shouts"]["failures"][0]
    assert first["by_turn"]["found"] == 1  # the second turn of c
    again = ran(home, "scanners.py:shouts", "scanners.py:turns")
    assert (again["shouts"]["scanned"], again["shouts"]["failed"]) == (0, 1)
    assert again["by_turn"]["scanned"] == 0
    assert ran(home, "scanners.py:shouts", "--again")["shouts"]["scanned"] == 3
    assert facts(home)["d"].tags == ("clear:by_turn",)  # what failed is not clear


def test_a_share_of_the_runs_is_always_the_same(home: Home) -> None:
    shares = [ran(home, "secrets", "--dry-run", "--share", s)["runs"] for s in (0.001, 1)]
    assert shares == [0, 4]
    halves = [ran(home, "secrets", "--dry-run", "--share", 0.5) for _ in range(2)]
    assert halves[0] == halves[1]


def test_recipes_take_what_is_clear(home: Home) -> None:
    ran(home, "secrets")
    manifest, _ = made(home, loop="l", where={"tags": ["clear:secrets"]})
    assert set(reasons(home, manifest["id"])) == {"b", "c", "d"}


async def test_nobody_else_gives_the_tags(tmp_path: Path) -> None:
    home = await stored(tmp_path / "home", said("a", "x", tags=["clear:secrets", "night"]))
    rows = await asyncio.to_thread(facts, home)
    assert rows["a"].tags == ("night",)
    store = Store(home)
    assert store.run("a").tags == ["night"]
    await store.close()


@pytest.mark.slow
def test_a_judge_of_the_platform_scans(tmp_path: Path) -> None:
    (tmp_path / "scanners.py").write_text(CODE)
    asked: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> str:
        asked.append(request)
        rude = "you fool" in request["messages"][-1]["content"].lower().split("<<< answer")[1]
        return json.dumps({"reason": "so", "score": float(rude)})

    root = tmp_path / "home"
    asyncio.run(stored(root, several(said("a", "You fool!"), said("b", "Good day."))))
    with platform(root, ScriptedEngine(answer)) as client:
        words = ["scan", "scanners.py:rude", "--home", root, "--json"]
        done = cli(*words, cwd=tmp_path, CRAY_AGENTS_URL=client.url)
        assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["scanners"]
    assert (row["scanned"], row["found"], row["failures"]) == (2, 1, [])
    rows = facts(Home(root))
    assert (rows["a"].tags, rows["b"].tags) == (("scan:rude",), ("clear:rude",))
    assert len(rows) == 4  # the verdicts are runs too, which are not scanned themselves


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "'nothing' is no scanner of texts: give one of secrets, pii, toxicity"),
        (["scanners.py:plain"], "is no scanner: put @scanner above the function"),
        (["scanners.py:absent"], "scanners.py has no 'absent'"),
        (["nowhere:x"], "no module 'nowhere'"),
        (["secrets", "secrets"], "two scanners have the same name"),
        (["secrets", "--share", "0"], "--share 0: give a share above 0"),
    ],
)
def test_what_is_no_scan(home: Home, words: list[str], message: str) -> None:
    done = cli("scan", *words, "--home", home.root, cwd=home.root.parent)
    refused(done, message)
    assert facts(home)["a"].tags == ()


async def test_scanners_are_functions_of_a_run() -> None:
    run: Run[Any] = Run(id="r", agent="a", model="m@1", input="q", stop_reason=StopReason.completed)

    @scanner
    def commented(run: Run[Any]) -> float:
        return Verdict(3, "three of them")

    @scanner(name="odd")
    async def fails(run: Run[Any]) -> float:
        return float("nan")

    findings, failures = await scan(run, [commented, fails])
    assert [(f.name, f.source, f.value, f.comment) for f in findings] == [
        ("commented", "scan:commented", 3.0, "three of them")
    ]
    assert len(failures) == 1 and "odd" in failures[0]
    assert scanner_name(judge("x", model="m")) is None
    with pytest.raises(BadInput, match="name the scanner by a letter"):
        scanner(name="a,b")(lambda run: 0.0)
    rewarded = run.model_copy(update={"rewards": [Reward(name="x", value=1, source="scan:x")]})
    assert rewarded.reward is None
