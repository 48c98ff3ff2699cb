"""`cray-agents export`: every format, its options, what it says and where."""

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard

from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.dashboard import static_files
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.exports.exporter import FORMATS
from cray_agents.runtime.exports.formats.html import HTML
from tests.support import command_line
from tests.support.command_line import refused
from tests.support.exports.small_runs import filled, name_of

RUNS = 24
PAIRS = {"openai-preference", "trl-preference"}
FOLDERS = {"tokens", "verl", "huggingface"}
ZIPS = {"eval"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "home"
    filled(Home(root), RUNS)
    return root


@pytest.fixture(scope="module")
def pairs(home: Path) -> str:
    store = filled(Home(home), 0)
    recipe = DatasetRecipe(loop="l", method="dpo", validation=0.4)
    return str(build_dataset(store, Home(home), recipe)["id"])


@pytest.fixture(autouse=True)
def viewer(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of the viewer, which checkouts may not have."""
    built = tmp_path_factory.mktemp("built")
    (built / "viewer.html").write_text("<!doctype html><title>a page</title>\n")
    monkeypatch.setattr(static_files, "STATIC", built)


def cli(*words: object, home: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "cray_agents", "export", "--home", str(home), *map(str, words)]
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def here(*words: object, home: Path) -> subprocess.CompletedProcess[str]:
    """The same in this process: a second faster. Only with -o: stdout is a matter of signals."""
    return command_line.cli("export", "--home", home, *words, cwd=home)


@pytest.mark.slow
def test_help_lists_every_format() -> None:
    done = subprocess.run([sys.executable, "-m", "cray_agents", "export", "--help"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for name in FORMATS if not any(line[:1] == [name] for line in lines)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FORMATS])
def test_every_format(home: Path, pairs: str, tmp_path: Path, name: str) -> None:
    target = tmp_path / "out"
    of = ["--dataset", pairs] if name in PAIRS else []
    done = here("-f", name, "-o", target, "--json", *of, home=home)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["format"] == name and summary["records"] > 0
    assert target.is_dir() == (name in FOLDERS)
    if name == "html":
        assert target.read_bytes().count(b" data-run>") == summary["records"]
    elif name in ZIPS:
        assert summary["bytes"] == target.stat().st_size
        assert len(json.loads(zipfile.ZipFile(target).read("summaries.json"))) == summary["records"]
    elif target.is_file():
        lines = target.read_bytes().splitlines()
        assert len(lines) == summary["records"] and all(map(json.loads, lines))
    assert all(loss["count"] and loss["sentence"] for loss in summary["losses"].values())


@pytest.mark.slow
def test_lines_to_stdout_and_the_rest_to_stderr(home: Path) -> None:
    done = cli("--format", "openai", "--where", "reward>=1", home=home)
    assert done.returncode == 0
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == RUNS // 2 and all("messages" in row for row in rows)
    assert f"{RUNS // 2} records of {RUNS // 2} runs" in done.stderr
    assert "conversation_only" in done.stderr
    quiet = cli("--format", "openai", "--where", "reward>=1", "--quiet", home=home)
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


@pytest.mark.slow
def test_a_reader_that_stops(home: Path) -> None:
    argv = [sys.executable, "-m", "cray_agents", "export", "--home", str(home)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(120) != 0
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


def test_filters(home: Path, tmp_path: Path) -> None:
    def names(*words: object) -> list[str]:
        done = here(*words, "-q", "-o", tmp_path / "out", home=home)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["id"] for line in (tmp_path / "out").read_bytes().splitlines()]

    everything = [name_of(n) for n in range(RUNS)]
    assert names("--where", "loop=l agent=agent tag=small tag!=big") == everything
    assert names("--where", "task=task-000001 reward<=0") == [name_of(4), name_of(6)]
    assert names("--where", 'text="ANSWER 17 "') == [name_of(17)]
    assert names("--where", "model=m stop_reason=completed split=train") == everything
    until = "iteration=1,2 until=2023-11-14T22:13:21+00:00"
    assert names("--where", until) == everything[:2]
    assert names("--where", "since=7d") == names("--where", "error=*") == []
    assert names("--where", "tag!=small") == []


def test_a_dataset_and_its_splits(home: Path, pairs: str, tmp_path: Path) -> None:
    done = here("-f", "tokens", "--dataset", pairs, "-o", tmp_path / "x.parquet", home=home)
    assert "--split validation" in done.stderr
    validation = ["--dataset", pairs, "--split", "validation"]
    here("-f", "tokens", *validation, "-o", tmp_path / "v.parquet", home=home)
    rows = [pq.read_table(tmp_path / f"{name}.parquet").num_rows for name in "xv"]
    assert all(rows) and sum(rows) == RUNS // 4 * 2
    both, one_by_one = tmp_path / "both", tmp_path / "one by one"
    here("-f", "trl-preference", *validation, "-o", both, home=home)
    assert both.read_bytes().count(b"\n") == rows[1] // 2
    done = here("-f", "trl", *validation, "-o", one_by_one, home=home)
    assert one_by_one.read_bytes().count(b"\n") == rows[1]
    assert "unpaired" in done.stderr


def test_what_runs_alone_do_not_tell_is_said(home: Path, tmp_path: Path) -> None:
    recipe = DatasetRecipe(loop="l", method="kto")
    labelled = str(build_dataset(filled(Home(home), 0), Home(home), recipe)["id"])
    done = here("-f", "trl", "--dataset", labelled, "-o", tmp_path / "out", home=home)
    assert done.returncode == 0 and "unlabelled" in done.stderr


def test_named_runs_alone(home: Path, tmp_path: Path) -> None:
    chosen = [name_of(17), name_of(3)]
    done = here(*chosen, "-q", "-o", tmp_path / "out", home=home)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out").read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in lines] == sorted(chosen)
    by_task = here(*chosen, "-f", "verl", "-o", tmp_path / "verl.parquet", home=home)
    assert by_task.returncode == 0, by_task.stderr
    assert pq.read_table(tmp_path / "verl.parquet").num_rows == 2
    target = ["-o", tmp_path / "no"]
    refused(here("run-nope", *target, home=home), "run-nope", "recorded")
    refused(here(*chosen, "--where", "reward>=1", *target, home=home), "--where", "names")
    refused(here(*chosen, "--dataset", "d", *target, home=home), "not both")
    assert not (tmp_path / "no").exists()


def test_a_page_needs_the_built_viewer(home: Path, tmp_path: Path) -> None:
    (static_files.STATIC / "viewer.html").unlink()
    done = here("-f", "html", "-o", tmp_path / "runs.html", home=home)
    refused(done, "make ui")
    refused(here("-f", "html", "-o", tmp_path / "runs.html.zst", home=home), "browser")


def test_a_page_that_is_full_says_so(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = dataclasses.replace(HTML.page, most_bytes=5000)
    monkeypatch.setitem(FORMATS, "html", dataclasses.replace(HTML, page=page))
    done = here("-f", "html", "-o", tmp_path / "runs.html", "--json", home=home)
    summary = json.loads(done.stdout)
    left = summary["losses"]["full_file"]["count"]
    assert left > 0 and summary["records"] + left == RUNS
    assert b" data-full>" in (tmp_path / "runs.html").read_bytes()
    allowed = ["--strict", "--allow", "token_texts"]
    strict = here("-f", "html", "-o", tmp_path / "s.html", *allowed, home=home)
    refused(strict, "full")


def test_zst(home: Path, tmp_path: Path) -> None:
    assert here("-o", tmp_path / "out.jsonl.zst", home=home).returncode == 0
    with zstandard.open(tmp_path / "out.jsonl.zst", "rt") as file:
        assert len(list(file)) == RUNS


@pytest.mark.slow
def test_what_is_refused(home: Path, pairs: str, tmp_path: Path) -> None:
    def tried(*words: object) -> subprocess.CompletedProcess[str]:
        return here(*words, "-o", tmp_path / "out", home=home)

    refused(tried("-f", "hugging-face"), "'huggingface' is meant", "sharegpt")
    refused(tried("-f", "trl-preference"), "dataset build --method dpo")
    refused(tried("--dataset", "ds-0"), "ds-0")
    refused(tried("--dataset", pairs, "--where", "loop=l"), "--where", "--dataset")
    refused(tried("--dataset", pairs, "--split", "test"), "train and validation")
    refused(tried("--where", "since=yesterday"), "since", "7d", "'yesterday'")
    refused(tried("--split", "train"), "--dataset")
    refused(tried("--where", "stop_reason=done"), "completed")
    refused(tried("--where", "reward>=2 reward<=1"), "no reward can match")
    refused(tried("-f", "openai", "--strict"), name_of(0), "conversation_only")
    allowed = tried("-f", "openai", "--strict", "--allow", "conversation_only")
    assert allowed.returncode == 0
    lines_only = cli("-f", "tokens", home=home)
    assert lines_only.returncode == 2 and "Parquet files" in lines_only.stderr
    assert "Traceback" not in lines_only.stderr and lines_only.stdout == ""
