"""Rewards that come later: over HTTP, by the openai client, from the command line."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from cray_agents import Agent, Platform, tool
from cray_agents.cli import app
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import BadInput, NotFound
from cray_agents.queries import DatasetRecipe
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_gateway import Gateway
from tests.support.scripted_platform import platform


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.fixture
async def run_id(gateway: Gateway) -> str:
    """A run of a plain client: one call."""
    return (await gateway.ask("hello")).run_id


async def give(gateway: Gateway, run_id: str, **body: Any) -> tuple[int, Any]:
    return await gateway.call("POST", f"/v1/trajectories/{run_id}/rewards", json=body)


async def test_feedback_is_on_the_run_and_the_newest_counts(gateway: Gateway, run_id: str) -> None:
    status, given = await give(gateway, run_id, value=1, comment="well said")
    assert status == 200
    assert {k: given[k] for k in ("name", "value", "source", "turn", "comment")} == {
        "name": "feedback", "value": 1.0, "source": "human", "turn": None, "comment": "well said",
    }  # fmt: skip
    await give(gateway, run_id, value=0.5, source="anna")
    await give(gateway, run_id, value=-2, name="tone", turn=0)
    await give(gateway, run_id, value=0.25)  # in the place of the first
    _, run = await gateway.call("GET", f"/v1/trajectories/{run_id}")
    rewards = [(r["name"], r["source"], r["turn"], r["value"]) for r in run["rewards"]]
    assert rewards == [
        ("feedback", "anna", None, 0.5), ("feedback", "human", None, 0.25),
        ("tone", "human", 0, -2.0),
    ]  # fmt: skip
    assert run["reward"] == -1.25
    _, page = await gateway.call("GET", "/v1/trajectories?view=summary&max_reward=-1")
    assert [row["id"] for row in page["data"]] == [run_id]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "value"),
        ({"value": "1"}, "value"),
        ({"value": True}, "value"),
        ({"value": None}, "value"),
        ({"value": 1, "turn": 1}, "turn"),
        ({"value": 1, "turn": -1}, "turn"),
        ({"value": 1, "turn": 0.5}, "turn"),
        ({"value": 1, "name": ""}, "name"),
        ({"value": 1, "source": ""}, "source"),
        ({"value": 1, "who": "anna"}, "who"),
    ],
)
async def test_what_is_no_feedback(gateway: Gateway, run_id: str, body: Any, param: str) -> None:
    status, refused = await give(gateway, run_id, **body)
    assert (status, refused["error"]["code"]) == (400, "invalid_value")
    assert refused["error"]["param"] == param
    assert (await give(gateway, "run_nobody", value=1))[0] == 404
    assert gateway.store.run(run_id).rewards == []


async def test_no_event_carries_a_reward_that_is_no_number(gateway: Gateway, run_id: str) -> None:
    path = f"/v1/trajectories/{run_id}/events"
    for wrong in ({"value": "inf"}, {"value": "nan"}, {"value": 1, "turn": -1}):
        body = {"name": "r", **wrong}
        run: Any = {"agent": "a", "model": "m", "input": "x", "stop_reason": "completed"}
        run["rewards"] = [body]
        for event in ({"kind": "reward", "body": body}, {"kind": "run", "body": run}):
            status, refused = await gateway.call("POST", path, json={"events": [event]})
            code = "invalid_value" if wrong["value"] == 1 else "reward_refused"
            assert (status, refused["error"]["code"]) == (400, code), event
    far = {"events": [{"kind": "run", "body": {
        "agent": "a", "model": "m", "input": "x", "stop_reason": "completed", "iteration": 2**70,
    }}]}  # fmt: skip
    status, refused = await gateway.call("POST", path, json=far)
    assert status == 400 and "body.iteration" in refused["error"]["message"]
    assert (await gateway.call("GET", "/v1/trajectories"))[0] == 200  # the index goes on
    huge = b'{"events": [{"kind": "reward", "body": {"name": "r", "value": 1e999}}]}'
    assert (await gateway.call("POST", path, data=huge))[0] == 400
    assert gateway.store.run(run_id).rewards == []


def test_from_python_and_any_openai_client(tmp_path: Path) -> None:
    """And the dataset that is built next is of what was said by then."""
    replies: list[Any] = [tool_call("add", a=2, b=2), "4", tool_call("add", a=2, b=2), "5"]

    async def go(site: Platform) -> None:
        agent = Agent(name="a", model="m", tools=[add], engine=site.engine())
        for name in ("run_good", "run_bad"):
            await agent.run("2 + 2?", run_id=name)
        given = await site.reward("run_good", 0.5, name="thumbs", who="anna", turn=1)
        assert (given.value, given.source, given.turn) == (0.5, "anna", 1)
        await site.reward("run_good", 1.0, name="thumbs", who="anna", turn=1, comment="yes")
        client = openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none")
        body = {"name": "thumbs", "value": -1, "comment": "no", "turn": 1}
        await client.post("/trajectories/run_bad/rewards", cast_to=object, body=body)
        await client.close()
        rewards = {run.id: run.reward async for run in site.runs()}
        assert rewards == {"run_good": 1.0, "run_bad": -1.0}
        built = await site.build_dataset(DatasetRecipe())
        assert (built["accepted_runs"], built["rejected"]) == (1, {"low_reward": 1})
        with pytest.raises(NotFound, match="no run 'run_none'"):
            await site.reward("run_none", 1.0)
        with pytest.raises(BadInput, match="run run_good has 2 turns, counted from 0"):
            await site.reward("run_good", 1.0, turn=2)
        with pytest.raises(BadInput, match="nan is no reward"):
            await site.reward("run_good", float("nan"))
        await site.close()

    with platform(tmp_path, ScriptedEngine(replies)) as site:
        asyncio.run(go(site))
        done = cli("run_bad", "2.5", "--name", "thumbs", home=tmp_path)  # beside the platform
        assert done.exit_code == 0

        async def look() -> None:
            assert (await site.run("run_bad")).reward == 1.5
            await site.close()

        asyncio.run(look())


def cli(*words: str, home: Path) -> Any:
    return CliRunner().invoke(app, ["runs", "reward", *words, "--home", str(home)])


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(site: Platform) -> None:
        agent = Agent(name="a", model="m", tools=[add], engine=site.engine())
        await agent.run("2 + 2?", run_id="run_a")
        await site.close()

    with platform(tmp_path, ScriptedEngine([tool_call("add", a=2, b=2), "4"])) as site:
        asyncio.run(go(site))
    (tmp_path / "cray-agents.toml").write_text('redact = ["email"]\n')
    monkeypatch.chdir(tmp_path)
    done = cli("run_a", "-1", "--name", "thumbs", "--comment", "ask ann@example.org", home=tmp_path)
    assert (done.exit_code, done.stdout) == (0, "run_a: thumbs = -1, by human\n")
    done = cli("run_a", "0.5", "--turn", "2", "--who", "anna", home=tmp_path)
    assert done.stdout == "run_a: feedback = 0.5 for turn 2, by anna\n"
    done = cli("run_a", "1", "--turn", "2", "--who", "anna", "--json", home=tmp_path)
    assert json.loads(done.stdout)["turn"] == 1
    printed = CliRunner().invoke(app, ["runs", "show", "run_a", "--home", str(tmp_path)]).stdout
    assert "reward  feedback = 1  (anna, turn 2)\n" in printed
    assert "reward  thumbs = -1  (human): ask [redacted:email]\n" in printed
    assert "reward  0 in all\n" in printed
    for words in (("run_none", "1"), ("run_a", "nan"), ("run_a", "1", "--turn", "3")):
        assert isinstance(cli(*words, home=tmp_path).exception, BadInput | NotFound)
    for mistaken in (["run_a", "good"], ["run_a"], ["run_a", "1", "--turn", "0"]):
        assert cli(*mistaken, home=tmp_path).exit_code == 2
