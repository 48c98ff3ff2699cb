"""The card: what `datasets` makes of a dataset's directory, and what people read in it."""

from collections import Counter
from pathlib import Path

import pytest

from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, Decontamination
from cray_agents.runtime.datasets.build import card
from cray_agents.runtime.datasets.considered_runs import BuildCounts
from tests.support.datasets.dataset_runs import build, rows, run_events, several, task


async def test_the_directory_loads_with_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    events = several(
        *(run_events(f"r{n:02}", [n, n + 1], task=task(f"t{n}"), reward=n % 4) for n in range(40))
    )
    manifest, train = await build(tmp_path, events, validation=0.4)
    home, name = Home(tmp_path), manifest["id"]
    directory, cache = str(home.dataset(name)), str(tmp_path / "cache")
    loaded = datasets.load_dataset(directory, cache_dir=cache)
    assert loaded["train"].to_list() == train
    assert loaded["validation"].to_list() == rows(home, name, "validation")
    runs = datasets.load_dataset(directory, "runs", split="train", cache_dir=cache)
    assert len(runs) == 40 and runs.filter(lambda row: row["accepted"]).num_rows == 30
    text = (home.dataset(name) / "README.md").read_text()
    assert f"# {name}" in text and "- cray-agents" in text
    assert "| `low_reward` | its reward is below `min_reward` | 10 |" in text
    assert "| `validation` | 0.4 |" in text and "| Trained tokens | 60 |" in text
    assert "cray-agents dataset build --recipe recipe.json" in text


def test_where_things_lie_is_not_told_and_nothing_is_markup() -> None:
    recipe = DatasetRecipe(
        tokenizer="/root/here/tiny",
        decontamination=Decontamination(files=["/root/here/bench.jsonl"], threshold=0.7),
    )
    counts = BuildCounts(recipe, versions=Counter({"<b>|**m**@3": 8}))
    text = card("ds-0", counts, ["train-00000.parquet"])
    assert "/root" not in text and "bench.jsonl" in text and "tiny" in text and "0.7" in text
    assert "<b>" not in text and r"&lt;b&gt;\|\*\*m\*\*@3 | 8 |" in text
