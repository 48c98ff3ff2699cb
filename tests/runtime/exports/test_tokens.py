"""`tokens`: what its consumers get, from a dataset's shards and straight from the store."""

from array import array
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunFilter
from cray_agents.records import Run
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.datasets.reader import shards
from cray_agents.runtime.datasets.run_samples import Span, TokenSample
from cray_agents.runtime.datasets.token_shards import SampleRow, table_of
from cray_agents.runtime.exports.exporter import export, format_named, open_dataset, open_runs
from cray_agents.runtime.exports.formats import tokens
from cray_agents.runtime.exports.formats.tokens import IGNORED, rewrite_batch, rows_of, schema
from tests.support.exports.example_runs import called, of_calls
from tests.support.exports.small_runs import filled

TOKENS = format_named("tokens")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("tokens") / "home")
    filled(home, 120)
    return home


def built(home: Home, **recipe: Any) -> str:
    store = open_runs(home, RunFilter(), False).store  # type: ignore[attr-defined]
    return str(build_dataset(store, home, DatasetRecipe(loop="l", **recipe))["id"])


def sample(sampled: list[int], *context: int) -> TokenSample:
    """Context, tokens of m@1, a token of context, tokens of m@2."""
    ids = array("i", [*context, *sampled, 9, *sampled])
    n = len(sampled)
    spans = [Span(len(context), 0), Span(n, 1, 0), Span(1, 0), Span(n, 1, 1)]
    return TokenSample(ids, array("f", [-0.5] * len(ids)), spans, ["m@1", "m@2"])


def test_of_a_dataset_by_hand() -> None:
    unsampled = TokenSample(array("i", [5, 6]), array("f", [0.0] * 2), [Span(1, 0), Span(1, 1)])
    rows = [
        SampleRow(sample([7, 8], 1, 2), "run-1", "task", 1.0, 0.25, "group", "pair", True),
        SampleRow(unsampled, "demonstration/0", "", 0.0),
        SampleRow(sample([3], 4), "run-2", "task", 0.0, -0.25, "group", "pair", False),
    ]
    [batch] = table_of(rows).to_batches()
    expected: list[dict[str, Any]] = [
        {
            "input_ids": [1, 2, 7, 8, 9, 7, 8],
            "labels": [IGNORED, IGNORED, 7, 8, IGNORED, 7, 8],
            "advantages": [0.0, 0.0, 0.25, 0.25, 0.0, 0.25, 0.25],
            "weight_version": "m@2",
            "version_index": [-1, -1, 0, 0, -1, 1, 1],
            "versions": ["m@1", "m@2"],
            "chosen": True,
        },
        {"input_ids": [5, 6], "labels": [IGNORED, 6], "weight_version": "", "versions": [],
         "chosen": None},
        {"input_ids": [4, 3, 9, 3], "labels": [IGNORED, 3, IGNORED, 3], "weight_version": "m@2",
         "advantages": [0.0, -0.25, 0.0, -0.25], "run_id": "run-2", "chosen": False},
    ]  # fmt: skip
    for part in (batch, batch.slice(1), batch.slice(0, 1), batch.slice(2, 1)):  # offsets count
        made = rewrite_batch(part)
        assert made.schema == schema()
        first = batch.num_rows - part.num_rows if part.num_rows > 1 else None
        wanted = expected[first:] if first is not None else None
        for row, want in zip(made.to_pylist(), wanted or [], strict=wanted is not None):
            assert {name: row[name] for name in want} == want
            assert row["attention_mask"] == [1] * len(row["input_ids"])
    assert rewrite_batch(batch.slice(2, 1)).to_pylist()[0]["labels"] == expected[2]["labels"]
    assert rewrite_batch(batch.slice(0, 0)).num_rows == 0


@pytest.mark.parametrize("method", ["sft", "grpo", "dpo"])
def test_of_a_dataset(home: Home, tmp_path: Path, method: str) -> None:
    dataset = built(home, method=method)
    source = open_dataset(home, dataset, TOKENS, "train", False)
    done = export(source, TOKENS, tmp_path / "out")
    before = pa.concat_tables([pq.read_table(path) for path in shards(home, dataset)])
    [path] = (tmp_path / "out").iterdir()
    assert path.name == "train-00000-of-00001.parquet"
    after = pq.read_table(path)
    assert after.schema == schema()
    assert done.records == after.num_rows == before.num_rows > 0
    for name in tokens.KEPT:
        assert after[name].to_pylist() == before[name].to_pylist(), name
    for ids, labels, mask, index in zip(
        *(after[n].to_pylist() for n in ("input_ids", "labels")),
        before["loss_mask"].to_pylist(),
        after["version_index"].to_pylist(),
        strict=True,
    ):
        assert labels == [t if m else IGNORED for t, m in zip(ids, mask, strict=True)]
        assert [i >= 0 for i in index] == [bool(m) for m in mask]


def test_a_dataset_needs_no_store(home: Home, tmp_path: Path) -> None:
    """Pruned runs do not matter: everything is in the shards."""
    dataset = built(home)
    alone = Home(tmp_path / "home")
    alone.datasets.mkdir(parents=True)
    home.dataset(dataset).rename(alone.dataset(dataset))
    done = export(open_dataset(alone, dataset, TOKENS, "train", False), TOKENS, tmp_path / "out")
    assert done.records == 60 and set(done.losses) == {"no_conversation"}


def test_of_runs_is_what_the_builder_makes_of_them(home: Home, tmp_path: Path) -> None:
    """A dataset of all runs and the runs themselves: the same sequences, but for advantages."""
    dataset = built(home, min_reward=-1.0)
    export(open_dataset(home, dataset, TOKENS, "train", False), TOKENS, tmp_path / "a.parquet")
    export(open_runs(home, RunFilter(), False), TOKENS, tmp_path / "b.parquet")
    one, other = (pq.read_table(tmp_path / n).sort_by("run_id") for n in ("a.parquet", "b.parquet"))
    assert one.num_rows == 120
    for name in ("input_ids", "attention_mask", "labels", "logprobs", "weight_version", "versions",
                 "version_index", "reward", "run_id", "task_id"):  # fmt: skip
        assert one[name].to_pylist() == other[name].to_pylist(), name
    assert other["advantages"].null_count == 120


def test_datasets_loads_it(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import load_dataset

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    export(open_runs(home, RunFilter(), False), TOKENS, tmp_path / "out", shard_size=50)
    rows = load_dataset(
        "parquet", data_files=str(tmp_path / "out" / "*.parquet"), cache_dir=str(tmp_path / "cache")
    )["train"]
    assert len(rows) == 120 and len(list((tmp_path / "out").iterdir())) == 3
    assert rows.features["input_ids"].feature.dtype == "int32"
    assert rows[7]["labels"][-2:] == [13, 14]


def test_runs_whose_tokens_are_not_all_there(runs: dict[str, Run]) -> None:
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    unequal = of_calls(called([question], answer, logprobs=[-0.5]))
    for run in (runs["redacted"], runs["imported"], runs["lost_call"], unequal):
        assert rows_of(run, 0) == ([], ("no_tokens",)), run.id
    cut = called([question], answer, "2", logprobs=[-0.5], finish_reason="cancelled")
    written = rows_of(of_calls(called([question], answer), cut), 0)
    assert len(written.records) == 1 and "no_tokens" in written.losses


def test_a_broken_prefix_makes_two_rows() -> None:
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    first, second = (
        called([question], answer, str(sampled[0]), prompt_token_ids=prompt, token_ids=sampled,
               logprobs=[-1.0])
        for prompt, sampled in (([1], [2]), ([1, 3], [4]))
    )  # fmt: skip
    rows = rows_of(of_calls(first, second), 0).records
    assert [list(row["input_ids"]) for row in rows] == [[1, 2], [1, 3, 4]]
    assert [list(row["labels"]) for row in rows] == [[IGNORED, 2], [IGNORED, IGNORED, 4]]
