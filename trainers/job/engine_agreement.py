"""Whether trainer and engine agree: log-probabilities of sampled tokens under the same weights.

What the parent sampled was recorded with the engine's log-probabilities. Before the first step the
trainer holds the same weights, so its own must be the same numbers but for rounding: if they are
not, one of the two computes another model, and every ratio of policies would be wrong. Called by
job.py (which tokens can be compared) and by rank.py (with what the trainer makes of them).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cray_agents.errors import JobError, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.data.samples import Floats, Samples
from cray_agents.training_jobs import JobSpec

MOST = 256  # samples that are compared
LIMITS = {"float32": 0.01, "bfloat16": 0.5}


@dataclass(frozen=True)
class Agreement:
    """How far apart the two are, in nats; `run_id` and `place` say of which token the most."""

    tokens: int
    max_difference: float
    mean_difference: float
    run_id: str
    place: int
    ours: float
    theirs: float

    def refuse(self, limit: float) -> None:
        """Raises JobError when the largest difference is above the limit, or is no number."""
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


def sampled_by_parent(
    samples: Samples, home: Home, parent_sha256: str, temperature: float = 1.0, most: int = MOST
) -> Samples:
    """At most so many samples, evenly chosen, with masks on what can be compared; perhaps none.

    Those are the marked tokens that versions with the parent's weights sampled, at `temperature`
    (vLLM's log-probabilities of greedy tokens are those at 1) and with nothing else that changes
    the distribution, such as top_p.
    """
    parents = _versions_with(samples.versions, home, parent_sha256)
    at = samples.temperatures
    plain = ~samples.shaped & (np.isclose(at, temperature) | ((at == 0) & (temperature == 1)))

    def mask_of(place: int) -> Floats:
        return samples.masks[place] * np.isin(samples.sampled_by[place], parents)

    usable = [int(i) for i in np.flatnonzero(plain) if mask_of(i)[1:].any()]
    if len(usable) > most:
        usable = [usable[i] for i in np.linspace(0, len(usable) - 1, most).astype(int)]
    return replace(samples.only(usable), masks=[mask_of(i) for i in usable])


def _versions_with(versions: Sequence[str], home: Home, weights_sha256: str) -> list[int]:
    """The places of those versions that are these weights."""
    registry, found = Registry(home), []
    for place, version in enumerate(versions):
        try:
            if registry.resolve(version).weights_sha256 == weights_sha256:
                found.append(place)
        except NotFound:  # imported runs name models of elsewhere
            continue
    return found


def compare(samples: Samples, ours: Sequence[Floats]) -> Agreement | None:
    """The trainer's log-probabilities, [marked tokens] of each sample, with the recorded ones.

    None where there is nothing to compare.
    """
    if not len(samples):
        return None
    places = [1 + np.flatnonzero(mask[1:]) for mask in samples.masks]
    theirs = np.concatenate([row[at] for row, at in zip(samples.sampled, places, strict=True)])
    mine = np.concatenate(list(ours)).astype(np.float64)
    apart = np.abs(mine - theirs)
    worst = int(apart.argmax())  # numpy takes a nan for the largest
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


def limit_of(spec: JobSpec) -> float:
    """The largest difference that is let pass, in nats."""
    return spec.logprob_limit or LIMITS[spec.hyperparameters.dtype]
