"""Environments: state per run, tools that share it, replies, rewards per turn, an end for sure."""

import asyncio
import logging
from typing import Any, ClassVar

import pytest

from cray_agents import Environment, Run, RunContext, Task, tool
from cray_agents.errors import BadInput
from cray_agents.tools.calculator import calculator
from tests.support.model_scripts import SUM, agent, asks, pass_time, script


class Number(Environment):
    """Guess it: three tools that share what `reset` set up."""

    ended: ClassVar[list["Number"]] = []

    def __init__(self) -> None:
        self.guesses: list[int] = []

    async def reset(self, task: Task, context: RunContext) -> str:
        self.secret = int(task.metadata["secret"])
        return f"It has {len(str(self.secret))} digits."

    @tool
    def guess(self, number: int, context: RunContext) -> str:
        """Guess the number.

        Args:
            number: your guess.
        """
        self.guesses.append(number)
        context.reward(1.0 if number == self.secret else -0.1, "guess")
        return "yes" if number == self.secret else "lower" if number > self.secret else "higher"

    @tool(name="how_often")
    async def count(self) -> int:
        """How many guesses there were."""
        return len(self.guesses)

    def teardown(self) -> None:  # sync: it runs in a thread
        self.ended.append(self)


@pytest.fixture(autouse=True)
def fresh() -> None:
    Number.ended.clear()


def guesses(*numbers: int) -> list[dict[str, Any]]:
    return asks(*(("guess", {"number": number}) for number in numbers))


async def test_each_run_has_its_own():
    engine = script(guesses(50), guesses(20, 30), asks(("how_often", {})), "30")
    a = agent(engine, environment=Number, tools=[calculator], output_type=int)
    names = [schema["function"]["name"] for schema in a.tool_schemas]
    assert names == ["calculator", "how_often", "guess"]
    assert engine.requests == [] and a.tool_schemas[2]["function"]["parameters"]["properties"] == {
        "number": {"description": "your guess.", "type": "integer"}
    }
    run = await a.run(Task(input="Which?", metadata={"secret": 30}))
    assert run.output == 30 and run.input == "Which?"
    assert engine.requests[0]["tools"] == a.tool_schemas
    assert run.trajectory.messages[0]["content"] == "Which?\n\nIt has 2 digits."
    results = [[call.result for call in turn.tool_calls] for turn in run.trajectory.turns]
    assert results == [["lower"], ["higher", "yes"], [3], []]
    # what was given twice within a turn adds up
    given = [(r.name, r.turn, r.value, r.source) for r in run.rewards]
    assert given == [("guess", 0, -0.1, "environment"), ("guess", 1, 0.9, "environment")]
    assert [sorted(each.guesses) for each in Number.ended] == [[20, 30, 50]]  # two at once


async def test_many_at_once_do_not_mix():
    def say(request: dict[str, Any]) -> Any:
        last = request["messages"][-1]
        return guesses(int(request["seed"])) if last["role"] == "user" else last["content"]

    a = agent(script(say), environment=Number)
    tasks = [Task(input="?", metadata={"secret": n}) for n in range(40)]
    runs = await asyncio.gather(*(a.run(task, seed=n) for n, task in enumerate(tasks)))
    assert [run.output for run in runs] == ["yes"] * 40 and len(Number.ended) == 40
    assert all(each.guesses == [each.secret] for each in Number.ended)


class Talk(Environment):
    """Answers the model twice, then lets it be."""

    def reset(self, task: Task, context: RunContext) -> None:
        self.left = 2
        self.given = context.deps

    def reply(self, answer: str, context: RunContext) -> str | None:
        context.reward(float(answer == "right"))
        self.left -= 1
        return f"{self.given} {self.left}" if self.left >= 0 else None


async def test_it_replies_until_the_run_ends():
    engine = script("wrong", "right", "3")
    run = await agent(engine, environment=Talk, output_type=int).run("go", deps="more:")
    assert run.output == 3 and run.stop_reason == "completed"
    assert [(m["role"], m["content"]) for m in run.trajectory.messages] == [
        ("user", "go"), ("assistant", "wrong"), ("user", "more: 1"),
        ("assistant", "right"), ("user", "more: 0"), ("assistant", "3"),
    ]  # fmt: skip
    assert [(r.turn, r.value) for r in run.rewards] == [(0, 0.0), (1, 1.0), (2, 0.0)]
    run = await agent(script("a", "b"), environment=Talk, max_turns=2).run("go")
    assert run.stop_reason == "max_turns" and len(run.rewards) == 2


async def test_a_factory_makes_one_with_settings():
    class Level(Environment):
        def __init__(self, level: int) -> None:
            self.level = level

        @tool
        def which(self) -> int:
            return self.level

    a = agent(script(asks(("which", {})), "ok"), environment=lambda: Level(7))
    assert [schema["function"]["name"] for schema in a.tool_schemas] == ["which"]
    assert (await a.run("go")).trajectory.turns[0].tool_calls[0].result == 7


# ---- the end


async def test_a_reset_that_fails_is_no_reward_of_zero():
    engine = script("ok")

    class Broken(Number):
        async def reset(self, task: Task, context: RunContext) -> str:
            context.reward(0.0)
            raise ConnectionError("no database")

    run = await agent(engine, environment=Broken).run("go")
    assert run.stop_reason == "error" and run.error is not None and run.error.infrastructure
    assert run.error.message == "Broken.reset failed: ConnectionError: no database"
    assert (run.rewards, run.reward, engine.requests) == ([], None, [])
    assert len(Number.ended) == 1


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("__init__", "making Broken failed: OSError: full"),
        ("reply", "Broken.reply failed: OSError: full"),
    ],
)
async def test_others_that_fail(method, message):
    def fail(*arguments: Any) -> None:
        raise OSError("full")

    kind = type("Broken", (Environment,), {method: fail})
    run = await agent(script("ok"), environment=kind).run("go")
    assert run.error is not None and (run.error.message, run.error.infrastructure) == (
        message,
        True,
    )


async def test_what_it_says_must_be_text():
    class Odd(Environment):
        def reply(self, answer: str, context: RunContext) -> Any:
            return 7

    run = await agent(script("ok"), environment=Odd).run("go")
    assert run.error is not None and "Odd.reply returned 7: give a str or None" in run.error.message


async def test_teardown_after_a_timeout_an_error_and_a_cancellation():
    asked = asyncio.Event()

    async def never(request: Any) -> str:
        asked.set()
        pass_time(45)
        await asyncio.Event().wait()
        return ""

    task = Task(input="?", metadata={"secret": 5})
    a = agent(script(never), environment=Number)
    late = await a.override(timeout=30).run(task)
    assert late.stop_reason == "timeout"
    assert len(Number.ended) == 1
    assert (await agent(script(), environment=Number).run(task)).stop_reason == "error"
    assert len(Number.ended) == 2
    asked.clear()
    running = asyncio.create_task(a.run(task))
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(Number.ended) == 3


async def test_a_reset_that_takes_all_the_time_is_the_infrastructures():
    class Slow(Number):
        async def reset(self, task: Task, context: RunContext) -> str:
            pass_time(45)
            await asyncio.Event().wait()
            return ""

    run = await agent(script("ok"), environment=Slow, timeout=30).run("go")
    assert run.stop_reason == "timeout" and run.error is not None and run.error.infrastructure
    assert run.error.message.startswith("history, environment and instructions took all")
    assert len(Number.ended) == 1


async def test_a_teardown_that_fails_takes_nothing_from_the_run(caplog):
    class Broken(Environment):
        async def teardown(self) -> None:
            raise OSError("stuck")

    with caplog.at_level(logging.ERROR):
        run = await agent(script("ok"), environment=Broken).run("go", run_id="r")
    assert run.output == "ok" and run.error is None
    assert "run r: the teardown of its environment failed" in caplog.text


async def test_rewards_of_a_run_that_the_engine_failed_are_dropped():
    run = await agent(script(guesses(3)), environment=Number).run(
        Task(input="?", metadata={"secret": 5})
    )
    assert run.error is not None and run.error.infrastructure and run.rewards == []
    assert run.trajectory.turns[0].tool_calls[0].result == "higher"


async def test_a_reward_that_is_no_number_is_an_error_of_the_run_and_not_raised():
    class Broken(Number):
        def teardown(self) -> None: ...

        async def reset(self, task: Task, context: RunContext) -> str:
            context.reward(float("nan"))
            return await super().reset(task, context)

    kept: list[Run] = []

    async def keep(run: Run) -> None:
        kept.append(run)

    made = agent(script("ok"), environment=Broken, recorder=keep)
    run = await made.run(Task(input="?", metadata={"secret": 5}))
    assert run.error is not None and (run.error.type, run.reward) == ("RewardError", None)
    assert "reward step of turn 0 is nan" in run.error.message and kept == [run]
    assert run.error.infrastructure  # to be run again, not only scored


def test_a_tool_that_is_there_twice():
    class Twice(Environment):
        @tool(name="calculator")
        def mine(self) -> None: ...

    with pytest.raises(BadInput, match="two tools of one name: calculator"):
        agent(script("ok"), environment=Twice, tools=[calculator])


async def test_its_tools_stay_after_a_handoff():
    engine = script(asks(("transfer_to_b", {})), guesses(5), "ok")
    a = agent(engine, environment=Number, handoffs=[agent(None, name="b")])
    run: Run = await a.run(Task(input="?", metadata={"secret": 5}))
    assert run.trajectory.turns[1].tool_calls[0].result == "yes"
    assert SUM[0] not in [t["function"]["name"] for t in engine.requests[1]["tools"]]
