"""Engine agreement: compare the trainer's log-probabilities with the engine's before step one.

Tokens that the parent sampled were recorded with the engine's log-probabilities. Before the first
step the trainer holds the same weights, so its own numbers must equal these but for rounding.
Otherwise one of the two computes another model, and every ratio of policies would be wrong. job.py
selects the comparable tokens; rank.py compares them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cray_agents.errors import JobError, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.data.samples import Floats, Samples
from cray_agents.training_jobs import JobSpec

MOST = 256  # samples compared, at most
LIMITS = {"float32": 0.01, "bfloat16": 0.5}  # nats, by the trainer's dtype


@dataclass(frozen=True)
class Agreement:
    """Differences between trainer and engine in nats. `run_id`, `place`: the worst token's."""

    tokens: int
    max_difference: float
    mean_difference: float
    run_id: str
    place: int
    ours: float
    theirs: float

    def refuse(self, limit: float) -> None:
        """Raise JobError if the largest difference is above the limit or not a number."""
        if self.max_difference <= limit:
            return
        raise JobError(
            f"trainer and engine do not agree on the parent's weights: for token {self.place} of"
            f" {self.run_id} the trainer computes a log-probability of {self.ours:.4f}, and the"
            f" engine recorded {self.theirs:.4f}; the limit is {limit:g}, and the mean difference"
            f" {self.mean_difference:.4g} over {self.tokens} tokens. Either other weights answered"
            " under the parent's name, or the engine's options (engine_args: another dtype,"
            " quantization, logprobs mode) make another distribution of them. Raise logprob_limit"
            " if that is meant"
        )


def select_sampled(
    samples: Samples, parents: Sequence[int], temperature: float = 1.0, most: int = MOST
) -> Samples:
    """Select at most `most` samples, evenly chosen, masked to their comparable tokens.

    Comparable are trained tokens that a version of `parents` (places in `samples.versions`) sampled
    at `temperature`, with no other setting that changes the distribution, such as top_p. Greedy
    tokens count as sampled at 1: vLLM's log-probabilities of them are those at 1. The result may be
    empty.
    """
    at = samples.temperatures
    plain = ~samples.shaped & (np.isclose(at, temperature) | ((at == 0) & (temperature == 1)))

    def mask_of(place: int) -> Floats:
        return samples.masks[place] * np.isin(samples.sampled_by[place], parents)

    usable = [int(i) for i in np.flatnonzero(plain) if mask_of(i)[1:].any()]
    if len(usable) > most:
        usable = [usable[i] for i in np.linspace(0, len(usable) - 1, most).astype(int)]
    return replace(samples.only(usable), masks=[mask_of(i) for i in usable])


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


def compare(samples: Samples, ours: Sequence[Floats]) -> Agreement | None:
    """Compare the trainer's log-probabilities, [trained tokens] per sample, with the recorded ones.

    Return None if there are no samples.
    """
    if not len(samples):
        return None
    places = [1 + np.flatnonzero(mask[1:]) for mask in samples.masks]
    theirs = np.concatenate([row[at] for row, at in zip(samples.sampled, places, strict=True)])
    mine = np.concatenate(list(ours)).astype(np.float64)
    apart = np.abs(mine - theirs)
    worst = int(apart.argmax())  # numpy treats nan as the largest
    of = np.repeat(np.arange(len(samples)), [len(at) for at in places])
    return Agreement(
        tokens=len(apart),
        max_difference=float(apart[worst]),
        mean_difference=float(apart.mean()),
        run_id=samples.run_ids[of[worst]],
        place=int(np.concatenate(places)[worst]),
        ours=float(mine[worst]),
        theirs=float(theirs[worst]),
    )


def difference_limit(spec: JobSpec) -> float:
    """Return the largest allowed difference, in nats."""
    return spec.logprob_limit or LIMITS[spec.hyperparameters.dtype]
