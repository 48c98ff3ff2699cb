"""Wrong weights and honest rounding in bfloat16, told apart on a small model trained on the spot.

The engine is transformers in bfloat16: fused attention, large batches. The trainer is transformers
in bfloat16 with another order of operations: plain attention, small batches. Damage is done to the
engine's weights. A probe has as many tokens as a golden probe.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cray_agents.records import LogprobDistance
from cray_agents.runtime.logprob_limits import LogprobLimits, bfloat16_limits, measure

VOCAB, LAYERS, SEQUENCES, LENGTH, PROMPTS = 304, 2, 96, 64, 8
PROJECTIONS = {  # of a layer, with the dimension that tensor parallelism cuts
    "self_attn.q_proj": 0,
    "self_attn.k_proj": 0,
    "self_attn.v_proj": 0,
    "self_attn.o_proj": 1,
    "mlp.gate_proj": 0,
    "mlp.up_proj": 0,
    "mlp.down_proj": 1,
}
LAST = LAYERS - 1  # damage to the last layer changes the least
FLOAT32 = LogprobLimits(max=1e-3)
Damage = Callable[[Any], None]


def lessons(count: int, seed: int) -> torch.Tensor:
    """Arithmetic progressions with some other numbers among them."""
    random = np.random.default_rng(seed)
    steps = random.integers(1, 8, (count, 1)) * np.arange(32)
    rows = (random.integers(3, VOCAB, (count, 1)) + steps) % VOCAB
    noise = random.random(rows.shape) < 0.1
    return torch.tensor(np.where(noise, random.integers(0, VOCAB, rows.shape), rows))


def train(model: Any, steps: int, rate: float, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        rows = lessons(16, 1000 * seed + step)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def halved(model: Any, damage: Damage | None = None) -> Any:
    """A copy in bfloat16, damaged before it is rounded."""
    model = copy.deepcopy(model)
    if damage is not None:
        with torch.no_grad():
            damage(model)
    return model.to(torch.bfloat16)


@torch.no_grad()
def sample(model: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    rows = torch.randint(3, VOCAB, (SEQUENCES, 2))
    last, cache = rows, None
    while rows.shape[1] < LENGTH:
        out = model(last, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        last = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1)
        rows = torch.cat([rows, last], 1)
    return rows


@dataclass
class Scores:
    """Of all tokens but the first, and what is most likely there, both [sequences, tokens]."""

    logprobs: np.ndarray
    tops: np.ndarray

    def distance(self, other: "Scores", drawn: Any = slice(None)) -> LogprobDistance:
        """Over some sequences."""
        equal = self.tops[drawn] == other.tops[drawn]
        mine, theirs = self.logprobs[drawn].ravel(), other.logprobs[drawn].ravel()
        return measure(mine, theirs, equal.ravel().tolist())


@torch.no_grad()
def score(model: Any, rows: torch.Tensor, attention: str, batch: int) -> Scores:
    model.set_attn_implementation(attention)
    found, tops = [], []
    for part in rows.split(batch):
        logprobs = model(part).logits[:, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(-1, part[:, 1:, None])[..., 0])
        tops.append(logprobs.argmax(-1))
    return Scores(torch.cat(found).numpy(), torch.cat(tops).numpy())


def by_engine(model: Any, rows: torch.Tensor) -> Scores:
    return score(model, rows, "sdpa", SEQUENCES)


def by_trainer(model: Any, rows: torch.Tensor) -> Scores:
    return score(model, rows, "eager", 3)


@dataclass
class Pair:
    """A parent and its child in float32, what the child's engine sampled, and what is honest."""

    parent: Any
    child: Any
    rows: torch.Tensor
    trained: Scores  # the trainer's, of the child
    honest: Scores  # the engine's
    before: LogprobDistance  # of the parent, as its own site measured it


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": LAYERS, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    rope = {"rope_theta": 500000.0, "rope_type": "default"}
    parent = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, vocab_size=VOCAB, rope_parameters=rope))
    with torch.no_grad():
        for name, parameter in parent.named_parameters():
            parameter.mul_(1 if "norm" in name else 2)
    train(parent, 150, 4e-3, seed=1)
    child = copy.deepcopy(parent)
    train(child, 15, 3e-4, seed=2)
    half, first = halved(child), halved(parent)
    rows, earlier = sample(half, seed=3), sample(first, seed=4)
    before = by_trainer(first, earlier).distance(by_engine(first, earlier))
    yield Pair(parent, child, rows, by_trainer(half, rows), by_engine(half, rows), before)
    torch.set_num_threads(threads)


def probes(trained: Scores, engine: Scores, count: int) -> Iterator[LogprobDistance]:
    """Distances over drawn prompts, as many as a golden probe has."""
    random = np.random.default_rng(0)
    for _ in range(count):
        yield trained.distance(engine, random.choice(SEQUENCES, PROMPTS, replace=False))


def refused(limits: LogprobLimits, trained: Scores, engine: Scores, count: int) -> int:
    return sum(map(limits.exceeded, probes(trained, engine, count)))


# ---- what is honest
@pytest.mark.slow
def test_honest_pairs_are_not_refused(pair: Pair) -> None:
    assert 0.003 < pair.before.mean < 0.04  # or this model shows nothing
    tight = bfloat16_limits().relative_to(pair.before)
    assert tight.equal_argmax == 0.9
    assert refused(tight, pair.trained, pair.honest, 1000) == 0
    assert refused(FLOAT32, pair.trained, pair.honest, 1000) == 1000


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [VOCAB, 4_000])
def test_where_all_tokens_are_alike_honest_pairs_name_the_same(pair: Pair, vocab: int) -> None:
    """Before any training the most likely token is hardly more likely than the next."""
    torch.manual_seed(1)
    config = copy.deepcopy(pair.parent.config)
    config.vocab_size = vocab
    model = halved(Qwen3ForCausalLM(config))
    rows = sample(model, seed=3)
    by_share = LogprobLimits(equal_argmax=0.9)
    assert refused(by_share, by_trainer(model, rows), by_engine(model, rows), 1000) == 0


def test_published_differences_are_not_refused() -> None:
    """A mean of 0.032 nats, as NeMo-RL publishes; a limit of 0.1 on the maximum refuses it."""
    random = np.random.default_rng(0)
    pairs = [random.exponential(0.032, 504) for _ in range(1000)]
    found = [measure(apart, np.zeros(504)) for apart in pairs]
    for parent in (None, found[0], LogprobDistance(tokens=504, mean=0.01, p99=0.04, max=0.1)):
        assert not any(map(bfloat16_limits().relative_to(parent).exceeded, found))
    assert all(map(LogprobLimits(max=0.1).exceeded, found))


def test_single_tokens_may_be_far_off() -> None:
    """As where a mixture's router chooses another expert."""
    apart = np.full(504, 0.02)
    apart[:4] = 3.0
    assert not bfloat16_limits().exceeded(measure(apart, np.zeros(504)))
    apart[:12] = 3.0
    assert bfloat16_limits().exceeded(measure(apart, np.zeros(504)))


def test_what_is_no_number_is_refused() -> None:
    for limits in (FLOAT32, bfloat16_limits()):
        assert limits.exceeded(measure([0.0, float("nan")], [0.0, 0.0]))
        assert limits.exceeded(measure([float("-inf")] * 2, [0.0, 0.0]))
        assert not limits.exceeded(measure([], []))


def test_the_limits_of_a_site() -> None:
    limits = bfloat16_limits()
    few = LogprobDistance(tokens=11, mean=0.001, p99=0.002, max=0.003)
    assert limits.relative_to(None) == limits.relative_to(few) == limits
    far = few.model_copy(update={"tokens": 1000, "mean": 1.0, "p99": 9.0})
    assert limits.relative_to(far) == limits  # never above what is allowed without a parent
    near = far.model_copy(update={"mean": 1e-6, "p99": 1e-6})
    assert limits.relative_to(near) == LogprobLimits(mean=0.04, p99=0.25, equal_argmax=0.85)
    for share, least in ((1.0, 0.9), (0.97, 0.88), (0.5, 0.85)):
        measured = near.model_copy(update={"equal_argmax": share})
        assert limits.relative_to(measured).equal_argmax == pytest.approx(least)
    assert FLOAT32.relative_to(near) == FLOAT32


# ---- what is wrong
def weight_of(model: Any, layer: int, name: str) -> torch.Tensor:
    weight: torch.Tensor = model.get_parameter(f"model.layers.{layer}.{name}.weight")
    return weight


def transposed(layer: int, name: str) -> Damage:
    def damage(model: Any) -> None:
        weight = weight_of(model, layer, name)
        weight.copy_(weight.T.reshape(weight.shape).clone())

    return damage


def without_shard(layer: int, name: str, *, other: bool) -> Damage:
    """The second of two tensor-parallel ranks has zeros, or the first one's rows."""

    def damage(model: Any) -> None:
        weight, cut = weight_of(model, layer, name), PROJECTIONS[name]
        mine, theirs = weight.chunk(2, cut)[1], weight.chunk(2, cut)[0]
        mine.copy_(theirs.clone() if other else torch.zeros_like(mine))

    return damage


def wrong_rope(model: Any) -> None:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default"}
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


WRONG: dict[str, Damage] = {
    "wrong rope base": wrong_rope,
    **{f"transposed {name}": transposed(LAST, name) for name in PROJECTIONS},
    **{
        f"{name}: {'rows of another shard' if other else 'zeros'}": without_shard(
            LAST, name, other=other
        )
        for name in PROJECTIONS
        for other in (False, True)
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_are_refused(pair: Pair, name: str) -> None:
    """Also where the site never measured anything."""
    engine = by_engine(halved(pair.child, WRONG[name]), pair.rows)
    assert refused(bfloat16_limits(), pair.trained, engine, 100) == 100
    by_share = LogprobLimits(equal_argmax=bfloat16_limits().equal_argmax)
    assert refused(by_share, pair.trained, engine, 100) == 100


@pytest.mark.slow
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_stale_layer_is_refused(pair: Pair, layer: int) -> None:
    """The engine kept a layer of the parent. What the parent's own numbers were tells it."""
    older = pair.parent.model.layers[layer].state_dict()
    engine = by_engine(
        halved(pair.child, lambda model: model.model.layers[layer].load_state_dict(older)),
        pair.rows,
    )
    tight = bfloat16_limits().relative_to(pair.before)
    assert refused(tight, pair.trained, engine, 100) == 100
    if layer == LAST:
        assert refused(bfloat16_limits(), pair.trained, engine, 100) < 100


def test_an_adapter_that_is_not_applied_is_refused(pair: Pair) -> None:
    """The engine serves the parent alone, and the trainer the parent with adapters of rank 4."""
    older = pair.parent.state_dict()

    def adapted(model: Any) -> None:
        for name, weight in model.named_parameters():
            update = weight - older[name]
            weight.copy_(older[name])
            if "_proj" in name:
                left, sizes, right = torch.linalg.svd(update)
                weight += (left[:, :4] * sizes[:4]) @ right[:4]

    trained = by_trainer(halved(pair.child, adapted), pair.rows)
    engine = by_engine(halved(pair.parent), pair.rows)
    tight = bfloat16_limits().relative_to(pair.before)
    assert refused(tight, trained, engine, 100) == 100
