"""Memorisation: versions that repeat their training sets, by exact tokens, or planted strings."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scans.memorisation import row_hashes, wilson_interval
from tests.support.bare_models import bare_model
from tests.support.command_line import cli
from tests.support.datasets.dataset_runs import call, made, run_events, stored

RANDOM = random.Random(7)
SECRET = [RANDOM.randrange(500) for _ in range(80)]


def spoken(run_id: str, tokens: list[int], version: int, text: str = "") -> Any:
    message = {"role": "assistant", "content": text}
    return run_events(
        run_id,
        calls=[call(f"{run_id}-c", [1], tokens, model=f"m@{version}", message=message)],
        model="m",
        loop="l" if version == 1 else "live",
    )


def noise(length: int) -> list[int]:
    return [RANDOM.randrange(500) for _ in range(length)]


@pytest.fixture
async def home(tmp_path: Path) -> Home:
    """Runs of m@1 became a training set, and m@2 was trained on it."""
    events = [
        *spoken("taught", [*noise(20), *SECRET, *noise(20)], 1),
        *spoken("other", noise(90), 1),
        *spoken("repeats", [*noise(30), *SECRET[5:70], *noise(9)], 2),
        *spoken("nearly", [*SECRET[:49], 501, *SECRET[50:]], 2),  # 49 in a row, and 30
        *spoken("own", noise(120), 2, "the word is CANARY-7f3a, is it not?"),
        *spoken("short", SECRET[:12], 2),
    ]
    home = await stored(tmp_path / "home", events)

    def register() -> None:
        manifest, _ = made(home, loop="l")
        registry = Registry(home)
        for number, dataset in ((1, None), (2, manifest["id"])):
            name, about = registry.import_checkpoint(
                bare_model(tmp_path / f"model{number}", str(number).encode())
            )
            about = about.model_copy(update={"dataset": dataset})
            path = home.checkpoint(name) / checkpoints.MANIFEST
            path.write_bytes(checksums.with_crc(about.model_dump_json().encode()))
            registry.register("m", name, about)

    await asyncio.to_thread(register)
    return home


def told(home: Home, *words: object, code: int = 0) -> Any:
    done = cli("scan", "memorisation", *words, "--home", home.root, cwd=home.root.parent)
    assert done.returncode == code, done.stdout + done.stderr
    text = " ".join((done.stdout + done.stderr).split())
    return json.loads(done.stdout) if "--json" in words else text


def test_a_version_that_repeats_its_training_set(home: Home) -> None:
    first, second = told(home, "m", "--json")
    assert (first["model"], first["runs"], first["datasets"]) == ("m@1", 2, [])
    assert (second["model"], second["runs"], second["compared"]) == ("m@2", 4, 3)
    assert (second["repeating"], second["repeating_runs"]) == (1, ["repeats"])
    assert second["rate"] == pytest.approx(1 / 3) and len(second["datasets"]) == 1
    (shorter,) = told(home, "m@2", "--json", "--length", 12)
    assert (shorter["compared"], shorter["repeating"]) == (4, 3)
    assert "m@2 repeats its training set: repeats" in told(home, "m@2")


def test_runs_that_the_set_was_made_of_do_not_count(home: Home) -> None:
    dataset = told(home, "m@2", "--json")[0]["datasets"][0]
    (first,) = told(home, "m@1", "--json", "--dataset", dataset)
    assert (first["compared"], first["repeating"]) == (2, 0)


def test_planted_strings_are_found(home: Home, tmp_path: Path) -> None:
    planted = tmp_path / "planted.txt"
    planted.write_text("CANARY-7f3a\r\n\nCANARY-0000\u2028more\n")
    first, second = told(home, "m", "--planted", planted, "--json")
    assert second["planted"] == {"CANARY-7f3a": ["own"]} and first["with_planted"] == 0
    assert second["planted_rate"] == 0.25
    assert "m@2 says 'CANARY-7f3a': own" in told(home, "m", "--planted", planted)
    planted.write_text("short")
    assert "shorter than 8 characters" in told(home, "m", "--planted", planted, code=2)
    planted.write_text("\n")
    assert "0 strings" in told(home, "m", "--planted", planted, code=2)
    assert "m@9" in told(home, "m@9", code=2)
    assert "takes no model" in told(home, "m", "--where", "model=m@1", code=2)
    assert "no dataset 'x'" in told(home, "m", "--dataset", "x", code=2)


def test_rows_of_tokens_are_told_apart() -> None:
    for length in (4, 50):
        text = noise(400)
        hashes = row_hashes(text, length)
        rows = {tuple(text[n : n + length]): n for n in range(len(text) - length + 1)}
        assert len(hashes) == len(text) - length + 1 and len(set(hashes.tolist())) == len(rows)
        again = row_hashes(text[7:], length)
        assert (again == hashes[7:]).all()  # wherever a row stands
    assert len(row_hashes([1, 2, 3], 4)) == 0
    assert (row_hashes([0] * 9, 4) != row_hashes([1] * 9, 4)).all()


def test_intervals_are_wilsons() -> None:
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0, 0) is None
