"""Training sets: what was sampled and nothing else, the same for the same runs, with reasons."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from pydantic import ValidationError

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.records import DatasetRecipe, Event, Sample
from cray_agents.runtime.datasets import build_dataset, read_dataset
from cray_agents.runtime.demonstrations import Renderer
from cray_agents.runtime.samples import TokenTurn, merge_turns
from cray_agents.runtime.store import Store


def turn(prompt: list[int], sampled: list[int]) -> TokenTurn:
    return TokenTurn(prompt, sampled, [-float(token) for token in sampled])


def test_turns_that_extend_each_other_are_one_sample() -> None:
    (sample,) = merge_turns([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5, 6], [7])])
    assert sample.input_ids == [1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask == [0, 0, 1, 1, 0, 0, 1]
    assert sample.logprobs == [0, 0, -3, -4, 0, 0, -7]


def test_a_broken_prefix_starts_a_new_sample() -> None:
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 3, 9], [7]), turn([1, 2, 3, 9, 7, 8], [5])]
    first, second = merge_turns(turns)
    assert (first.input_ids, first.loss_mask) == ([1, 2, 3, 4], [0, 0, 1, 1])
    assert second.input_ids == [1, 2, 3, 9, 7, 8, 5]
    assert second.loss_mask == [0, 0, 0, 0, 1, 0, 1]


def run_events(run_id: str, tokens: list[int] | None = None, **more: Any) -> list[Event]:
    """A run of one call, correct unless told otherwise; pass `reward=None` for none."""
    reward = more.pop("reward", 1.0)
    tokens = [5, 6] if tokens is None else tokens
    call = {
        "id": f"{run_id}-c",
        "run_id": run_id,
        "model": "calc@3",
        "messages": [],
        "message": {},
        "prompt_token_ids": [1, 2],
        "token_ids": tokens,
        "logprobs": more.pop("logprobs", [-0.5] * len(tokens)),
        "started": 1.0,
    }
    run = {
        "id": run_id,
        "agent": "calc",
        "model": "calc",
        "input": "q",
        "stop_reason": "completed",
        "loop": "l",
        "trajectory": {"turns": [{"call_id": more.pop("call_id", call["id"])}]},
        **more,
    }
    events = [
        Event(id=f"{run_id}-c", run_id=run_id, kind="call", body=call),
        Event(id=f"{run_id}-r", run_id=run_id, kind="run", body=run),
    ]
    if reward is not None:
        body = {"name": "correct", "value": reward, "time": 1.0}
        events.append(Event(id=f"{run_id}-w", run_id=run_id, kind="reward", body=body))
    return events


def task(name: str, split: str = "train", **metadata: Any) -> dict[str, Any]:
    return {"input": name, "id": name, "split": split, "metadata": metadata}


async def build(
    root: Path, events: Iterable[Event], **recipe: Any
) -> tuple[dict[str, Any], list[Sample]]:
    home = Home(root)
    store = Store(home)
    await store.append(list(events))
    manifest = build_dataset(store, home, DatasetRecipe(**recipe))
    await store.close()
    return manifest, samples(home, manifest["id"])


def samples(home: Home, dataset_id: str) -> list[Sample]:
    table = pyarrow.parquet.read_table(home.dataset(dataset_id) / "samples.parquet")
    assert [str(table.schema.field(n).type) for n in ("input_ids", "loss_mask", "logprobs")] == [
        "list<element: int32>",
        "list<element: int8>",
        "list<element: float>",
    ]
    return [Sample(**row) for row in table.to_pylist()]


async def test_every_reason_is_counted(tmp_path: Path) -> None:
    outage = {"type": "EngineUnavailable", "message": "gone", "infrastructure": True}
    events = [
        *run_events("good", [5, 6], task=task("t1")),
        *run_events("same", [5, 6], task=task("t3")),
        *run_events("low", [7], reward=0.5),
        *run_events("unjudged", [8], reward=None),
        *run_events("outage", [9], error=outage),
        *run_events("kept-back", [10], task=task("t2", "holdout")),
        *run_events("silent", []),
        *run_events("unsure", [11], logprobs=[]),
        *run_events("late", [12], call_id="not-there-yet"),
        *run_events("second-of-t1", [13], task=task("t1"), attempt=1),
        *run_events("other-loop", [14], loop="m"),
        *run_events("other-generation", [15], generation=4),
    ]
    manifest, made = await build(tmp_path, events, loop="l", max_per_task=1)
    assert manifest["rejected"] == {
        "duplicate": 1,
        "held_out": 1,
        "infrastructure_error": 1,
        "low_reward": 1,
        "missing_call": 1,
        "no_logprobs": 1,
        "no_reward": 1,
        "no_tokens": 1,
        "over_max_per_task": 1,
    }
    reasons = {line["run"]: line["reason"] for line in manifest["runs"]}
    assert {run for run in reasons if reasons[run] is None} == {"good", "other-generation"}
    assert (reasons["same"], reasons["second-of-t1"]) == ("duplicate", "over_max_per_task")
    assert manifest["considered_runs"] == 11 and manifest["accepted_runs"] == len(made) == 2
    assert manifest["trained_tokens"] == sum(sum(s.loss_mask) for s in made) == 3
    assert manifest["tokens"] == 7


async def test_the_sample_says_where_it_comes_from(tmp_path: Path) -> None:
    events = run_events("a", task=task("t1"), generation=2)
    manifest, (made,) = await build(tmp_path, events, loop="l", generations=[2])
    assert (made.run_id, made.task_id, made.version, made.reward) == ("a", "t1", "calc@3", 1.0)
    assert (made.input_ids, made.loss_mask) == ([1, 2, 5, 6], [0, 0, 1, 1])
    assert made.logprobs == [0, 0, -0.5, -0.5]
    assert manifest["id"].startswith("ds-")
    assert read_dataset(Home(tmp_path), manifest["id"]) == manifest
    with pytest.raises(NotFound):
        read_dataset(Home(tmp_path), "ds-none")


async def test_the_order_of_arrival_does_not_matter(tmp_path: Path) -> None:
    runs = [run_events(f"r{n}", [n, n + 1], task=task(f"t{n}")) for n in range(3)]
    made = []
    for number, order in enumerate(itertools.permutations(runs)):
        events = [event for run in order for event in run]
        made.append(await build(tmp_path / str(number), events, loop="l", generations=None))
    assert len({manifest["id"] for manifest, _ in made}) == 1
    assert len({manifest["files"]["samples.parquet"] for manifest, _ in made}) == 1
    assert all(found == made[0][1] for _, found in made)


async def test_building_again_is_finding_and_another_recipe_is_another_set(tmp_path: Path) -> None:
    events = [*run_events("a", [5]), *run_events("b", [6])]
    first, _ = await build(tmp_path, events)
    again, _ = await build(tmp_path, events)
    fewer, made = await build(tmp_path, events, rewards={"a": 0.0})
    assert first == again
    assert fewer["id"] != first["id"] and [s.run_id for s in made] == ["b"]
    assert len(list((tmp_path / "datasets").iterdir())) == 2


async def test_balance_gives_every_group_the_same_weight(tmp_path: Path) -> None:
    levels = [1, 1, 1, 2]
    events = [
        event
        for n, level in enumerate(levels)
        for event in run_events(f"r{n}", [n], task=task(f"t{n}", level=level))
    ]
    _, made = await build(tmp_path, events, balance_by="level")
    weights = [sample.weight for sample in made]
    assert sum(weights) / len(weights) == pytest.approx(1)
    assert sum(weights[:3]) == pytest.approx(weights[3])
    with pytest.raises(BadInput, match="'lvel'"):
        await build(tmp_path, events, balance_by="lvel")


async def test_an_empty_set_says_why(tmp_path: Path) -> None:
    events = [*run_events("a", [5], reward=0.0), *run_events("b", [6], reward=None)]
    with pytest.raises(BadInput, match="low_reward 1, no_reward 1") as empty:
        await build(tmp_path, events)
    assert empty.value.code == "empty_dataset"
    with pytest.raises(BadInput, match="holdout"):
        await build(tmp_path, events, split="holdout")
    with pytest.raises(ValidationError):
        DatasetRecipe.model_validate({"min_rewrd": 1})


CALL = '{"expression": "47 + 385"}'
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the calculator."},
    {"role": "user", "content": "What is 47 + 385?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "calculator", "arguments": CALL},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "432"},
    {"role": "assistant", "content": "432"},
]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cray_agents.trainers.seed_model import make_seed_model

    directory = tmp_path_factory.mktemp("seed")
    corpus = ["system user assistant tool Use the calculator. What is 47 + 385? " + CALL] * 3
    make_seed_model(directory, seed=0, corpus=corpus)
    return directory


Decode = Callable[[list[int]], str]


@pytest.fixture(scope="module")
def decode(tokenizer: Path) -> Decode:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokenizer)).decode  # type: ignore[no-any-return]


def test_demonstrations_train_only_what_the_assistant_says(tokenizer: Path, decode: Decode) -> None:
    (sample,) = Renderer(tokenizer).samples(CONVERSATION, TOOLS)
    whole = decode(sample.input_ids)
    assert whole == (
        "<|im_start|>system\nUse the calculator.\ncalculator(expression)<|im_end|>\n"
        "<|im_start|>user\nWhat is 47 + 385?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": '
        f"{CALL}}}\n</tool_call><|im_end|>\n"
        "<|im_start|>tool\n432<|im_end|>\n"
        "<|im_start|>assistant\n432<|im_end|>"
    )
    pairs = zip(sample.input_ids, sample.loss_mask, strict=True)
    trained = decode([token for token, mask in pairs if mask])
    assert trained == (
        f'<tool_call>\n{{"name": "calculator", "arguments": {CALL}}}\n</tool_call><|im_end|>'
        "432<|im_end|>"
    )


async def test_demonstrations_and_runs_in_one_set(tmp_path: Path, tokenizer: Path) -> None:
    recipe = {
        "demonstrations": [CONVERSATION, CONVERSATION[:3]],
        "demonstrations_metadata": [{"level": 1}, {"level": 1}],
        "tools": TOOLS,
        "balance_by": "level",
    }
    events = run_events("a", task=task("t", level=2))
    manifest, made = await build(tmp_path / "a", events, tokenizer=str(tokenizer), **recipe)
    assert (manifest["samples"], manifest["demonstrations"], manifest["accepted_runs"]) == (3, 2, 1)
    assert [s.weight for s in made] == [0.75, 0.75, 1.5]
    moved = tmp_path / "moved"
    tokenizer_copy = moved.with_name("tokenizer")
    tokenizer_copy.symlink_to(tokenizer)
    again, _ = await build(moved, events, tokenizer=str(tokenizer_copy), **recipe)
    assert again["id"] == manifest["id"]
    with pytest.raises(BadInput, match="tokenizer"):
        await build(moved, events, **recipe)
    with pytest.raises(BadInput, match="no tokenizer can be read"):
        await build(moved, events, tokenizer=str(tmp_path), **recipe)
