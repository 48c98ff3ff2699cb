"""grpo, cispo and gspo against their papers' formulas, worked out one token after the other."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cray_agents.trainers.methods import METHODS
from cray_agents.training_jobs import Policy
from tests.support.trainers.method_batches import Answer, Numbers, answers, gradient, hyper, marked

LENGTHS = [3, 5, 1, 6, 2, 4]


def clip(ratio: float, policy: Policy) -> float:
    return min(max(ratio, 1 - policy.clip_low), 1 + policy.clip_high)


def engine_weights(answer: Answer, policy: Policy) -> Numbers:
    """p_before / p_sampled of each token or of the whole answer, bounded or masked by the cap."""
    cap = policy.importance_cap
    if cap is None:
        return np.ones(len(answer.now))
    pairs = zip(answer.before, answer.sampled, strict=True)
    ratios = [math.exp(b) / math.exp(s) for b, s in pairs]
    if policy.importance_mode.startswith("sequence"):
        ratios = [math.prod(ratios)] * len(ratios)
    instead = 0.0 if policy.importance_mode.endswith("mask") else cap
    return np.array([ratio if ratio <= cap else instead for ratio in ratios])


def by_hand(batch: Sequence[Answer], policy: Policy) -> tuple[float, Numbers]:
    """The loss, and its derivative with respect to each token's log-probability.

    Derivatives of d ratio = ratio d log p, worked out on paper: clipped terms have none.
    """
    tokens = sum(len(a.now) for a in batch)
    loss, slopes = 0.0, []
    for answer in batch:
        weights = engine_weights(answer, policy)
        length, advantage = len(answer.now), answer.advantage
        mean = sum(n - b for n, b in zip(answer.now, answer.before, strict=True)) / length
        for token in range(length):
            now, reference = answer.now[token], answer.reference[token]
            ratio = math.exp(now) / math.exp(answer.before[token])
            if policy.objective == "gspo":
                ratio = math.exp(mean)
            held = clip(ratio, policy)
            if policy.objective == "cispo":
                gain, slope = held * advantage * now, held * advantage
            elif ratio * advantage <= held * advantage:
                gain, slope = ratio * advantage, ratio * advantage
            else:
                gain, slope = held * advantage, 0.0
            least = advantage * (policy.dual_clip or math.inf)
            if advantage < 0 and gain < least:
                gain, slope = least, 0.0
            u = math.exp(reference) / math.exp(now)
            value = -weights[token] * gain + policy.kl * (u - math.log(u) - 1)
            slope = -weights[token] * slope + policy.kl * (1 - u)
            if policy.objective == "gspo" or policy.normalization == "sequence":
                part = 1 / length / len(batch)
            elif policy.normalization == "constant":
                part = 1 / len(batch) / policy.constant
            else:
                part = 1 / tokens
            loss += part * value
            slopes.append(part * slope)
    return loss, np.array(slopes)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_low": 0.1, "clip_high": 0.28},
    {"importance_cap": None},
    {"kl": 0.2, "importance_cap": 1.1},
    *[
        {"importance_cap": 1.1, "importance_mode": mode}
        for mode in ("token_mask", "sequence_truncate", "sequence_mask")
    ],
]


KINDS = [
    *[(o, n) for o in ("ppo", "cispo") for n in (None, "token", "sequence", "constant")],
    *[("gspo", None), ("gspo", "sequence")],
]


@pytest.mark.parametrize(("objective", "normalization"), KINDS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradient_are_the_papers(
    objective: Any, normalization: Any, options: dict[str, Any]
) -> None:
    policy = Policy(objective=objective, normalization=normalization, constant=9, **options)
    batch = answers(21, LENGTHS)
    given = marked(batch, fillers=1)
    loss = METHODS["grpo"](given, hyper(policy=policy))
    value, slopes = by_hand(batch, policy)
    count = loss.count.item()
    by_tokens = normalization in (None, "token") and objective != "gspo"
    assert count == (sum(LENGTHS) if by_tokens else len(LENGTHS))
    assert loss.total.item() / count == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(gradient(given, loss) / count, slopes, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_a_dual_clip_bounds_what_a_bad_token_costs(normalization: Any) -> None:
    """arXiv 1912.09729: max(min(r A, clip(r) A), c A) where the advantage is negative."""
    policy = Policy(dual_clip=1.05, normalization=normalization)
    batch = answers(21, LENGTHS)
    given = marked(batch, fillers=1)
    loss = METHODS["grpo"](given, hyper(policy=policy))
    value, slopes = by_hand(batch, policy)
    count = loss.count.item()
    assert loss.total.item() / count == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(gradient(given, loss) / count, slopes, rtol=1e-10, atol=1e-15)
    unbounded = hyper(policy=Policy(normalization=normalization))
    free = METHODS["grpo"](marked(batch, fillers=1), unbounded)
    assert loss.total < free.total, "some token was bounded"
    taken, before = (x.measures["clip_fraction"][0].item() for x in (loss, free))
    assert taken > before
    with pytest.raises(ValueError, match="dual_clip"):
        Policy(objective="gspo", dual_clip=3.0)


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token_truncate", [0.5, 2, 2, 1]),
        ("token_mask", [0.5, 0, 2, 1]),
        ("sequence_truncate", [1.5, 1.5, 2, 2]),
        ("sequence_mask", [1.5, 1.5, 2, 2]),
        ("sequence_mask above", [1.5, 1.5, 0, 0]),
    ],
)
def test_an_engines_ratio_counts_by_token_or_sequence(mode: str, weights: list[float]) -> None:
    """Two answers of two tokens with p_before / p_sampled of 1/2, 3 and 2, 1; the cap is 2."""
    ratios = [np.array([0.5, 3]), np.array([2, 1.01 if "above" in mode else 1])]
    batch = [
        replace(a, before=a.now, sampled=a.now - np.log(r), advantage=1.0)
        for a, r in zip(answers(29, [2, 2]), ratios, strict=True)
    ]
    given = marked(batch)
    policy: Any = {"importance_mode": mode.split()[0], "importance_cap": 2.0 + 1e-9}
    loss = METHODS["grpo"](given, hyper(policy=policy))
    np.testing.assert_allclose(-gradient(given, loss), weights, rtol=1e-6)
    changed = {"token": 1, "sequence": 2 if "above" in mode else 0}[mode.split("_")[0]]
    assert loss.measures["engine_clip_fraction"][0] == changed
    with pytest.raises(ValueError, match="no effect without importance_cap"):
        Policy(importance_cap=None, importance_mode="token_mask")


@pytest.mark.parametrize("objective", ["ppo", "cispo", "gspo"])
def test_the_first_step_is_the_plain_policy_gradient(objective: Any) -> None:
    """Where the policy is still the one before, all ratios are 1 and nothing is clipped."""
    batch = [replace(a, before=a.now) for a in answers(23, LENGTHS)]
    policy = Policy(objective=objective, normalization="sequence", importance_cap=None)
    given = marked(batch)
    loss = METHODS["grpo"](given, hyper(policy=policy))
    plain = [np.full(len(a.now), -a.advantage / len(a.now)) for a in batch]
    np.testing.assert_allclose(gradient(given, loss), np.concatenate(plain), rtol=1e-12)
    measures = {name: (v / n).item() for name, (v, n) in loss.measures.items()}
    assert measures["ratio"] == 1 and measures["clip_fraction"] == 0 == measures["kl_before"]


@pytest.mark.parametrize("objective", ["ppo", "cispo", "gspo"])
def test_without_advantage_there_is_nothing_to_learn(objective: Any) -> None:
    given = marked([replace(a, advantage=0.0) for a in answers(24, LENGTHS)])
    loss = METHODS["grpo"](given, hyper(policy=Policy(objective=objective)))
    assert not gradient(given, loss).any()
    assert objective == "cispo" or loss.measures["clip_fraction"][0] == 0


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(0.5, 1, True), (0.5, -1, False), (-0.5, 1, False), (-0.5, -1, True), (0.1, 1, False)],
)
def test_ppo_clips_only_what_would_go_further(
    log_ratio: float, advantage: float, clipped: bool
) -> None:
    (answer,) = answers(25, [1])
    answer = replace(answer, now=answer.before + log_ratio, advantage=advantage)
    given = marked([answer])
    loss = METHODS["grpo"](given, hyper(policy=Policy(importance_cap=None)))
    slope = 0.0 if clipped else -advantage * math.exp(log_ratio)
    assert gradient(given, loss)[0] == pytest.approx(slope)
    assert loss.measures["clip_fraction"][0].item() == clipped


def test_cispo_keeps_every_tokens_gradient() -> None:
    batch = answers(26, [40])
    policy = Policy(objective="cispo", clip_low=0.1, clip_high=0.1, importance_cap=None)
    given = marked(batch)
    loss = METHODS["grpo"](given, hyper(policy=policy))
    strength = -gradient(given, loss) / batch[0].advantage
    assert strength.min() == pytest.approx(0.9) and strength.max() == pytest.approx(1.1)
    share = loss.measures["clip_fraction"][0].item() / 40
    assert share == np.mean(np.isclose(strength, 0.9) | np.isclose(strength, 1.1))


def test_k3_has_the_divergence_as_its_mean() -> None:
    """Over all tokens, weighed by how likely the policy takes each."""
    random = np.random.default_rng(27)
    now, reference = (np.log(random.dirichlet(np.ones(6))) for _ in range(2))
    divergence = float((np.exp(now) * (now - reference)).sum())
    estimate = 0.0
    for n, r in zip(now, reference, strict=True):
        (answer,) = answers(27, [1])
        answer = replace(answer, now=np.array([n]), reference=np.array([r]))
        measures = METHODS["grpo"](marked([answer]), hyper(policy=Policy(kl=1))).measures
        assert measures["kl"][0] >= 0
        estimate += math.exp(n) * measures["kl"][0].item()
    assert estimate == pytest.approx(divergence)


def test_measures_are_means_over_tokens() -> None:
    batch = answers(28, LENGTHS)
    now, before, sampled, reference, entropy = (
        np.concatenate([getattr(a, name) for a in batch])
        for name in ("now", "before", "sampled", "reference", "entropy")
    )
    signs = np.concatenate([np.full(len(a.now), np.sign(a.advantage)) for a in batch])
    ratio, u = np.exp(now - before), np.exp(reference - now)
    expected = {
        "ratio": ratio,
        "clip_fraction": (ratio > 1.2) & (signs > 0) | (ratio < 0.8) & (signs < 0),
        "kl_before": ratio - 1 - np.log(ratio),
        "engine_ratio": np.exp(before - sampled),
        "engine_gap": np.abs(before - sampled),
        "engine_kl": np.exp(before - sampled) - 1 - (before - sampled),
        "engine_clip_fraction": np.exp(before - sampled) > 2,
        "kl": u - 1 - np.log(u),
        "entropy": entropy,
    }
    measures = METHODS["grpo"](marked(batch), hyper(policy=Policy(kl=0.1))).measures
    found = {name: (value / count).item() for name, (value, count) in measures.items()}
    assert found == pytest.approx({name: values.mean() for name, values in expected.items()})
    assert 0 < found["clip_fraction"] < 1
    without = METHODS["grpo"](replace(marked(batch), entropy=None), hyper()).measures
    assert set(found) - set(without) == {"kl", "entropy"}


def test_gspo_has_no_other_normalization() -> None:
    with pytest.raises(ValueError, match="gspo has no normalization 'token'"):
        Policy(objective="gspo", normalization="token")
