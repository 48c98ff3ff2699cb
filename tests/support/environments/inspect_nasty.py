"""Task of Inspect AI that fails in every way: as its sample's id says."""

from contextlib import suppress

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import generate, solver
from inspect_ai.tool import ToolDef
from misbehaviour import FLOOD, misbehave

WAYS = ["good", "reset", "hangs", "dies", "nan", "floods", "floods first", "floods a tool", "leaks",
        "crowded"]  # fmt: skip


async def submit(number: int) -> str:
    """Submit the sum.

    Args:
        number: the sum.
    """
    return "thanks"


async def flood(number: int) -> str:
    """Submit the sum.

    Args:
        number: the sum.
    """
    return FLOOD


@solver
def nasty():
    async def solve(state, generate):
        misbehave(state.sample_id)
        names = [f"tool_{n}" for n in range(1999)] if state.sample_id == "crowded" else []
        tool = flood if state.sample_id == "floods a tool" else submit
        state.tools = [ToolDef(tool, name=name).as_tool() for name in ["submit", *names]]
        if state.sample_id == "floods first":
            state.messages.append(ChatMessageUser(content=FLOOD))
        return state

    return solve


@solver
def careless():
    """A solver that goes on after any error."""

    async def solve(state, generate):
        if state.sample_id == "floods":
            state.messages.append(ChatMessageUser(content=FLOOD))
            with suppress(Exception):
                return await generate(state)
        return state

    return solve


@scorer(metrics=[accuracy()])
def right():
    async def score(state, target):
        return Score(value=float("nan") if state.sample_id == "nan" else 1.0)

    return score


@task
def nasties():
    samples = [Sample(id=way, input="Add 0 and 2.", target="2") for way in WAYS]
    return Task(dataset=samples, solver=[nasty(), generate(), careless()], scorer=right())
