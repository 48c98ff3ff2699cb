"""A loop that watches: live traffic over a real gateway, rewarded through its HTTP route."""

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from cray_agents import (
    GRPO,
    KTO,
    RFT,
    SFT,
    Agent,
    Loop,
    Platform,
    PromotionTest,
    Task,
    TaskSet,
    Training,
    reward,
)
from cray_agents.errors import BadInput
from cray_agents.iteration import Iteration
from cray_agents.loop.live.schedule import Daily, Live, Update, held_back, is_due, quiet_until
from cray_agents.loop.live.traffic import mixed
from cray_agents.paths import Home
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.records import Run, StopReason
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.feedback import Feedback, give_feedback
from cray_agents.testing import ScriptedEngine
from tests.support.in_process_engine import InProcessEngine
from tests.support.loops import grouped
from tests.support.scripted_gateway import checkpoint, served, until
from tests.support.scripted_platform import PROBE, platform
from tests.support.scripted_trainer import ScriptedTrainer

POLL = 0.02
SKILL = {"m@1": 1, "m@2": 5, "m@3": 9}  # of 10 held-out tasks, how many a version solves


@reward
def right(run: Run) -> float:
    return float(run.task is not None and run.output == run.task.target)


def answer(request: dict[str, Any], version: str) -> str:
    number = request["messages"][-1]["content"].split()[-1]
    return number if int(number) % 10 < SKILL.get(version, 9) else f"{number}, wrong"


def held_out() -> TaskSet:
    return TaskSet(
        [Task(input=f"say {n}", target=str(n), split="holdout") for n in range(100, 120)]
    )


def make_loop(where: Platform, **changes: Any) -> Loop:
    arguments: dict[str, Any] = {
        "agent": Agent(name="a", model="m"),
        "tasks": held_out(),
        "rewards": [right],
        "method": KTO,
        "training": Training(steps=1),
        "promotion": PromotionTest(hidden=0, batch=40),
        "live": Live(runs=4, poll=POLL),
        "name": "live",
        "platform": where,
    }
    return Loop(**grouped(**arguments | changes))


class Users:
    """People at the OpenAI endpoint, who say what they think of the answers."""

    def __init__(self, where: Platform, key: str = "none") -> None:
        self.url = where.url
        self.client = openai.OpenAI(base_url=f"{where.url}/v1", api_key=key)
        self.headers = {"authorization": f"Bearer {key}"}

    def ask(self, number: int, **more: Any) -> str:
        """Ask; returns the run's id."""
        said: list[Any] = [{"role": "user", "content": f"say {number}"}]
        answered = self.client.chat.completions.with_raw_response.create(
            model=more.pop("model", "m"), messages=said, **more
        )
        return str(answered.headers["x-run-id"])

    def judge(self, run: str, value: float) -> None:
        url = f"{self.url}/v1/trajectories/{run}/rewards"
        httpx.post(url, json={"value": value}, headers=self.headers).raise_for_status()

    def asked_and_judged(self, numbers: Sequence[int]) -> list[str]:
        """Thumbs up for every second answer."""
        runs = [self.ask(number) for number in numbers]
        for place, run in enumerate(runs):
            self.judge(run, float(place % 2))
        return runs


def trained_on(root: Path, iteration: Iteration) -> list[str]:
    lines = dataset_runs(Home(root), iteration.dataset or "")
    return sorted(line["run"] for line in lines if line["accepted"])


# ---- when


def test_quiet_hours_may_span_midnight() -> None:
    night, noon = "22:00-06:00", "11:30-13:00"
    at = datetime(2026, 3, 4, 23, 15)
    assert quiet_until(night, at) == datetime(2026, 3, 5, 6, 0)
    assert quiet_until(night, datetime(2026, 3, 5, 5, 59)) == datetime(2026, 3, 5, 6, 0)
    assert quiet_until(night, datetime(2026, 3, 5, 6, 0)) is None
    assert quiet_until(night, datetime(2026, 3, 5, 21, 59)) is None
    assert quiet_until(noon, datetime(2026, 3, 5, 12, 59)) == datetime(2026, 3, 5, 13, 0)
    assert quiet_until(noon, datetime(2026, 3, 5, 13, 0)) is None


def test_a_day_has_its_budget() -> None:
    noon = datetime(2026, 3, 5, 12, 0).timestamp()
    today, yesterday = Update(noon - 3600, 50.0), Update(noon - 86_400, 500.0)
    two = Live(per_day=Daily(updates=2))
    assert held_back(two, [yesterday, yesterday, today], noon) is None
    assert held_back(two, [yesterday, today, today], noon) == "2 of 2 updates a day"
    seconds = Live(per_day=Daily(trainer_seconds=100))
    assert held_back(seconds, [yesterday, today], noon) is None
    assert held_back(seconds, [today, today], noon) == "100 of 100 trainer seconds a day"
    assert held_back(Live(quiet="11:00-12:30"), [], noon) == "quiet until 12:30"


def test_an_update_is_due_by_count_or_by_the_clock() -> None:
    count, clock, either = Live(runs=4), Live(runs=None, every=60), Live(runs=4, every=60)
    assert [is_due(count, n, 0, 1e9) for n in (3, 4)] == [False, True]
    assert [is_due(clock, n, 0, t) for n, t in ((9, 59), (0, 60), (1, 60))] == [False, False, True]
    assert [is_due(either, n, 0, t) for n, t in ((4, 1), (1, 60), (3, 59))] == [True, True, False]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"quiet": "ten to six"}, "such as 22:00-06:00"),
        ({"quiet": "25:00-06:00"}, "such as 22:00-06:00"),
        ({"quiet": "06:00-06:00"}, "all day or never"),
        ({"runs": None}, "say when to train"),
        ({"runs": 10, "most": 9}, "would never fit"),
        ({"where": RunFilter(loop="x")}, "no loop's"),
        ({"ever": 1}, "ever"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Live(**wrong)


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    nowhere = Platform("http://127.0.0.1:9")
    with pytest.raises(BadInput, match="staleness has no effect on live traffic"):
        make_loop(nowhere, max_staleness=1)
    with pytest.raises(BadInput, match="SFT learns"):
        make_loop(nowhere, method=SFT, demonstrations=[([{"role": "assistant"}], {})])


# ---- what


@pytest.mark.slow
def test_trains_on_what_people_rewarded_and_on_each_run_once(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        users = Users(where)
        first = users.asked_and_judged([1, 2, 3, 4])
        (start, one) = list(make_loop(where).run_sync(1))
        assert (start.version, start.holdout_success) == ("m@1", 0.1)
        assert (one.version, one.promoted, one.sampled_from) == ("m@2", True, "m@1")
        assert (one.runs, one.accepted_runs) == (4, 2)
        assert trained_on(tmp_path, one) == sorted(first)

        users.judge(first[0], 1.0)  # what was trained on is not again, whatever is said of it
        second = users.asked_and_judged([5, 6, 7, 8])
        two = list(make_loop(where).run_sync(2))[-1]
        assert (two.version, two.sampled_from) == ("m@3", "m@2")
        assert trained_on(tmp_path, two) == sorted(second)
    runs = Store(Home(tmp_path)).runs(RunQuery(loop="live", iteration=1))
    assert {run.id for run in runs} == set(first)
    assert {run.task.split for run in runs if run.task} == {"train"}


@pytest.mark.slow
def test_only_live_runs_with_a_reward_count(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        users = Users(where)
        good = [users.ask(n) for n in range(4)]
        users.ask(20)  # nobody judged it
        held = Agent(name="a", model="m", engine=where.engine(), recorder=None)

        async def others() -> None:
            async def record(run_id: str, **about: Any) -> None:
                run = await held.run(Task(input=f"say {len(run_id)}"), run_id=run_id)
                await where.record([run.model_copy(update=about)])
                await where.reward(run_id, 1.0)

            await record("of-another-loop", loop="other", iteration=1)
            await record("a-judge", tags=["judge"])
            task = Task(input="say 31", split="holdout")
            await record("held-out", task=task)
            await record("imported", imported="openai")
            await where.record([Run(id="silent", agent="a", model="m@1", input="x",
                                    stop_reason=StopReason.completed)])  # fmt: skip
            await where.reward("silent", 1.0)
            await where.close()

        asyncio.run(others())
        for place, run in enumerate(good):
            users.judge(run, float(place % 2))
        done = list(make_loop(where, live=Live(runs=1, poll=POLL)).run_sync(1))
        assert trained_on(tmp_path, done[1]) == sorted(good)


@pytest.mark.slow
def test_rewards_count_of_givers_that_the_loop_names(tmp_path: Path) -> None:
    """Who may call models may reward what he called: that alone teaches no model anything."""
    roles = {"ops": Role.admin, "web": Role.use, "eve": Role.use}
    keys = {name: Keys(Home(tmp_path)).create(name, role)[1] for name, role in roles.items()}
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        web, eve, ops = (Users(where, keys[name]) for name in ("web", "eve", "ops"))
        forged = eve.asked_and_judged([20, 21, 22, 23])
        named = web.asked_and_judged([1, 2])
        own = ops.asked_and_judged([3, 4])
        corrected = eve.ask(5)  # an admin's word, which the run's owner cannot talk away
        ops.judge(corrected, 0.0)
        eve.judge(corrected, 1.0)
        late = web.ask(6)
        for name in ("ann", "bob"):  # rewards before keys, or from the host, have no giver
            asyncio.run(_reward_on_host(tmp_path, late, name))
        loop = make_loop(
            Platform(where.url, api_key=keys["ops"]),
            live=Live(runs=9, every=0.01, poll=POLL, givers=["web"]),
        )
        done = list(loop.run_sync(1))
        assert trained_on(tmp_path, done[1]) == sorted([*named, *own, corrected, late])
        lines = {line["run"]: line for line in dataset_runs(Home(tmp_path), done[1].dataset or "")}
        assert lines[corrected]["reward"] == 0.0
        assert not set(forged) & set(lines)
        # what a loop has taken stays its owner's to judge, and is not described anew
        web.judge(named[0], 1.0)
        told = {"kind": "run", "body": {"agent": "a", "model": "m", "input": "x",
                                        "stop_reason": "completed"}}  # fmt: skip
        url = f"{where.url}/v1/trajectories/{named[0]}/events"
        refused = httpx.post(url, json={"events": [told]}, headers=web.headers)
        assert refused.status_code == 403
        run = Store(Home(tmp_path)).run(named[0])
        assert (run.loop, run.owner != "") == ("live", True)


async def _reward_on_host(root: Path, run_id: str, who: str) -> None:
    store = Store(Home(root))
    await give_feedback(store, run_id, Feedback(value=0.5, source=who))
    await store.close()


@pytest.mark.slow
def test_a_filter_says_which_count(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        users = Users(where)
        users.asked_and_judged([1, 2])
        tagged = [users.ask(n, extra_headers={"X-Run-Tags": "shop"}) for n in (3, 4)]
        for place, run in enumerate(tagged):
            users.judge(run, float(place))
        live = Live(runs=1, poll=POLL, where=RunFilter(tags=["shop"]))
        done = list(make_loop(where, live=live).run_sync(1))
        assert trained_on(tmp_path, done[1]) == sorted(tagged)


@pytest.mark.slow
def test_the_same_question_of_several_users_is_one_task(tmp_path: Path) -> None:
    answers = iter(["one", "two", "three", "four"])

    def say(request: dict[str, Any], version: str) -> str:
        asked = request["messages"][-1]["content"]
        return next(answers) if asked == "say 7" else answer(request, version)

    with platform(tmp_path, ScriptedEngine(say)) as where:
        asked = Users(where).asked_and_judged([7, 7, 7, 7])
        done = list(make_loop(where, method=GRPO).run_sync(1))
        assert trained_on(tmp_path, done[1]) == sorted(asked)


@pytest.mark.slow
def test_an_update_that_teaches_nothing_is_noted(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        users = Users(where)
        for number in range(8):  # two updates' worth of thumbs down, of which rft learns nothing
            users.judge(users.ask(number), 0.0)
        live = Live(runs=4, most=4, poll=POLL)
        done = list(make_loop(where, method=RFT, live=live).run_sync(2))
        assert [g.note.split(":")[0] for g in done[1:]] == ["no update", "no update"]
        assert [g.runs for g in done[1:]] == [4, 4]
        users.asked_and_judged([11, 12, 13, 14])
        last = list(make_loop(where, method=RFT, live=live).run_sync(3))[-1]
        assert (last.version, last.promoted) == ("m@2", True)


@pytest.mark.slow
def test_goes_on_from_what_somebody_else_promoted(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        users = Users(where)
        users.asked_and_judged([1, 2, 3, 4])
        assert list(make_loop(where).run_sync(1))[-1].version == "m@2"

        async def roll_back() -> None:
            await where.rollback("m", who="me", reason="users complain")
            await where.close()

        asyncio.run(roll_back())
        users.asked_and_judged([5, 6, 7, 8])
        two = list(make_loop(where).run_sync(2))[-1]
        assert (two.sampled_from, two.version, two.wins) == ("m@1", "m@3", 16)
        lineage = asyncio.run(parents(where))
    assert lineage["m@3"] == "m@1"


async def parents(where: Platform) -> dict[str, str | None]:
    found = {one["id"]: one["parent"] for one in await where.lineage("m")}
    await where.close()
    return found


@pytest.mark.slow
def test_a_failed_job_is_noted_and_the_next_runs_are_waited_for(tmp_path: Path) -> None:
    failures = {0: "the loss is NaN"}
    with platform(tmp_path, ScriptedEngine(answer), failures=failures) as where:
        users = Users(where)
        users.asked_and_judged([1, 2, 3, 4])
        one = list(make_loop(where).run_sync(1))[-1]
        assert (one.version, one.promoted) == ("m@1", False)
        assert "the loss is NaN" in one.note
        second = users.asked_and_judged([5, 6, 7, 8])
        two = list(make_loop(where).run_sync(2))[-1]
        assert (two.version, trained_on(tmp_path, two)) == ("m@2", sorted(second))


def test_kto_wants_good_runs_and_bad_ones() -> None:
    found = [("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 0.0)]
    assert mixed(found, 3, None) == ["a", "b", "c"]
    assert mixed(found, 3, 1.0) == ["a", "b", "d"]
    assert mixed(found[:3], 3, 1.0) == []
    assert mixed(found[3:], 3, 1.0) == []


# ---- killed


# ---- without held-out tasks


def live_traffic(**changes: Any) -> Loop:
    live = Live(runs=4, poll=POLL, canary_share=0.5, canary_sessions=8)
    arguments: dict[str, Any] = {
        "tasks": TaskSet([]), "rewards": [], "live": live,
        "agent": Agent(name="a", model="calc"),
    }  # fmt: skip
    return make_loop(**(arguments | changes))


@pytest.mark.slow
@pytest.mark.parametrize(("better", "kind"), [(True, "promoted"), (False, "rejected")])
async def test_a_canary_judges_where_nothing_is_held_out(
    tmp_path: Path, better: bool, kind: str
) -> None:
    others = [InProcessEngine(ScriptedEngine(said_by))]
    trainer = partial(ScriptedTrainer, probe=PROBE)
    async with served(tmp_path, ScriptedEngine(said_by), others=others, trainer=trainer) as gateway:

        async def people(prefix: str) -> None:
            for session in range(8):
                headers = {"X-Session-Id": f"{prefix}-{session}"}
                reply = await gateway.ask(f"{prefix} {session}", headers=headers)
                value = float((reply.text == "calc@2") == better)
                value = float(session % 2) if prefix == "before" else value
                path = f"/v1/trajectories/{reply.run_id}/rewards"
                await gateway.call("POST", path, json={"value": value})

        await people("before")
        where = Platform(gateway.url)
        watching = asyncio.create_task(updates(live_traffic(where=where), 1))
        for crowd in itertools.count():
            await people(f"crowd-{crowd}")
            if watching.done():
                break
        (_, update) = await watching
        assert (update.version, update.promoted) == ("calc@2", better)
        assert "canary" in update.note
        history = await where.history("calc")
        assert kind in [event["kind"] for event in history if event["version"] == 2]
        now = await where.promoted("calc")
        assert now is not None
        assert now.number == (2 if better else 1)
        await where.close()


@pytest.mark.slow
async def test_who_promotes_another_version_has_the_last_word(tmp_path: Path) -> None:
    others = [InProcessEngine(ScriptedEngine(said_by))]
    trainer = partial(ScriptedTrainer, probe=PROBE)
    async with served(tmp_path, ScriptedEngine(said_by), others=others, trainer=trainer) as gateway:
        where = Platform(gateway.url)
        for session in range(8):
            reply = await gateway.ask(f"hi {session}", headers={"X-Session-Id": str(session)})
            await where.reward(reply.run_id, float(session % 2))
        loop = live_traffic(where=where, live=Live(runs=4, poll=POLL, canary_sessions=8000))
        watching = asyncio.create_task(updates(loop, 1))
        registry = gateway.services.registry
        await until(lambda: registry.canary("calc") is not None)
        other = await where.register("calc", str(checkpoint(tmp_path / "other", b"other")))
        await where.promote(other, who="me", reason="I know better")
        (_, update) = await watching
        assert (update.version, update.promoted) == ("calc@2", False)
        assert registry.resolve("calc") == other
        # The loop may reject 2 as soon as its canary has ended, so before 3 is promoted.
        kinds = [event.kind for event in registry.history("calc") if event.version == 2]
        assert kinds == ["canary_started", "canary_ended", "rejected"]
        await where.close()


async def test_what_could_not_be_judged_is_not_trained(tmp_path: Path) -> None:
    async with served(tmp_path, ScriptedEngine(said_by)) as gateway:
        where = Platform(gateway.url)
        with pytest.raises(BadInput, match="--replicas 2"):
            await updates(live_traffic(where=where), 1)
        await where.close()


def said_by(request: dict[str, Any], version: str) -> str:
    return version


async def updates(loop: Loop, count: int) -> list[Iteration]:
    return [iteration async for iteration in loop.run(count)]


# ---- at the terminal

FILE = """
from cray_agents import KTO, Agent, Loop, PromotionTest, Run, Task, TaskSet, Training, reward
from cray_agents.loop import Live

@reward
def right(run: Run) -> float:
    return float(run.task is not None and run.output == run.task.target)

tasks = [Task(input=f"say {n}", target=str(n), split="holdout") for n in range(100, 140)]
tasks.append(Task(input="say 1000", target="1000"))
loop = Loop(Agent(name="a", model="m"), TaskSet(tasks), rewards=[right], name="it",
            method=KTO(training=Training(steps=1)), promotion=PromotionTest(hidden=0, batch=40),
            live=Live(runs=2))
"""


def command(*words: Any) -> list[str]:
    return [sys.executable, "-m", "cray_agents", "loop", *map(str, words)]


@pytest.mark.slow
def test_watch_at_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(FILE)
    with platform(tmp_path / "home", ScriptedEngine(answer)) as where:
        file = [tmp_path / "agent.py", "--url", where.url]
        Users(where).asked_and_judged([1, 2])
        words = command(*file, "--watch", "--once", "--json")
        once = subprocess.run(words, capture_output=True, text=True, check=True)
        assert [g["version"] for g in json.loads(once.stdout)] == ["m@1", "m@2"]
        assert Registry(Home(tmp_path / "home")).resolve("m").id == "m@2"

        words = command(*file, "--watch")
        waiting = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        for line in waiting.stderr:
            if "waiting for rewarded runs (2)" in line:
                break
        waiting.send_signal(signal.SIGINT)
        out, rest = waiting.communicate()
        assert (waiting.returncode, "Traceback" in rest) == (0, False)
        assert "the same command goes on" in rest
        assert "m@2" in out

    for words, told in (
        (["--once"], "--once has no effect without --watch"),
        (["--every", "6h"], "--every has no effect without --watch"),
        (["--watch", "--every", "often"], "--every 'often': give a time such as 30m, 12h or 7d"),
    ):
        wrong = subprocess.run(command(*file, *words), capture_output=True, text=True)
        assert (wrong.returncode, told in wrong.stderr) == (2, True)


@pytest.mark.slow
def test_every_six_hours_for_days_through_kills(tmp_path: Path) -> None:
    """The file sets the clock of its process: an update six hours after the last, and none before.

    The process is killed after each look, and once for longer than six hours.
    """
    hours, began = tmp_path / "hours", time.time()
    clock = f"import time\nfrom pathlib import Path\n\nHOURS = Path({str(hours)!r})\n"
    clock += f"time.time = lambda: {began} + 3600 * float(HOURS.read_text())\n"
    (tmp_path / "agent.py").write_text(clock + FILE.replace("Live(runs=2)", f"Live(poll={POLL})"))
    with platform(tmp_path / "home", ScriptedEngine(answer)) as where:
        users = Users(where)
        words = command(tmp_path / "agent.py", "--url", where.url, "--watch", "--every", "6h")

        def updates_after(hour: float, sign: str) -> int:
            """Let the command run until it says so at that hour, kill it; count its updates."""
            hours.write_text(str(hour))
            running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
            assert any(sign in line for line in running.stderr)
            running.kill()
            running.communicate()
            return len(asyncio.run(recorded()))

        async def recorded() -> list[Any]:
            found = await where.iterations("it")
            await where.close()
            return found

        users.asked_and_judged([1, 2])
        waiting, none = (f"waiting for the schedule {count} rewarded runs" for count in (2, 0))
        assert updates_after(0, waiting) == 1  # the model before training alone
        assert updates_after(5.9, waiting) == 1
        assert updates_after(6.1, none) == 2
        users.asked_and_judged([3, 4])
        assert updates_after(12.0, waiting) == 2  # six hours after 6.1 are not over
        assert updates_after(40.0, none) == 3  # one for all that were missed
        assert updates_after(72.0, none) == 3  # due, but no run came
        users.asked_and_judged([5, 6])
        assert updates_after(72.1, none) == 4
