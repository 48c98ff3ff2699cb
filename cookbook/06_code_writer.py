"""06: an agent that writes code, rewarded by unit tests that it never sees.

    python cookbook/06_code_writer.py --quick          one problem, the model's part from a script
    cray-agents up --model DIR --name coder --home H   then, with a model that can write Python:
    cray-agents loop cookbook/06_code_writer.py --home H

The agent may try its code with a tool, `python`, and answers with a fenced block. The reward is the
share of the tests that this code passes. Both run in the sandbox. A model that is rewarded for
passing tests learns to pass them by whatever way there is. So the tests are calls: the code gets
these and gives values back, and the right ones stay outside of its sandbox, where they are
compared. Code that exits early, reads files and memory, or returns an object that equals everything
earns nothing; a run whose code does what no honest code does gets the tag `suspect`.

The problems below are there to be read and to be tested with. To get better a model needs some
thousand, such as MBPP's, and has to solve a few of them before: a chat model of 1.5B parameters or
more, on a GPU (docs/cluster.md). The settings are meant for that. The tiny models that the other
recipes make here cannot learn to program.

    TaskSet.from_jsonl("problems.jsonl")     lines: {"input": ..., "metadata": {"tests": [...]}},
                                             with tests such as "span([3]) == 0"
"""

import asyncio
import sys

from cray_agents import GRPO, Agent, Loop, Sampling, Task, TaskSet, Training
from cray_agents.testing import ScriptedEngine, tool_call
from cray_agents.tools.python import python_tool
from cray_agents.tools.sandbox import Sandbox
from cray_agents.tools.verifier import verifier
from cray_agents.training import Lora, Split

agent = Agent(
    name="coder",
    model="coder",
    instructions="Write the Python function that is asked for. Try it if in doubt. Answer with the "
    "code, in one fenced block, and nothing else.",
    tools=[python_tool(Sandbox(seconds=5))],
    max_turns=4,
    max_tokens=1024,
)

# ---- the reward: the share of the hidden tests, which stand in the task's metadata

passes = verifier(partial=True, sandbox=Sandbox(seconds=5), name="passes")

# ---- the tasks: a function, what it returns, that as an expression, and calls of it: the first
# one is shown, the others are hidden tests

TRAIN = [
    ("total(a, b)", "the sum of two numbers", "a + b", "total(2, 3)", "total(-1, 1)"),
    ("twice(x)", "a number times two", "2 * x", "twice(4)", "twice(-3)", "twice(0)"),
    ("last(items)", "the last item", "items[-1]", "last([1, 2])", "last('abc')"),
    ("even(n)", "whether n is even", "n % 2 == 0", "even(4)", "even(7)", "even(0)"),
    ("largest(xs)", "the largest number", "max(xs)", "largest([1, 3, 2])", "largest([-5])"),
    ("count(s, c)", "how often c is in s", "s.count(c)", "count('abca', 'a')", "count('', 'x')"),
    (
        "initial(s)",
        "s with a capital first",
        "s[:1].upper() + s[1:]",
        "initial('ab')",
        "initial('')",
    ),
    ("mean(xs)", "their mean", "sum(xs) / len(xs)", "mean([1, 2])", "mean([5])", "mean([0, 0, 3])"),
]
HOLDOUT = [
    ("square(x)", "x times itself", "x * x", "square(3)", "square(-2)", "square(0)"),
    ("flip(s)", "the text backwards", "s[::-1]", "flip('abc')", "flip('')", "flip('xy')"),
    ("odd(n)", "whether n is odd", "n % 2 == 1", "odd(3)", "odd(8)", "odd(-1)"),
    ("smallest(xs)", "the smallest number", "min(xs)", "smallest([2, 1])", "smallest([7])"),
    ("vowels(s)", "how many of aeiou are in s", "sum(c in 'aeiou' for c in s)",
     "vowels('tea')", "vowels('rhythm')", "vowels('aeiou')"),
    ("unique(xs)", "the list without repetitions, sorted", "sorted(set(xs))",
     "unique([2, 1, 2])", "unique([])"),
    ("shout(s)", "all letters large", "s.upper()", "shout('hi')", "shout('Oslo 1')"),
    ("span(xs)", "largest minus smallest", "max(xs) - min(xs)", "span([1, 5])", "span([3])"),
]  # fmt: skip


def problem(split: Split, function: str, what: str, solution: str, *calls: str) -> Task:
    """A task; the expected values are those of our own solution."""
    name, _, rest = function.partition("(")
    ours = {name: eval(f"lambda {rest[:-1]}: {solution}")}
    tests = [(call, repr(eval(call, dict(ours)))) for call in calls]
    shown, value = tests[0]
    return Task(
        input=f"{function}: {what}. For example, {shown} is {value}.",
        metadata={
            "tests": [f"{call} == {expected}" for call, expected in tests[1:]],
            "solution": f"def {function}:\n    return {solution}",
        },
        split=split,
    )


tasks = TaskSet(
    [*(problem("train", *row) for row in TRAIN), *(problem("holdout", *row) for row in HOLDOUT)]
)

loop = Loop(
    agent,
    tasks,
    rewards=[passes],
    method=GRPO(
        group_size=8,
        tasks_per_iteration=64,
        evaluate_every=2,
        clip_high=0.28,
        training=Training(
            steps=8,
            batch_size=64,
            learning_rate=2e-5,
            dtype="bfloat16",
            max_tokens_per_microbatch=16384,
            lora=Lora(rank=32, alpha=64),
        ),
    ),
    # problems that all of a group solve, or none, teach nothing
    sampling=Sampling(concurrency=32, dynamic_sampling=0.5),
)


async def quick() -> None:
    """One problem as the agent solves it, and what the tests say; the model's part is a script."""
    task = tasks[-1]
    code = task.metadata["solution"]
    tried = tool_call("python", code=f"{code}\nprint(span([4, 4, 9]))")
    says = ScriptedEngine([tried, f"```python\n{code}\n```"])
    run = await agent.override(engine=says).run(task)
    for call in (call for turn in run.trajectory.turns for call in turn.tool_calls):
        print(f"{call.name}: {call.result}")
    print(run.output)
    print("passes:", await passes(run))


if __name__ == "__main__":
    if "--quick" not in sys.argv:
        sys.exit("run it on a platform, as the docstring says, or with --quick")
    asyncio.run(quick())
