"""Logprob limits: judge two programs' log-probabilities of the same tokens, ours and an engine's.

Trainer and engine compute the same weights in different orders. In float32 every token must agree.
In bfloat16 single tokens of good weights lie far apart by rounding alone, and with them the
largest difference. There the distribution is judged: its mean, its 99th percentile, and the share
of places where both name the same most likely token. Called by pool/golden_probe.py and
trainers/job/engine_agreement.py.

The limits in bfloat16 are from published figures and from small models on CPUs. No GPU was seen.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cray_agents.records import LogprobDistance

Logprobs = Sequence[float] | npt.NDArray[np.floating]


def measure(ours: Logprobs, theirs: Logprobs, equal_tops: Collection[bool] = ()) -> LogprobDistance:
    """Return the distribution of |ours - theirs|, both [tokens]. Without tokens all is 0.

    `equal_tops`: whether both name the same most likely token, for the places where that is known.
    """
    apart = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
    if not apart.size:
        return LogprobDistance(tokens=0, mean=0.0, p99=0.0, max=0.0)
    with np.errstate(invalid="ignore"):  # infinite: the mean tells
        p99 = float(np.quantile(apart, 0.99))
    return LogprobDistance(
        tokens=apart.size,
        mean=float(apart.mean()),
        p99=p99,
        max=float(apart.max()),  # numpy treats nan as the largest
        equal_argmax=sum(equal_tops) / len(equal_tops) if len(equal_tops) >= _ENOUGH else None,
    )


@dataclass(frozen=True)
class LogprobLimits:
    """Largest allowed differences in nats. None: that one is not judged.

    `equal_argmax`: the smallest share of equal most likely tokens; an unknown one is not judged.
    """

    max: float | None = None
    mean: float | None = None
    p99: float | None = None
    equal_argmax: float | None = None

    def exceeded(self, distance: LogprobDistance) -> bool:
        """Tell whether a distance is beyond any of the limits, or not a number."""
        pairs = ((getattr(self, name), getattr(distance, name)) for name in _JUDGED)
        least, share = self.equal_argmax, distance.equal_argmax
        return any(limit is not None and not value <= limit for limit, value in pairs) or (
            least is not None and share is not None and share < least
        )

    def relative_to(self, parent: LogprobDistance | None) -> "LogprobLimits":
        """Return tighter limits, from the distance that this site measured for good weights.

        A distance of few tokens says little, and changes nothing. In float32 the limits are tight.
        """
        if parent is None or parent.tokens < _ENOUGH or self.mean is None or self.p99 is None:
            return self
        least = self.equal_argmax
        if least is not None and parent.equal_argmax is not None:
            least = max(least, min(_GOOD_ARGMAX, 1 - _TIMES * (1 - parent.equal_argmax)))
        return LogprobLimits(
            mean=min(self.mean, max(_GOOD.mean, _TIMES * parent.mean)),
            p99=min(self.p99, max(_GOOD.p99, _TIMES * parent.p99)),
            equal_argmax=least,
        )

    def widened_to(self, dtype: str | None) -> "LogprobLimits":
        """Return a dtype's limits where these are float32's and one side is not in float32.

        The wider rounding of the two sides decides. None: unknown, and no reason to allow more.
        """
        if self.max is None or dtype in (None, "float32"):
            return self
        return limits_in(dtype)

    def __str__(self) -> str:
        """Describe them: "mean 0.1, 99th percentile 0.5, equal most likely tokens 0.85"."""
        labels = _JUDGED | {"equal_argmax": "equal most likely tokens"}
        given = ((label, getattr(self, name)) for name, label in labels.items())
        return ", ".join(f"{label} {limit:g}" for label, limit in given if limit is not None)


#: Of a golden probe, where both sides compute in float32.
FLOAT32_PROBE = LogprobLimits(max=1e-3)
_JUDGED = {"max": "maximum", "mean": "mean", "p99": "99th percentile"}


def bfloat16_limits(p99: float = 0.5) -> LogprobLimits:
    """Return the limits in bfloat16 for a 99th percentile; the mean's is a fifth of it.

    An exponential distribution's 99th percentile is 4.6 times its mean. The default mean of 0.1 is
    what NeMo-RL accepts (mean of exp |difference| < 1.1), and three times the 0.032 published there
    for DeepSeek-V3. Wrong weights are far beyond: a transposed matrix, a wrong RoPE base or a lost
    tensor-parallel shard give a mean of 0.25 to 4 (tests/runtime/test_logprob_limits.py). A
    doubled `p99` also doubles the allowed share of tokens whose most likely token differs.
    """
    least = max(0.0, 1 - (1 - _LEAST_ARGMAX) * max(1.0, p99 / 0.5))
    return LogprobLimits(mean=p99 / 5, p99=p99, equal_argmax=least)


def limits_in(dtype: str | None) -> LogprobLimits:
    """Return the limits of an engine that computes in a dtype, but for float32: fp8's are wider.

    FP8's three bits of mantissa put SmolLM2-135M, a small and so a hard case, 0.20 from bfloat16 on
    average, 1.2 in the 99th percentile, with 0.88 of most likely tokens equal: FP8 as vLLM does it,
    emulated on a CPU. bfloat16 lies 0.036, 0.17 and 0.985 from float32 there.
    """
    return _FP8 if dtype == "fp8" else bfloat16_limits()


_FP8 = LogprobLimits(mean=0.3, p99=1.5, equal_argmax=0.75)
#: Differences like the published ones are never refused: a mean of 0.032, and the tail of probes of
#: 500 tokens around its 99th percentile of 0.15.
_GOOD = LogprobDistance(tokens=0, mean=0.04, p99=0.25, max=0.0)
#: Shares of equal argmaxes that rounding never goes below: without a site's own measure, with it.
_LEAST_ARGMAX, _GOOD_ARGMAX = 0.85, 0.9
#: Good weights of one site lie closer together than this, other tokens and tasks included. A stale
#: layer or a missing adapter of a small model is further away.
_TIMES = 4.0
_ENOUGH = 100  # tokens that a site's own measure needs
