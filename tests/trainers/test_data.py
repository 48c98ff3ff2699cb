"""Samples of a step and their packing: pure functions, no Megatron."""

import json
import subprocess
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest
from cray_agents.runtime.datasets.run_samples import Span, TokenSample
from cray_agents.runtime.datasets.token_shards import SampleRow, ShardWriter
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.checkpointing.hf_export import probe_prompts
from cray_agents.trainers.data.packer import balance, microbatches, pack, step_units
from cray_agents.trainers.data.samples import Samples, read_samples
from cray_agents.trainers.job.baselines import mismatch_completions
from cray_agents.trainers.job.job_inputs import (
    check_samples,
    check_temperature,
    check_tokenizer,
    remark_on_epochs,
)
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.methods.learning_rate import learning_rate
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.training_jobs import Hyperparameters, MethodName, Policy


def some_samples(lengths: Sequence[int]) -> Samples:
    return Samples.of([range(100 * i, 100 * i + n) for i, n in enumerate(lengths)])


def token_sample(
    ids: Sequence[int], prompt: int, version: str = "", temperature: float | None = 1.0
) -> TokenSample:
    """A prompt of so many tokens, and what a version sampled after it (or nobody did)."""
    drawn = len(ids) - prompt
    logprobs = array("f", [0.0] * prompt + [-1.0 if version else 0.0] * drawn)
    spans = [Span(prompt, 0), Span(drawn, 1, 0 if version else -1)]
    versions = [version] if version else []
    return TokenSample(array("i", ids), logprobs, spans, versions, {temperature})


def publish(home: Home, method: str, rows: Sequence[SampleRow], split: str = "train") -> Path:
    """A dataset by the builder's own writer, all in one file."""
    folder = home.dataset("ds")
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, split)
    writer.add(rows)
    files = {name: {"sha256": durable.sha256_file(folder / name)} for name in writer.finish()}
    (folder / "manifest.json").write_text(json.dumps({"method": method, "files": files}))
    return folder


def pair(better: TokenSample, worse: TokenSample, name: str) -> list[SampleRow]:
    return [
        SampleRow(better, f"{name}-good", name, 1.0, pair=name, chosen=True),
        SampleRow(worse, f"{name}-bad", name, 0.0, pair=name, chosen=False),
    ]


# ---- the order


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 40),
    batch=st.integers(1, 50),
    steps=st.integers(1, 12),
)
def test_every_epoch_goes_through_every_unit_once(
    seed: int, size: int, batch: int, steps: int
) -> None:
    hyper = Hyperparameters(steps=steps, batch_size=batch, seed=seed)
    seen = [unit for step in range(steps) for unit in step_units(hyper, step, np.ones(size))]
    assert len(seen) == steps * batch
    for start in range(0, len(seen) - size + 1, size):
        assert sorted(seen[start : start + size]) == list(range(size))
    last = steps - 1
    assert step_units(hyper, last, np.ones(size)) == seen[last * batch :]  # of the step alone


def test_a_job_that_sees_few_samples_often_is_told() -> None:
    hyper = Hyperparameters(steps=12, batch_size=16)
    assert "train on each of 5 samples 38.4 times" in remark_on_epochs(hyper, 5)
    assert not remark_on_epochs(hyper, 20)


def test_epochs_and_seeds_differ() -> None:
    hyper = Hyperparameters(steps=2, batch_size=10, seed=3)
    first, second = (step_units(hyper, step, np.ones(10)) for step in (0, 1))
    assert first != second
    assert step_units(hyper.model_copy(update={"seed": 4}), 0, np.ones(10)) != first


def test_weighted_draws_follow_the_weights() -> None:
    hyper = Hyperparameters(steps=1, batch_size=4000, order="weighted")
    drawn = np.bincount(step_units(hyper, 0, np.array([0.0, 1.0, 3.0])), minlength=3)
    assert drawn[0] == 0
    assert drawn[2] / drawn[1] == pytest.approx(3.0, rel=0.15)
    assert step_units(hyper, 0, np.ones(3)) == step_units(hyper, 0, np.ones(3))
    assert step_units(hyper, 1, np.ones(3)) != step_units(hyper, 0, np.ones(3))


def test_a_pair_is_drawn_by_the_weight_of_its_better_one() -> None:
    samples = replace(some_samples([4] * 4), weights=np.array([1.0, 9, 3, 9]))
    assert replace(samples, units=[[0, 1], [2, 3]]).unit_weights.tolist() == [1, 3]


# ---- packing


@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    ranks=st.integers(1, 5),
    limit=st.integers(50, 200),
)
def test_spreading_uses_each_sequence_once_within_the_limit(
    costs: list[int], ranks: int, limit: int
) -> None:
    shares = balance(costs, ranks, limit)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1  # as many micro-batches on every rank
    places = [place for share in shares for batch in share for place in batch]
    assert sorted(places) == list(range(len(costs)))
    assert all(sum(costs[p] for p in batch) <= limit for share in shares for batch in share)
    loads = [sum(costs[p] for batch in share for p in batch) for share in shares]
    assert max(loads) - min(loads) <= max(costs)


@given(
    pairs=st.lists(st.tuples(st.integers(2, 25), st.integers(2, 25)), min_size=1, max_size=12),
    ranks=st.integers(1, 3),
    limit=st.integers(50, 120),
    rounds=st.integers(1, 3),
)
def test_packing_loses_and_doubles_nothing_and_keeps_pairs_together(
    pairs: list[tuple[int, int]], ranks: int, limit: int, rounds: int
) -> None:
    samples = some_samples([length for both in pairs for length in both])
    units = [[i, i + 1] for i in range(0, len(samples), 2)]
    shares = [microbatches(samples, units, limit, r, ranks, rounds=rounds) for r in range(ranks)]
    counts = {len(packed) for packed, _ in shares}
    assert len(counts) == 1 and counts.pop() % rounds == 0
    found = []
    for batches, members in shares:
        for batch, inside in zip(batches, members, strict=True):
            assert all(inside[n] + 1 == inside[n + 1] for n in range(0, len(inside), 2))
            assert not inside or batch.bounds[-1] == len(batch.tokens) <= limit
            assert inside or (len(batch.tokens), batch.mask.sum()) == (1, 0)
            starts = batch.bounds.tolist()[: len(inside)]
            for place, start in zip(inside, starts, strict=True):
                end = start + samples.cost(place)
                ids = samples.tokens[place].tolist()
                assert batch.tokens[start:end].tolist() == ids[:-1]
                assert batch.labels[start:end].tolist() == ids[1:]
                assert batch.positions[start:end].tolist() == list(range(end - start))
                found.append(place)
    assert sorted(found) == list(range(len(samples)))


def test_packing_shifts_masks_and_columns_to_the_labels() -> None:
    samples = some_samples([3, 4])
    masks = [np.array(mask, np.float32) for mask in ([0, 0, 1], [0, 1, 0, 1])]
    samples = replace(samples, masks=masks, chosen=np.array([1, 0], np.float32))
    values = [np.array(row, np.float32) for row in ([0, 1, 2], [5, 6, 7, 8])]
    packed = pack(samples, [1, 0], {"values": values})
    assert packed.tokens.tolist() == [100, 101, 102, 0, 1]
    assert packed.mask.tolist() == [1, 0, 1, 0, 1]
    assert packed.columns["values"].tolist() == [6, 7, 8, 1, 2]
    assert packed.bounds.tolist() == [0, 3, 5]
    assert packed.chosen.tolist() == [0, 1]


def test_probe_prompts_are_starts_and_ends_by_turns_without_repeats() -> None:
    prompts = probe_prompts(some_samples([100, 80, 7]))
    assert prompts[0] == list(range(64))
    assert prompts[1] == list(range(116, 180))
    assert prompts[2] == list(range(200, 207))
    assert len(probe_prompts(Samples.of([list(range(100))] * 20))) == 2
    assert len(probe_prompts(some_samples([9] * 20))) == 8


# ---- reading


def test_a_dataset_is_read_as_its_builder_wrote_it(home: Home) -> None:
    rows = [
        SampleRow(token_sample([1, 2, 3], 2, "m@2"), "a", "t", 1.0, advantage=-0.5),
        SampleRow(token_sample([9, 8, 7, 6], 1, "m@1", 0.7), "b", "t", 1.0, advantage=2.0),
        SampleRow(token_sample([5, 6, 7], 1, "m@2", None), "c", "t", 1.0),
    ]
    rows[2].sample.shaped = True
    samples = read_samples(publish(home, "grpo", rows), "grpo")
    assert [ids.tolist() for ids in samples.tokens] == [[1, 2, 3], [9, 8, 7, 6], [5, 6, 7]]
    assert [mask.tolist() for mask in samples.masks] == [[0, 0, 1], [0, 1, 1, 1], [0, 1, 1]]
    assert [row.tolist() for row in samples.sampled[:2]] == [[0, 0, -1], [0, -1, -1, -1]]
    assert [row.tolist() for row in samples.advantages[:2]] == [[0, 0, -0.5], [0, 2, 2, 2]]
    assert samples.versions == ["m@2", "m@1"]
    assert [row.tolist() for row in samples.sampled_by] == [[-1, -1, 0], [-1, 1, 1, 1], [-1, 0, 0]]
    assert (samples.run_ids, samples.units) == (["a", "b", "c"], [[0], [1], [2]])
    assert samples.temperatures[:2].tolist() == [1.0, 0.7] and np.isnan(samples.temperatures[2])
    assert samples.shaped.tolist() == [False, False, True]
    assert {row.dtype.itemsize for row in samples.tokens} == {4}  # memory: see the docstring


@pytest.mark.slow
def test_a_jobs_inputs_are_read_without_torch_and_pandas(lab: Any) -> None:
    """Each of them would take longer than all the rest of it."""
    lab.dataset(method="grpo", version="m@1")
    spec = lab.spec("qwen3", method="grpo")
    journal = JobJournal(lab.home, spec.id)
    journal.write_spec(spec)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from cray_agents.paths import Home\n"
        "from cray_agents.trainers.job.job import JobJournal, read_inputs\n"
        f"journal = JobJournal(Home(Path({str(lab.home.root)!r})), {spec.id!r})\n"
        "print(len(read_inputs(journal, journal.spec(), 1).samples))\n"
        "print(sorted({'torch', 'pandas', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["24", "[]"], done.stderr


@pytest.mark.slow
def test_versions_keep_their_names_over_many_row_groups(home: Home) -> None:
    versions = [f"m@{1 + n % 7}" for n in range(2500)]
    rows = [SampleRow(token_sample([n % 50, 1, 2], 1, v), f"r{n}", "", 1.0)
            for n, v in enumerate(versions)]  # fmt: skip
    samples = read_samples(publish(home, "sft", rows))
    assert [samples.versions[by[-1]] for by in samples.sampled_by] == versions
    assert [ids[0] for ids in samples.tokens] == [n % 50 for n in range(2500)]


def test_samples_without_a_target_are_left_out_and_counted(lab: Any) -> None:
    lab.dataset(ids=[[1, 2, 3], [4, 5], [6, 7]], masks=[[0, 0, 1], [1, 0], [0, 1]])
    samples = read_samples(lab.home.dataset("ds"))
    assert [ids.tolist() for ids in samples.tokens] == [[1, 2, 3], [6, 7]]
    assert samples.weights.tolist() == [1.0, 3.0]
    assert (samples.units, samples.left_out) == ([[0], [1]], 1)


def test_a_pair_is_left_out_as_a_whole(home: Home) -> None:
    good = [token_sample([n, 1, 2], 1, "m@1") for n in range(4)]
    rows = [*pair(good[0], good[1], "a"), *pair(good[2], token_sample([7], 0, "m@1"), "b"),
            *pair(good[3], good[0], "c")]  # fmt: skip
    samples = read_samples(publish(home, "dpo", rows), "dpo")
    assert samples.run_ids == ["a-good", "a-bad", "c-good", "c-bad"]
    assert (samples.units, samples.left_out) == ([[0, 1], [2, 3]], 2)
    assert samples.chosen.tolist() == [1, 0, 1, 0]


def test_rows_that_are_no_pair_are_named(home: Home) -> None:
    one = token_sample([1, 2, 3], 1, "m@1")
    rows = [*pair(one, one, "a"), *pair(one, one, "b")[::-1]]
    with pytest.raises(Corrupt, match="row 2 of its shards and the next"):
        read_samples(publish(home, "dpo", rows), "dpo")


def test_the_validation_split_may_be_missing(home: Home) -> None:
    row = SampleRow(token_sample([1, 2, 3], 1, "m@1"), "a", "t", 1.0)
    folder = publish(home, "sft", [row])
    assert len(read_samples(folder, split="validation")) == 0
    manifest = publish(home, "sft", [row] * 3, split="validation")
    assert len(read_samples(manifest, split="validation")) == 3
    with pytest.raises(BadInput, match="is empty"):
        read_samples(folder)


def test_all_shards_are_read_and_none_that_was_changed(lab: Any) -> None:
    lab.dataset(samples=24)
    folder = lab.home.dataset("ds")
    assert len(list(folder.glob("train-*.parquet"))) == 3
    assert len(read_samples(folder)) == 24
    shard = folder / "train-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(Corrupt, match="is damaged"):
        read_samples(folder)
    shard.unlink()
    with pytest.raises(Corrupt, match="is missing"):
        read_samples(folder)
    with pytest.raises(NotFound, match="no dataset at"):
        read_samples(folder.parent / "other")


@pytest.mark.parametrize(
    ("made_for", "method", "rows", "said"),
    [
        ("dpo", "sft", [{}], "is made for dpo, and this job is to train with sft"),
        ("sft", "kto", [{}], "build a dataset with method 'kto'"),
        ("sft", "sft", [{"prompt": 3}], "zero trainable tokens in 1 samples"),
        ("grpo", "grpo", [{}], "has no reward signal: all its advantages are 0"),
        ("grpo", "grpo", [{"advantage": 1.0}, {"version": "", "advantage": 1.0}], "those of run-1"),
        ("kto", "kto", [{"chosen": True}], "has no undesirable sample"),
        ("kto", "kto", [{"chosen": False}] * 2, "has no desirable sample"),
    ],
)  # fmt: skip
def test_what_a_method_cannot_learn_from_is_refused(
    home: Home, made_for: str, method: MethodName, rows: list[dict[str, Any]], said: str
) -> None:
    made = []
    for number, about in enumerate(rows):
        about = dict(about)
        sample = token_sample([1, 2, 3], about.pop("prompt", 1), about.pop("version", "m@1"))
        made.append(SampleRow(sample, f"run-{number}", "t", 1.0, **about))
    with pytest.raises(BadInput, match=said):
        read_samples(publish(home, made_for, made), method)


# ---- fitting


def test_what_does_not_fit_is_named(models: Any) -> None:
    model = read_architecture(models("qwen3"))
    hyper = Hyperparameters(steps=1, max_tokens_per_microbatch=100)
    check_samples(Samples.of([[0, 303], [5] * 101]), model, hyper)
    for ids, said in (
        ([[1, 2], [1, 304]], "sample 1 has token id 304, outside the model's vocabulary of 304"),
        ([[1, -2]], "token id -2"),
        ([[5] * 300], "sample 0 has 300 tokens, and the model attends to 256"),
        ([[5] * 4, [5] * 103], r"sample 1 has 103 tokens.*\(100\) to at least 102"),
    ):
        with pytest.raises(BadInput, match=said):
            check_samples(Samples.of(ids), model, hyper)
    pairs = replace(Samples.of([[5] * 60] * 4), units=[[0, 1], [2, 3]])
    with pytest.raises(BadInput, match=r"the pair of sample 0 has 120 tokens.* to at least 118"):
        check_samples(pairs, model, hyper)
    drawn = hyper.model_copy(update={"order": "weighted"})
    with pytest.raises(BadInput, match="'order' needs weights"):
        check_samples(replace(Samples.of([[1, 2]]), weights=np.zeros(1)), model, drawn)


def test_grpo_is_told_at_which_temperature_was_sampled() -> None:
    policy = Policy(temperature=0.7)
    hyper = Hyperparameters(steps=1, policy=policy)
    samples = replace(Samples.of([[1, 2]] * 2), temperatures=np.array([0.7, 0.7]))
    check_temperature(samples, hyper)
    for wrong, said in ((1.0, "temperature 1, and policy.temperature is 0.7"), (np.nan, "several")):
        with pytest.raises(BadInput, match=said):
            check_temperature(replace(samples, temperatures=np.array([0.7, wrong])), hyper)


def checkpoint(home: Home, name: str, words: Sequence[str], **more: Any) -> Path:
    """A registered version `<name>@1` that has nothing but a tokenizer."""
    folder = home.checkpoint(name)
    folder.mkdir(parents=True)
    content = {"model": {"vocab": {word: n for n, word in enumerate(words)}}, **more}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    Registry(home).register(name, name, Manifest(files={}, weights_sha256=f"of {name}"))
    return folder


def test_tokens_must_be_the_same_texts_to_the_parent(home: Home) -> None:
    added = [{"id": 3, "content": "<end>"}]
    parent = checkpoint(home, "parent", ["a", "b", "c"], added_tokens=added)
    checkpoint(home, "alike", ["a", "b", "c", "<end>"], version="1.0")  # written otherwise
    checkpoint(home, "larger", ["a", "b", "c", "<end>", "e"])
    checkpoint(home, "other", ["a", "c", "b"])
    folder = publish(home, "sft", [])
    samples = Samples.of([[0, 2, 3]])
    for version in ("alike@1", "larger@1", "parent@1", "gone@1", "elsewhere"):
        check_tokenizer(replace(samples, versions=[version]), folder, home, parent)
    used = replace(samples, versions=["alike@1", "other@1"])
    with pytest.raises(BadInput, match=r"made by other@1.*token 2 is 'b' in .*, and 'c' in"):
        check_tokenizer(used, folder, home, parent)
    check_tokenizer(replace(used, tokens=[np.array([0, 0])]), folder, home, parent)


def test_rendered_texts_must_be_the_same_to_the_parent_too(home: Home) -> None:
    parent = checkpoint(home, "parent", ["a", "b"])
    other = checkpoint(home, "other", ["b", "a"])
    folder = publish(home, "sft", [])
    manifest = {"recipe": {"tokenizer": str(other)}, "demonstrations": 1, "files": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match="token 0 is 'b' in"):
        check_tokenizer(Samples.of([[0, 1]]), folder, home, parent)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "demonstrations": 0}))
    check_tokenizer(Samples.of([[0, 1]]), folder, home, parent)


# ---- mismatched pairs


def test_mismatched_gives_each_prompt_a_completion_of_another_prompt() -> None:
    ids = [[1, 1, 10], [1, 1, 11, 5, 12], [2, 20], [2, 21], [2, 22], [3, 30, 31]]
    masks = [[0, 0, 1], [0, 0, 1, 0, 1], [0, 1], [0, 1], [1, 1], [0, 1, 1]]
    samples = Samples.of(ids, [np.array(mask, np.float32) for mask in masks])
    found = mismatch_completions(samples, limit=4)
    assert [row.tolist() for row in found.tokens] == [
        [1, 1, 21],  # passed on by three places: three have the prompt [2]
        [1, 1, 22],
        [2, 30, 31],
        [2, 10],
        [2, 11, 5, 12],
        [3, 20],
    ]
    assert [row.tolist() for row in found.masks] == [
        [0, 0, 1],
        [0, 0, 1],
        [0, 1, 1],
        [0, 1],
        [0, 1, 0, 1],
        [0, 1],
    ]
    assert [row.tolist() for row in mismatch_completions(samples, limit=3).tokens][4] == [2, 11, 5]
    assert [
        row.tolist() for row in mismatch_completions(Samples.of([[1, 2], [1, 3]]), 9).tokens
    ] == [[1, 3], [1, 2]]


@given(
    prompts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=2, max_size=8),
    limit=st.integers(6, 12),
)
def test_mismatched_uses_every_completion_once(prompts: list[tuple[int, int]], limit: int) -> None:
    attempts = [prompt for prompt, times in prompts for _ in range(times)]
    samples = Samples.of([[prompt, 10 + n, 99] for n, prompt in enumerate(attempts)])
    masks = [np.array([0, 1, 1], np.float32) for _ in attempts]
    found = mismatch_completions(replace(samples, masks=masks), limit)
    assert [row[0] for row in found.tokens] == attempts
    assert sorted(row[1] for row in found.tokens) == [10 + n for n in range(len(attempts))]


# ---- the learning rate


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_the_rate_warms_up_and_decays_to_its_minimum(schedule: Any, middle: float) -> None:
    hyper = Hyperparameters(
        steps=13, learning_rate=1.0, min_learning_rate=0.1, warmup_steps=2, schedule=schedule
    )
    rates = [learning_rate(hyper, step) for step in range(13)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[7] == pytest.approx(middle)
    assert rates[12] == pytest.approx(0.1)
    constant = hyper.model_copy(update={"schedule": "constant"})
    assert learning_rate(constant, 12) == 1.0


def test_wsd_is_constant_until_its_last_part() -> None:
    hyper = Hyperparameters(
        steps=20,
        learning_rate=1.0,
        min_learning_rate=0.2,
        warmup_steps=4,
        schedule="wsd",
        decay_fraction=0.2,
    )
    rates = [learning_rate(hyper, step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(rates[4:16]) == {1.0}
    assert rates[15:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
