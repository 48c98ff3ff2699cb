"""Conversations to imitate: only what the assistant says is trained on."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import Trajectory
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.datasets.build_process import BuildProcess
from cray_agents.runtime.datasets.demonstrations import Renderer
from cray_agents.runtime.exports.formats.fine_tuning_lines import OPENAI_PREFERENCE
from cray_agents.runtime.exports.sources import DatasetRuns
from cray_agents.runtime.imports import import_file
from cray_agents.runtime.store import Store
from tests.support.datasets.dataset_runs import (
    build,
    details,
    made,
    reasons,
    rows,
    run_events,
    stored,
    task,
)

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
    from cray_agents.trainers.models.seed_model import make_seed_model

    directory = tmp_path_factory.mktemp("seed")
    corpus = ["system user assistant tool Use the calculator. What is 47 + 385? " + CALL] * 3
    make_seed_model(directory, seed=0, corpus=corpus)
    return directory


Decode = Callable[[list[int]], str]


@pytest.fixture(scope="module")
def decode(tokenizer: Path) -> Decode:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokenizer)).decode  # type: ignore[no-any-return]


@pytest.mark.slow
async def test_a_platform_builds_the_same_without_torch(tokenizer: Path, tmp_path: Path) -> None:
    """The process that builds for a gateway has none; this one has."""
    import torch  # noqa: F401

    recipe = DatasetRecipe(demonstrations=[CONVERSATION], iterations=[], tokenizer=str(tokenizer))
    homes = [Home(tmp_path / name) for name in ("here", "there")]
    made = build_dataset(Store(homes[0]), homes[0], recipe)
    Store(homes[1])
    process = BuildProcess(homes[1])
    try:
        assert (await process.build(recipe))["id"] == made["id"]  # a hash of the content
        (child,) = process._executor._processes
        loaded = Path(f"/proc/{child}/maps").read_text()
    finally:
        await process.close()
    assert "/tokenizers/" in loaded and "libtorch" not in loaded
    here, there = (home.dataset(made["id"]) / "train-00000.parquet" for home in homes)
    assert here.read_bytes() == there.read_bytes()


def test_demonstrations_train_only_what_the_assistant_says(tokenizer: Path, decode: Decode) -> None:
    (sample,) = Renderer(tokenizer).samples(CONVERSATION, TOOLS)
    whole = decode(sample.input_ids.tolist())
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


@pytest.mark.slow
def test_a_template_that_loops_is_given_up(tokenizer: Path, tmp_path: Path) -> None:
    """In whatever thread it is; what is rendered afterwards in that thread is not disturbed."""
    looping = tmp_path / "looping"
    shutil.copytree(tokenizer, looping)
    template = looping / "chat_template.jinja"
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    start = "{% if messages[0].content == 'loop' %}" + loops + "{% endif %}"
    template.write_text(start + template.read_text())
    renderer = Renderer(looping)
    loop = [{"role": "user", "content": "loop"}, {"role": "assistant", "content": "432"}]
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(BadInput, match="the chat template took more than 5 s"):
            executor.submit(renderer.samples, loop, []).result()
        assert executor.submit(renderer.samples, CONVERSATION, TOOLS).result()


async def test_demonstrations_and_runs_in_one_set(tmp_path: Path, tokenizer: Path) -> None:
    recipe = {
        "demonstrations": [CONVERSATION, CONVERSATION[:3]],
        "demonstrations_metadata": [{"level": 1}, {"level": 1}],
        "tools": TOOLS,
        "balance_by": "level",
    }
    events = run_events("a", task=task("t", level=2))
    manifest, rows = await build(tmp_path / "a", events, tokenizer=str(tokenizer), **recipe)
    assert (manifest["samples"], manifest["demonstrations"], manifest["accepted_runs"]) == (3, 2, 1)
    assert [row["weight"] for row in rows] == [0.75, 0.75, 1.5]
    assert [row["run_id"] for row in rows] == ["demonstration/0", "demonstration/1", "a"]
    assert [row["versions"] for row in rows] == [[], [], ["calc@3"]]
    assert set(rows[0]["version_index"]) == {-1}
    assert "demonstrations" not in manifest["recipe"]
    moved = tmp_path / "moved"
    tokenizer_copy = moved.with_name("tokenizer")
    tokenizer_copy.symlink_to(tokenizer)
    again, _ = await build(moved, events, tokenizer=str(tokenizer_copy), **recipe)
    assert again["id"] == manifest["id"]
    with pytest.raises(BadInput, match="tokenizer"):
        await build(moved, events, **recipe)
    with pytest.raises(BadInput, match="no tokenizer can be read"):
        await build(moved, events, tokenizer=str(tmp_path), **recipe)


async def test_what_samples_lack_is_counted(tmp_path: Path, tokenizer: Path) -> None:
    thought = [*asks("38?", "3")[:1], {**asks("", "3")[1], "reasoning": "I think."}]
    events = run_events("forged", tags=["control-tokens"])
    manifest, _ = await build(
        tmp_path, events, tokenizer=str(tokenizer), demonstrations=[thought, asks("47?", "4")]
    )
    border = "the border between contents and control tokens"
    assert manifest["losses"] == {border: 1, "thoughts of answers": 1}
    said = details(Home(tmp_path), manifest["id"])
    assert said["demonstration/0"] == "thoughts of answers" and said["forged"] == border
    assert said["demonstration/1"] is None


def asks(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


async def test_demonstrated_pairs(tmp_path: Path, tokenizer: Path, decode: Decode) -> None:
    home = await stored(tmp_path, [])
    wrong = {"role": "assistant", "content": "385"}
    recipe: dict[str, Any] = {
        "method": "dpo",
        "tokenizer": str(tokenizer),
        "tools": TOOLS,
        "demonstrations": [CONVERSATION, asks("38?", "3"), CONVERSATION, asks("47?", "4")],
        "demonstrations_rejected": [wrong, {**wrong, "content": "3"}, wrong, wrong],
    }
    manifest, found = made(home, **recipe)
    assert manifest["rejected_demonstrations"] == {"duplicate": 1, "no_pair": 1}
    assert (manifest["demonstrations"], manifest["samples"]) == (2, 4)
    assert [(row["run_id"], row["pair"], row["chosen"]) for row in found] == [
        ("demonstration/0", "demonstration/0", True),
        ("demonstration/0/rejected", "demonstration/0", False),
        ("demonstration/3", "demonstration/3", True),
        ("demonstration/3/rejected", "demonstration/3", False),
    ]
    trained = [
        decode([t for t, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask])
        for row in found[:2]
    ]
    assert trained == ["432<|im_end|>", "385<|im_end|>"]  # the call is context here
    better, worse = ([t for t, m in zip(r["input_ids"], r["loss_mask"], strict=True) if not m]
                     for r in found[:2])  # fmt: skip
    assert better == worse
    assert why(home, manifest["id"]) == [None, "no_pair", "duplicate", None]
    exported = list(openai_pairs(home, manifest["id"]))
    assert exported[1] == {
        "input": {"messages": asks("47?", "4")[:1], "tools": TOOLS},
        "preferred_output": asks("47?", "4")[1:],
        "non_preferred_output": [wrong],
    }


def why(home: Home, dataset: str) -> list[str | None]:
    return list(reasons(home, dataset).values())


def openai_pairs(home: Home, dataset: str) -> Iterator[dict[str, Any]]:
    """What `export --format openai-preference` writes of a dataset."""
    for item in DatasetRuns(Store(home), home, dataset, pairs=True).items():
        better, worse = item.runs
        assert OPENAI_PREFERENCE.write_pair is not None
        yield from OPENAI_PREFERENCE.write_pair(better, worse).records


async def test_demonstrations_may_say_their_split(tmp_path: Path, tokenizer: Path) -> None:
    home = await stored(tmp_path, [])
    manifest, found = made(
        home,
        tokenizer=str(tokenizer),
        demonstrations=[asks("38?", "3"), asks("47?", "4"), asks("38?", "3")],
        demonstrations_splits=["train", "validation", "validation"],
        validation=0.999,  # of tasks
    )
    assert [row["run_id"] for row in found] == ["demonstration/0"]
    held = rows(home, manifest["id"], "validation")
    assert [row["run_id"] for row in held] == ["demonstration/1"]
    assert why(home, manifest["id"]) == [None, None, "duplicate"]  # of what is trained on


async def test_demonstrations_that_are_left_out(tmp_path: Path, tokenizer: Path) -> None:
    asked = [{"role": "user", "content": "What is the TEST?"}, CONVERSATION[-1]]
    long = [{"role": "user", "content": "What is 47 + 385? " * 50}, CONVERSATION[-1]]
    events = run_events("held", task={**task("h", "holdout"), "input": "what is the test"})
    manifest, rows = await build(
        tmp_path,
        events,
        demonstrations=[CONVERSATION, CONVERSATION, asked, long, [*asks("Hi", "Hello!"), *asked]],
        tokenizer=str(tokenizer),
        tools=TOOLS,
        max_tokens=400,
    )
    assert manifest["rejected_demonstrations"] == {"contaminated": 2, "duplicate": 1, "too_long": 1}
    assert (manifest["demonstrations"], manifest["rejected"]) == (1, {"held_out": 1})
    said = details(Home(tmp_path), manifest["id"])
    assert said["demonstration/1"] == "demonstration/0"
    assert said["demonstration/2"] == said["demonstration/4"] == "equal to holdout task h"
    assert len(rows) == 1


async def test_imported_runs_are_rendered_if_that_is_asked(
    tmp_path: Path, tokenizer: Path, decode: Decode
) -> None:
    trajectory = Trajectory(messages=CONVERSATION, tools=TOOLS).model_dump()
    broken = Trajectory(messages=CONVERSATION[:2]).model_dump()
    events = [
        *run_events("kept", calls=[], imported="openai", trajectory=trajectory),
        *run_events("broken", calls=[], imported="openai", trajectory=broken),
        *run_events("ours", [7]),
    ]
    home = await stored(tmp_path, events)
    manifest, rows = made(home)
    assert reasons(home, manifest["id"]) == {"kept": "imported", "broken": "imported", "ours": None}
    manifest, rows = made(home, render=True, tokenizer=str(tokenizer))
    found = reasons(home, manifest["id"])
    assert found == {"kept": None, "broken": "not_renderable", "ours": None}
    kept = next(row for row in rows if row["run_id"] == "kept")
    assert decode(kept["input_ids"]).endswith("432<|im_end|>")
    with pytest.raises(BadInput, match="render needs a tokenizer"):
        made(home, render=True)


async def test_of_an_imported_preference_only_the_outputs_are_trained_on(
    tmp_path: Path, tokenizer: Path, decode: Decode
) -> None:
    home, file = Home(tmp_path / "home"), tmp_path / "pairs.jsonl"
    preference = {
        "input": {"messages": [*asks("47?", "4"), *asks("385?", "3")[:1]]},
        "preferred_output": asks("", "385")[1:],
        "non_preferred_output": asks("", "38")[1:],
    }
    file.write_text(json.dumps(preference))
    store = Store(home)
    await import_file(store, file, "openai")
    await store.close()
    _, found = made(home, method="kto", render=True, tokenizer=str(tokenizer))
    trained = {
        row["chosen"]: decode(
            [t for t, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        )
        for row in found
    }
    assert trained == {True: "385<|im_end|>", False: "38<|im_end|>"}
