"""Tasks of Inspect AI: a tool, a solver and a scorer, as people write them."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, includes, scorer
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return str(a + b)

    return execute


@scorer(metrics=[accuracy()])
def short():
    async def score(state, target):
        if "raise" in state.input_text:
            raise RuntimeError("no score today")
        value = "brilliant" if "word" in state.input_text else {"characters": 0.5, "nice": "C"}
        return Score(value=value)

    return score


@task
def sums(count: int = 4):
    samples = [
        Sample(id=f"s{n}", input=f"What is {n} + {n + 1}?", target=str(2 * n + 1))
        for n in range(count)
    ]
    samples += [Sample(input="raise 1 + 1", target="2"), Sample(input="word 1 + 1", target="2")]
    return Task(
        dataset=samples,
        solver=[system_message("Add."), use_tools(add()), generate()],
        scorer=[includes(), short()],
    )
