"""Engine agreement: compare the trainer's log-probabilities with the engine's before step one.

Tokens that the parent sampled were recorded with the engine's log-probabilities. Before the first
step the trainer holds the same weights, so its own numbers must equal these but for rounding.
Otherwise one of the two computes another model, and every ratio of policies would be wrong. Where
both compute in float32 the largest difference is judged. Else the mean and the 99th percentile are,
also against those that the parent's own job measured. So is, for tokens that were sampled greedily,
the share that are the trainer's most likely ones too. job_inputs.py finds the parent's versions;
rank.py compares. Read next: runtime/logprob_limits.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cray_agents.errors import JobError, NotFound
from cray_agents.paths import Home
from cray_agents.records import LogprobDistance
from cray_agents.runtime.logprob_limits import LogprobLimits, bfloat16_limits, limits_in, measure
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.data.samples import Floats, Ints, Samples
from cray_agents.training_jobs import JobSpec

MOST = 128  # samples compared, at most
KEPT = 20  # tokens that a job keeps, of those that differ most
FLOAT32_LIMIT = 0.01  # nats, of the largest difference
CAP = 2.0  # the usual importance_cap
LARGEST = 20.0  # log of a ratio, as in methods/grpo.py


@dataclass(frozen=True)
class Agreement:
    """Differences between trainer and engine in nats. `largest`: run, place, ours and theirs."""

    distance: LogprobDistance
    largest: list[tuple[str, int, float, float]]

    def event(self, limits: LogprobLimits) -> dict[str, Any]:
        """Return the fields of the journal's event `agreement`."""
        distance = self.distance
        return {
            "tokens": distance.tokens,
            "max_difference": distance.max,
            "mean_difference": distance.mean,
            "p99_difference": distance.p99,
            "equal_argmax": distance.equal_argmax,
            "kl": distance.kl,
            "tokens_above": distance.tokens_above,
            "sequences_above": distance.sequences_above,
            **dict(zip(("run_id", "place", "ours", "theirs"), self.largest[0], strict=True)),
            "largest": self.largest,
            "limit": limits.max or limits.p99,
            "mean_limit": limits.mean,
            "argmax_limit": limits.equal_argmax,
            "agrees": not limits.exceeded(distance),
        }

    def refuse(self, limits: LogprobLimits) -> None:
        """Raise JobError if the distance is above the limits or not a number."""
        if not limits.exceeded(self.distance):
            return
        tokens, mean, p99 = self.distance.tokens, self.distance.mean, self.distance.p99
        run, place, ours, theirs = self.largest[0]
        if limits.max is not None:
            measured = f"; the limit is {limits.max:g}, and the mean difference {mean:.4g} over"
            measured += f" {tokens} tokens"
        else:
            measured = f". Over {tokens} tokens the mean difference is {mean:.4g} and the 99th"
            measured += f" percentile {p99:.4g}"
            if (equal := self.distance.equal_argmax) is not None:
                measured += f", and {equal:.4g} of the greedy ones are the trainer's most likely"
            measured += f"; the limits are {limits}"
        raise JobError(
            f"trainer and engine do not agree on the parent's weights: for token {place} of {run}"
            f" the trainer computes a log-probability of {ours:.4f}, and the engine recorded"
            f" {theirs:.4f}{measured}. Either other weights answered"
            " under the parent's name, or the engine's options (engine_args: quantization) make"
            " another distribution of them. If an engine in bfloat16 sampled, and no platform knows"
            " it, say so: --set engine_dtype=bfloat16. If the difference is meant, raise the limit:"
            " in a loop Training(logprob_limit=NATS), of a job --set logprob_limit=NATS"
        )


def select_sampled(
    samples: Samples, parents: Sequence[int], temperature: float = 1.0, most: int = MOST
) -> tuple[Samples, list[int]]:
    """Select at most `most` samples, evenly chosen, masked to their comparable tokens.

    Return them, and their places in `samples`; there may be none. Comparable are trained tokens
    that a version of `parents` (places in `samples.versions`) sampled at `temperature`, with no
    other setting that changes the distribution, such as top_p. Greedy tokens count as sampled at 1:
    vLLM's log-probabilities of them are those at 1.
    """
    at = samples.temperatures
    plain = ~samples.shaped & (np.isclose(at, temperature) | ((at == 0) & (temperature == 1)))

    def mask_of(place: int) -> Floats:
        return samples.masks[place] * np.isin(samples.sampled_by[place], parents)

    usable = [int(i) for i in np.flatnonzero(plain) if mask_of(i)[1:].any()]
    if len(usable) > most:
        usable = [usable[i] for i in np.linspace(0, len(usable) - 1, most).astype(int)]
    return replace(samples.only(usable), masks=[mask_of(i) for i in usable]), usable


def places_of_parent(samples: Samples, home: Home, weights_sha256: str) -> list[int]:
    """Return the places in `samples.versions` of the versions that have these weights."""
    registry, places = Registry(home), []
    for place, version in enumerate(samples.versions):
        try:
            if registry.resolve(version).weights_sha256 == weights_sha256:
                places.append(place)
        except NotFound:  # imported runs may name models that this home does not have
            continue
    return places


def compare(
    samples: Samples, ours: Sequence[Floats], tops: Sequence[Ints] | None = None
) -> Agreement | None:
    """Compare the trainer's log-probabilities, [trained tokens] per sample, with the recorded ones.

    `tops`: the tokens that the trainer finds most likely in these places. Return None if there are
    no samples.
    """
    if not len(samples):
        return None
    places = [1 + np.flatnonzero(mask[1:]) for mask in samples.masks]
    at = np.concatenate(places)
    theirs = np.concatenate([row[at] for row, at in zip(samples.sampled, places, strict=True)])
    mine = np.concatenate(list(ours)).astype(np.float64)
    worst = np.abs(mine - theirs).argsort()[: -KEPT - 1 : -1]  # numpy treats nan as the largest
    equal: list[bool] = []
    if tops is not None:
        for i in np.flatnonzero(samples.temperatures == 0):
            equal += (np.asarray(samples.tokens[i])[places[i]] == tops[i]).tolist()
    of = np.repeat(np.arange(len(samples)), [len(at) for at in places])
    drawn = samples.temperatures[of] != 0
    disagreement = disagreement_of((mine - theirs)[drawn], of[drawn]) if drawn.any() else {}
    return Agreement(
        distance=measure(mine, theirs, equal).model_copy(update=disagreement),
        largest=[
            (samples.run_ids[of[n]], int(at[n]), float(mine[n]), float(theirs[n])) for n in worst
        ],
    )


def disagreement_of(logs: Floats, sequence: Ints, cap: float = CAP) -> dict[str, float]:
    """Return `kl`, `tokens_above` and `sequences_above` of a LogprobDistance, with any `cap`.

    `logs`: ours minus theirs of tokens that they drew, [tokens]; `sequence`: those of each token.
    """
    whole = np.bincount(sequence, logs)[np.unique(sequence)]
    return {
        "kl": float((np.expm1(np.minimum(logs, LARGEST)) - logs).mean()),
        "tokens_above": float((logs > math.log(cap)).mean()),
        "sequences_above": float((whole > math.log(cap)).mean()),
    }


def limits_of(spec: JobSpec, parent: LogprobDistance | None) -> LogprobLimits:
    """Return the limits of a job. `parent`: what the job that made its parent had measured.

    Trainer or engine, the one that rounds more decides. A `logprob_limit` of the spec's own is
    taken as it is.
    """
    given = spec.logprob_limit
    if spec.hyperparameters.dtype == "float32" and spec.engine_dtype is None:
        return LogprobLimits(max=given or FLOAT32_LIMIT)
    if given:
        return bfloat16_limits(given)
    return limits_in(spec.engine_dtype).relative_to(parent)
