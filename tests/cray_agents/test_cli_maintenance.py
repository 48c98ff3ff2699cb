"""`maintain fsck`, `compact` and `prune`, as people call them."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.store import Store
from tests.support.command_line import cli as command
from tests.support.command_line import refused
from tests.support.store.plain_reader import events_of as stored
from tests.support.store.writer_process import events_of


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Ten runs in ten sealed segments."""
    home = Home(tmp_path / "root")

    async def write() -> None:
        for number in range(10):
            store = Store(home)
            await store.append(events_of(f"run-{number}"))
            await store.close()

    asyncio.run(write())
    return home


def cli(home: Home, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return command(*words, "--home", home.root, cwd=home.root.parent, typed=typed)


def told(result: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(result.stdout)


def test_a_store_that_is_whole(home: Home) -> None:
    result = cli(home, "maintain", "fsck", "--json")
    assert result.returncode == 0 and told(result) == []


def test_damage_is_told_with_its_place_and_mended(home: Home) -> None:
    path = sorted(home.segments.glob("*.zst"))[3]
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 8]) + whole[101:])
    result = cli(home, "maintain", "fsck", "--json")
    assert result.returncode == 1
    finding = told(result)[0]
    assert (finding["path"], finding["kind"]) == (str(path), "lost")
    assert finding["repairable"] and finding["lost"] == 3
    result = cli(home, "maintain", "fsck", "--repair", "--json")
    assert result.returncode == 1, "lines were lost"
    assert told(cli(home, "maintain", "fsck", "--json")) == []
    kept = [file.read_bytes() for file in (home.segments / "damaged").iterdir()]
    assert any(len(data) == len(whole) for data in kept), "no byte is destroyed"
    assert len(told(cli(home, "runs", "list", "--json"))) == 9


def test_compaction_and_its_dry_run(home: Home) -> None:
    before = sorted(home.segments.iterdir())
    rows = told(cli(home, "maintain", "compact", "--dry-run", "--json"))
    assert sum(len(row["segments"]) for row in rows) == 10
    assert sorted(home.segments.iterdir()) == before
    (row,) = told(cli(home, "maintain", "compact", "--json"))
    assert len(row["segments"]) == 10 and row["bytes_after"] < row["bytes_before"]
    assert len(list(home.segments.glob("*.jsonl.zst"))) == 1
    assert len(told(cli(home, "runs", "list", "--json"))) == 10
    assert "0 segments" in cli(home, "maintain", "compact").stdout


@pytest.mark.slow
def test_pruning_and_its_dry_run(home: Home) -> None:
    good = {event["run_id"] for event in stored(home) if event["body"].get("value") == 1.0}
    assert 0 < len(good) < 10
    asked = ("maintain", "prune", "runs", "--where", "loop=faults reward<=0")
    about = told(cli(home, *asked, "--dry-run", "--json"))
    assert about["runs"] == 10 - len(good) and about["loops"] == {"faults": about["runs"]}
    assert "forgotten" not in about and len(told(cli(home, "runs", "list", "--json"))) == 10
    assert cli(home, *asked, typed="n\n").returncode == 1
    assert len(told(cli(home, "runs", "list", "--json"))) == 10
    about = told(cli(home, *asked, "--yes", "--json"))
    assert about["forgotten"] == 10 - len(good)
    assert {row["id"] for row in told(cli(home, "runs", "list", "--json"))} == good
    cli(home, "maintain", "compact")
    assert {e["run_id"] for e in stored(home) if e["kind"] != "forget"} == good


def test_pruning_everything_by_mistake_is_refused(home: Home) -> None:
    refused(cli(home, "maintain", "prune", "runs", "--yes"), "which runs")
