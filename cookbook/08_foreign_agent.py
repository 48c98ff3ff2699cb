"""08: an agent of another framework, trained as it is.

    requirements/environment.sh foreign        once: their framework, in an environment of its own
    python cookbook/08_foreign_agent.py [--seed N] [--quick]

The agent is that of 03_any_framework/with_openai_agents.py; not a line of it changes, and it knows
nothing but a base URL. What happens to it, you do here by hand, with the calls that a Loop makes:

    ask it       the platform captures each model call, with the exact tokens, as a run
    reward       the runs that are found by their questions get a number each
    train        the runs that were right become a training set, that a job, that a new version
    compare      the same agent answers held-out questions under that version's name
    decide       the test by which a Loop promotes: promoted or rejected

Model, questions and warm-up are those of 02_calculator_loop.py: a tiny model that its few
demonstrations made right now and then. With a model of yours all of `main` stays, but for the
warm-up. `--quick` does little of everything, in about two minutes. Their agent samples at the
server's temperature in either case: what it answers to the same question differs from time to time.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from cray_agents import Loop, Platform, PromotionTest, Task, local_platform
from cray_agents.loop import Pair, decide
from cray_agents.training import DatasetRecipe, Hyperparameters, ModelVersion, RunFilter

COOKBOOK = Path(__file__).resolve().parent
PYTHON = COOKBOOK.parent / ".venv-foreign" / "bin" / "python"
NAME = "calc"  # what their agent calls its model

# Their program, in their environment: questions in, answers out; it asks the version it is told to.
ASK = """
import asyncio, json, sys
from agents import OpenAIChatCompletionsModel, RunConfig, Runner
from agents.exceptions import AgentsException
from with_openai_agents import agent, client

async def answer(question, config, places):
    async with places:
        try:
            return (await Runner.run(agent, question, max_turns=3, run_config=config)).final_output
        except AgentsException:  # no answer within its turns, a tool that is not there
            return None

async def main(model, questions):
    config = RunConfig(model=OpenAIChatCompletionsModel(model, openai_client=client))
    places = asyncio.Semaphore(16)
    return await asyncio.gather(*(answer(question, config, places) for question in questions))

print(json.dumps(asyncio.run(main(**json.load(sys.stdin)))))
"""

book = import_module("02_calculator_loop")  # the file beside this one


async def ask(platform: Platform, model: str, tasks: Sequence[Task]) -> list[str | None]:
    """What their agent answers to the tasks' questions; None where it came to no answer."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-c", ASK),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "CRAY_AGENTS_URL": platform.url,
            "PYTHONPATH": str(COOKBOOK / "03_any_framework"),
        },
    )
    asked = {"model": model, "questions": [task.input for task in tasks]}
    answers, _ = await process.communicate(json.dumps(asked).encode())
    if process.returncode != 0:
        sys.exit("their program failed; see above")
    return list(json.loads(answers))


async def rewarded(platform: Platform, tasks: Sequence[Task], since: float) -> tuple[int, int]:
    """Reward the runs since then by their questions; how many there are, and were right."""
    targets = {task.input: task.target for task in tasks}
    found = [r async for r in platform.runs(since=since, model=NAME) if r.input in targets]
    values = [float(run.output == targets[run.input]) for run in found]
    for run, value in zip(found, values, strict=True):
        await platform.reward(run.id, value, name="exact", who="cookbook")
    return len(found), int(sum(values))


async def trained(
    platform: Platform, warmed: Loop, parent: ModelVersion, job: Hyperparameters, since: float
) -> ModelVersion:
    """A new version, of the parent, by the runs since then that were right.

    And by the demonstrations of the warm-up, those that it has shown.
    """
    recipe = DatasetRecipe(
        where=RunFilter(since=since, model=NAME),
        min_reward=1.0,
        demonstrations=[messages for messages, _ in warmed.data.demonstrations],
        demonstrations_metadata=[metadata for _, metadata in warmed.data.demonstrations],
        tools=book.agent.tool_schemas,
        tokenizer=NAME,
        balance_by="kind",
    )
    dataset = await platform.build_dataset(recipe)
    begun = await platform.submit_job(
        dataset=dataset["id"], parent=parent.id, hyperparameters=job, optimizer_from="parent"
    )
    done = await platform.wait_for(begun, lambda status: None)
    return await platform.register(NAME, done.checkpoint or done.id)


async def main(platform: Platform, warmed: Loop, size: Any, iterations: int) -> None:
    """Iteration by iteration: ask, reward, train, compare, decide.

    `warmed` is a loop of 02 that was warmed up, for what it was shown; `size`: see there.
    """
    questions = book.questions(warmed.sampling.seed, "train", iterations * size.per_iteration)
    held_out, begun = book.questions(warmed.sampling.seed, "holdout", size.evaluated), time.time()
    incumbent = await promoted(platform)
    before = await ask(platform, incumbent.id, held_out)
    for iteration in range(iterations):
        start = iteration * size.per_iteration
        tasks = questions[start : start + size.per_iteration]
        await ask(platform, incumbent.id, tasks)
        runs, right = await rewarded(platform, tasks, begun)
        seed = 100 * warmed.sampling.seed + iteration + 1
        job = book.imitating(seed, size.steps).job(size.steps)
        candidate = await trained(platform, warmed, incumbent, job, begun)
        async with platform.staged(candidate, holder="cookbook"):
            after = await ask(platform, candidate.id, held_out)
            pairs = [
                Pair(task=task.id, incumbent=old == task.target, candidate=new == task.target)
                for task, old, new in zip(held_out, before, after, strict=True)
            ]
            planned = {None: len(pairs)}  # no kind of question is guarded by itself
            decision = decide(pairs, PromotionTest(hidden=0), planned=planned, exhausted=True)
            why, numbers = decision.reason, decision.model_dump(mode="json")
            if decision.verdict == "promote":
                await platform.promote(candidate, who="cookbook", reason=why, numbers=numbers)
                incumbent, before = candidate, after
            else:
                await platform.reject(candidate, who="cookbook", reason=why, numbers=numbers)
        success = f"{decision.incumbent:.3f} -> {decision.candidate:.3f}"
        print(f"{candidate.id}: {right} of {runs} runs were right; held out {success}")
        print(f"  {decision.verdict}: {why}", flush=True)
    await platform.close()


async def promoted(platform: Platform) -> ModelVersion:
    """What the bare name stands for."""
    version = await platform.promoted(NAME)
    if version is None:
        sys.exit(f"no version of {NAME} is promoted")
    return version


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if not PYTHON.exists():
        sys.exit("their framework is not installed: run requirements/environment.sh foreign")
    home = Path(".cray-agents") / f"cookbook-08{'-quick' if given.quick else ''}-{given.seed}"
    book.make_model(home / "seed-model", given.seed)
    with local_platform(home, model=home / "seed-model", name=NAME) as here:
        loop = book.make_loop(given.seed, given.quick)
        loop.platform = here
        book.warm_up(loop, given.quick)
        size = book.QUICK if given.quick else book.FULL
        asyncio.run(main(here, loop, size, 1 if given.quick else 8))
