"""Evaluation of versions without a loop: its figures, its records, its ends."""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from cray_agents import Agent, Evaluation, OutsideModel, Run, Task, TaskSet, evaluate_sync
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.agent.user_code import wait_for
from cray_agents.config.settings import PriceSettings
from cray_agents.errors import BadInput, EngineUnavailable, NotFound, SwapError
from cray_agents.loop import rollouts
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunFilter, RunQuery
from cray_agents.runtime.accounting.ledger import LedgerFile, LedgerLine
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.bare_models import bare_model
from tests.support.command_line import cli, refused
from tests.support.scripted_platform import platform
from tests.support.waiting import wait_until

#: How many of four attempts pass, by version and task.
PASSED = {
    "m@1": {"a0": 2, "a1": 0, "a2": 4, "b0": 0, "b1": 1, "b2": 0},
    "m@2": {"a0": 4, "a1": 1, "a2": 4, "b0": 0, "b1": 0},  # b2: the infrastructure fails it
}
AGENT = Agent("clerk", model="m", temperature=1.0)
WORKED = Agent("clerk", model="m", environment=WorkerEnvironment("theirs"))
OUTSIDE_MODEL = OutsideModel(model="o", base_url="http://x", prompt_price=0, sampled_price=0)
TASKS = TaskSet([Task(input=name, metadata={"kind": name[0]}) for name in PASSED["m@1"]])


def passed(run: Run) -> bool:
    return run.attempt < PASSED[run.model][run.input]


def answer(request: dict[str, Any], version: str) -> Any:
    said = request["messages"][-1]["content"]
    return said if said in PASSED[version] else SwapError("it will not")


@pytest.mark.slow
def test_two_versions_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "RETRIES", 1)
    engine = ScriptedEngine(answer)
    settings: dict[str, Any] = {"models": ["m", "m@2"], "attempts": 4, "by": "kind"}
    with platform(tmp_path / "home", engine) as where:
        arguments = (AGENT, TASKS, [passed])
        with pytest.raises(NotFound, match="m@2"):
            evaluate_sync(*arguments, **settings, platform=where)
        assert engine.requests == []
        add_version(where, tmp_path)
        found = evaluate_sync(*arguments, **settings, platform=where)
        wait_until(lambda: engine.version == "m@1")  # the promoted version is served again
        first, second = found.models["m@1"], found.models["m@2"]
        assert first.mean.value == pytest.approx((0.5 + 0 + 1 + 0 + 0.25 + 0) / 6)
        assert first.pass_at[2].value == pytest.approx((5 / 6 + 0 + 1 + 0 + 0.5 + 0) / 6)
        assert first.by["a"].mean.value == pytest.approx(0.5) and first.by["b"].mean.tasks == 3
        assert (first.missing, second.missing, second.runs) == (0, 4, 20)
        assert second.mean.value == pytest.approx((1 + 0.25 + 1 + 0 + 0) / 5)
        assert second.errors == {"EngineError": 4}
        (difference,) = found.comparisons
        assert difference.difference.value == pytest.approx((0.5 + 0.25 + 0 + 0 - 0.25) / 5)
        assert (difference.wins, difference.losses, difference.ties) == (2, 1, 2)
        assert (difference.left_out, difference.missing, difference.p) == (1, 4, 0.75)
        # asked again: what the infrastructure failed alone, also with more attempts and tasks
        engine.requests.clear()
        assert evaluate_sync(*arguments, **settings, platform=where) == found
        assert {said(request) for request in engine.requests} == {"b2"}
        engine.requests.clear()
        evaluate_sync(AGENT, TASKS[:2], [passed], models="m@1", attempts=5, platform=where)
        assert Counter(map(said, engine.requests)) == {"a0": 1, "a1": 1}
        greedy = evaluate_sync(*arguments, temperature=0, platform=where)
        assert greedy.loop != found.loop and greedy.attempts == 1
        assert {request["temperature"] for request in engine.requests[-6:]} == {0}
        # train tasks, and no training set takes their runs
        recipe = DatasetRecipe(where=RunFilter(model="m@1"))
        with pytest.raises(BadInput, match=r"32 considered \(held_out 32\)"):
            wait_for(where.build_dataset(recipe))
    runs = Store(Home(tmp_path / "home")).runs(RunQuery(loop=found.loop, model="m@1"))
    assert {run.task.split for run in runs} == {"train"}
    assert all(run.tags == ["evaluation"] for run in runs) and len(runs) == 26


def said(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"])


def add_version(where: Any, folder: Path) -> None:
    wait_for(where.register("m", str(bare_model(folder / "second", b"other"))))


@pytest.mark.slow
def test_an_outside_model_stands_beside_a_version_with_what_each_costs(tmp_path: Path) -> None:
    (tmp_path / "e.py").write_text(OUTSIDE)
    prices = PriceSettings(core_hour=2.0, currency="EUR")
    inside = ScriptedEngine(lambda request, _: "7")
    outside = ScriptedEngine(lambda request, _: said(request))
    with (
        platform(tmp_path / "other", outside, name="big") as elsewhere,
        platform(tmp_path / "home", inside, prices=prices) as where,
    ):
        words = ["eval", "e.py", "--url", where.url]
        told: dict[str, Any] = {"cwd": tmp_path, "OTHER": elsewhere.url}
        first = json.loads(cli(*words, "--json", **told).stdout)
        name = f"{elsewhere.url.partition('//')[2]}#big"  # the same model elsewhere is another one
        ours, theirs = first["models"]["m@1"], first["models"][name]
        assert ours["cost"] is None, "the account does not reach to these runs yet"
        assert ours["mean"]["value"] == pytest.approx(1 / 30) and theirs["mean"]["value"] == 1
        assert first["currency"] == "EUR" and theirs["seconds"] > 0
        (run,) = Store(Home(tmp_path / "home")).runs(RunQuery(model=name, limit=1))
        usage = wait_for(elsewhere.views.get("/trajectories/stats", by="model"))["data"][0]
        tokens = 2e-6 * usage["prompt_tokens"] + 8e-6 * usage["sampled_tokens"]
        assert theirs["cost"] == pytest.approx(tokens / 30) and run.cost and not run.calls
        place = {"kind": "replica", "holder": "replica-0", "what": "m@1", "node": "a", "cores": 4}
        now = time.time()
        lines = [(now - 60, "hold", 0.0), (now, "busy", 36.0), (now, "served", 0.0)]
        file = LedgerFile(Home(tmp_path / "home").ledger, "w")
        file.write([LedgerLine(time=at, event=event, seconds=busy, state="serving", **place)
                    for at, event, busy in lines])  # fmt: skip
        file.close()
        asked = len(inside.requests), len(outside.requests)
        again = json.loads(cli(*words, "--json", **told).stdout)
        assert asked == (len(inside.requests), len(outside.requests)), "all is on record"
        cost = again["models"]["m@1"]["cost"]  # less where an hour begins meanwhile
        assert 0 < cost <= 1.01 * 4 * 36 / 3600 * 2 / 30
        shown = cli(*words, **told).stdout
        assert f"{cost:.3g} EUR" in shown and "big" in shown and "needs [prices]" not in shown
        rows = wait_for(where.views.get("/evaluations"))["data"]
        assert [row["model"] for row in rows] == [name, "m@1"]
        assert rows[1]["cost"] == pytest.approx(cost, rel=0.01)
        assert rows[1]["success"]["low"] == pytest.approx(ours["mean"]["low"])
        for given, why in (
            ("2", "sampled_price"),
            ("-1, sampled_price=1", "greater than or equal"),
        ):
            (tmp_path / "bad.py").write_text(OUTSIDE.replace("2, sampled_price=8", given))
            refused(cli("eval", "bad.py", *words[2:], **told), "OutsideModel", why)


def test_an_outside_server_that_takes_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal is no failure of the model, and it is sent no key of ours."""
    monkeypatch.setattr(rollouts, "RETRIES", 0)
    monkeypatch.setenv("CRAY_AGENTS_API_KEY", "sk-of-the-platform")
    keys = list[str | None]()

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            keys.append(self.headers["authorization"])
            body = b'{"error": {"message": "this model has no temperature", "code": "bad"}}'
            self.send_response(400)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.delenv("NONE", raising=False)
    big = OutsideModel(model="big", base_url=url, prompt_price=1, sampled_price=1, api_key="NONE")
    try:
        with platform(tmp_path / "home", ScriptedEngine(answer)) as where:
            with pytest.raises(EngineUnavailable, match="this model has no temperature"):
                evaluate_sync(AGENT, TASKS, [passed], [big], platform=where)
            (run, *_) = Store(Home(tmp_path / "home")).runs(RunQuery(model=big.id))
    finally:
        server.shutdown()
    assert run.reward is None and set(keys) == {"Bearer none"}


OUTSIDE = """
import os
from cray_agents import Agent, Evaluation, OutsideModel, Task, reward

@reward
def right(run):
    return run.output == run.task.target

big = OutsideModel(
    model="big", base_url=os.environ["OTHER"], prompt_price=2, sampled_price=8, api_key="NONE"
)
tasks = [Task(input=str(n), target=str(n)) for n in range(30)]
evaluation = Evaluation(Agent(name="echo", model="m"), tasks, right, models=["m", big])
"""


FILE = """
from cray_agents import Agent, Evaluation, Task, TaskSet, reward

@reward
def right(run):
    return run.output == run.task.target

@reward
def broken(run):
    if int(run.input) < 3:
        raise ValueError("no such column")
    return 1

agent = Agent(name="echo", model="m")
tasks = [Task(input=str(n), target=str(n), metadata={"kind": n % 2}) for n in range(30)]
evaluation = Evaluation(agent, tasks, right, models=["m@1", "m@2"], attempts=2, by="kind",
                        concurrency=4)
failing = Evaluation(agent, tasks[:3], [right, broken], name="failing")
some = Evaluation(agent, tasks[2:5], broken, name="some")
absent = Evaluation(agent, tasks, right, models=["m@9"])
unknown = Evaluation(agent, tasks, right, models=["nobody"])
"""


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "e.py").write_text(FILE)
    home = Home(tmp_path / "home")
    held, killed, store = list[str](), Event(), Store(home)

    async def right_by_version(request: dict[str, Any], version: str) -> str:
        number = said(request)
        if len(engine.requests) >= 80:  # so that it is killed in the midst, whenever that is
            held.append(number)
            await asyncio.to_thread(killed.wait, 300)
        return number if version == "m@2" or int(number) % 3 == 0 else "no"

    def stands() -> bool:
        return len(held) == 4 and len(store.runs(RunQuery())) == len(engine.requests) - 4

    engine = ScriptedEngine(right_by_version)
    with platform(home.root, engine) as where:
        add_version(where, tmp_path)
        words = ["eval", "e.py", "--url", where.url]
        argv = [sys.executable, "-m", "cray_agents", *words]
        with subprocess.Popen(argv, cwd=tmp_path, stdout=-1, stderr=-1) as command:
            wait_until(lambda: stands() or command.poll() is not None)
            command.kill()
        killed.set()
        recorded = {(run.input, run.attempt, run.model) for run in store.runs(RunQuery())}
        assert 60 < len(recorded) < 120
        engine.requests.clear()
        done = cli(*words, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(engine.requests) <= 120 - len(recorded)
        result = json.loads(done.stdout)
        assert result["models"]["m@1"]["mean"]["value"] == pytest.approx(1 / 3)
        assert result["models"]["m@2"]["pass_at"]["2"]["value"] == 1
        assert result["comparisons"][0]["wins"] == 20 and result["comparisons"][0]["p"] < 1e-4
        engine.requests.clear()
        loaded = engine.loaded.count("m@2")
        table = cli(*words, cwd=tmp_path).stdout
        assert engine.requests == [] and engine.loaded.count("m@2") == loaded
        assert "m@2 - m@1: +0.667 [+0.488, +0.846]" in table and "20 of 30 tasks" in table
        assert table.count("0.333") == 9 and result["loop"] in table
        refused(
            cli("eval", "e.py:failing", *words[2:], cwd=tmp_path),
            "none of 3 runs of m@1 could be scored",
            "broken failed: ValueError: no such column",
        )
        some = cli("eval", "e.py:some", *words[2:], cwd=tmp_path)
        assert some.returncode == 1 and "m@1: 1 runs are missing (1 RewardError)" in some.stdout
        refused(cli("eval", "e.py:absent", *words[2:], cwd=tmp_path), "m@9")
        refused(cli("eval", "e.py:unknown", *words[2:], cwd=tmp_path), "nobody")
        refused(cli("eval", "e.py:agent", *words[2:], cwd=tmp_path), "agent = Evaluation(...)")


@pytest.mark.parametrize(
    ("changes", "param", "told"),
    [
        ({"attempts": 0}, "attempts", "greater than 0"),
        ({"tasks": []}, "tasks", "no tasks"),
        ({"tasks": "a0"}, "tasks", "give a TaskSet or a list"),
        ({"rewards": []}, "rewards", "at least one reward"),
        ({"rewards": ["passed"]}, "rewards", r"rewards\[0\] is 'passed'"),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"temperature": 0, "attempts": 2}, "attempts", "would all be the same"),
        ({"by": "level"}, "by", "there is 'kind'"),
        ({"models": [1]}, "models", "valid string"),
        ({"models": [OUTSIDE_MODEL], "agent": WORKED}, "models", "ask the platform alone"),
        ({"name": "a/b"}, "name", "match pattern"),
        ({"agent": "clerk"}, "agent", "give an Agent"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], param: str, told: str) -> None:
    arguments: dict[str, Any] = {"agent": AGENT, "tasks": TASKS, "rewards": [passed]}
    with pytest.raises(BadInput, match=told) as error:
        Evaluation(**arguments | changes)
    assert error.value.param == param
