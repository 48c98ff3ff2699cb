"""`verl`: a row per task, in the columns and types that verl's RL data loader reads."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunFilter
from cray_agents.records import Run, Task
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.exports.exporter import export, format_named, open_dataset, open_runs
from cray_agents.runtime.exports.formats.verl import rows_of, schema
from tests.support.exports.example_runs import chat, made
from tests.support.exports.small_runs import ATTEMPTS, filled

VERL = format_named("verl")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("verl") / "home")
    filled(home, 42)
    return home


def test_of_runs(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import load_dataset

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    target = tmp_path / "train.parquet"
    done = export(open_runs(home, RunFilter(), False), VERL, target)
    assert pq.read_schema(target).equals(schema())
    rows = load_dataset("parquet", data_files=str(target), cache_dir=str(tmp_path / "cache"))
    rows = rows["train"].to_list()
    assert (done.records, done.runs, len(rows)) == (11, 42, 11)
    assert done.losses["other_attempts"].count == 42 - 11
    assert rows[3] == {
        "data_source": "l",
        "prompt": [{"role": "user", "content": "question 3"}],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {
            "index": 3, "split": "train", "task_id": "task-000003", "run_id": "run-0000012",
            "agent": "agent", "loop": "l", "iteration": 1, "model": "m@1",
        },
    }  # fmt: skip
    assert [row["extra_info"]["index"] for row in rows] == list(range(11))


def test_of_a_dataset_it_is_the_same_tasks(home: Home, tmp_path: Path) -> None:
    source = open_runs(home, RunFilter(), False)
    store = source.store  # type: ignore[attr-defined]
    dataset = build_dataset(store, home, DatasetRecipe(loop="l"))["id"]
    done = export(open_dataset(home, dataset, VERL, "train", False), VERL, tmp_path / "x.parquet")
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    tasks = [row["extra_info"]["task_id"] for row in rows]
    assert len(tasks) == len(set(tasks)) == done.records == 11
    assert done.losses["other_attempts"].count == 42 // 2 - 11
    assert all(int(row["extra_info"]["run_id"][4:]) // ATTEMPTS == int(task[5:])
               for row, task in zip(rows, tasks, strict=True))  # fmt: skip


def row_of(run: Run) -> tuple[dict[str, object], tuple[str, ...]]:
    written = rows_of(run, 0)
    [row] = written.records
    assert pa.RecordBatch.from_pylist([row], schema=schema()).num_rows == 1
    return row, written.losses


def test_targets_and_prompts() -> None:
    task = Task(input="x", target={"b": 1, "a": [2]},
                metadata={"data_source": "gsm8k", "ability": "math"})  # fmt: skip
    told = made(messages=[{"role": "system", "content": "s"}, *chat("x", "y", "z")], task=task)
    row, losses = row_of(told)
    assert (row["data_source"], row["ability"]) == ("gsm8k", "math")
    assert row["reward_model"] == {"style": "rule", "ground_truth": '{"a":[2],"b":1}'}
    assert row["prompt"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert losses == ("answers", "json_target")
    mute, losses = row_of(made(task=Task(input="x")))  # it failed before anything was said
    assert mute["prompt"] == [{"role": "user", "content": "x"}]
    assert losses == ("answers", "no_target")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined, losses = row_of(made(messages=[{"role": "user", "content": parts}], task=task))
    assert joined["prompt"] == [{"role": "user", "content": "a\nb"}]
    assert "text_parts" in losses


def test_what_it_cannot_carry(runs: dict[str, Run]) -> None:
    assert rows_of(made(), 0) == ([], ("no_task",))
    with pytest.raises(BadInput, match="no text") as caught:
        rows_of(runs["image"].model_copy(update={"task": Task(input="x")}), 0)
    assert caught.value.code == "unsupported_export"
    answer = {"role": "assistant", "content": "y"}
    with pytest.raises(BadInput, match="no prompt"):
        rows_of(made(messages=[answer], task=Task(input="x")), 0)
