"""Turns become sequences: what was sampled is trained on, and each token knows its version."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from cray_agents.records import ModelCall, WeightChange
from cray_agents.runtime.datasets.run_samples import (
    TokenTurn,
    is_shaped,
    merge_turns,
    temperature_of,
    turn_of,
)
from cray_agents.runtime.datasets.token_shards import SampleRow, ShardWriter, table_of


def turn(prompt: list[int], sampled: list[int], version: str = "m@1") -> TokenTurn:
    return TokenTurn(prompt, sampled, [-float(token) for token in sampled], version)


def test_turns_that_extend_each_other_are_one_sample() -> None:
    (sample,) = merge_turns([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5, 6], [7])])
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask == [0, 0, 1, 1, 0, 0, 1]
    assert sample.logprobs.tolist() == [0, 0, -3, -4, 0, 0, -7]
    assert sample.prompt.tolist() == [1, 2]
    assert (sample.trained, sample.by_version()) == (3, {"m@1": 3})


def test_a_swap_in_mid_answer_is_told_token_by_token() -> None:
    call = ModelCall(
        id="c",
        run_id="r",
        model="m@1",
        messages=[],
        message={},
        prompt_token_ids=[1, 2],
        token_ids=[3, 4, 5, 6],
        logprobs=[-1.0] * 4,
        seams=[WeightChange(at=1, model="m@2"), WeightChange(at=3, model="m@3")],
    )
    (sample,) = merge_turns([turn_of(call), turn([1, 2, 3, 4, 5, 6, 7], [8], "m@2")])
    assert sample.versions == ["m@1", "m@2", "m@3"]
    assert sample.version_index == [-1, -1, 0, 1, 1, 2, -1, 1]
    assert sample.by_span([5.0, 7.0]) == (0.0, 5.0, 5.0, 5.0, 0.0, 7.0)
    assert sample.shaped  # the trainer has no cache that older weights made


def test_how_a_sample_was_sampled() -> None:
    def called(prompt: list[int], sampled: list[int], **sampling: Any) -> TokenTurn:
        about = {"id": "c", "run_id": "r", "model": "m@1", "messages": [], "message": {}}
        return turn_of(
            ModelCall(
                **about,
                prompt_token_ids=prompt,
                token_ids=sampled,
                logprobs=[-1.0] * len(sampled),
                sampling=sampling,
            )
        )

    turns = [
        called([1], [2], temperature=0.7, seed=3),
        called([1, 2, 3], [4], temperature=0.7, top_p=1.0, stop=["x"], tool_choice="auto"),
        called([9], [8], temperature=0.7),
        called([9, 8, 7], [6]),  # vLLM's default is 1
        called([5], [4], temperature=1e-9, top_k=20),
        turn([3], [2]),  # as demonstrations are
    ]
    samples = merge_turns(turns)
    assert [(s.temperature, s.shaped) for s in samples] == [
        (0.7, False),
        (None, False),
        (0.0, True),
        (None, False),
    ]
    found = table_of([SampleRow(sample, "r", "t", 1.0) for sample in samples]).to_pylist()
    assert [(row["temperature"], row["shaped"]) for row in found] == [
        (sample.temperature, sample.shaped) for sample in samples
    ]


@pytest.mark.parametrize(
    ("sampling", "shaped"),
    [
        ({}, False),
        ({"max_tokens": 5, "n": 2, "parallel_tool_calls": True}, False),
        ({"top_p": None, "response_format": {"type": "text"}, "tool_choice": "none"}, False),
        ({"text": {"format": {"type": "text"}}}, False),
        ({"top_p": 0.9}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": {"5": -100}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "any"}}, True),
    ],
)
def test_options_that_shape_what_can_be_sampled(sampling: dict[str, Any], shaped: bool) -> None:
    assert is_shaped(sampling) is shaped


def test_temperatures_that_are_none() -> None:
    assert [temperature_of({"temperature": t}) for t in (None, 0, 2, "hot", math.nan)] == [
        *(1.0, 0.0, 2.0),
        *(None, None),
    ]


def test_a_table_says_the_same_as_the_samples() -> None:
    samples = merge_turns([turn([1, 2], [3]), turn([9], [8, 7], "m@2"), turn([9, 8, 7], [6])])
    made = [
        SampleRow(sample, f"r{n}", "t", 1.0, advantage=-0.5) for n, sample in enumerate(samples)
    ]
    found = table_of(made).to_pylist()
    assert [row["run_id"] for row in found] == ["r0", "r1"]
    for row, sample in zip(found, samples, strict=True):
        assert row["input_ids"] == sample.input_ids.tolist()
        assert row["logprobs"] == sample.logprobs.tolist()
        assert (row["loss_mask"], row["versions"]) == (sample.loss_mask, sample.versions)
        assert row["version_index"] == sample.version_index
        assert row["advantages"] == [-0.5 * mask for mask in sample.loss_mask]
        assert not np.signbit(row["advantages"][0])
        assert (row["pair"], row["chosen"], row["group"]) == (None, None, "")


def test_shards_are_bounded_and_keep_together_what_belongs_together(tmp_path: Path) -> None:
    (sample,) = merge_turns([turn([1, 2], [3])])
    writer = ShardWriter(tmp_path, "train", shard_rows=10, batch_rows=3)
    sizes = [4, 4, 4, 1, 12, 9]
    for number, size in enumerate(sizes):
        writer.add([SampleRow(sample, f"r{number}", "t", 1.0, group=str(number))] * size)
    files = writer.finish()
    assert files == {f"train-0000{n}.parquet": size for n, size in enumerate([8, 5, 10, 2, 9])}
    tables = [pyarrow.parquet.read_table(tmp_path / name) for name in files]
    groups = [table["group"].to_pylist() for table in tables]
    assert [group for shard in groups for group in shard] == [
        str(number) for number, size in enumerate(sizes) for _ in range(size)
    ]
    assert [
        str(tables[0].schema.field(n).type) for n in ("input_ids", "loss_mask", "logprobs")
    ] == ["list<element: int32>", "list<element: int8>", "list<element: float>"]
