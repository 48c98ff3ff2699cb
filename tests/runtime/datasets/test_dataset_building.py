"""Training sets: the same for the same runs, with a reason for each run that is not in them."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet
import pytest

from cray_agents.errors import BadInput, Corrupt, NewerFormat, NotFound
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import Event
from cray_agents.runtime.datasets.build import build_dataset, plan_dataset
from cray_agents.runtime.datasets.reader import list_datasets, read_dataset
from cray_agents.runtime.disk.checksums import with_crc
from cray_agents.runtime.disk.durable import sha256_file
from cray_agents.runtime.store import Store
from tests.support.datasets.dataset_runs import (
    build,
    call,
    details,
    made,
    reasons,
    rows,
    run_events,
    several,
    stored,
    task,
)

OUTAGE = {"type": "EngineUnavailable", "message": "gone", "infrastructure": True}
REDACTED = [{"kind": "email", "count": 1}]
LONG = "How many apples are left of a hundred when nine of them are eaten by wasps"


async def test_every_reason_is_counted(tmp_path: Path) -> None:
    hidden = call("hidden-c", [], [], logprobs=[], redacted=REDACTED)
    near = list(range(20, 60))
    events = several(
        run_events("good", [5, 6], task=task("a")),
        run_events("same", [5, 6], task=task("b")),
        run_events("long-ish", near, task=task("c")),
        run_events("nearly", [*near, 61], task=task("d")),
        run_events("low", [7], reward=0.5),
        run_events("unjudged", [8], reward=None),
        run_events("outage", [9], error=OUTAGE),
        run_events("kept-back", [10], task={**task("held", "holdout"), "input": LONG}),
        run_events("leaked", [10], task={**task("e"), "input": LONG.upper() + "?"}),
        run_events("silent", []),
        run_events("no-turn", calls=[]),
        run_events("unseen", calls=[call("unseen-c", [], [])]),
        run_events("unsure", calls=[call("unsure-c", [1], [11], logprobs=[])]),
        run_events("late", [12], call_ids=["not-there-yet"]),
        run_events("hidden", calls=[hidden]),
        run_events("foreign", calls=[], imported="atif"),
        run_events("endless", list(range(200))),
        run_events("second", [13], task=task("a"), attempt=1),
        run_events("third", [14], task=task("a"), attempt=2),
        run_events("other-loop", [15], loop="m"),
        run_events("other-iteration", [16], iteration=4),
    )
    recipe = {"loop": "l", "max_per_task": 2, "max_tokens": 100, "near_duplicates": 0.8}
    manifest, found = await build(tmp_path, events, **recipe)
    home = Home(tmp_path)
    assert manifest["rejected"] == {
        "contaminated": 1,
        "duplicate": 1,
        "empty": 2,
        "held_out": 1,
        "imported": 1,
        "infrastructure_error": 1,
        "low_reward": 1,
        "missing_call": 1,
        "near_duplicate": 1,
        "no_logprobs": 1,
        "no_reward": 1,
        "no_tokens": 1,
        "over_max_per_task": 1,
        "redacted": 1,
        "too_long": 1,
    }
    why = reasons(home, manifest["id"])
    assert {run for run in why if why[run] is None} == {
        "good",
        "second",
        "long-ish",
        "other-iteration",
    }
    assert (why["same"], why["third"], why["leaked"]) == (
        "duplicate",
        "over_max_per_task",
        "contaminated",
    )
    said = details(home, manifest["id"])
    assert said["same"] == "good" and str(said["nearly"]).startswith("long-ish (0.9")
    assert said["leaked"] == "equal to holdout task held"
    assert (said["endless"], said["hidden"]) == ("202 tokens", "email")
    assert manifest["considered_runs"] == len(why) == 20
    assert manifest["accepted_runs"] == len(found) == 4
    assert manifest["considered_runs"] == 4 + sum(manifest["rejected"].values())
    assert manifest["trained_tokens"] == sum(sum(row["loss_mask"]) for row in found) == 44
    assert manifest["tokens"] == sum(len(row["input_ids"]) for row in found)


def told(run_id: str, *calls: dict[str, Any]) -> list[Event]:
    """A rewarded run that nobody described."""
    return [event for event in run_events(run_id, calls=calls) if event.kind != "run"]


async def test_what_a_client_did_not_go_on_with_is_not_trained_on(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "2+2?"}]
    answers = [{"role": "assistant", "content": text} for text in ("3", "4")]
    more = [*asked, answers[1], {"role": "user", "content": "Sure?"}]
    cut: dict[str, Any] = {"messages": asked, "finish_reason": "cancelled"}
    events = several(
        told(
            "unsure",
            call("a", [1], [7, 8], logprobs=[-0.5], **cut),
            call("b", [1], [5], started=2.0, messages=asked),
        ),
        told(
            "sure",
            call("c", [2], [7, 8], **cut),
            call("d", [2], [5], started=2.0, messages=asked),
        ),
        told(
            "chosen",
            call("e", [3], [7], messages=asked, message=answers[0]),
            call("e-1", [3], [5], messages=asked, message=answers[1]),
            call("f", [3, 5, 4], [6], started=2.0, messages=more),
        ),
        told(
            "open",
            call("g", [4], [7], messages=asked, message=answers[0]),
            call("g-1", [4], [5], messages=asked, message=answers[1]),
        ),
        told(
            "stopped",
            call("h", [5], [7], messages=asked, message=answers[1]),
            call("i", [5, 7, 4], [6, 8], logprobs=[-0.5], started=2.0, messages=more,
                 finish_reason="cancelled"),
        ),
        told(
            "broken",
            call("j", [], [], messages=asked, finish_reason="error"),
        ),
        told(
            "half",
            call("k", [6], [7, 8], logprobs=[-0.5], messages=asked, finish_reason="cancelled"),
        ),
        told(
            "unknown",
            call("l", [7], [7], messages=asked, message=answers[1]),
            call("m", [7, 7, 4], [6, 8], logprobs=[-0.5], started=2.0, messages=more),
        ),
    )  # fmt: skip
    manifest, found = await build(tmp_path, events)
    assert {row["run_id"]: (row["input_ids"], row["loss_mask"]) for row in found} == {
        "unsure": ([1, 5], [0, 1]),
        "sure": ([2, 5], [0, 1]),
        "chosen": ([3, 5, 4, 6], [0, 1, 0, 1]),
        "stopped": ([5, 7], [0, 1]),
    }
    assert manifest["rejected"] == {"ambiguous_choices": 1, "no_tokens": 1, "no_logprobs": 2}
    said = details(Home(tmp_path), manifest["id"])
    assert said["open"] == "2 of g" and said["stopped"] == "without 1 cut-off turns"


async def test_a_broken_run_is_corrupt_and_does_not_stop_the_others(tmp_path: Path) -> None:
    home = Home(tmp_path)
    store = Store(home)
    await store.append(several(run_events("a", [5]), run_events("b", [6])))
    (segment,) = home.segments.glob("*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b'"token_ids":[6]', b'"token_ids":[9]'))
    manifest = build_dataset(store, home, DatasetRecipe())
    assert [row["run_id"] for row in rows(home, manifest["id"])] == ["a"]
    assert reasons(home, manifest["id"]) == {"a": None, "b": "corrupt"}
    assert details(home, manifest["id"])["b"]
    await store.close()


async def test_the_sample_says_where_it_comes_from(tmp_path: Path) -> None:
    events = run_events("a", task=task("t1"), iteration=2)
    manifest, (row,) = await build(tmp_path, events, loop="l", iterations=[2])
    assert (row["run_id"], row["task_id"], row["versions"]) == ("a", "t1", ["calc@3"])
    assert (row["input_ids"], row["loss_mask"]) == ([1, 2, 5, 6], [0, 0, 1, 1])
    assert (row["logprobs"], row["reward"]) == ([0, 0, -0.5, -0.5], 1.0)
    assert manifest["id"].startswith("ds-") and manifest["versions"] == {"calc@3": 2}
    assert read_dataset(Home(tmp_path), manifest["id"]) == manifest
    with pytest.raises(NotFound):
        read_dataset(Home(tmp_path), "ds-none")


async def test_a_swap_and_a_broken_prefix_in_one_run(tmp_path: Path) -> None:
    calls = [
        call("c1", [1, 2], [3], started=1.0),
        call("c2", [1, 2, 3, 4], [5], model="calc@4", started=2.0),
        call("c3", [1, 9], [6, 7], model="calc@4", started=3.0),
    ]
    manifest, (first, second) = await build(tmp_path, run_events("a", calls=calls))
    assert first["input_ids"] == [1, 2, 3, 4, 5]
    assert (first["versions"], first["version_index"]) == (["calc@3", "calc@4"], [-1, -1, 0, -1, 1])
    assert (second["input_ids"], second["version_index"]) == ([1, 9, 6, 7], [-1, -1, 0, 0])
    assert manifest["versions"] == {"calc@3": 1, "calc@4": 3}
    assert manifest["accepted_runs"] == 1 and manifest["samples"] == 2
    assert manifest["split_runs"] == 1


async def test_arrival_home_and_time_do_not_matter(tmp_path: Path) -> None:
    runs = [
        run_events(f"r{n}", [n, n + 1], task=task(f"t{n % 3}"), attempt=n, started=float(n))
        for n in range(6)
    ]
    shuffle = random.Random(1)
    homes, ids = [], set()
    for number in range(4):
        home = Home(tmp_path / str(number))
        for _ in range(2):  # two writers
            events = several(*runs)
            shuffle.shuffle(events)
            await stored(home.root, events if number % 2 else events[: len(events) // 2])
            await stored(home.root, events)
        manifest, _ = made(home, loop="l", iterations=None, validation=0.4)
        homes.append(home)
        ids.add(manifest["id"])
    (name,) = ids
    files = [
        {p.name: sha256_file(p) for p in home.dataset(name).iterdir() if p.suffix == ".parquet"}
        for home in homes
    ]
    assert files[0].keys() == {"runs.parquet", "train-00000.parquet", "validation-00000.parquet"}
    assert all(each == files[0] for each in files)
    cards = {(home.dataset(name) / "README.md").read_bytes() for home in homes}
    assert len(cards) == 1


async def test_building_again_is_finding_and_another_recipe_is_another_set(tmp_path: Path) -> None:
    home = await stored(tmp_path, several(run_events("a", [5]), run_events("b", [6])))
    first, _ = made(home)
    again, _ = made(home)
    fewer, found = made(home, rewards={"a": 0.0})
    assert first == again
    assert fewer["id"] != first["id"] and [row["run_id"] for row in found] == ["b"]
    assert [m["id"] for m in list_datasets(home).rows] == [fewer["id"], first["id"]]
    page = list_datasets(home, limit=1)
    assert page.has_more and page.rows[0]["id"] == fewer["id"]
    rest = list_datasets(home, after=fewer["id"])
    assert [m["id"] for m in rest.rows] == [first["id"]] and not rest.has_more
    same, _ = made(home, iterations=None, where={"loop": "l"})
    assert same["id"] != first["id"]  # another recipe, though with the same samples
    assert not [path for path in home.datasets.iterdir() if path.name.startswith(".")]


async def test_the_manifest_tells_every_file(tmp_path: Path) -> None:
    events = several(*(run_events(f"r{n}", [n]) for n in range(3)))
    manifest, _ = await build(tmp_path, events, tools=[{"type": "function"}])
    directory = Home(tmp_path).dataset(manifest["id"])
    assert {p.name for p in directory.iterdir()} == {"manifest.json", *manifest["files"]}
    for name, about in manifest["files"].items():
        assert about["sha256"] == sha256_file(directory / name)
        assert about["bytes"] == (directory / name).stat().st_size
    assert {n: about.get("rows") for n, about in manifest["files"].items()} == {
        "README.md": None,
        "recipe.json": None,
        "runs.parquet": 3,
        "train-00000.parquet": 3,
    }
    recipe = DatasetRecipe.model_validate(orjson.loads((directory / "recipe.json").read_bytes()))
    assert recipe.tools == [{"type": "function"}]


async def test_a_newer_format_is_refused_and_one_without_a_number_is_read(tmp_path: Path) -> None:
    home = await stored(tmp_path, run_events("a", [5]))
    manifest, _ = made(home)
    path = home.dataset(manifest["id"]) / "manifest.json"
    for found in (None, 2, "x"):
        record = {**manifest, "format": found} if found else {**manifest}
        record.pop("format" if found is None else "crc", None)
        path.write_bytes(with_crc(orjson.dumps(record)))
        if found is None:
            assert read_dataset(home, manifest["id"])["id"] == manifest["id"]
            continue
        error = NewerFormat if found == 2 else Corrupt
        with pytest.raises(error, match=r"has format 2,|no version"):
            read_dataset(home, manifest["id"])
        listed = list_datasets(home)
        assert not listed.rows and [row["id"] for row in listed.damaged] == [manifest["id"]]
        if found == 2:
            with pytest.raises(NewerFormat):
                made(home)
            assert path.exists(), "what a newer version wrote is not set aside"


async def test_drafts_that_nobody_writes_to_are_swept(tmp_path: Path) -> None:
    home = await stored(tmp_path, run_events("a", [5]))
    old, new = (home.datasets / f".building.draft_{name}" for name in ("old", "new"))
    for draft in (old, new):
        draft.mkdir(parents=True)
        (draft / "train-00000.parquet").write_bytes(b"half")
    for path in (old / "train-00000.parquet", old):
        os.utime(path, (1.0, 1.0))
    made(home)
    assert not old.exists() and new.exists()


async def test_balance_gives_every_group_the_same_weight(tmp_path: Path) -> None:
    levels = [1, 1, 1, 2]
    events = several(
        *(run_events(f"r{n}", [n], task=task(f"t{n}", level=x)) for n, x in enumerate(levels))
    )
    _, found = await build(tmp_path, events, balance_by="level")
    weights = [row["weight"] for row in found]
    assert sum(weights) / len(weights) == pytest.approx(1)
    assert sum(weights[:3]) == pytest.approx(weights[3])
    _, found = made(Home(tmp_path), balance_by="level", balance_power=1)
    assert [row["weight"] for row in found] == [1.0] * 4
    with pytest.raises(BadInput, match="'lvel'"):
        made(Home(tmp_path), balance_by="lvel")


async def test_a_validation_split_holds_whole_tasks(tmp_path: Path) -> None:
    events = several(*(run_events(f"r{n}", [n, n + 7], task=task(f"t{n % 20}")) for n in range(60)))
    manifest, train = await build(tmp_path, events, validation=0.3)
    apart = rows(Home(tmp_path), manifest["id"], "validation")
    ours, theirs = ({row["task_id"] for row in part} for part in (train, apart))
    assert ours and theirs and not ours & theirs and len(ours | theirs) == 20
    assert manifest["splits"]["validation"]["samples"] == len(apart) == 3 * len(theirs)
    assert manifest["samples"] == 60 and manifest["accepted_runs"] == 60
    less, _ = made(Home(tmp_path), validation=0.1)
    fewer = {row["task_id"] for row in rows(Home(tmp_path), less["id"], "validation")}
    assert fewer < theirs  # a task stays where it is when the fraction grows


async def test_where_and_iterations_choose_what_is_considered(tmp_path: Path) -> None:
    events = several(
        *(run_events(f"r{n}", [n], iteration=n, tags=[f"tag{n % 2}"]) for n in range(6))
    )
    home = await stored(tmp_path, events)
    manifest, found = made(home, iterations=[1, 2, 3, 3], where={"tags": ["tag1"]})
    assert [row["run_id"] for row in found] == ["r1", "r3"]
    assert manifest["considered_runs"] == 2
    same, _ = made(home, iterations=[3, 2, 1], where={"tags": ["tag1"]})
    assert same["id"] == manifest["id"]
    _, found = made(home, iterations=[1, 2], where={"iterations": [2, 5]})
    assert [row["run_id"] for row in found] == ["r2"]
    with pytest.raises(BadInput, match="no run is in both"):
        made(home, loop="l", where={"loop": "m"})


async def test_an_empty_set_says_why(tmp_path: Path) -> None:
    events = several(run_events("a", [5], reward=0.0), run_events("b", [6], reward=None))
    home = await stored(tmp_path, events)
    with pytest.raises(BadInput, match=r"2 considered \(low_reward 1, no_reward 1\)") as empty:
        made(home)
    assert empty.value.code == "empty_dataset"
    with pytest.raises(BadInput, match="all 1 samples fell to the validation split"):
        made(home, min_reward=0.0, validation=0.999999)
    with pytest.raises(BadInput, match="none match") as empty:
        made(home, iterations=[])
    assert empty.value.code == "empty_dataset"
    assert not [*home.datasets.iterdir()]


DEMONSTRATED = {"demonstrations": [[{"role": "assistant", "content": "a"}]], "tokenizer": "x"}


@pytest.mark.parametrize(
    ("recipe", "param"),
    [
        ({"split": "holdout"}, "split"),
        ({"min_margin": 0.1}, "min_margin"),
        ({"normalize": False}, "normalize"),
        ({"method": "grpo", "min_reward": 1}, "min_reward"),
        ({"method": "grpo", "best_of": 1}, "best_of"),
        ({"method": "grpo", "render": True, "tokenizer": "x"}, "render"),
        ({"method": "grpo", "demonstrations": [[]], "tokenizer": "x"}, "demonstrations"),
        ({"method": "dpo", "best_of": 2}, "best_of"),
        ({"method": "dpo", "normalize": False}, "normalize"),
        ({"method": "dpo", **DEMONSTRATED}, "demonstrations_rejected"),
        (
            {"method": "dpo", **DEMONSTRATED, "demonstrations_rejected": [{"role": "user"}]},
            "demonstrations_rejected",
        ),
        ({"method": "dpo", "demonstrations": [[]], "demonstrations_rejected": [{}]}, "tokenizer"),
        (
            {
                "method": "dpo",
                "tokenizer": "x",
                "demonstrations": [[]],
                "demonstrations_rejected": [{}],
            },
            "demonstrations",
        ),
        ({**DEMONSTRATED, "demonstrations_rejected": [{}]}, "demonstrations_rejected"),
        ({**DEMONSTRATED, "demonstrations_splits": ["train"] * 2}, "demonstrations_splits"),
        ({"max_uses": 1}, "max_uses"),
        ({"max_uses": 1, "loop": "l"}, "max_uses"),
        ({"step": 1}, "step"),
        ({"step": 1, "loop": "../l"}, "loop"),
        ({"balance_power": 0.5}, "balance_power"),
        ({"demonstrations": [[]]}, "tokenizer"),
        ({"demonstrations_tools": [[]]}, "demonstrations_tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_has_no_effect_is_refused_by_name(
    tmp_path: Path, recipe: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadInput) as refused:
        made(Home(tmp_path), **recipe)
    assert refused.value.param == param


async def test_a_plan_says_what_would_be_and_writes_nothing(tmp_path: Path) -> None:
    events = several(run_events("a", [5]), run_events("b", [6], reward=0.0))
    home = await stored(tmp_path, events)
    lines = []
    seen: list[tuple[int, int, str]] = []
    plan = plan_dataset(
        Store(home),
        home,
        DatasetRecipe(step=1, loop="l"),
        lambda *now: seen.append(now),
        lines.append,
    )
    assert not home.datasets.exists() and not home.loop("l").exists()
    assert [(line.run, line.reason) for line in lines] == [("a", None), ("b", "low_reward")]
    assert seen[-1] == (2, 2, "writing")
    manifest, _ = made(home, step=1, loop="l")
    assert plan == {name: manifest[name] for name in plan}
    nothing = plan_dataset(Store(home), home, DatasetRecipe(min_reward=2))
    assert (nothing["id"], nothing["samples"], nothing["rejected"]) == (None, 0, {"low_reward": 2})


async def test_many_runs_go_through_pages_and_shards(tmp_path: Path) -> None:
    events = several(
        *(run_events(f"r{n:04}", [n, n + 1], task=task(f"t{n % 7}"), attempt=n) for n in range(700))
    )
    manifest, found = await build(tmp_path, events)
    assert manifest["samples"] == len({tuple(row["input_ids"]) for row in found}) == 700
    order = [(row["task_id"], row["run_id"]) for row in found]
    assert order == sorted(order)
    lines = pyarrow.parquet.read_table(Home(tmp_path).dataset(manifest["id"]) / "runs.parquet")
    assert lines["run"].to_pylist() == [run for _, run in order]


def test_nothing_is_built_twice_by_builders_at_once(tmp_path: Path) -> None:
    async def go() -> list[dict[str, Any]]:
        home = await stored(tmp_path, several(*(run_events(f"r{n}", [n]) for n in range(50))))
        builds = (
            asyncio.to_thread(build_dataset, Store(home), home, DatasetRecipe()) for _ in range(4)
        )
        return await asyncio.gather(*builds)

    found = asyncio.run(go())
    assert all(manifest == found[0] for manifest in found)
    assert [path.name for path in Home(tmp_path).datasets.iterdir()] == [found[0]["id"]]
