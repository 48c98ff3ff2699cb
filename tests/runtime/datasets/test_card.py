"""The card: what `datasets` makes of a directory, and what people read in it."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from cray_agents.queries import DatasetRecipe, Decontamination
from cray_agents.runtime.datasets.card import card
from cray_agents.runtime.datasets.considered_runs import (
    BuildCounts,
    ConsideredRun,
    LineWriter,
    Removed,
)

SCHEMA = pyarrow.schema(
    [
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("loss_mask", pyarrow.list_(pyarrow.int8())),
        ("logprobs", pyarrow.list_(pyarrow.float32())),
        ("advantages", pyarrow.list_(pyarrow.float32())),
        ("version_index", pyarrow.list_(pyarrow.int16())),
        ("versions", pyarrow.list_(pyarrow.string())),
        ("weight", pyarrow.float64()),
        ("reward", pyarrow.float64()),
        ("advantage", pyarrow.float64()),
        ("run_id", pyarrow.string()),
        ("task_id", pyarrow.string()),
        ("group", pyarrow.string()),
        ("pair", pyarrow.string()),
        ("chosen", pyarrow.bool_()),
    ]
)


def row(number: int) -> dict[str, Any]:
    return {
        "input_ids": list(range(number + 2)),
        "loss_mask": [0] * number + [1, 1],
        "logprobs": [0.0] * number + [-0.5, -0.25],
        "advantages": [0.0] * number + [1.0, 1.0],
        "version_index": [-1] * number + [0, 0],
        "versions": ["m@3"],
        "weight": 1.0,
        "reward": 1.0,
        "advantage": 1.0,
        "run_id": f"run_{number}",
        "task_id": f"task_{number}",
        "group": "",
        "pair": None,
        "chosen": None,
    }


NAME = "ds-0123456789abcdef"


def files_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Three rows in two training shards, one in a validation shard, five runs."""
    shards = {"train-00000": [0, 1], "train-00001": [2], "validation-00000": [3]}
    for name, numbers in shards.items():
        table = pyarrow.Table.from_pylist([row(n) for n in numbers], schema=SCHEMA)
        pyarrow.parquet.write_table(table, directory / f"{name}.parquet")
    lines = LineWriter(directory)
    for number in range(4):
        lines.add(ConsideredRun(run=f"run_{number}", accepted=True, samples=1, reward=1.0))
    lines.add(ConsideredRun(run="run_4", reason="low_reward", reward=0.0))
    lines.finish()
    return {
        path.name: {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
        }
        for path in directory.glob("*.parquet")
    }


def counts_of(**more: Any) -> BuildCounts:
    about: dict[str, Any] = {
        "recipe": DatasetRecipe(loop="calc", best_of=2),
        "considered": 5,
        "accepted": 4,
        "rejected": Counter(low_reward=1),
        "versions": Counter({"m@3": 8}),
        "splits": {
            "train": Counter(samples=3, tokens=9, trained_tokens=6),
            "validation": Counter(samples=1, tokens=5, trained_tokens=2),
        },
    }
    return BuildCounts(**{**about, **more})


def text_of(directory: Path, **more: Any) -> str:
    return card(NAME, counts_of(**more), files_of(directory))


def test_the_directory_loads_with_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    directory = tmp_path / NAME
    directory.mkdir()
    (directory / "README.md").write_text(text_of(directory))
    (directory / "recipe.json").write_text("{}")
    (directory / "manifest.json").write_text("{}")
    cache = str(tmp_path / "cache")
    loaded = datasets.load_dataset(str(directory), cache_dir=cache)
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 3, "validation": 1}
    assert loaded["train"][2] == row(2)
    runs = datasets.load_dataset(str(directory), "runs", split="train", cache_dir=cache)
    assert runs["run"] == [f"run_{n}" for n in range(5)]
    assert runs[4]["reason"] == "low_reward"


def test_the_card_says_what_is_in_and_why_others_are_not(tmp_path: Path) -> None:
    text = text_of(tmp_path, rejected=Counter(low_reward=1_200, new_reason=7))
    assert "# ds-0123456789abcdef" in text
    assert "| `best_of` | 2 |" in text
    assert "| `low_reward` | its reward is below `min_reward` | 1,200 |" in text
    assert "| `new_reason` |  | 7 |" in text
    assert text.index("low_reward`") < text.index("new_reason")  # the most first
    assert "| Trained tokens | 8 |" in text
    assert "| m@3 | 8 |" in text
    assert "cray-agents dataset build --recipe recipe.json" in text


def test_the_front_matter_is_yaml(tmp_path: Path) -> None:
    text = text_of(tmp_path, splits={"train": Counter(samples=250_000)})
    matter = yaml.safe_load(text.split("---\n")[1])
    assert "cray-agents" in matter["tags"] and "sft" in matter["tags"]
    assert [c["config_name"] for c in matter["configs"]] == ["default", "runs"]


def test_at_most_five_examples_and_nothing_in_them_is_markup(tmp_path: Path) -> None:
    evil = "<script>x</script> | **bold** [a](b) `code`\n\n# heading"
    removed = [Removed(f"run_{n}", evil, "holdout task `t`", evil, 0.9) for n in range(9)]
    text = text_of(tmp_path, contaminated=removed)
    examples = text.split("## Contamination")[1].split("## Loading")[0]
    assert "run_4" in examples and "run_5" not in examples
    assert "<script>" not in text
    assert r"\*\*bold\*\*" in examples
    assert "\n# heading" not in examples
    assert "similarity 0.90" in examples


def test_where_things_lie_is_not_told(tmp_path: Path) -> None:
    recipe = DatasetRecipe(
        tokenizer="/root/here/tiny",
        decontamination=Decontamination(files=["/root/here/bench.jsonl"], threshold=0.7),
    )
    text = text_of(tmp_path, recipe=recipe)
    assert "/root" not in text and "bench.jsonl" in text and "tiny" in text and "0.7" in text
