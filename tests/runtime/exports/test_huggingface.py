"""`huggingface`: the folder loads with datasets, and its card names the shards."""

from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from cray_agents.paths import Home
from cray_agents.queries import RunFilter
from cray_agents.records import Run
from cray_agents.runtime.exports.exporter import export, format_named, open_runs
from cray_agents.runtime.exports.formats.huggingface import ABOUT, rows_of, schema
from tests.support.exports.small_runs import filled

RUNS = 130


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("huggingface") / "home")
    filled(home, RUNS)
    return home


@pytest.fixture(scope="module")
def folder(home: Home) -> Path:
    target = home.root.parent / "folder"
    source = open_runs(home, RunFilter(loop="l"), False)
    export(source, format_named("huggingface"), target, shard_size=50)
    return target


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def test_datasets_loads_the_folder(home: Home, folder: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    rows = load_dataset(str(folder), cache_dir=str(tmp_path))
    assert list(rows) == ["train"] and len(rows["train"]) == RUNS
    row = rows["train"][7]
    run = open_runs(home, RunFilter(), False).store.run(row["id"])  # type: ignore[attr-defined]
    for message, want in zip(row["messages"], run.trajectory.messages, strict=True):
        calls = message.pop("tool_calls")
        want = {**want}
        assert (calls and orjson.loads(calls)) == want.pop("tool_calls", None)
        assert {name: value for name, value in message.items() if value is not None} == {
            name: value for name, value in want.items() if value is not None
        }
    assert orjson.loads(row["tools"]) == run.calls[0].tools
    assert row["rewards"] == [{"name": "right", "value": 1.0, "source": "test", "turn": None}]
    assert (row["reward"], row["tags"], row["task_id"]) == (1.0, ["small"], "task-000001")


def test_the_card_names_the_shards(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    [config] = front["configs"]
    assert config["data_files"] == [{"split": "train", "path": "data/train-*.parquet"}]
    names = sorted(path.name for path in (folder / "data").iterdir())
    assert names == [f"train-0000{n}-of-00003.parquet" for n in range(3)]
    assert [pq.read_metadata(folder / "data" / name).num_rows for name in names] == [50, 50, 30]
    assert "130 rows" in text and "exact token ids" in text
    assert set(ABOUT) == set(pq.read_schema(folder / "data" / names[0]).names)


def test_every_odd_run_is_carried_or_told(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        if name == "surrogate":
            continue  # no UTF-8 holds it, so the store does not either
        rows = rows_of(run, 0).records
        assert all(set(row) <= set(ABOUT) for row in rows)
        batch = pa.RecordBatch.from_pylist(rows, schema=schema())
        told = [(row["id"], row["part"]) for row in batch.to_pylist()]
        assert told == [(run.id, part) for part in range(2 if name == "tools_changed" else 1)]
    assert "message_fields" in rows_of(runs["refusal"], 0).losses
    assert "content_parts" in rows_of(runs["image"], 0).losses
    assert "redacted" in rows_of(runs["redacted"], 0).losses
