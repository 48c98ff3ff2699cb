"""Differences of two datasets over HTTP, in the SDK and on the command line: each run by hand."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cray_agents.runtime.views.dataset_views import ChangedRun, DatasetDifferences
from cray_agents.trainers.models.seed_model import make_seed_model
from tests.runtime.views.test_run_views import get, model_with_tokenizer
from tests.support.datasets.dataset_runs import call, run_events, several, task
from tests.support.scripted_gateway import Gateway, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
RUNS = 8


def events(number: int) -> list[Any]:
    """Run n samples n + 1 tokens, and its reward is n / 7."""
    name = f"r{number}"
    sampled = [call(f"{name}-c", [104, 105], [*range(97, 98 + number)], model="calc@1")]
    return run_events(name, calls=sampled, task=task(f"t{number}"), reward=number / 7)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("differences")
    async with served(directory, model=model_with_tokenizer(directory / "model")) as gateway:
        await gateway.store.append(several(*(events(n) for n in range(RUNS - 1))))
        yield gateway


async def built(gateway: Gateway, **recipe: Any) -> str:
    status, made = await gateway.call("POST", "/v1/datasets", json={"loop": "l", **recipe})
    assert status == 200, made
    return str(made["id"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(gateway: Gateway) -> tuple[str, str]:
    """Runs 4 to 6; then, with a run more and one rewarded anew, 3 to 7 but for the longest."""
    one = await built(gateway, min_reward=4 / 7)
    await gateway.store.append(several(events(RUNS - 1)))
    status, _ = await gateway.call(
        "POST", "/v1/trajectories/r5/rewards", json={"name": "more", "value": 0.9}
    )
    assert status == 200
    return one, await built(gateway, min_reward=3 / 7, max_tokens=9)


@pytest.mark.slow
async def test_runs_moves_recipes_and_figures_differ_as_they_were_built(
    gateway: Gateway, pair: tuple[str, str]
) -> None:
    answer = await get(gateway, f"/v1/datasets/diff?a={pair[0]}&b={pair[1]}&bins=4")
    differences = DatasetDifferences.model_validate(answer)
    assert differences.runs.model_dump() == {
        "added": 1, "removed": 0, "kept": 2, "changed": 1, "out": 4,
    }  # fmt: skip
    moves = {(one.before, one.after): one.runs for one in differences.moves}
    assert moves == {("low_reward", "taken"): 1, ("not considered", "too_long"): 1}
    fields = {one.field: (one.one, one.other) for one in differences.recipe}
    assert fields == {"min_reward": (4 / 7, 3 / 7), "max_tokens": (None, 9)}
    assert (differences.one.accepted_runs, differences.other.accepted_runs) == (3, 4)
    assert differences.one.rejected == {"low_reward": 4}
    assert differences.other.rejected == {"low_reward": 3, "too_long": 1}
    tokens = differences.tokens
    assert (sum(tokens.one), sum(tokens.other)) == (3, 4)
    assert tokens.means == [2 + 6.0, 2 + 5.5]
    assert differences.versions == {"calc@1": [3, 4]}
    assert sum(differences.reward.one) == 7 and sum(differences.reward.other) == 8
    same = await get(gateway, f"/v1/datasets/diff?a={pair[0]}&b={pair[0]}")
    assert same["moves"] == same["recipe"] == [] and same["runs"]["kept"] == 3


async def test_the_runs_of_a_change_come_in_pages(gateway: Gateway, pair: tuple[str, str]) -> None:
    path = f"/v1/datasets/diff/runs?a={pair[0]}&b={pair[1]}"
    rows = [ChangedRun.model_validate(one) for one in (await get(gateway, path))["data"]]
    assert [(one.run, one.change, one.before, one.after) for one in rows] == [
        ("r3", "added", "low_reward", "taken"),
        ("r5", "changed", "taken", "taken"),
    ]
    assert rows[1].rewards == [pytest.approx(5 / 7), pytest.approx(5 / 7 + 0.9)] and rows[
        1
    ].samples == [1, 1]
    first = await get(gateway, f"{path}&change=out&limit=3")
    assert [one["run"] for one in first["data"]] == ["r0", "r1", "r2"] and first["has_more"]
    rest = await get(gateway, f"{path}&change=out&limit=3&after={first['last_id']}")
    assert [one["run"] for one in rest["data"]] == ["r7"] and not rest["has_more"]
    removed = await get(gateway, f"/v1/datasets/diff/runs?a={pair[1]}&b={pair[0]}&change=removed")
    assert [one["run"] for one in removed["data"]] == ["r3"]


@pytest.mark.slow
async def test_demonstrations_are_the_same_by_their_messages(
    gateway: Gateway, tmp_path: Path
) -> None:
    def chat(word: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": word}, {"role": "assistant", "content": f"{word}!"}]

    corpus = ["system user assistant a b c !"] * 3
    make_seed_model(tmp_path / "tokenizer", seed=0, corpus=corpus)
    tokenizer = str(tmp_path / "tokenizer")
    sets = [
        await built(gateway, loop=None, iterations=[], demonstrations=chats, tokenizer=tokenizer)
        for chats in ([chat("a"), chat("b")], [chat("b"), chat("c"), chat("b b")])
    ]
    answer = await get(gateway, f"/v1/datasets/diff?a={sets[0]}&b={sets[1]}")
    assert {name: answer["runs"][name] for name in ("added", "removed", "kept")} == {
        "added": 2, "removed": 1, "kept": 1,
    }  # fmt: skip


async def test_what_is_wrong_is_said(gateway: Gateway, pair: tuple[str, str]) -> None:
    one, other = pair
    for path, status, param in (
        (f"/v1/datasets/diff?a={one}", 400, "b"),
        (f"/v1/datasets/diff?a={one}&b=ds-0", 404, None),
        (f"/v1/datasets/diff?a=..%2Fx&b={one}", 404, "a"),
        (f"/v1/datasets/diff?a={one}&b={other}&bins=0", 400, "bins"),
        (f"/v1/datasets/diff/runs?a={one}&b={other}&change=odd", 400, "change"),
    ):
        got, answer = await gateway.call("GET", path)
        assert got == status, answer
        assert param in (None, answer["error"]["param"])
