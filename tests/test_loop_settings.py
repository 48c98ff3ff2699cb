"""Settings of a loop on restart: compared with the recorded ones; and the stopping rules."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents import GRPO, RFT, Agent, Data, Sampling, Training, judge, reward
from cray_agents.errors import BadInput
from cray_agents.iteration import Iteration
from cray_agents.loop import Budget, Curriculum
from cray_agents.loop.settings_record import differences, settings_record, translated
from cray_agents.loop.stop_rules import Stop, why_stopped
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunQuery
from cray_agents.records import Event, Run
from cray_agents.runtime.datasets.reader import read_manifest
from cray_agents.runtime.datasets.recipe import recipe_name
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.loop_records import LoopRecords
from cray_agents.testing import ScriptedEngine
from tests.support.killable_loop import echo, site_loop, some_tasks
from tests.support.scripted_platform import platform


@reward
def odd(run: Run) -> float:
    """The same for every version."""
    return float(int(run.input.split()[-1]) % 2)


SMALL: dict[str, Any] = {
    "tasks": some_tasks(40, 16, 0),
    "tasks_per_iteration": 10,
    "rewards": [odd],
}


@pytest.mark.slow
def test_other_settings_are_refused_by_name_unless_they_are_accepted(tmp_path: Path) -> None:
    warmer = Training(steps=1, learning_rate=2e-3)
    changed: dict[str, Any] = {"training": warmer, "tasks_per_iteration": 5, "seed": 3}
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        begun = list(site_loop(platform=where, **SMALL).run_sync(1))
        with pytest.raises(BadInput) as refusal:
            list(site_loop(platform=where, **SMALL | changed).run_sync(2))
        told = str(refusal.value)
        assert "method.1.training.learning_rate was None, now 0.002" in told
        assert "method.1.tasks_per_iteration was 10, now 5" in told
        assert "sampling.seed was 0, now 3" in told
        assert (refusal.value.code, refusal.value.param) == (
            "loop_changed",
            "method.1.tasks_per_iteration",
        )
        accepted = list(site_loop(platform=where, changed="accept", **SMALL | changed).run_sync(2))
        assert accepted[:2] == begun
        assert accepted[2].runs == 5
        # these are its settings now; the ones before stay on record
        assert list(site_loop(platform=where, **SMALL | changed).run_sync(2)) == accepted
        with pytest.raises(BadInput, match="was 5, now 10"):
            list(site_loop(platform=where, **SMALL).run_sync(2))
    journal = Home(tmp_path).loop("loop") / "journal"
    seeds = [
        json.loads((journal / f"settings-{n}.json").read_text())["sampling"]["seed"] for n in (1, 2)
    ]
    assert seeds == [0, 3]


@pytest.mark.slow
def test_replicas_that_quantise_are_refused_before_the_first_run(tmp_path: Path) -> None:
    facts = {"engine": {"name": "vllm", "quantized": "--quantization"}}
    in_fp8 = {"engine": {"name": "vllm", "rounding": "fp8"}}
    with platform(tmp_path / "fp8", ScriptedEngine(echo), facts=in_fp8) as where:
        trusting = site_loop(platform=where, **SMALL | {"method": GRPO(importance_cap=None)})
        with pytest.raises(BadInput, match=r"FP8.*importance_cap, which corrects that"):
            list(trusting.run_sync(1))
    with platform(tmp_path, ScriptedEngine(echo), facts=facts) as where:
        with pytest.raises(
            BadInput, match=r"--quantization.*Training\(logprob_limit=0.5\)"
        ) as refusal:
            list(site_loop(platform=where, **SMALL).run_sync(1))
        assert refusal.value.param == "logprob_limit"
        assert not (Home(tmp_path).loop("loop") / "journal").exists(), "nothing ran"
        made = list(
            site_loop(
                platform=where, training=Training(steps=1, logprob_limit=0.25), **SMALL
            ).run_sync(1)
        )
    assert len(made) == 2 and made[1].job is not None
    specs = [json.loads(p.read_text()) for p in Home(tmp_path).jobs.glob("*/spec.json")]
    assert [spec["logprob_limit"] for spec in specs] == [0.25]


def test_a_judge_is_the_same_setting_in_every_process() -> None:
    def asked(model: str) -> Any:
        engine = ScriptedEngine(echo)
        by = judge(lambda run: f"Is {run.input} answered?", model=model, engine=engine)
        return settings_record(site_loop(rewards=[by]).settings)["rewards"]

    assert asked("judge") == asked("judge") != asked("other")


#: Of version 1, as the code before 0.1.0 wrote it.
BEFORE = json.loads((Path(__file__).parent / "support/loop_settings_1.json").read_text())


def test_settings_of_the_first_version_are_read() -> None:
    grpo = GRPO(
        group_size=3,
        tasks_per_iteration=12,
        evaluate_every=2,
        clip_high=0.28,
        training=Training(steps=3, learning_rate=1e-4),
    )
    given: dict[str, Any] = {
        "method": [RFT(iterations=2, tasks_per_iteration=12, training=Training(steps=1)), grpo],
        "sampling": Sampling(dynamic_sampling=0.5, max_staleness=1, seed=4),
        "data": Data(history=2, curriculum=Curriculum(revisit=0.5)),
    }
    now = settings_record(replace(site_loop(), **given).settings)
    assert differences(translated(BEFORE), now) == []
    given["sampling"] = Sampling(dynamic_sampling=0.5, max_staleness=2, seed=4)
    given["method"][1] = grpo.model_copy(update={"clip_high": 0.2, "group_size": 4})
    now = settings_record(replace(site_loop(), **given).settings)
    assert sorted(differences(translated(BEFORE), now)) == [
        ("method.3.clip_high", 0.28, 0.2),
        ("method.3.group_size", 3, 4),
        ("sampling.max_staleness", 1, 2),
    ]
    training = now["method"]["1"]["training"]
    older = {name: value for name, value in training.items() if name != "backend"}
    older |= {"way": "universal"}
    recorded = {**now, "method": {**now["method"], "1": {**now["method"]["1"], "training": older}}}
    assert differences(translated(recorded), now) == [
        ("method.1.training.backend", "transformers", None)
    ]
    with pytest.raises(BadInput, match="version 3"):
        translated(now | {"version": 3})


async def test_iterations_that_earlier_versions_called_generations_are_read(tmp_path: Path) -> None:
    home, dataset = Home(tmp_path), tmp_path / "set"
    before = {"generation": 0, "holdout_success": 0.5, "holdout_tasks": 3, "version": "m@1"}
    recipe: dict[str, Any] = {"loop": "l", "generations": [2, 1], "where": {"generation": 1}}
    for path, content in (
        (home.loop("l") / "generations" / "0.json", before),
        (dataset / "manifest.json", {"recipe": recipe}),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    [record] = LoopRecords(home, "l").finished()
    assert (record.iteration, record.version) == (0, "m@1")
    [shown] = LoopRecords(home, "l").listing().rows
    assert shown["iteration"] == 0 and "generation" not in shown

    body = {"id": "r", "agent": "a", "model": "m@1", "input": "?", "stop_reason": "completed"}
    store = Store(home)
    event = Event(id="e", run_id="r", kind="run", body={**body, "generation": 3})
    await store.append([event])
    [run] = store.runs(RunQuery(iteration=3))
    assert run.iteration == 3
    await store.close()

    now = read_manifest(dataset)["recipe"]
    assert now == {"loop": "l", "iterations": [2, 1], "where": {"iteration": 1}}
    made = DatasetRecipe.model_validate(now)
    assert recipe_name(made).startswith("b499cd486d6c4020"), "the name that it had"


def asks(**changes: Any) -> Agent:
    """An agent with one that it asks, and one that takes over."""
    helper = Agent(name="helper", instructions=changes.pop("helps", "Help."))
    next_one = Agent(name="next", temperature=changes.pop("warm", 0.0))
    given: dict[str, Any] = {"tools": [helper.as_tool()], "handoffs": [next_one]}
    return Agent(name="a", model="m", **given | changes)


CODE = """
from dataclasses import dataclass
from functools import partial
from cray_agents import Agent, tool
from cray_agents.agent import Hooks

def near(a, b):
    return abs(a - b) < 1  # as near as this

def right(run, most=3):
    return float(near(len(run.input), most))

@dataclass(frozen=True)
class Judge:
    most: int
    def __call__(self, run):
        return right(run, self.most)

class Count:
    def __init__(self): self.calls = 0
    def __call__(self, run):
        self.calls += 1
        return 1.0

@tool
def look(key: str) -> str:
    return key.upper()

def seen(call, context):
    return None

agent = Agent(name="a", model="m", tools=[look], hooks=[Hooks(before_tool=seen)])
rewards = [right, partial(right, most=4), Judge(5), Count(), lambda run: 0.5]
"""


def coded(path: Path, code: str) -> dict[str, Any]:
    """What a loop records of code that is read anew from a file, as another process does."""
    path.parent.mkdir()
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    right, half, *others = module.rewards
    record = settings_record(site_loop(agent=module.agent, rewards=[right, *others]).settings)
    partly = settings_record(site_loop(rewards=[half]).settings)
    return record["reward_code"] | record["agent"]["code"] | {"partial": partly["reward_code"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("was", "now", "changed"),
    [
        ("# as near as this", "# another comment", set()),
        ("abs(a - b) < 1", "abs(a - b) < 2", {"right", "partial", "Judge"}),  # through a helper
        ("most=3", "most=6", {"right", "partial", "Judge"}),
        ("most=4", "most=7", {"partial"}),
        ("Judge(5)", "Judge(6)", {"Judge"}),
        ("return 1.0", "return 2.0", {"Count"}),
        ("run: 0.5", "run: 0.25", {"<lambda>"}),
        ("key.upper()", "key.lower()", {"tool look"}),
        ("    return None", "    return 'no'", {"hooks 0"}),
    ],
)
def test_the_body_of_rewards_tools_and_hooks_is_a_setting(
    tmp_path: Path, was: str, now: str, changed: set[str]
) -> None:
    before, again = (coded(tmp_path / f"{name}" / "code.py", CODE) for name in "ab")
    assert was in CODE and before == again  # no address, and no count of calls
    after = coded(tmp_path / "c" / "code.py", CODE.replace(was, now))
    assert {name for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_turns": 9}, "max_turns"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"max_total_tokens": 9}, "max_total_tokens"),
        ({"timeout": 9.5}, "timeout"),
        ({"on_limit": "answer"}, "on_limit"),
        ({"tool_calls": "native"}, "tool_calls"),
        ({"retries": 1}, "retries"),
        ({"sampling": {"top_p": 0.5}}, "sampling"),
        ({"output_type": int}, "output_type"),
        ({"helps": "Do not."}, "agents.helper.instructions"),
        ({"warm": 0.5}, "agents.transfer_to_next.temperature"),
        ({"handoffs": []}, "tools"),
    ],
)
def test_another_agent_is_another_setting(changes: dict[str, Any], told: str) -> None:
    known = json.loads(json.dumps(settings_record(site_loop(agent=asks()).settings)))
    assert (
        differences(known, settings_record(site_loop(agent=asks(timeout=float("inf"))).settings))
        == []
    )
    found = differences(known, settings_record(site_loop(agent=asks(**changes)).settings))
    assert [name for name, _, _ in found] == [f"agent.{told}"]
    for name in (*known["agent"], "reward_weights"):  # as it was recorded once
        if name not in ("name", "model", "instructions", "tools"):
            known.pop(name, None)
            known["agent"].pop(name, None)
    older = differences(known, settings_record(site_loop(agent=asks(**changes)).settings))
    assert older == (found if told == "tools" else [])


def test_the_weights_of_rewards_and_not_the_length_of_the_last_stage_are_settings() -> None:
    def of(weight: float, last: int | None) -> dict[str, Any]:
        half = reward(weight=weight)(lambda run: 1.0)
        return settings_record(site_loop(rewards=[half], method=[RFT(iterations=last)]).settings)

    known = json.loads(json.dumps(of(0.5, 2)))
    assert differences(known, of(0.5, 3)) == differences(known, of(0.5, None)) == []
    assert differences(known, of(1.0, 2)) == [("reward_weights", [0.5], [1.0])]


@pytest.mark.slow
def test_where_and_how_far_it_runs_may_change(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        list(site_loop(platform=where, **SMALL).run_sync(1))
        free: dict[str, Any] = {"concurrency": 2, "patience": 9, "budget": Budget(runs=10**6)}
        assert len(list(site_loop(platform=where, **SMALL | free).run_sync(2))) == 3


@pytest.mark.slow
def test_other_tasks_are_other_settings(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        list(site_loop(platform=where, **SMALL).run_sync(1))
        with pytest.raises(BadInput, match="tasks was 'sha256:"):
            list(site_loop(platform=where, **SMALL | {"tasks": some_tasks(41, 16, 0)}).run_sync(1))


@pytest.mark.slow
def test_a_used_up_budget_ends_it_and_a_restart_does_not_give_it_back(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        budget = Budget(runs=40)  # 16 in iteration 0, 26 in each other
        done = list(site_loop(platform=where, budget=budget, **SMALL).run_sync(5))
        assert [g.iteration for g in done] == [0, 1]
        assert done[0].stopped is None
        assert done[1].stopped == "budget: 42 of 40 runs are used"
        assert list(site_loop(platform=where, budget=budget, **SMALL).run_sync(5)) == done
        more = list(site_loop(platform=where, budget=Budget(runs=50), **SMALL).run_sync(5))
        assert len(more) == 3


def iteration(number: int, **given: Any) -> Iteration:
    base: dict[str, Any] = {"iteration": number, "holdout_success": 0.5, "holdout_tasks": 10,
                            "version": f"m@{number + 1}"}  # fmt: skip
    return Iteration(**base | given)


def test_why_it_stops() -> None:
    done = [
        iteration(0, wall=10.0),
        iteration(1, wall=5.0, runs=8, tokens=100, trainer_seconds=3.0, holdout_success=0.7),
    ]
    assert why_stopped([], Stop(target=0.1, patience=1)) is None
    assert why_stopped(done, Stop()) is None
    assert why_stopped(done, Stop(target=0.7)) == "target: held-out success 0.700 of 0.7"
    assert why_stopped(done, Stop(target=0.8, patience=1)) is None
    assert "15 of 15 seconds" in str(why_stopped(done, Stop(budget=Budget(seconds=15))))
    assert "28 of 20 runs" in str(why_stopped(done, Stop(budget=Budget(runs=20))))
    assert "100 of 99 tokens" in str(why_stopped(done, Stop(budget=Budget(tokens=99))))
    spent = why_stopped(done, Stop(budget=Budget(trainer_seconds=2.5)))
    assert spent == "budget: 3 of 2.5 trainer_seconds are used"
    # a rejected candidate is not the target, and not being evaluated is no rejection
    rejected = iteration(2, promoted=False, holdout_success=0.9, note="rejected: futile")
    passed_on = iteration(3, promoted=False, holdout_tasks=0)
    assert why_stopped([*done, rejected, passed_on], Stop(target=0.8, patience=2)) is None
    assert "no progress" in str(why_stopped([*done, rejected, rejected], Stop(patience=2)))


def test_an_older_record_is_read_and_a_newer_one_by_older_code() -> None:
    older = {"iteration": 1, "holdout_success": 0.5, "holdout_tasks": 3, "version": "m@2"}
    read = Iteration.model_validate({**older, "from_the_future": 1})
    assert (read.method, read.onward, read.stopped) == ("rft", None, None)
