"""12: on-policy distillation: a teacher judges every token of the student's own runs.

    python cookbook/12_distillation.py [--seed N] [--quick]

Model, questions and warm-up are those of 02_calculator_loop.py. The teacher is the untrained model
after many demonstrations; a larger model with the same tokens would do as well. The student saw
few. It then learns from its own runs alone: at each token that it sampled, what was likelier to the
teacher than to itself becomes likelier. No reward is used; the held-out tasks only measure and
decide on promotion, as in every loop. `--quick` does little of everything.
"""

import argparse
import asyncio
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from cray_agents import Distill, Loop, Platform, Training, local_platform
from cray_agents.training import DatasetRecipe, ModelVersion

book = import_module("02_calculator_loop")  # the file beside this one
NAME = book.agent.model


async def teach(platform: Platform, seed: int, quick: bool) -> ModelVersion:
    """Train a teacher on demonstrations, register it, and print how well it answers."""
    shown = book.questions(seed, "train", 60 if quick else 3000)
    recipe = DatasetRecipe(
        loop="teacher",  # the student's loop, and what it holds out, then changes nothing here
        demonstrations=[book.demonstration(task) for task in shown],
        tools=book.agent.tool_schemas,
        tokenizer=NAME,
    )
    dataset = await platform.build_dataset(recipe)
    steps = 12 if quick else 800
    hyper = book.imitating(seed, steps).job(steps)
    job = await platform.submit_job(
        dataset=dataset["id"], parent=f"{NAME}@1", hyperparameters=hyper
    )
    done = await platform.wait_for(job, lambda status: None)
    teacher = await platform.register("teacher", done.checkpoint or done.id)
    asked = book.questions(seed, "holdout", 24 if quick else 204)
    async with platform.staged(teacher, holder="cookbook"):
        able = book.agent.override(engine=platform.engine(), model=teacher.id)
        runs = await asyncio.gather(*(able.run(task) for task in asked))
    right = sum(run.output == task.target for run, task in zip(runs, asked, strict=True))
    print(f"{teacher.id}: held out {right / len(asked):.3f}", flush=True)
    await platform.close()
    return teacher


def make_loop(seed: int, quick: bool, teacher: ModelVersion) -> Loop:
    """Make the student's loop: that of 02, with a teacher in the place of demonstrations.

    Each run is learned from once: what was sampled says little of a model that has moved on.
    """
    loop = book.make_loop(seed, quick)
    method = Distill(
        teacher=teacher.id,
        tasks_per_iteration=32 if quick else 512,
        evaluate_every=3,
        training=Training(
            steps=3 if quick else 8,
            batch_size=64,
            learning_rate=3e-4,
            warmup_steps=2,
            adam_beta2=0.99,
            seed=1000 * (seed + 1),
        ),
    )
    data = loop.data.model_copy(update={"demonstrations": ()})
    return replace(loop, name=f"distilled-{seed}", method=method, data=data)


def main(seed: int, quick: bool) -> None:
    """Teach the teacher, warm the student up, distill; the same command goes on."""
    home = Path(".cray-agents") / f"cookbook-12{'-quick' if quick else ''}-{seed}"
    book.make_model(home / "model", seed)
    with local_platform(home, model=home / "model", name=NAME) as platform:
        teacher = asyncio.run(teach(platform, seed, quick))
        if not quick:
            book.warm_up(replace(book.make_loop(seed), platform=platform))
        loop = replace(make_loop(seed, quick, teacher), platform=platform)
        for done in loop.run_sync(1 if quick else 12):
            # a job's first loss is the divergence before it, on the student's samples
            apart = (
                "" if done.loss_first is None else f", {done.loss_first:.4f} nats a token before"
            )
            print(f"{done.version}: held out {done.holdout_success:.3f}{apart}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    main(given.seed, given.quick)
