"""A step of a loop has one training set for ever, and no run is used more often than was said."""

import asyncio
import multiprocessing
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from cray_agents.errors import BadInput, Corrupt
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.store import Store
from tests.support.campaign import Campaign, kills
from tests.support.datasets.dataset_runs import made, reasons, run_events, several, stored, task
from tests.support.datasets.killed_builder import build_until

MOST_TOUCHES = 60  # of a build, about


def commits(home: Home) -> list[dict[str, Any]]:
    paths = (home.loop_datasets("l") / "commits").glob("*.json")
    return [
        orjson.loads(path.read_bytes()) for path in sorted(paths, key=lambda path: int(path.stem))
    ]


def used(home: Home) -> Counter[str]:
    """How often each run is in the loop's training sets."""
    return Counter(
        line["run"]
        for commit in commits(home)
        for line in dataset_runs(home, commit["dataset"])
        if line["accepted"]
    )


async def test_a_step_keeps_its_set(tmp_path: Path) -> None:
    home = await stored(tmp_path, several(run_events("a", [5]), run_events("b", [6])))
    first, _ = made(home, loop="l", step=1)
    await stored(tmp_path, run_events("c", [7]))
    again, _ = made(home, loop="l", step=1)
    assert again == first and first["accepted_runs"] == 2
    with pytest.raises(BadInput, match=f"has a training set, {first['id']}") as taken:
        made(home, loop="l", step=1, min_reward=0.5)
    assert (taken.value.code, taken.value.param) == ("step_taken", "step")
    later, _ = made(home, loop="l", step=2)
    assert (later["accepted_runs"], later["step"], later["loop"]) == (3, 2, "l")
    assert [(each["dataset"], each["step"]) for each in commits(home)][1:] == [(later["id"], 2)]
    other, _ = made(home, loop="l")
    assert len(commits(home)) == 2 and other["id"] not in (first["id"], later["id"])


async def test_a_run_is_used_as_often_as_was_said(tmp_path: Path) -> None:
    home = await stored(tmp_path, several(run_events("a", [5]), run_events("b", [6])))
    made(home, loop="l", step=1, max_uses=2)
    await stored(tmp_path, run_events("c", [7]))
    made(home, loop="l", step=2, max_uses=2)
    third, found = made(home, loop="l", step=3, max_uses=2)
    assert [row["run_id"] for row in found] == ["c"]
    assert reasons(home, third["id"]) == {"a": "used_up", "b": "used_up", "c": None}
    with pytest.raises(BadInput, match="used_up 3") as empty:
        made(home, loop="l", step=4, max_uses=2)
    assert empty.value.code == "empty_dataset"
    assert used(home) == {"a": 2, "b": 2, "c": 2}
    with pytest.raises(BadInput, match="used_up 3"):  # those of later steps count, too
        made(home, loop="l", step=0, max_uses=2)


def test_steps_that_are_built_at_once_do_not_miss_each_other(tmp_path: Path) -> None:
    async def go() -> Home:
        events = several(
            *(
                run_events(f"t{n}-{k}", [n, k], task=task(f"t{n}"), attempt=k)
                for n in range(5)
                for k in range(4)
            )
        )
        home = await stored(tmp_path, events)
        recipes = [
            DatasetRecipe(loop="l", step=step, max_uses=1, max_per_task=1) for step in (1, 2, 3, 4)
        ]
        builds = [asyncio.to_thread(build_dataset, Store(home), home, r) for r in recipes * 2]
        found = await asyncio.gather(*builds)
        assert [m["id"] for m in found[:4]] == [m["id"] for m in found[4:]]
        assert [m["step"] for m in found[:4]] == [1, 2, 3, 4]
        return home

    home = asyncio.run(go())
    assert sorted(commit["step"] for commit in commits(home)) == [1, 2, 3, 4]
    assert set(used(home).values()) == {1} and len(used(home)) == 20


async def test_a_set_that_was_removed_is_not_built_anew(tmp_path: Path) -> None:
    import shutil

    home = await stored(tmp_path, run_events("a", [5]))
    manifest, _ = made(home, loop="l", step=1)
    shutil.rmtree(home.dataset(manifest["id"]))
    with pytest.raises(Corrupt, match=f"{manifest['id']}, the training set of step 1"):
        made(home, loop="l", step=1)


@pytest.mark.slow
def test_kills_at_any_moment_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    Campaign(steps, kill_builders, check).run(tmp_path, kills(6))


@dataclass
class Steps:
    """A loop's training sets, by step, and how many runs they were built of."""

    home: Home
    count: int = 0
    done: dict[int, str] = field(default_factory=dict)


@contextmanager
def steps(folder: Path, chance: random.Random) -> Iterator[Steps]:
    yield Steps(Home(folder))


def recipe(step: int) -> dict[str, Any]:
    return {"loop": "l", "step": step, "max_uses": 1}


def kill_builders(steps: Steps, chance: random.Random, enough: int) -> Counter[str]:
    """Runs come in all the time; each step is built until it is done, then the next."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["tests.support.datasets.killed_builder"])
    root, step, killed = steps.home.root, 1, 0

    def add_run() -> None:
        runs = run_events(f"r{steps.count:05}", [steps.count, steps.count + 1])
        asyncio.run(stored(root, runs))
        steps.count += 1

    while killed < enough:
        add_run()
        touches = chance.randint(1, MOST_TOUCHES)
        builder = forking.Process(target=build_until, args=(str(root), recipe(step), touches))
        builder.start()
        builder.join()
        assert builder.exitcode in (0, -signal.SIGKILL)
        killed += builder.exitcode != 0
        # every third is let be done, also by another process than began it
        if builder.exitcode == 0 or killed % 3 == 0:
            steps.done[step] = made(steps.home, **recipe(step))[0]["id"]
            step += 1
    add_run()
    steps.done[step] = made(steps.home, **recipe(step))[0]["id"]
    return Counter(builder=killed)


def check(steps: Steps) -> None:
    home, done = steps.home, steps.done
    assert {commit["step"]: commit["dataset"] for commit in commits(home)} == done
    assert used(home) == {f"r{n:05}": 1 for n in range(steps.count)}
    names = {path.name for path in home.datasets.iterdir() if not path.name.startswith(".")}
    assert names == set(done.values())
    for step, name in done.items():
        assert made(home, **recipe(step))[0]["id"] == name
