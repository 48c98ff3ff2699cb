"""Probe check: prove that weights in memory compute what their checkpoint's golden probe says.

A reference or a teacher that is not the one that was named changes every loss and no loss shows it.
So before it judges a sample, it scores the prompts that its own training job recorded. Checkpoints
without a probe, such as downloaded ones, are not checked. Called by job/baselines.py. Read next:
runtime/logprob_limits.py.
"""

from pathlib import Path

from cray_agents.errors import NotFound
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE, bfloat16_limits, measure
from cray_agents.runtime.registry.checkpoints import manifest_of
from cray_agents.trainers.data.samples import Samples
from cray_agents.trainers.job.checks.weights_check import FailedEverywhere
from cray_agents.trainers.training.parallel_groups import broadcast_from_rank0, is_rank0
from cray_agents.trainers.training.train_step import Training


def check_probe(training: Training, checkpoint: Path, role: str) -> None:
    """Score a checkpoint's golden probe with the weights in memory. Collective.

    `role`: what the weights are for, in the error. Raises FailedEverywhere if they differ by more
    than rounding: see logprob_limits.py. Where one of the two jobs was not in float32, they are
    judged as in bfloat16.
    """
    probe = broadcast_from_rank0(_probe_of(checkpoint) if is_rank0() else None)
    if not probe:
        return
    prompts, expected, exact = probe
    scores = training.score(Samples.of(prompts), temperature=1.0)
    exact = exact and training.hyper.dtype == "float32"
    limits = FLOAT32_PROBE if exact else bfloat16_limits()
    distance = measure(
        [value for row in scores for value in row.tolist()],
        [value for row in expected for value in row],
    )
    if limits.exceeded(distance):
        raise FailedEverywhere(
            f"the weights in memory are not those of the {role} {checkpoint.name}: over"
            f" {distance.tokens} tokens of its golden probe their log-probabilities differ by"
            f" {distance.max:.3g} at most and {distance.mean:.3g} on average (allowed: {limits})."
            " Nothing was trained. Were its files changed by hand? Then make the checkpoint anew"
        )


def _probe_of(checkpoint: Path) -> tuple[list[list[int]], list[list[float]], bool] | None:
    """Return prompts, log-probabilities, and whether the job that made them was in float32."""
    try:
        manifest = manifest_of(checkpoint)
    except NotFound:
        return None
    prompts = [prompt.token_ids for prompt in manifest.probe]
    logprobs = [prompt.logprobs for prompt in manifest.probe]
    return prompts, logprobs, manifest.dtype == "float32"
