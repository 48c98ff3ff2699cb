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
from cray_agents.loop import Loop, wait_for
from cray_agents.platform import Platform
from cray_agents.records import DatasetRecipe, Hyperparameters, JobStatus, ModelVersion
from cray_agents.rollouts import success


@dataclass(frozen=True)
class WarmUp:
    """How to warm up: the first job, the jobs after it, and where to stop.

    `band` is (lowest, highest) held-out success; the first version inside it is promoted. A job
    that jumps over the band is done again from the same parent with half of its steps.
    """

    first: Hyperparameters
    then: Hyperparameters
    band: tuple[float, float] = (0.15, 0.40)
    jobs: int = 10


def warm_up(loop: Loop, plan: WarmUp) -> ModelVersion:
    """Warm up the loop's model on the loop's demonstrations; returns the promoted version.

    Returns at once when the loop's model is past its first, untrained version already. Raises
    JobError when `plan.jobs` jobs did not reach the band.
    """
    return asyncio.run(_warm_up(loop, plan))


async def _warm_up(loop: Loop, plan: WarmUp) -> ModelVersion:
    platform = loop.platform = loop.platform or Platform()
    name = loop.agent.model
    version = await platform.promoted(name)
    assert version is not None, "a platform promotes the model it was started with"
    if version.number > 1:
        return version
    dataset = await _demonstrations(platform, loop)
    below, reached, plan_now = version, 0.0, plan.first
    for number in range(1, plan.jobs + 1):
        job = await platform.submit_job(
            dataset=dataset,
            parent=below.id,
            hyperparameters=plan_now,
            optimizer_from=below.job,
        )
        job = await wait_for(platform, job, _reporter(loop, number))
        version = await platform.register(name, job.checkpoint or job.id)
        loop.on_progress(Progress(0, "warm-up: swap", note=version.id))
        await platform.stage(version)
        reached = success(await loop.evaluate(version, "holdout"))
        if reached > plan.band[1]:
            plan_now = plan_now.model_copy(update={"steps": max(1, plan_now.steps // 2)})
        elif reached >= plan.band[0]:
            reason = f"warm-up: held-out {reached:.3f} in {plan.band[0]:g}-{plan.band[1]:g}"
            await platform.promote(version, who="warm-up", reason=reason)
            return version
        else:
            below, plan_now = version, plan.then
    raise JobError(
        f"{plan.jobs} warm-up jobs did not reach held-out success in the band {plan.band[0]:g}-"
        f"{plan.band[1]:g}, the last one {reached:.3f}: give more demonstrations or more steps"
    )


async def _demonstrations(platform: Platform, loop: Loop) -> str:
    recipe = DatasetRecipe(
        demonstrations=[messages for messages, _ in loop.demonstrations],
        demonstrations_metadata=[metadata for _, metadata in loop.demonstrations],
        balance_by=loop.balance_by,
        tools=loop.agent.tool_schemas,
        tokenizer=loop.agent.model,
    )
    return str((await platform.build_dataset(recipe))["id"])


def _reporter(loop: Loop, number: int) -> Callable[[JobStatus], None]:
    def report(job: JobStatus) -> None:
        phase = f"warm-up job {number}"
        loop.on_progress(Progress(0, phase, job.step, job.steps, f"job {job.scheduler_job_id}"))

    return report
