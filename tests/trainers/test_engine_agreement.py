"""The trainer's log-probabilities of sampled tokens against the engine's, for the same weights."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.errors import JobError
from cray_agents.paths import Home
from cray_agents.records import LogprobDistance, Manifest, ModelCall
from cray_agents.runtime.datasets.run_samples import merge_turns, turn_of
from cray_agents.runtime.datasets.token_shards import SampleRow, ShardWriter
from cray_agents.runtime.disk import durable
from cray_agents.runtime.logprob_limits import LogprobLimits, bfloat16_limits
from cray_agents.runtime.pool.vllm_process import EngineSettings, environment
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.data.samples import Floats, Samples
from cray_agents.trainers.job.engine_agreement import (
    compare,
    disagreement_of,
    limits_of,
    places_of_parent,
    select_sampled,
)
from cray_agents.trainers.job.job_inputs import read_inputs
from cray_agents.trainers.job.journal import distance_in

VERSION = "m@1"
DRAWN = 24  # tokens of each request


def floats(*numbers: float) -> Floats:
    return np.array(numbers, np.float32)


def register(home: Home, name: str, weights: str) -> None:
    Registry(home).register(name, f"hf-{weights[:8]}", Manifest(files={}, weights_sha256=weights))


def sampled(count: int, **changes: Any) -> Samples:
    """Sequences [0, 1, 2, 3, 4] whose last three tokens versions 0, 1 and 0 sampled."""
    samples = Samples.of([[0, 1, 2, 3, 4]] * count, [floats(0, 0, 1, 1, 1)] * count)
    about: dict[str, Any] = {
        "sampled": [floats(0, 0, -1, -2, -3)] * count,
        "sampled_by": [np.array([-1, -1, 0, 1, 0], np.int16)] * count,
        "versions": [VERSION, "m@2", "elsewhere@3"],
        "temperatures": np.ones(count),
        "run_ids": [f"run-{i}" for i in range(count)],
    }
    return replace(samples, **about | changes)


def select_from(samples, home, sha256, *rest, **more):
    return select_sampled(samples, places_of_parent(samples, home, sha256), *rest, **more)[0]


def test_what_the_parent_sampled_is_compared(home: Home) -> None:
    register(home, "m", "parent")
    register(home, "m", "another")
    found = select_from(sampled(3), home, "parent")
    assert [mask.tolist() for mask in found.masks] == [[0, 0, 1, 0, 1]] * 3
    other = select_from(sampled(3), home, "another")
    assert [mask.tolist() for mask in other.masks] == [[0, 0, 0, 1, 0]] * 3
    assert len(select_from(sampled(3), home, "nobody")) == 0
    assert len(select_from(Samples.of([[1, 2]]), home, "parent")) == 0


def test_only_tokens_of_the_plain_distribution_are_compared(home: Home) -> None:
    register(home, "m", "parent")
    at = np.array([1.0, 0.7, 0.0, np.nan, 1.0])
    samples = sampled(5, temperatures=at, shaped=np.array([False] * 4 + [True]))
    assert select_from(samples, home, "parent").run_ids == ["run-0", "run-2"]
    assert select_from(samples, home, "parent", 0.7).run_ids == ["run-1"]


def test_of_many_samples_some_are_compared_evenly() -> None:
    found, places = select_sampled(sampled(1000), [0], most=5)
    assert places == [0, 249, 499, 749, 999]
    assert found.run_ids == [f"run-{i}" for i in places]


def test_the_largest_difference_is_found_and_refused_above_the_limit() -> None:
    samples = sampled(2)
    found = compare(samples, [floats(-1, -2, -3), floats(-1.25, -2, -2.5)])
    assert found is not None
    assert (found.distance.tokens, found.distance.max, found.distance.mean) == (6, 0.5, 0.125)
    kl = (math.exp(-0.25) - 1 + 0.25 + math.exp(0.5) - 1 - 0.5) / 6  # k3, four tokens agree
    assert found.distance.kl == pytest.approx(kl)
    assert (found.distance.tokens_above, found.distance.sequences_above) == (0, 0)
    event = {"event": "agreement", "time": 1.0, **found.event(LogprobLimits(max=0.5))}
    assert distance_in(event) == found.distance.model_copy(update={"worst": found.largest[0]})
    older = {name: event[name] for name in event if name not in ("kl", "p99_difference")}
    assert distance_in(older) is None
    assert found.largest[0] == event["largest"][0] == ("run-1", 4, -2.5, -3)
    assert [abs(ours - theirs) for *_, ours, theirs in found.largest] == [0.5, 0.25, 0, 0, 0, 0]
    found.refuse(LogprobLimits(max=0.5))
    with pytest.raises(JobError, match=r"for token 4 of run-1 .* -2.5000, .* -3.0000; the limit"):
        found.refuse(LogprobLimits(max=0.49))
    broken = compare(samples, [floats(-1, np.nan, -3), floats(-1, -2, -3)])
    assert broken is not None
    with pytest.raises(JobError, match=r"for token 3 of run-0 the trainer computes .* nan"):
        broken.refuse(LogprobLimits(max=1e9))
    with pytest.raises(JobError, match=r"mean difference is nan and the 99th percentile nan"):
        broken.refuse(LogprobLimits(mean=1e9, p99=1e9))
    assert compare(Samples.of([]), []) is None


def test_a_cap_counts_tokens_and_sequences() -> None:
    """Ratios of 3 and 1/3 make a sequence of ratio 1; of 1.9 and 1.9 one that is above 2."""
    logs, sequence = np.log(np.array([3, 1 / 3, 1.9, 1.9])), np.array([4, 4, 7, 7])
    found = disagreement_of(logs.astype(np.float32), sequence)
    assert (found["tokens_above"], found["sequences_above"]) == (0.25, 0.5)
    assert disagreement_of(logs.astype(np.float32), sequence, cap=4)["sequences_above"] == 0


def test_greedy_tokens_say_nothing_about_the_divergence() -> None:
    found = compare(sampled(1, temperatures=np.zeros(1)), [floats(-1, -2, -2)])
    assert found is not None and found.distance.max == 1 and found.distance.kl is None


def test_in_bfloat16_the_distribution_is_judged() -> None:
    """One token of 600 is far off: no reason to refuse in bfloat16, but one in float32."""
    samples = sampled(200)
    exact = [floats(-1, -2, -3)] * 200
    found = compare(samples, [floats(-1, -2, -4), *exact[1:]])
    everywhere = compare(samples, [row - 0.2 for row in exact])
    assert found is not None and everywhere is not None
    found.refuse(bfloat16_limits())
    with pytest.raises(JobError, match=r"for token 4 of run-0 .*; the limit is 0.01, and the mean"):
        found.refuse(LogprobLimits(max=0.01))
    words = r"600 tokens the mean difference is 0.2 .* limits are mean 0.1, 99th percentile 0.5, "
    with pytest.raises(JobError, match=words):
        everywhere.refuse(bfloat16_limits())
    event = found.event(bfloat16_limits())
    assert (event["max_difference"], event["limit"], event["mean_limit"]) == (1, 0.5, 0.1)
    assert event["agrees"] and not everywhere.event(bfloat16_limits())["agrees"]
    assert not found.event(LogprobLimits(max=0.01))["agrees"]


def test_limits(lab: Any, tmp_path: Path) -> None:
    def limits(parent: LogprobDistance | None = None, **changes: Any) -> LogprobLimits:
        return limits_of(lab.spec(tmp_path, parent_sha256="0" * 64, **changes), parent)

    half: dict[str, Any] = {"hyper": {"dtype": "bfloat16"}}
    close = LogprobDistance(tokens=1000, mean=0.015, p99=0.06, max=1.0)
    assert limits() == limits(close) == LogprobLimits(max=0.01)
    assert limits(logprob_limit=0.2) == LogprobLimits(max=0.2)
    assert limits(**half) == LogprobLimits(mean=0.1, p99=0.5, equal_argmax=0.85)
    assert limits(close, **half) == LogprobLimits(mean=0.06, p99=0.25, equal_argmax=0.85)
    given = limits(close, **half, logprob_limit=0.2)
    assert given == LogprobLimits(mean=0.04, p99=0.2, equal_argmax=0.85)
    assert limits(**half, logprob_limit=5.0) == LogprobLimits(mean=1, p99=5, equal_argmax=0)
    # the one that rounds more decides
    rounded: dict[str, Any] = {"engine_dtype": "bfloat16"}
    assert limits(**rounded) == limits(**half) == limits(**half, **rounded) == bfloat16_limits()
    assert limits(**rounded, logprob_limit=5.0) == limits(**half, logprob_limit=5.0)


def test_the_greedy_tokens_are_compared_with_the_trainers_most_likely() -> None:
    greedy = sampled(100, temperatures=np.array([0.0, 1.0] * 50))  # 50 x 3 greedy tokens
    exact = [floats(-1, -2, -3)] * 100
    right, wrong = np.array([2, 3, 4]), np.array([2, 3, 9])

    def found(tops: list[Any]) -> Any:
        return compare(greedy, exact, tops)

    assert found([right, wrong] * 50).distance.equal_argmax == 1
    third = found([wrong, right] * 50)
    assert third.distance.equal_argmax == pytest.approx(2 / 3)
    event = third.event(bfloat16_limits())
    assert (event["equal_argmax"], event["argmax_limit"]) == (pytest.approx(2 / 3), 0.85)
    none = found([right + 9] * 100)
    with pytest.raises(JobError, match=r"0, and 0 of the greedy ones are the trainer's most like"):
        none.refuse(bfloat16_limits())
    none.refuse(LogprobLimits(max=0.01))
    few = compare(greedy.only(range(60)), exact[:60], [right + 9] * 60)
    assert few is not None and few.distance.equal_argmax is None
    assert compare(greedy, exact).distance.equal_argmax is None  # type: ignore[union-attr]


# ---- with vLLM

REQUESTS: list[dict[str, Any]] = [
    *({"temperature": 1.0} for _ in range(8)),
    *({"temperature": 0.5} for _ in range(4)),
    *({"temperature": 0.0} for _ in range(2)),
    *({"temperature": 1.0, "top_p": 0.5} for _ in range(2)),
]


@pytest.fixture(scope="module")
def calls(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[ModelCall]:
    """What vLLM sampled from a model, as calls."""
    out = tmp_path_factory.mktemp("vllm") / "answers.jsonl"
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 300, 4 + n).tolist() for n in range(len(REQUESTS))]
    asked = [{"prompt": p, **request} for p, request in zip(prompts, REQUESTS, strict=True)]
    script = Path(__file__).parents[1] / "support/trainers/vllm_sampler.py"
    done = subprocess.run(
        [sys.executable, str(script), str(models("llama")), str(out)],
        input="\n".join(map(json.dumps, asked)),
        env=environment(EngineSettings()),  # a replica's: it compiles nothing
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    return [
        ModelCall(
            id=f"call-{n}",
            run_id=f"run-{n}",
            model=VERSION,
            messages=[],
            message={},
            prompt_token_ids=prompts[n],
            sampling=REQUESTS[n],
            **answer,
        )
        for n, answer in enumerate(answers)
    ]


def publish(lab: Any, method: str, calls: Sequence[ModelCall]) -> None:
    """A dataset of the calls by the builder's own writer; the parent is what sampled them."""
    folder = lab.home.dataset("ds")
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, "train")
    for n, call in enumerate(calls):
        [sample] = merge_turns([turn_of(call)])
        writer.add([SampleRow(sample, call.run_id, "t", 1.0, advantage=1.0 - 2 * (n % 2))])
    files = {name: {"sha256": durable.sha256_file(folder / name)} for name in writer.finish()}
    (folder / "manifest.json").write_text(json.dumps({"method": method, "files": files}))
    register(lab.home, "m", weights_sha256(lab.models("llama")))


def reported(job: Any) -> dict[str, Any]:
    [event] = [event for event in job.journal.events() if event["event"] == "agreement"]
    return dict(event)


@pytest.mark.vllm
@pytest.mark.megatron
def test_a_job_finds_the_engines_numbers(lab: Any, calls: list[ModelCall]) -> None:
    publish(lab, "sft", calls)
    found = reported(lab.run(lab.spec("llama", hyper={"steps": 1})))
    assert found["tokens"] == (8 + 2) * DRAWN
    assert found["max_difference"] < 1e-4


@pytest.mark.vllm
@pytest.mark.megatron
def test_a_job_finds_the_engines_numbers_at_the_policys_temperature(
    lab: Any, calls: list[ModelCall]
) -> None:
    publish(lab, "grpo", [call for call in calls if call.sampling["temperature"] == 0.5])
    spec = lab.spec("llama", method="grpo", hyper={"steps": 1, "policy": {"temperature": 0.5}})
    job = lab.run(spec)
    found = reported(job)
    assert found["tokens"] == 4 * DRAWN
    assert found["max_difference"] < 1e-4
    [step] = [event for event in job.journal.events() if event["event"] == "step"]
    # what was compared is each sample's baseline, too, by which the first step divides
    assert (step["ratio"], step["kl_before"]) == pytest.approx((1.0, 0.0), abs=1e-6)


@pytest.mark.vllm
@pytest.mark.megatron
def test_a_job_refuses_what_another_distribution_gave(lab: Any, calls: list[ModelCall]) -> None:
    """Recorded as sampled plainly, but it was not."""
    wrong = [call.model_copy(update={"sampling": {}}) for call in calls]
    publish(lab, "sft", wrong)
    said = lab.fail(lab.spec("llama", hyper={"steps": 1}))
    assert "trainer and engine do not agree on the parent's weights" in said


# ---- in bfloat16, with transformers as the engine
def sampled_by(model: Path, seed: int, damage: Callable[[Any], None] | None = None) -> list[Any]:
    """Calls whose tokens an engine in bfloat16 sampled from a model; `damage` is done to it."""
    import torch
    from transformers import AutoModelForCausalLM

    engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    rows = torch.randint(3, 300, (16, 4))
    with torch.no_grad():
        if damage is not None:
            damage(engine)
        for _ in range(DRAWN):
            now = engine(rows).logits[:, -1].float().softmax(-1)
            rows = torch.cat([rows, torch.multinomial(now, 1)], 1)
        all_logprobs = engine(rows).logits[:, :-1].float().log_softmax(-1)
        logprobs = all_logprobs.gather(-1, rows[:, 1:, None])[:, 3:, 0]
    return [
        ModelCall(
            id=f"call-{n}",
            run_id=f"run-{n}",
            model=VERSION,
            messages=[],
            message={},
            sampling={"temperature": 1.0},
            prompt_token_ids=row[:4],
            token_ids=row[4:],
            logprobs=numbers,
        )
        for n, (row, numbers) in enumerate(zip(rows.tolist(), logprobs.tolist(), strict=True))
    ]


@pytest.mark.megatron
def test_a_job_in_bfloat16_judges_the_distribution(lab: Any) -> None:
    publish(lab, "sft", sampled_by(lab.models("llama"), seed=1))
    half = {"steps": 1, "dtype": "bfloat16"}
    job = lab.run(lab.spec("llama", hyper=half))
    found = reported(job)
    assert found["tokens"] == 16 * DRAWN and found["agrees"]
    assert 1e-3 < found["mean_difference"] < 0.04 and found["p99_difference"] < 0.2
    assert (found["limit"], found["mean_limit"]) == (0.5, 0.1)
    checkpoint = lab.home.checkpoint(job.journal.job_id)
    manifest = read_manifest(checkpoint)
    assert all(len(prompt.top) == len(prompt.logprobs) > 0 for prompt in manifest.probe)
    agreement = manifest.agreement
    assert agreement is not None and agreement.mean == found["mean_difference"]
    assert read_inputs(job.journal, lab.spec(checkpoint, hyper=half), 1).parent_agreement == (
        agreement
    )


@pytest.mark.megatron
def test_a_job_in_float32_allows_for_the_rounding_of_an_engine_in_bfloat16(lab: Any) -> None:
    publish(lab, "sft", sampled_by(lab.models("llama"), seed=1))
    assert "the limit is 0.01" in lab.fail(lab.spec("llama", hyper={"steps": 2}))
    found = reported(lab.run(lab.spec("llama", hyper={"steps": 1}, engine_dtype="bfloat16")))
    assert found["agrees"] and (found["limit"], found["mean_limit"]) == (0.5, 0.1)
    assert found["max_difference"] > 0.01


@pytest.mark.megatron
@pytest.mark.parametrize("wrong", ["transposed", "no adapter"])
def test_a_job_in_bfloat16_refuses_other_weights(lab: Any, wrong: str) -> None:
    def damage(engine: Any) -> None:
        import torch

        weight = engine.model.layers[1].self_attn.o_proj.weight
        if wrong == "transposed":
            weight.copy_(weight.T.reshape(weight.shape).clone())
        else:  # the engine applies one that the trainer does not have, or the other way about
            out, inner = weight.shape
            weight += 0.1 * (torch.randn(out, 4) @ torch.randn(4, inner)).to(weight.dtype)

    publish(lab, "sft", sampled_by(lab.models("llama"), seed=1, damage=damage))
    said = lab.fail(lab.spec("llama", hyper={"steps": 1, "dtype": "bfloat16"}))
    assert "trainer and engine do not agree on the parent's weights" in said
    assert "the limits are mean 0.1, 99th percentile 0.5" in said
