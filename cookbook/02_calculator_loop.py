"""02: an agent that trains itself to use a calculator.

    python cookbook/02_calculator_loop.py [--method grpo] [--seed N] [--quick]

A tiny model, made here, imitates a few demonstrations until it succeeds now and then. From there on
it learns from its own runs: run, reward, train, check, evaluate, promote if better. The same
command goes on where a killed one stopped. 03_loop_by_hand.py does the same without a `Loop`.

    --method rft     imitate the runs that were right (rejection sampling): the default
    --method grpo    eight runs at each task; the likelihood of those that were better than the
                     others rises, that of the worse falls
"""

import argparse
import json
import random
from pathlib import Path

from cray_agents import (
    GRPO,
    RFT,
    Agent,
    Data,
    Loop,
    Message,
    Run,
    Stop,
    Task,
    TaskSet,
    Training,
    local_platform,
    reward,
)
from cray_agents.loop import WarmUp
from cray_agents.testing import make_tiny_model
from cray_agents.tools.calculator import calculator

agent = Agent(
    name="calculator",
    model="calc",
    instructions="Use the calculator. Answer with the number.",
    tools=[calculator],
    max_turns=2,
    max_tokens=40,
    temperature=0.0,  # when people ask; the loop's training runs sample at 1
)


@reward
def exact(run: Run) -> float:
    """Return 1 when the answer is the target and nothing else."""
    return float(run.output == run.target)


def question(draw: random.Random) -> Task:
    """Draw a question. Those whose first number ends in 7 are held out: no other has such one."""
    left, right, operator = draw.randrange(10, 100), draw.randrange(10, 100), draw.choice("+-*")
    expression = f"{left} {operator} {right}"
    split = "holdout" if left % 10 == 7 else "train"
    return Task(input=f"What is {expression}?", target=str(eval(expression)), split=split)


def demonstration(task: Task) -> list[Message]:
    """Return the conversation of a perfect agent."""
    expression = task.text.removeprefix("What is ").removesuffix("?")
    call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {"role": "system", "content": agent.instructions},
        {"role": "user", "content": task.input},
        {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "0", "content": task.target},
        {"role": "assistant", "content": task.target},
    ]


def make_loop(method: str = "rft", seed: int = 0, quick: bool = False) -> Loop:
    """Make the loop of a seed: its tasks, its demonstrations, its method."""
    tasks = TaskSet.from_generator(question, 80 if quick else 2000, seed=seed)
    shown = [task for task in tasks if task.split == "train"][: 24 if quick else 72]
    imitating = Training(
        steps=10 if quick else 120,
        learning_rate=2e-3,
        min_learning_rate=2e-4,
        warmup_steps=10,
        schedule="cosine",
        seed=seed,
    )
    comparing = Training(steps=4, batch_size=64, learning_rate=2.5e-4, adam_beta2=0.99, seed=seed)
    methods = {
        "rft": RFT(tasks_per_iteration=16 if quick else 384, training=imitating),
        "grpo": GRPO(
            tasks_per_iteration=4 if quick else 64,
            evaluate_every=1 if quick else 4,
            clip_high=0.28,
            training=comparing,
        ),
    }
    return Loop(
        agent,
        tasks,
        rewards=[exact],
        name=f"calculator-{method}-{seed}",
        method=methods[method],
        data=Data(demonstrations=[(demonstration(task), {}) for task in shown]),
        warm_up=WarmUp(imitating, band=(0.0, 1.0) if quick else (0.2, 0.6)),
        stop=Stop(target=None if quick else 0.95),
    )


loop = make_loop()  # for `cray-agents loop`


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--method", choices=["rft", "grpo"], default="rft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    loop = make_loop(given.method, given.seed, given.quick)
    home = Path(".cray-agents") / f"cookbook-02{'-quick' if given.quick else ''}" / loop.name
    model = make_tiny_model(
        home / "model", loop.data.demonstrations, tools=agent.tool_schemas, seed=given.seed
    )
    with local_platform(home, model=model, name=agent.model) as loop.platform:
        for done in loop.run_sync(1 if given.quick else 6 if given.method == "rft" else 40):
            print(done.version, f"{done.holdout_success:.3f}", done.note, flush=True)
