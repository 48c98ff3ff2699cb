"""Runs as events, and datasets built from them over the real store."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import Event
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.datasets.reader import SplitName, dataset_runs, shards
from cray_agents.runtime.store import Store

Row = dict[str, Any]


def task(name: str, split: str = "train", **metadata: Any) -> dict[str, Any]:
    return {"input": f"task {name}", "id": name, "split": split, "metadata": metadata}


def call(
    call_id: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    model: str = "calc@3",
    started: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    return {
        "id": call_id,
        "run_id": "",
        "model": model,
        "messages": [],
        "message": {},
        "prompt_token_ids": list(prompt),
        "token_ids": list(tokens),
        "logprobs": [-0.5] * len(tokens),
        "started": started,
        **more,
    }


def run_events(
    run_id: str,
    tokens: Sequence[int] | None = None,
    *,
    reward: float | None = 1.0,
    calls: Sequence[dict[str, Any]] | None = None,
    call_ids: Sequence[str] | None = None,
    **more: Any,
) -> list[Event]:
    """A run of one call, correct unless told otherwise; pass `reward=None` for none."""
    if calls is None:
        calls = [call(f"{run_id}-c", [1, 2], [5, 6] if tokens is None else tokens)]
    turns = [{"call_id": name} for name in call_ids or [each["id"] for each in calls]]
    asked = more.get("task") or {}
    run = {
        "id": run_id,
        "agent": "calc",
        "model": "calc",
        "input": asked.get("input", "q"),
        "stop_reason": "completed",
        "loop": "l",
        "trajectory": {"turns": turns},
        **more,
    }
    events = [
        Event(id=each["id"], run_id=run_id, kind="call", body={**each, "run_id": run_id})
        for each in calls
    ]
    events.append(Event(id=f"{run_id}-r", run_id=run_id, kind="run", body=run))
    if reward is not None:
        body = {"name": "correct", "value": reward, "source": "function", "time": 1.0}
        events.append(Event(id=f"{run_id}-w", run_id=run_id, kind="reward", body=body))
    return events


def several(*runs: Iterable[Event]) -> list[Event]:
    return [event for run in runs for event in run]


async def stored(root: Path, events: Iterable[Event]) -> Home:
    """A home whose store has these events."""
    home = Home(root)
    store = Store(home)
    await store.append(list(events))
    await store.close()
    return home


def made(home: Home, **recipe: Any) -> tuple[dict[str, Any], list[Row]]:
    """A dataset's manifest and its training rows."""
    manifest = build_dataset(Store(home), home, DatasetRecipe.model_validate(recipe))
    return manifest, rows(home, manifest["id"])


async def build(
    root: Path, events: Iterable[Event], **recipe: Any
) -> tuple[dict[str, Any], list[Row]]:
    return made(await stored(root, events), **recipe)


def rows(home: Home, dataset_id: str, split: SplitName = "train") -> list[Row]:
    tables = [pyarrow.parquet.read_table(path) for path in shards(home, dataset_id, split)]
    return [row for table in tables for row in table.to_pylist()]


def reasons(home: Home, dataset_id: str) -> dict[str, str | None]:
    """Why each considered run is out; None: it is in."""
    return {line["run"]: line["reason"] for line in dataset_runs(home, dataset_id)}


def details(home: Home, dataset_id: str) -> dict[str, str | None]:
    return {line["run"]: line["detail"] for line in dataset_runs(home, dataset_id)}
