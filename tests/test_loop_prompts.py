"""Loops that improve what stands before an agent's input: candidates, records, ends, bad input."""

from pathlib import Path
from typing import Any

import pytest

from cray_agents import (
    GRPO,
    RFT,
    Agent,
    Evaluation,
    Examples,
    Instructions,
    Loop,
    Run,
    Sampling,
    Task,
    TaskSet,
    Training,
    reward,
)
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.agent.user_code import wait_for
from cray_agents.errors import BadInput, EngineError, EngineUnavailable
from cray_agents.iteration import Iteration
from cray_agents.loop import rollouts
from cray_agents.loop.live.schedule import Live
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.queries import RunQuery
from cray_agents.records import digest
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.registry.lineage import lineage_of
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.calculator import calculator
from tests.support.command_line import cli
from tests.support.scripted_platform import platform

pytestmark = pytest.mark.slow

RULE = "Answer in capitals."
FEW: dict[str, Any] = {"count": 2, "sets": 3, "trials": 6, "tasks_per_iteration": 20}


def tasks(train: int = 24, holdout: int = 40) -> TaskSet:
    parts: list[Any] = ["train"] * train + ["holdout"] * holdout
    return TaskSet([Task(input=f"say w{n}", target="secret", split=s) for n, s in enumerate(parts)])


@reward
def capitals(run: Run) -> float:
    return float(run.output == run.input[4:].upper())


def luck(text: str) -> float:
    return int(digest(text, 6), 16) / 16**6


def speak(request: dict[str, Any], version: str) -> Any:
    """Right in a third of the cases; more with examples, with trained weights, and the rule."""
    messages = request["messages"]
    if "write a new instruction" in messages[0]["content"]:
        return f"Here they are:\n```\n{RULE}\n```"
    asked = messages[-1]["content"]
    skill = 0.3 + 0.25 * (len(messages) > 2) + 0.35 * (RULE in messages[0]["content"])
    skill += 0.2 * (version in ("m@3", "m@4"))
    word = asked.removeprefix("say ")
    return word.upper() if luck(asked) < skill else word


def crier(**changes: Any) -> Agent:
    return Agent(**{"name": "crier", "instructions": "Obey.", "model": "m"} | changes)


def a_loop(where: Platform, method: Any, **changes: Any) -> Loop:
    given: dict[str, Any] = {"agent": crier(), "tasks": tasks(), "rewards": [capitals]}
    return Loop(**given | {"method": method, "name": "loop", "platform": where} | changes)


def stored(root: Path, **query: Any) -> list[Run]:
    return Store(Home(root)).runs(RunQuery(loop="loop", **query))


def done_by(loop: Loop, iterations: int) -> list[Iteration]:
    return list(loop.run_sync(iterations))


def test_prompt_then_weights_then_prompt(tmp_path: Path) -> None:
    engine = ScriptedEngine(speak)
    with (
        platform(tmp_path, engine) as where,
        platform(tmp_path / "other", ScriptedEngine(speak), name="big") as elsewhere,
    ):
        big = f"{elsewhere.url}/v1#big"
        schedule = [
            Examples(iterations=1, **FEW),
            RFT(iterations=1, tasks_per_iteration=20, training=Training(steps=1)),
            Instructions(iterations=1, reflector=big, trials=6, budget=40),
        ]
        agent = crier(tools=[calculator])
        done = done_by(a_loop(where, schedule, agent=agent), 3)
        count = len(engine.requests)
        assert done_by(a_loop(where, schedule, agent=agent), 3) == done
        assert len(engine.requests) == count  # nothing is done twice
        measured = Evaluation(agent, tasks().holdout, [capitals], ["m@1", "m@2"], platform=where)
        compared = measured.run_sync().comparisons[0]
        (_, shown, *_) = Registry(Home(tmp_path)).versions("m")
        same = wait_for(where.register("m", shown.checkpoint, shown.prompts))
        back = wait_for(where.rollback("m", 1, who="me", reason="calm"))
        first = wait_for(where.promoted("m"))
    registry = Registry(Home(tmp_path))
    start, shown, trained, *rest = registry.versions("m")
    assert same == shown
    prompt = shown.prompts["crier"]
    # the prompt is a version of its own, with the same weights, promoted by the same test
    assert (shown.checkpoint, start.prompts) == (start.checkpoint, {})
    assert (done[1].promoted, done[1].version, done[1].prompt) == (True, "m@2", prompt.id)
    assert done[1].wins and done[1].evidence >= 20 and done[1].dataset is None
    assert done[1].trials == 3 * 6 and compared.difference.value > 0.1
    # examples are whole good runs at train tasks, and hold no gold answer
    asked, said = prompt.examples[::2], prompt.examples[1::2]
    assert [one["content"] for one in said] == [one["content"][4:].upper() for one in asked]
    known = {f"say w{n}" for n in range(24)}
    assert len(asked) == 2 and {one["content"] for one in asked} <= known
    assert prompt.tools == {"calculator": calculator_text()}
    # every run says which one it had
    held = [run for run in stored(tmp_path, split="holdout") if run.model == "m@2"]
    assert held and all(f"prompt:{prompt.id}" in run.tags for run in held)
    assert all(run.trajectory.messages[1:5] == prompt.examples for run in held)
    assert not any("prompt:" in tag for r in stored(tmp_path, iteration=1) for tag in r.tags)
    # weights learn from runs with that prompt alone, and keep it
    used = {line["run"] for line in dataset_runs(Home(tmp_path), done[2].dataset or "")}
    assert used == {run.id for run in stored(tmp_path, iteration=2)}
    assert trained.prompts == shown.prompts and trained.checkpoint != start.checkpoint
    assert done[2].prompt == prompt.id
    # the rule on top of the examples, with the last weights
    (last,) = rest
    assert done[3].promoted and last.prompts["crier"].instructions == RULE
    assert last.prompts["crier"].examples == prompt.examples
    parents = {one["id"]: one["parent"] for one in lineage_of(registry, "m")}
    assert [parents[f"m@{n}"] for n in (2, 3, 4)] == ["m@1", "m@2", "m@3"]
    assert back["version"] == 1 and first.prompts == {}
    assert prompt.id in cli("--home", tmp_path, "--json", "models", "list", cwd=tmp_path).stdout
    assert (
        said[0]["content"] in cli("--home", tmp_path, "models", "show", "m@2", cwd=tmp_path).stdout
    )
    followed = agent.at(shown)
    assert followed.model == "m@2" and followed.prompt == prompt


def calculator_text() -> str:
    (tool,) = crier(tools=[calculator]).tools
    return str(getattr(tool, "description"))  # noqa: B009 - a Tool by now


def test_a_rewrite_is_promoted_and_no_target_is_told(tmp_path: Path) -> None:
    engine = ScriptedEngine(speak)
    method = Instructions(reflector="m@1", trials=6, budget=40, iterations=1)
    with platform(tmp_path, engine) as where:
        done = done_by(a_loop(where, method), 1)
        version = wait_for(where.version("m@2"))
    assert done[1].promoted and version.prompts["crier"].instructions == RULE
    assert done[1].trials and done[1].runs == 0
    asked = [r for r in engine.requests if "write a new instruction" in str(r["messages"])]
    assert asked and "secret" not in str(asked) and "capitals: 0" in str(asked)
    reflections = Store(Home(tmp_path)).runs(RunQuery(tags=["reflector"]))
    assert {run.output.split("```")[1].strip() for run in reflections} == {RULE}


def test_a_reflector_of_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAY_AGENTS_API_KEY", "of the platform")
    other = ScriptedEngine(speak)
    with (
        platform(tmp_path / "a", ScriptedEngine(speak)) as where,
        platform(tmp_path / "b", other, name="big") as elsewhere,
    ):
        method = Instructions(reflector=f"{elsewhere.url}/v1#big", trials=6, budget=40)
        done = done_by(a_loop(where, method), 1)
    assert done[1].promoted
    assert other.requests and {request["model"] for request in other.requests} == {"big"}


def test_a_reflector_that_is_away_or_has_nothing_to_say(tmp_path: Path) -> None:
    """Nothing is lost: the same loop goes on, and repeats no trial."""
    says: list[Any] = [""]

    def speaks(request: dict[str, Any], version: str) -> Any:
        answer = speak(request, version)
        return says[0] if RULE in str(answer) else answer

    engine = ScriptedEngine(speaks)
    method = Instructions(reflector="m@1", trials=6, budget=40)
    with platform(tmp_path, engine) as where:
        with pytest.raises(BadInput, match=r"reflector m@1 gave no instructions.*3 times") as error:
            done_by(a_loop(where, method), 1)
        assert error.value.code == "no_instructions"
        says[0] = EngineError("no such thing", status=400)
        with pytest.raises(BadInput, match="are empty"):  # its answers are on record
            done_by(a_loop(where, method), 1)
        away = Instructions(reflector="http://127.0.0.1:9/v1#big", trials=6, budget=40)
        loop = a_loop(where, away, name="loop2")
        with pytest.raises(EngineUnavailable, match="the same command goes on"):
            done_by(loop, 1)
        assert [each["iteration"] for each in wait_for(where.iterations("loop2"))] == [0]
        trials = len(stored(tmp_path, split="train"))
        engine.requests.clear()
        says[0] = f"```\n{RULE}\n```"
        better = a_loop(where, Instructions(reflector="m@1", trials=6, budget=41), changed="accept")
        with pytest.raises(BadInput, match="are empty"):
            done_by(better, 1)
        assert not any("say" in str(request["messages"][-1]) for request in engine.requests)
    assert len(stored(tmp_path, split="train")) == trials


def test_no_rewrite_is_better(tmp_path: Path) -> None:
    def speaks(request: dict[str, Any], version: str) -> Any:
        return (
            "```\nBe brief.\n```" if "new instruction" in str(request) else speak(request, version)
        )

    schedule = [
        Instructions(iterations=1, reflector="m@1", trials=6, budget=30),
        Examples(iterations=1, **FEW),
    ]
    with platform(tmp_path, ScriptedEngine(speaks)) as where:
        done = done_by(a_loop(where, schedule), 2)
    assert not done[1].promoted and "no rewrite did better" in done[1].note
    assert (done[1].version, done[2].version) == ("m@1", "m@2") and done[2].promoted


def test_examples_longer_than_the_context(tmp_path: Path) -> None:
    def speaks(request: dict[str, Any], version: str) -> Any:
        too_long = EngineError("the prompt has 9000 tokens, and the context 8192", status=400)
        return too_long if len(request["messages"]) > 2 else speak(request, version)

    with platform(tmp_path, ScriptedEngine(speaks)) as where:
        with pytest.raises(BadInput, match=r"9000 tokens.*Examples\(count=1\)") as error:
            done_by(a_loop(where, Examples(**FEW)), 1)
        assert error.value.code == "examples_refused"
        assert len(wait_for(where.iterations("loop"))) == 1
        assert len(wait_for(where.versions("m"))) == 1


def test_no_run_can_be_an_example(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(lambda request: "no")) as where:
        with pytest.raises(BadInput, match="none of 20 runs can be an example"):
            done_by(a_loop(where, Examples(**FEW)), 1)
        (_, first) = wait_for(where.iterations("loop"))
    assert first["runs"] == 20 and not first["promoted"]


def test_a_control_draws_from_permuted_rewards(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(speak)) as where:
        method = Examples(**FEW | {"sets": 8, "iterations": 1})
        done_by(a_loop(where, method, control="shuffled-rewards"), 1)
    tried = [run for run in stored(tmp_path, split="train") if run.iteration is None]
    shown = {run.trajectory.messages[place]["content"] for run in tried for place in (2, 4)}
    assert any(not answer.isupper() for answer in shown)


def test_tool_runs_as_examples(tmp_path: Path) -> None:
    """An example has its tool calls and their results; a run cut off in the middle is none."""

    def speaks(request: dict[str, Any], version: str) -> Any:
        last = request["messages"][-1]
        if last["role"] == "user":
            return {"name": "calculator", "arguments": {"expression": "1 + 1"}}
        asked = next(m for m in reversed(request["messages"]) if m["role"] == "user")
        return asked["content"][4:].upper()

    with platform(tmp_path, ScriptedEngine(speaks)) as where:
        agent = crier(tools=[calculator])
        done_by(a_loop(where, Examples(**FEW, iterations=1), agent=agent), 1)
        examples = wait_for(where.version("m@2")).prompts["crier"].examples
    assert [one["role"] for one in examples] == ["user", "assistant", "tool", "assistant"] * 2


async def test_a_cancelled_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(rollouts, "BACKOFF", 0.02)
    reached = asyncio.Event()
    here = asyncio.get_running_loop()

    async def speaks(request: dict[str, Any], version: str) -> Any:
        if "write a new instruction" in str(request["messages"]):
            here.call_soon_threadsafe(reached.set)
            await asyncio.sleep(60)
        return speak(request, version)

    with platform(tmp_path, ScriptedEngine(speaks)) as where:
        loop = a_loop(where, Instructions(reflector="m@1", trials=6, budget=40))

        async def go() -> None:
            async for _ in loop.run(1):
                pass

        going = asyncio.create_task(go())
        await reached.wait()
        going.cancel()
        done, _ = await asyncio.wait({going}, timeout=120)
        await where.close()
    assert done and going.cancelled()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Examples(training=Training(steps=1)), "Examples trains no weights"),
        (lambda: Examples(count=0), "greater than or equal to 1"),
        (lambda: Instructions(reflector="big"), "name a version, such as 'big@3'"),
        (lambda: Instructions(reflector="http://host/v1"), "as in 'http://host/v1#model'"),
        (lambda: Instructions(reflector="big@3", budget=50), "trials=32 runs each"),
    ],
)
def test_methods_that_cannot_be(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


REWRITE = Instructions(reflector="big@3")
WORKERS = crier(environment=WorkerEnvironment("maze"))


@pytest.mark.parametrize(
    ("method", "changes", "told"),
    [
        (Examples(), {"live": Live()}, "leave live out"),
        (Examples(), {"agent": WORKERS}, "the workers of 'maze'"),
        (Examples(), {"sampling": Sampling(max_staleness=1)}, "leave max_staleness out"),
        (REWRITE, {"agent": crier(instructions=lambda: "Obey.")}, "instructions are a function"),
        (REWRITE, {"control": "shuffled-rewards"}, "no effect with Instructions"),
        (REWRITE, {"tasks": tasks(1)}, "two train tasks"),
        ([Examples(), GRPO()], {}, "say for how many iterations"),
        (Examples(), {"sampling": Sampling(dynamic_sampling=0.5)}, "without GRPO or DPO"),
    ],
)
def test_loops_that_cannot_be(method: Any, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        a_loop(Platform("http://127.0.0.1:9"), method, **changes)
