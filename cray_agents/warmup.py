"""A cold start: imitate a few demonstrations until the model succeeds sometimes, and stop there.

A model that never succeeds gives a loop nothing to learn from; one that was shown everything gives
it nothing to do. So training on the demonstrations goes on in small jobs until held-out success
lies in a stated band. Like the loop, it is resumed by running it again. Used by the cookbook.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cray_agents.errors import JobError
from cray_agents.generation import Progress
from cray_agents.held_out import hold_out
from cray_agents.loop import Loop
from cray_agents.platform import Platform
from cray_agents.recipes import DatasetRecipe
from cray_agents.records import ModelVersion, Run
from cray_agents.rollouts import success
from cray_agents.training import Hyperparameters, JobStatus

SEEDS = 2**31  # a job's seed is below, and not negative


@dataclass(frozen=True)
class WarmUp:
    """How to warm up: the first job, the jobs after it, and where to stop.

    The first job sees `demonstrations` of the loop's, each later one `more` of them.
    `band` is (lowest, highest) held-out success; the first version inside it is promoted. A job
    that jumps over the band is done again from the same parent with half of its steps.
    """

    first: Hyperparameters
    then: Hyperparameters
    demonstrations: int
    more: int
    band: tuple[float, float] = (0.15, 0.40)
    jobs: int = 12


def warm_up(loop: Loop, plan: WarmUp) -> ModelVersion:
    """Warm up the loop's model, from its first version; returns the version in the band.

    Promotes it unless a later one is promoted already, and leaves the loop with the demonstrations
    that were shown. Raises JobError when `plan.jobs` jobs did not reach the band.
    """
    return asyncio.run(_warm_up(loop, plan))


async def _warm_up(loop: Loop, plan: WarmUp) -> ModelVersion:
    platform = loop.platform = loop.platform or Platform()
    name = loop.agent.model
    below = ModelVersion.model_validate((await platform.versions(name))[0])
    reached, plan_now, shown = 0.0, plan.first, plan.demonstrations
    for number in range(1, plan.jobs + 1):
        job = await platform.submit_job(
            dataset=await _dataset(platform, loop, shown),
            parent=below.id,
            hyperparameters=plan_now.model_copy(
                update={
                    "seed": (plan_now.seed - number) % SEEDS
                }  # those from `seed` on are the loop's
            ),
            optimizer_from="parent",
        )
        job = await platform.wait_for(job, _reporter(loop, number, reached))
        version = await platform.register(name, job.checkpoint or job.id)
        reached = success(await _measured(loop, version))
        if reached > plan.band[1]:
            plan_now = plan_now.model_copy(update={"steps": max(1, plan_now.steps // 2)})
        elif reached >= plan.band[0]:
            await _promote(platform, version, f"{reached:.3f} in {plan.band}")
            loop.demonstrations = loop.demonstrations[:shown]
            return version
        else:
            below, plan_now, shown = version, plan.then, shown + plan.more
    raise JobError(
        f"{plan.jobs} warm-up jobs did not reach held-out success in the band {plan.band[0]:g}-"
        f"{plan.band[1]:g}, the last one {reached:.3f}: give more demonstrations or more steps"
    )


async def _measured(loop: Loop, version: ModelVersion) -> list[Run]:
    """The version's runs on the held-out tasks; it is loaded only if some are missing."""
    if not await loop.is_measured(version, "holdout"):
        await loop.stage(version)
    return await loop.evaluate(version, "holdout")


async def _promote(platform: Platform, version: ModelVersion, reason: str) -> None:
    promoted = await platform.promoted(version.name)
    if promoted is None or promoted.number < version.number:
        await platform.promote(version, who="warm-up", reason=f"held-out success {reason}")


async def _dataset(platform: Platform, loop: Loop, count: int) -> str:
    await hold_out(platform, loop.name, loop.tasks)
    recipe = DatasetRecipe(
        loop=loop.name,
        generations=[],  # demonstrations alone, however many runs there are by now
        demonstrations=[messages for messages, _ in loop.demonstrations[:count]],
        demonstrations_metadata=[metadata for _, metadata in loop.demonstrations[:count]],
        balance_by=loop.balance_by,
        balance_power=loop.balance_power,
        tools=loop.agent.tool_schemas,
        tokenizer=loop.agent.model,
    )
    return str((await platform.build_dataset(recipe))["id"])


def _reporter(loop: Loop, number: int, reached: float) -> Callable[[JobStatus], None]:
    def report(job: JobStatus) -> None:
        note = f"job {job.scheduler_job_id}"
        note += f", held-out {reached:.3f} so far" if number > 1 else ""
        loop.on_progress(Progress(0, f"warm-up job {number}", job.step, job.steps, note))

    return report
