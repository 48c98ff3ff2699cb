"""03: the whole loop by hand, in one file to be read from top to bottom.

    python cookbook/03_loop_by_hand.py [--seed N] [--quick]

An agent has a calculator, and a tiny model that knows nothing: it is made here, and imitates a few
demonstrations until it succeeds now and then. From there on it learns from its own runs:

    sample     runs of the agent, on questions that it was not shown
    reward     1 for the right answer and nothing else
    build      a training set of the runs that were right
    train      a job, which makes the next version of the model
    prove      the version is loaded, and must compute what the trainer computed
    measure    its answers to held-out questions, beside those of the version that serves
    decide     promote it if it is shown to be better, else reject it

02_calculator_loop.py does this with a `Loop`, which also goes on where it was killed; here each
start begins anew. A few minutes on two cores; `--quick` does little of everything.
"""

import argparse
import asyncio
import random
import shutil
from pathlib import Path

from cray_agents import Agent, Message, Platform, PromotionTest, Run, Task, local_platform
from cray_agents.loop import Pair, decide
from cray_agents.testing import make_tiny_model
from cray_agents.tools.calculator import calculator
from cray_agents.training import DatasetRecipe, Hyperparameters, ModelVersion

agent = Agent(
    name="by-hand",
    model="calc",
    instructions="Use the calculator. Answer with the number.",
    tools=[calculator],
    max_turns=2,
    max_tokens=40,
)


def question(draw: random.Random, split: str) -> Task:
    """Draw a question. Held-out ones have a first number that no other has: one that ends in 7."""
    left = draw.choice([n for n in range(10, 100) if (n % 10 == 7) == (split == "holdout")])
    right, operator = draw.randrange(10, 100), draw.choice("+-*")
    expression = f"{left} {operator} {right}"
    return Task(input=f"What is {expression}?", target=str(eval(expression)), split=split)


def demonstration(task: Task) -> list[Message]:
    """Return the conversation of a perfect agent."""
    expression = task.text.removeprefix("What is ").removesuffix("?")
    call = {"name": "calculator", "arguments": f'{{"expression": "{expression}"}}'}
    return [
        {"role": "system", "content": agent.instructions},
        {"role": "user", "content": task.input},
        {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "0", "content": task.target},
        {"role": "assistant", "content": task.target},
    ]


async def sample(
    platform: Platform, version: ModelVersion, tasks: list[Task], temperature: float, **labels: int
) -> list[Run]:
    """Run the agent on each task, 32 at a time, and reward the runs. The platform records both."""
    able = agent.override(engine=platform.engine(), model=version.id, temperature=temperature)
    places = asyncio.Semaphore(32)

    async def one(number: int, task: Task) -> Run:
        async with places:
            run = await able.run(task, loop="by-hand", seed=number, **labels)
            await platform.reward(run.id, right(run), name="right", who="recipe 03")
            return run

    return await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks)))


def right(run: Run) -> float:
    """Return the reward of a run."""
    return float(run.output == run.target)


async def train(
    platform: Platform, parent: ModelVersion, shown: list[list[Message]], steps: int, seed: int
) -> ModelVersion:
    """Make a version that imitates the demonstrations and all right runs, never a held-out one."""
    recipe = DatasetRecipe(loop="by-hand", min_reward=1.0, demonstrations=shown,
                           tools=agent.tool_schemas, tokenizer=agent.model)  # fmt: skip
    dataset = await platform.build_dataset(recipe)
    hyper = Hyperparameters(steps=steps, learning_rate=2e-3, min_learning_rate=2e-4,
                            warmup_steps=10, schedule="cosine", seed=seed)  # fmt: skip
    job = await platform.submit_job(dataset=dataset["id"], parent=parent.id, hyperparameters=hyper)
    job = await platform.wait_for(job, on_progress=lambda status: None)
    return await platform.register(agent.model, str(job.checkpoint))


async def main(seed: int, quick: bool) -> None:
    """Make a model, warm it up, go round."""
    iterations, count, steps = (1, 16, 4) if quick else (4, 384, 120)
    draw = random.Random(seed)
    shown = [demonstration(question(draw, "train")) for _ in range(24 if quick else 72)]
    held_out = [question(draw, "holdout") for _ in range(8 if quick else 120)]
    home = Path(".cray-agents") / f"cookbook-03-{seed}"
    shutil.rmtree(home, ignore_errors=True)  # an earlier start's
    words = [(messages, {}) for messages in shown]
    model = make_tiny_model(home / "model", words, tools=agent.tool_schemas, seed=seed)
    with local_platform(home, model=model, name=agent.model) as platform:
        untrained = await platform.version(f"{agent.model}@1")
        serving = await train(platform, untrained, shown, 10 if quick else 150, 1000 * seed)
        async with platform.staged(serving, holder="by-hand"):
            await platform.promote(serving, who="recipe 03", reason="it was shown what to do")
        before = await sample(platform, serving, held_out, temperature=0.0)
        print(f"{serving.id}: held out {sum(map(right, before)) / len(before):.3f}", flush=True)
        for iteration in range(1, iterations + 1):
            tasks = [question(draw, "train") for _ in range(count)]
            runs = await sample(platform, serving, tasks, temperature=1.0, iteration=iteration)
            candidate = await train(platform, serving, shown, steps, 1000 * seed + iteration)
            async with platform.staged(candidate, holder="by-hand"):  # proven, else a SwapError
                after = await sample(platform, candidate, held_out, temperature=0.0)
                pairs = [Pair(task=old.task.id, incumbent=right(old), candidate=right(new))
                         for old, new in zip(before, after, strict=True)]  # fmt: skip
                test, planned = PromotionTest(hidden=0), {None: len(pairs)}
                decision = decide(pairs, test, planned=planned, exhausted=True)
                better = decision.verdict == "promote"
                settle = platform.promote if better else platform.reject
                await settle(candidate, who="recipe 03", reason=decision.reason)
            print(f"{candidate.id}: {sum(map(right, runs)):.0f} of {count} runs were right")
            print(f"  held out {decision.candidate:.3f}: {decision.verdict}, {decision.reason}")
            serving, before = (candidate, after) if better else (serving, before)
        await platform.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    asyncio.run(main(given.seed, given.quick))
