"""The calculator loop of `demo`: an agent, its tasks, its reward and its loop.

A tiny model, made here and never downloaded, sees a few demonstrations until it succeeds now and
then. From there on it learns only from its own runs, by one of two methods: rft (rejection
sampling) imitates the runs that were right; grpo compares eight runs at each task. GRPO takes small
steps and many iterations, and begins where the model already succeeds now and then at every kind
of question: it is shown more demonstrations first. `cookbook/02_calculator_loop.py` is a shorter
loop of this kind, to copy.

The task: two-number arithmetic, "What is 47 + 385?". The agent must call the calculator with the
right expression and then answer with the result and nothing else. Both operands of a level-L
question have L digits, L = 1..4. One operand in five is reserved: a training question never has
one, a held-out or test question always does, and these two never share a question.
"""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, mul, sub
from pathlib import Path
from typing import Any, Literal

from cray_agents import (
    GRPO,
    RFT,
    Agent,
    Data,
    Loop,
    Message,
    Run,
    Sampling,
    Stop,
    Task,
    TaskSet,
    Training,
    reward,
)
from cray_agents.loop import Curriculum, WarmUp
from cray_agents.loop import warm_up as run_warm_up
from cray_agents.testing import make_tiny_model
from cray_agents.tools.calculator import calculator
from cray_agents.training import Split

LEVELS, OPERATORS = (1, 2, 3, 4), "+-*"
KINDS = list(itertools.product(LEVELS, OPERATORS))
HARDNESS = [level * (2 if operator == "*" else 1) for level, operator in KINDS]
RESULT = {"+": add, "-": sub, "*": mul}


@dataclass(frozen=True)
class Size:
    """Sizes of a run. `target`: the held-out success at which the loop stops."""

    train: int
    evaluated: int  # held-out tasks, and as many test tasks
    demonstrations: int
    per_iteration: int
    steps: int
    iterations: int
    target: float | None
    evaluate_every: int = 1


Method = Literal["rft", "grpo"]
FULL = Size(15_000, 408, 168, 1024, 150, 12, 0.955)
QUICK = Size(240, 24, 48, 32, 12, 2, None)
FULL_GRPO = Size(15_000, 204, 336, 64, 4, 120, 0.94, evaluate_every=8)
QUICK_GRPO = replace(QUICK, per_iteration=8, steps=4)

agent = Agent(
    name="calculator",
    model="calc",
    instructions="Use the calculator. Answer with the number.",
    tools=[calculator],
    max_turns=2,
    max_tokens=44,
    temperature=0.0,  # when people ask; the loop's training runs sample at 1
)


@reward
def exact(run: Run) -> float:
    """1 when the answer is the target and nothing else."""
    return float(run.task is not None and run.output == run.task.target)


# ---- the tasks


def reserved(operand: int) -> bool:
    """Tell if an operand is kept for evaluation: one in five, spread over every last digit."""
    return (operand + operand // 10) % 5 == 2


def split_of(left: int, operator: str, right: int) -> Split:
    """Return a question's split. It follows from the question alone, whatever the seed."""
    if not (reserved(left) or reserved(right)):
        return "train"
    return "holdout" if (left + right + OPERATORS.index(operator)) % 2 else "test"


def question(draw: random.Random, level: int, operator: str) -> Task:
    """Draw a question of a kind, in whatever split it belongs to."""
    low = 10 ** (level - 1) if level > 1 else 0
    left, right = draw.randrange(low, 10**level), draw.randrange(low, 10**level)
    return Task(
        input=f"What is {left} {operator} {right}?",
        target=str(RESULT[operator](left, right)),
        metadata={"kind": f"{level}{operator}", "expression": f"{left} {operator} {right}"},
        split=split_of(left, operator, right),
    )


def questions(
    seed: int, split: Split, count: int, weights: Sequence[int] | None = None
) -> list[Task]:
    """Draw `count` distinct questions of a split; the kinds come in turn, or by weight.

    There are few one-digit questions: when a kind has no more, the others go on.
    """
    draw = random.Random(f"{seed} {split} {weights}")
    drawn: dict[str, Task] = {}
    exhausted = set[tuple[int, str]]()
    for turn in itertools.count():
        kind = draw.choices(KINDS, weights)[0] if weights else KINDS[turn % len(KINDS)]
        if kind in exhausted:
            continue
        tries = (question(draw, *kind) for _ in range(2000))
        task = next((t for t in tries if t.split == split and t.text not in drawn), None)
        if task is None:
            exhausted.add(kind)
        else:
            drawn[task.text] = task
        if len(drawn) == count or len(exhausted) == len(KINDS):
            break
    return list(drawn.values())


def demonstrated(seed: int, count: int) -> list[Task]:
    """Draw the questions to demonstrate: two of each kind, then more of the harder kinds."""
    each = questions(seed, "train", 2 * len(KINDS))
    first = {task.text: task for task in each}
    more = [t for t in questions(seed, "train", count, HARDNESS) if t.text not in first]
    return [*each, *more][:count]


def demonstration(task: Task) -> list[Message]:
    """Return the conversation of a perfect agent."""
    arguments = json.dumps({"expression": task.metadata["expression"]})
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "calculator", "arguments": arguments},
    }
    return [
        {"role": "system", "content": agent.instructions},
        {"role": "user", "content": task.input},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": task.target},
        {"role": "assistant", "content": task.target},
    ]


# ---- the loop


def size_of(method: Method, quick: bool) -> Size:
    """Return the sizes that a method wants."""
    if method == "rft":
        return QUICK if quick else FULL
    return QUICK_GRPO if quick else FULL_GRPO


def make_loop(seed: int = 0, quick: bool = False, method: Method = "rft") -> Loop:
    """Make the loop of a seed: its tasks, its demonstrations, its method."""
    size = size_of(method, quick)
    tasks = [
        *questions(seed, "train", size.train),
        *questions(seed, "holdout", size.evaluated),
        *questions(seed, "test", size.evaluated),
    ]
    return Loop(
        agent,
        TaskSet(tasks),
        rewards=[exact],
        name=f"calculator-{seed}" if method == "rft" else f"calculator-{seed}-{method}",
        method=(imitation if method == "rft" else comparison)(seed, size),
        # a replica works on 64 calls; as many again wait, so that it never does
        sampling=Sampling(seed=seed, concurrency=64 if method == "rft" else 128),
        data=Data(
            demonstrations=[
                (demonstration(task), task.metadata)
                for task in demonstrated(seed, size.demonstrations)
            ],
            balance_by="kind",
            balance_power=0.3,
            curriculum=Curriculum(key="kind", revisit=0.0 if method == "rft" else 0.5),
        ),
        stop=Stop(target=size.target, patience=5 if method == "rft" else 3),
    )


def imitation(seed: int, size: Size) -> list[RFT]:
    """Rejection sampling: a large rate, as there is nothing wrong in what is imitated.

    Two or three points more near the top are no proof. They are not thrown away either: the next
    iteration goes on from there, and what serves changes when the sum of them is proven.
    """
    return [
        RFT(
            parent="latest",
            tasks_per_iteration=size.per_iteration,
            evaluate_every=size.evaluate_every,
            training=imitating(seed, size.steps),
        )
    ]


def comparison(seed: int, size: Size) -> list[GRPO]:
    """GRPO: many small iterations, each of whose runs is learned from about once.

    So the policy that learns is hardly ever another than the one that sampled. With six times as
    many runs an iteration it took twice as many to come as far (seed 500); at twice the rate, or
    with eight steps an iteration, success fell again. The first job has no optimizer to go on with,
    and warms up. The rate falls later: near the top there is less to learn from, and what is mere
    chance would lead elsewhere as fast as before. Half of the tasks are tried again, those first at
    which runs differed: where all do alike there is nothing to compare. Fewer iterations than
    eight are hard to tell from chance.
    """

    def grpo(iterations: int | None, rate: float, **more: Any) -> GRPO:
        return GRPO(
            iterations=iterations,
            group_size=8,
            tasks_per_iteration=size.per_iteration,
            evaluate_every=size.evaluate_every,
            clip_high=0.28,
            training=Training(
                steps=size.steps,
                batch_size=128,
                learning_rate=rate,
                adam_beta2=0.99,
                seed=1000 * (seed + 1),
                **more,
            ),
        )

    return [grpo(1, 2.5e-4, warmup_steps=size.steps), grpo(11, 2.5e-4), grpo(None, 1.2e-4)]


def imitating(seed: int, steps: int) -> Training:
    """Return the settings by which demonstrations, and runs that were right, are imitated."""
    return Training(
        steps=steps,
        batch_size=16,
        learning_rate=2e-3,
        min_learning_rate=2e-4,
        warmup_steps=min(10, steps),
        schedule="cosine",
        weight_decay=0.1,
        order="weighted",
        seed=1000 * (seed + 1),
    )


def warm_up(loop: Loop, quick: bool = False) -> None:
    """Imitate demonstrations, more each time, until a fifth of the held-out tasks is solved.

    Half of them for grpo: it learns nothing from a kind of task at which every run fails.
    """
    usual = imitating(loop.sampling.seed, (QUICK if quick else FULL).steps)
    first = usual.model_copy(update={"steps": 30 if quick else 200})
    then = usual.model_copy(update={"steps": 40})
    plan = WarmUp(first, then, demonstrations=80, more=8, band=(0.2, 0.4), jobs=40)
    if isinstance(loop.settings.schedule[0].method, GRPO):
        plan = replace(plan, demonstrations=160, more=16, band=(0.5, 0.75))
    run_warm_up(loop, replace(plan, band=(0.0, 1.0)) if quick else plan)


def make_model(directory: Path, seed: int = 0) -> None:
    """Write the untrained model; its tokenizer learns its merges from the demonstrations."""
    make_tiny_model(
        directory, make_loop(seed).data.demonstrations, tools=agent.tool_schemas, seed=seed
    )
