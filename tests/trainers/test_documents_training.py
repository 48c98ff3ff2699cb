"""Training on documents: read from this host's disk, in little memory, as transformers trains."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cray_agents.errors import BadInput, Corrupt, SetupError, StoreError
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.store import Store
from cray_agents.trainers.data.packer import BaselineLogprobs, microbatches, pack
from cray_agents.trainers.data.samples import Samples, read_samples
from cray_agents.trainers.data.stored_tokens import StoredTokens
from cray_agents.trainers.host_copies import host_copy
from cray_agents.trainers.job.job_inputs import check_samples
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.training_jobs import Hyperparameters
from tests.support.trainers.plain_model import plain_losses
from tests.support.trainers.tiny_families import FAMILIES, write_parent

CONTEXT = 32
MEGABYTES = int(os.environ.get("CRAY_TEST_DOCUMENT_MB", "1024"))  # of token ids


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host's cache, for this test alone."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("CRAY_AGENTS_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cray_agents.trainers.models.seed_model import make_seed_model

    directory = tmp_path_factory.mktemp("seed")
    make_seed_model(directory, seed=0, corpus=["0 1 2 3 4 5 6 7 8 9"] * 3)
    return directory


def documents(home: Home, tokenizer: Path, longest: int = 30, **recipe: Any) -> Path:
    """A set of 80 documents of one to thirty numbers, one after another."""
    home.root.mkdir(exist_ok=True)
    lines = (" ".join(str(n + i) for i in range(1 + n * 7 % longest)) for n in range(80))
    file = home.root / "numbers.txt"
    file.write_text("\n".join(lines))
    recipe = {"tokenizer": str(tokenizer), "max_tokens": CONTEXT, **recipe}
    made = build_dataset(Store(home), home, DatasetRecipe(documents=[str(file)], **recipe))
    return home.dataset(made["id"])


def stored_rows(folder: Path, split: str = "train") -> list[list[int]]:
    files = sorted(folder.glob(f"{split}-*.parquet"))
    return [row for file in files for row in pq.read_table(file)["input_ids"].to_pylist()]


def copies(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/tokens/*/tokens"))


def test_samples_are_those_of_the_shards_and_units_are_contexts(
    home: Home, tokenizer: Path, cache: Path
) -> None:
    folder = documents(home, tokenizer, validation=0.2)
    for split in ("train", "validation"):
        samples = read_samples(folder, split=split)  # type: ignore[arg-type]
        rows = stored_rows(folder, split)
        assert isinstance(samples.tokens, StoredTokens)
        assert [ids.tolist() for ids in samples.tokens] == rows
        plain = Samples.of(rows)
        assert samples.marks.tolist() == plain.marks.tolist()
        assert samples.token_range == plain.token_range
        assert [place for unit in samples.units for place in unit] == list(range(len(rows)))
        assert set(samples.unit_costs[:-1]) == {CONTEXT}
        assert 0 < samples.unit_costs[-1] <= CONTEXT
        first = [list(unit) for unit in samples.units[:3]]
        ours, theirs = (pack(each, first[0]) for each in (samples, plain))
        for name in ("tokens", "labels", "positions", "bounds", "mask"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
        assert len(ours.bounds) == len(first[0]) + 1, "no attention from one to another"
        batches, members = microbatches(samples, first, 2 * CONTEXT, 0, 1)
        assert sorted(place for each in members for place in each) == list(range(first[-1][-1] + 1))
        assert max(len(batch.tokens) for batch in batches) <= 2 * CONTEXT
        assert BaselineLogprobs(samples).weight_scale(range(len(samples))) == 1
    before = [file.stat().st_mtime_ns for file in copies(cache)]
    read_samples(folder)
    assert before == [file.stat().st_mtime_ns for file in copies(cache)] and len(before) == 2
    assert not len(read_samples(documents(home, tokenizer), split="validation"))


def test_a_damaged_copy_is_made_anew_and_a_damaged_set_is_refused(
    home: Home, tokenizer: Path, cache: Path
) -> None:
    folder = documents(home, tokenizer)
    samples = read_samples(folder)
    (copy,) = copies(cache)
    content = bytearray(copy.read_bytes())
    content[4 * int(samples.lengths[0]) + 1] ^= 1  # in the second sample
    copy.write_bytes(content)
    assert samples.tokens[0].tolist() == stored_rows(folder)[0]
    with pytest.raises(SetupError, match=r"tokens is damaged.*next start makes it anew"):
        samples.tokens[1]
    assert [ids.tolist() for ids in read_samples(folder).tokens] == stored_rows(folder)
    for name in ("samples", "index.json"):
        (copies(cache)[0].parent / name).write_bytes(b"damaged")
        assert [ids.tolist() for ids in read_samples(folder).tokens] == stored_rows(folder)
    shutil.rmtree(cache)
    cache.mkdir()
    shard = folder / "train-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(Corrupt, match=r"train-00000\.parquet is damaged"):
        read_samples(folder)
    assert not copies(cache)


def test_drafts_of_killed_makers_are_deleted(cache: Path) -> None:
    def die(draft: Path) -> None:
        (draft / "tokens").write_bytes(b"half")
        os._exit(9)

    for _ in range(2):
        if (pid := os.fork()) == 0:
            host_copy("tokens", "ds-1", die)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        (left,) = cache.glob("*/tokens/.ds-1.*")
    (left.parent / "gone").symlink_to("nowhere")  # as what another process deletes just now
    folder = host_copy("tokens", "ds-1", lambda draft: None)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["ds-1", "gone"]


def test_what_does_not_fit_is_refused(
    home: Home, tokenizer: Path, models: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = documents(home, tokenizer)
    samples, model = read_samples(folder), read_architecture(models("qwen3"))
    hyper = Hyperparameters(steps=1)
    check_samples(samples, model, hyper)
    with pytest.raises(BadInput, match=r"a context of documents has 33 .*to at least 32"):
        check_samples(samples, model, Hyperparameters(steps=1, max_tokens_per_microbatch=31))
    wide = read_samples(documents(home, tokenizer, longest=300, max_tokens=512))
    with pytest.raises(BadInput, match=r"attends to 256: build the dataset with max_tokens 256"):
        check_samples(wide, model, Hyperparameters(steps=1))
    monkeypatch.setenv("CRAY_AGENTS_CACHE", str(cache / "file"))
    (cache / "file").write_text("")
    with pytest.raises(StoreError, match="set CRAY_AGENTS_CACHE"):
        read_samples(folder)


@pytest.mark.megatron
def test_losses_are_those_of_a_plain_loop_of_transformers(
    lab: Any, tokenizer: Path, models: Any, tmp_path: Path
) -> None:
    folder = documents(lab.home, tokenizer)
    samples, rows = read_samples(folder), stored_rows(folder)
    own = {"dataset": folder.name, "hyper": {"steps": 1}}
    assert "whose tokenizer is not the one in" in lab.fail(lab.spec("qwen3", **own))
    parent = tmp_path / "model"
    shutil.copytree(models("qwen3"), parent)
    shutil.copy(tokenizer / "tokenizer.json", parent)
    spec = lab.spec(
        parent,
        dataset=folder.name,
        hyper={"steps": 10, "schedule": "constant", "warmup_steps": 0, "batch_size": 4},
        layout={"data": 2},
    )
    plain = plain_losses(parent, rows, spec.hyperparameters, units=samples.units)
    ours = lab.run(spec).losses
    print(f"losses by step: ours {ours}, a plain loop's {plain}")
    assert ours == pytest.approx(plain, rel=2e-4) and ours[-1] < ours[0]


@pytest.mark.megatron
def test_a_copy_damaged_under_a_job_costs_an_attempt_and_nothing_else(
    lab: Any, tokenizer: Path, models: Any, tmp_path: Path, cache: Path, hold: Any
) -> None:
    folder = documents(lab.home, tokenizer)
    parent = tmp_path / "model"
    shutil.copytree(models("qwen3"), parent)
    shutil.copy(tokenizer / "tokenizer.json", parent)
    spec = lab.spec(parent, dataset=folder.name, hyper={"steps": 60, "batch_size": 4})
    gate = hold(1)
    job = lab.start(spec)
    job.wait_for_step(1)
    (copy,) = copies(cache)
    with copy.open("r+b") as file:  # the same file, which the rank has open
        file.write(b"\xff" * copy.stat().st_size)
    gate.unlink()
    assert job.wait() == 1 and "tokens is damaged" in job.log
    assert job.journal.status() is None, "not failed: its trainer starts it again"
    again = lab.run(spec)
    assert len(again.losses) == 60 and again.journal.attempts == 2


@pytest.mark.megatron
def test_a_kind_without_megatron_layers_learns_documents_from_scratch(
    lab: Any, tokenizer: Path, tmp_path: Path
) -> None:
    from cray_agents.trainers.models.transformers_backend.initial_weights import initial_weights

    whole, bare = tmp_path / "whole", tmp_path / "bare"
    write_parent(whole, FAMILIES["gpt_oss"]())
    bare.mkdir()
    config = json.loads((whole / "config.json").read_text()) | {"dtype": "float32"}
    (bare / "config.json").write_text(json.dumps(config))
    folder = documents(lab.home, tokenizer, validation=0.1)
    samples = read_samples(folder)
    hyper = {"steps": 6, "batch_size": 4, "schedule": "constant", "warmup_steps": 0}
    spec = lab.spec(
        bare,
        dataset=folder.name,
        parent_sha256=checkpoints.config_sha256(bare),
        hyper={**hyper, "init": "random", "seed": 3},
        evaluate_every=3,
    )
    drawn = initial_weights(bare, 3)
    plain = plain_losses(drawn, stored_rows(folder), spec.hyperparameters, units=samples.units)
    job = lab.run(spec)
    assert job.losses == pytest.approx(plain, rel=1e-3) and plain[-1] < plain[0]
    assert [each["step"] for each in job.journal.events() if each["event"] == "evaluation"]


def random_set(home: Home, name: str, megabytes: int, context: int, vocab: int) -> str:
    """A set of full contexts, of so many MiB of token ids."""
    folder, rows, groups = home.dataset(name), 64, 16
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    size = rows * (context + 1)
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * (context + 1))
    shards = max(1, (megabytes << 20) // (4 * size * groups))
    schema, files = pa.schema({"input_ids": pa.list_(pa.int32())}), {}
    for number in range(shards):
        path = folder / f"train-{number:05d}.parquet"
        with pq.ParquetWriter(path, schema) as file:
            for _ in range(groups):
                ids = pa.array(random.integers(0, vocab, size, np.int32))
                file.write_table(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)}))
        files[path.name] = {"sha256": durable.sha256_file(path)}
    counts = {"samples": shards * groups * rows, "tokens": shards * groups * size}
    manifest = {
        "method": "sft",
        "files": files,
        "splits": {"train": counts | {"trained_tokens": counts["samples"] * context}},
        "documents": counts["samples"],
        "recipe": {"documents": ["x"], "max_tokens": context},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return name


@pytest.mark.slow
@pytest.mark.megatron
def test_a_large_set_takes_little_memory(lab: Any, models: Any, tmp_path: Path) -> None:
    """Launcher and ranks, beside the same job on a set of 8 MiB."""
    parent, context = tmp_path / "model", 2048
    shutil.copytree(models("qwen3"), parent)
    config = json.loads((parent / "config.json").read_text())
    changed = config | {"max_position_embeddings": context}
    (parent / "config.json").write_text(json.dumps(changed))
    peaks = {}
    for megabytes in (8, MEGABYTES):
        name = random_set(lab.home, f"ds-{megabytes}", megabytes, context, config["vocab_size"])
        spec = lab.spec(parent, dataset=name, hyper={"steps": 4, "batch_size": 4})
        job = lab.start(spec)
        _, status, usage = os.wait4(job.pid, 0)
        assert status == 0, job.log
        assert len(job.losses) == 4
        peaks[megabytes] = usage.ru_maxrss >> 10  # MiB, of the process or of a rank
    more = peaks[MEGABYTES] - peaks[8]
    print(f"{MEGABYTES} MiB of token ids: {more} MiB more memory than 8 MiB of them, {peaks}")
    assert more < min(2048, max(96, MEGABYTES // 8)), peaks
