"""The driver of exports: a killed one leaves no half file, and started again it is whole."""

import os
import random
import shutil
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from cray_agents.errors import BadInput, StoreError
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunFilter
from cray_agents.runtime.dashboard import static_files
from cray_agents.runtime.datasets.run_samples import Span, TokenSample
from cray_agents.runtime.datasets.token_shards import SampleRow, ShardWriter
from cray_agents.runtime.disk import durable
from cray_agents.runtime.exports import export_files
from cray_agents.runtime.exports.export_files import ExportProgress
from cray_agents.runtime.exports.export_format import LossRules
from cray_agents.runtime.exports.exporter import (
    FORMATS,
    export,
    format_named,
    open_dataset,
    open_runs,
)
from cray_agents.runtime.exports.sources import StoredRuns
from tests.support.exports.small_runs import filled, name_of

KILLS = int(os.environ.get("CRAY_TEST_KILLS", "2"))
RUNS = 600
LARGE = int(os.environ.get("CRAY_TEST_EXPORTED", "1500"))
TARGETS = {
    "jsonl": "out.jsonl",
    "openai": "out.jsonl.zst",
    "atif": "out.atif",
    "eval": "out.eval",
    "tokens": "tokens",
    "verl": "verl.parquet",
    "huggingface": "folder",
    "html": "runs.html",
}


class Interrupted(Exception):
    """What a test throws into an export."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("exports") / "home")
    filled(home, RUNS, words=200)
    return home


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress after every few runs."""
    monkeypatch.setattr(export_files, "ITEMS", 50)
    monkeypatch.setattr(export_files, "ROWS", 10)


@pytest.fixture(autouse=True)
def viewer(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of the viewer, which checkouts may not have."""
    built = tmp_path_factory.mktemp("built")
    (built / "viewer.html").write_text("<!doctype html><title>a page</title>\n")
    monkeypatch.setattr(static_files, "STATIC", built)


def bytes_of(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_interrupted_it_leaves_nothing_and_starts_again(
    home: Home, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, form = open_runs(home, RunFilter(), False), format_named(name)
    target = tmp_path / TARGETS[name]
    reports = 0

    def stop(progress: ExportProgress) -> None:
        nonlocal reports
        reports += 1
        if reports == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        export(source, form, target, shard_size=70, on_progress=stop)
    assert left_in(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            export(source, form, target, shard_size=70)
    assert left_in(tmp_path) == []
    (tmp_path / f".{target.name}.part").mkdir()  # as a kill leaves it
    (tmp_path / f".{target.name}.part" / "shard-0").touch()
    done = export(source, form, target, shard_size=70)
    assert left_in(tmp_path) == [target.name]
    assert done.runs == RUNS and done.files == len(bytes_of(target))
    assert done.bytes == sum(map(len, bytes_of(target).values()))
    again = tmp_path / "again" / target.name
    export(source, form, again, shard_size=70)
    assert bytes_of(again) == bytes_of(target), "equal exports are equal bytes"


def fail(path: Path) -> None:
    raise OSError(5, "Input/output error")


def test_lines_are_what_the_store_holds(home: Home, tmp_path: Path) -> None:
    source = open_runs(home, RunFilter(min_reward=1), False)
    done = export(source, format_named("jsonl"), tmp_path / "out.jsonl.zst")
    data = zstandard.ZstdDecompressor().stream_reader(
        (tmp_path / "out.jsonl.zst").open("rb"), read_across_frames=True
    ).read()  # fmt: skip
    rows = [orjson.loads(line) for line in data.splitlines()]
    assert [row["id"] for row in rows] == [name_of(n) for n in range(1, RUNS, 2)]
    assert rows[0]["trajectory"]["turns"][1]["call"]["token_ids"] == [13, 14]
    assert (done.records, done.files, done.losses) == (RUNS // 2, 1, {})


def test_two_at_once(home: Home, tmp_path: Path) -> None:
    source, form = open_runs(home, RunFilter(), False), format_named("jsonl")

    def second(progress: ExportProgress) -> None:
        with pytest.raises(BadInput, match="by another process") as caught:
            export(source, form, tmp_path / "out")
        assert caught.value.code == "export_running"

    assert export(source, form, tmp_path / "out", on_progress=second).runs == RUNS


def test_a_folder_that_exists(home: Home, tmp_path: Path) -> None:
    source = open_runs(home, RunFilter(), False)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").touch()
    for name in ("tokens", "huggingface"):
        with pytest.raises(BadInput, match="exists already"):
            export(source, format_named(name), tmp_path / "there")
    with pytest.raises(BadInput, match="is a folder"):
        export(source, format_named("huggingface"), tmp_path / "x.parquet")
    assert left_in(tmp_path) == ["there"]


def test_a_target_that_is_no_file(home: Home, tmp_path: Path) -> None:
    source = open_runs(home, RunFilter(), False)
    os.mkfifo(tmp_path / "pipe")
    for target, what in ((tmp_path, "a directory"), (tmp_path / "pipe", "no file")):
        with pytest.raises(BadInput, match=what):
            export(source, format_named("jsonl"), target)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "out")
    export(source, format_named("jsonl"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "out").is_file()


def test_a_dataset_in_its_order_with_demonstrations(home: Home, tmp_path: Path) -> None:
    """Two rows of a run are one run; a demonstration is the conversation in the recipe."""
    shown = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    names = ["demonstration/1", name_of(7), name_of(7), name_of(3), "demonstration/0"]
    sample = TokenSample(array("i", [1, 2]), array("f", [0, 0]), [Span(1, 0), Span(1, 1)])
    folder = home.dataset("ds-hand")
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, "train")
    writer.add([SampleRow(sample, name, "", 1.0) for name in names])
    rows_of = writer.finish()
    recipe = DatasetRecipe(demonstrations=[shown, [*shown, *shown]])
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    files: dict[str, Any] = {
        name: {"sha256": durable.sha256_file(folder / name)} for name in [*rows_of, "recipe.json"]
    }
    (folder / "manifest.json").write_bytes(orjson.dumps({"id": "ds-hand", "files": files}))
    form = format_named("openai")
    source = open_dataset(home, "ds-hand", form, "train", False)
    done = export(source, form, tmp_path / "out")
    rows = [orjson.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert [len(row["messages"]) for row in rows] == [4, 4, 4, 2]
    assert rows[3]["messages"] == shown and done.runs == source.count() == 4
    with pytest.raises(BadInput, match="no split 'validation'"):
        open_dataset(home, "ds-hand", form, "validation", False)


def test_strict_and_what_it_allows(home: Home, tmp_path: Path) -> None:
    source, form = open_runs(home, RunFilter(), False), format_named("openai")
    with pytest.raises(BadInput, match=f"{name_of(0)}: .*conversation_only") as caught:
        export(source, form, tmp_path / "out", rules=LossRules(strict=True))
    assert caught.value.code == "export_loss"
    allowed = LossRules(strict=True, allow=frozenset({"conversation_only"}))
    done = export(source, form, tmp_path / "out", rules=allowed)
    assert done.losses["conversation_only"].count == RUNS


def test_formats_have_names() -> None:
    with pytest.raises(BadInput, match="'sharegtp' is not known, perhaps 'sharegpt' is meant"):
        format_named("sharegtp")
    for name, form in FORMATS.items():
        assert form.name == name and form.title and form.about


def test_damage_is_an_error_unless_it_is_skipped(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    filled(home, 6)
    [segment] = home.segments.glob("*.jsonl*")
    assert segment.suffix == ".zst"
    store = open_runs(home, RunFilter(), False)
    assert isinstance(store, StoredRuns)
    known = sum(1 for _ in store.items())
    assert known == 6
    data = bytearray(segment.read_bytes())
    data[200] ^= 0xFF
    segment.write_bytes(data)
    with pytest.raises(OSError, match="fsck"):
        export(open_runs(home, RunFilter(), False), format_named("jsonl"), tmp_path / "out")
    skipping = open_runs(home, RunFilter(), True)
    done = export(skipping, format_named("jsonl"), tmp_path / "skipped")
    assert done.losses["missing_runs"].count + done.records == 6


# ---- a process that is killed --------------------------------------------------------------------


def command(home: Home, form: str, target: Path, *more: object) -> list[str]:
    words = ["export", "--home", home.root, "--format", form, "-o", target, "--json", *more]
    return [sys.executable, "-m", "cray_agents", *map(str, words)]


@pytest.mark.slow
def test_killed_it_starts_again(large: Home, tmp_path: Path) -> None:
    target, chance = tmp_path / "folder", random.Random(1)
    argv = command(large, "huggingface", target, "--shard-size", 300)
    kills = 0
    while kills < KILLS:
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (tmp_path / ".folder.part").exists():
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        kills += process.wait() < 0
        if target.exists():  # it was done
            shutil.rmtree(target)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout)["records"] == LARGE
    assert left_in(tmp_path) == ["folder"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("large") / "home")
    filled(home, LARGE)
    return home


PEAK = """
import atexit, re, sys
from pathlib import Path
from cray_agents.cli import main
status = Path("/proc/self/status")
atexit.register(lambda: print(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]))
sys.argv = ["cray-agents", *sys.argv[1:]]
main()
"""


def peak_of(argv: list[str]) -> int:
    """KiB of memory at most, of a command that succeeds."""
    words = [sys.executable, "-c", PEAK, *argv[3:], "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
def test_memory_is_flat(large: Home, tmp_path: Path) -> None:
    many = Home(tmp_path / "home")
    filled(many, 4 * LARGE)
    for form in ("jsonl", "tokens"):
        few = peak_of(command(large, form, tmp_path / f"few.{form}"))
        more = peak_of(command(many, form, tmp_path / f"many.{form}"))
        print(f"\n{form}: {few >> 10} MiB for {LARGE:,} runs, {more >> 10} MiB for {4 * LARGE:,}")
        assert more < 1.3 * few
