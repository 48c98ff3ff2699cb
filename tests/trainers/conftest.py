"""Tiny random models, datasets, and jobs in forked processes: Megatron is imported once."""

import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # tests fork ranks

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cray_agents.paths import Home
from cray_agents.runtime.disk import durable
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout

VOCAB = 304
SHARD_ROWS = 10


def make_model(kind: str, folder: Path) -> Path:
    """A random model of a kind, with stand-in tokenizer files.

    `-tied`: with tied embeddings; `-deep`: of six layers, not two.
    """
    import torch
    import transformers as hf

    torch.set_num_threads(1)
    torch.manual_seed(sum(map(ord, kind)))
    name, _, variant = kind.partition("-")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 6 if variant == "deep" else 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "tie_word_embeddings": variant == "tied",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    if name == "qwen2":
        sizes["hidden_size"] = 128
        del sizes["head_dim"]
    if name == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        sizes |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if name == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if name == "llama":
        sizes["rope_parameters"] = {
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    classes = {
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "qwen3_moe": (hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM),
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
        "mixtral": (hf.MixtralConfig, hf.MixtralForCausalLM),
    }
    config, model = classes[name]
    network = model(config(**sizes))
    with torch.no_grad():
        for parameter_name, parameter in network.named_parameters():
            if parameter_name.endswith(("norm.weight", "layernorm.weight", ".bias")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3)
    network.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def get(kind: str) -> Path:
        folder = root / kind
        return folder if folder.exists() else make_model(kind, folder)

    return get


def write_dataset(
    home: Home,
    name: str = "ds",
    samples: int = 24,
    ids: list[list[int]] | None = None,
    masks: list[list[int]] | None = None,
    *,
    method: str = "sft",
    split: str = "train",
    logprobs: list[list[float]] | None = None,
    advantages: list[float] | None = None,
    chosen: list[bool] | None = None,
    version: str | None = None,
    temperature: float = 1.0,
) -> str:
    """Learnable sequences of 10-40 tokens whose first five are a prompt, or the given ones.

    dpo: rows 0 and 1 are a pair, and so on. `version` sampled all marked tokens. Called again with
    another `split`, it adds to the dataset.
    """
    if ids is None:
        ids = sequences(samples, seed=7 if split == "train" else 8)
    masks = masks or [[int(i >= 5) for i in range(len(row))] for row in ids]
    logprobs = logprobs or [[-2.0 * bit for bit in mask] for mask in masks]
    advantages = advantages or [float(i % 3 - 1) for i in range(len(ids))]
    chosen = chosen or [i % 2 == 0 for i in range(len(ids))]
    sampled = -1 if version is None else 0
    by_token = [[a * bit for bit in mask] for a, mask in zip(advantages, masks, strict=True)]
    versions = [[sampled if bit else -1 for bit in mask] for mask in masks]
    pairs = [f"pair-{i // 2}" if method == "dpo" else None for i in range(len(ids))]
    table = pa.table(
        {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "loss_mask": pa.array(masks, pa.list_(pa.int8())),
            "logprobs": pa.array(logprobs, pa.list_(pa.float32())),
            "advantages": pa.array(by_token, pa.list_(pa.float32())),
            "version_index": pa.array(versions, pa.list_(pa.int16())),
            "temperature": pa.array([temperature] * len(ids), pa.float64()),
            "shaped": pa.array([False] * len(ids), pa.bool_()),
            "versions": pa.array([[version or ""]] * len(ids), pa.list_(pa.string())),
            "weight": pa.array([1.0 + i % 3 for i in range(len(ids))], pa.float64()),
            "reward": pa.array([1.0] * len(ids), pa.float64()),
            "advantage": pa.array(advantages, pa.float64()),
            "run_id": [f"run-{i}" for i in range(len(ids))],
            "task_id": [f"task-{i}" for i in range(len(ids))],
            "group": [""] * len(ids),
            "pair": pa.array(pairs, pa.string()),
            "chosen": pa.array(
                chosen if method in ("dpo", "kto") else [None] * len(ids), pa.bool_()
            ),
        }
    )
    folder = home.dataset(name)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    files = json.loads(manifest.read_bytes())["files"] if manifest.exists() else {}
    for number, start in enumerate(range(0, len(ids), SHARD_ROWS)):
        path = folder / f"{split}-{number:05d}.parquet"
        pq.write_table(table.slice(start, SHARD_ROWS), path)
        files[path.name] = {"sha256": durable.sha256_file(path)}
    manifest.write_text(json.dumps({"method": method, "files": files}))
    return name


def sequences(samples: int, seed: int) -> list[list[int]]:
    """Token ids in arithmetic progressions, which a model can learn."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(samples):
        start, step, size = (int(random.integers(*b)) for b in ((3, VOCAB), (1, 5), (10, 41)))
        rows.append([(start + step * i) % VOCAB for i in range(size)])
    return rows


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def make_spec(parent: Path, dataset: str = "ds", **changes: Any) -> JobSpec:
    hyper = {
        "steps": 8,
        "batch_size": 6,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "schedule": "cosine",
        "min_learning_rate": 3e-4,
        **changes.pop("hyper", {}),
    }
    return JobSpec(
        dataset=dataset,
        parent=str(parent),
        parent_sha256=changes.pop("parent_sha256", None) or weights_sha256(parent),
        hyperparameters=Hyperparameters(**hyper),
        layout=Layout(**changes.pop("layout", {})),
        save_every=changes.pop("save_every", 3),
        **changes,
    )


class RunningJob:
    """A job's process, forked from this one: Megatron is loaded already."""

    def __init__(self, home: Home, spec: JobSpec, **environment: str) -> None:
        from cray_agents.trainers.job import job, rank  # noqa: F401  (imported once, before the fork)
        from cray_agents.trainers.models.megatron_fixes import load_megatron

        load_megatron()
        self.journal = JobJournal(home, spec.id)
        self.journal.write_spec(spec)
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                os.environ.update(environment)
                log = os.open(self.journal.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
                code = job.main([str(self.journal.folder / "spec.json")])
            except SystemExit as stop:
                code = int(str(stop.code))
            finally:
                os._exit(code)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 400
        while self.journal.step < step:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.002)

    def kill(self, number: int = signal.SIGKILL) -> int:
        os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def log(self) -> str:
        rank_logs = [p.read_text() for p in sorted((self.journal.folder / "logs").glob("*"))]
        return "\n".join([self.journal.log_tail(), *rank_logs])

    @property
    def losses(self) -> list[float]:
        return [e["loss"] for e in self.journal.events() if e["event"] == "step"]


class Lab:
    """A home with datasets and jobs. Tests get one as a fixture: they cannot import from here."""

    def __init__(self, home: Home, models: Callable[[str], Path]) -> None:
        self.home, self.models = home, models

    def dataset(self, *args: Any, **kwargs: Any) -> str:
        return write_dataset(self.home, *args, **kwargs)

    def spec(self, parent: str | Path, **changes: Any) -> JobSpec:
        folder = self.models(parent) if isinstance(parent, str) else parent
        return make_spec(folder, **changes)

    def start(self, spec: JobSpec, **environment: str) -> RunningJob:
        return RunningJob(self.home, spec, **environment)

    def run(self, spec: JobSpec) -> RunningJob:
        """Run a job to its end, which must be good."""
        job = self.start(spec)
        assert job.wait() == 0, job.log
        return job

    def fail(self, spec: JobSpec) -> str:
        """Run a job that must refuse its inputs; returns the reason in its status.json."""
        job = self.start(spec)
        assert job.wait() == 1, job.log
        status = job.journal.status()
        assert status is not None and status.state == "failed", job.log
        assert not self.home.checkpoint(spec.id).exists()
        assert status.error is not None
        return status.error


@pytest.fixture
def lab(home: Home, models: Callable[[str], Path]) -> Lab:
    return Lab(home, models)


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Returns a function: jobs that start from here on wait after this step.

    They go on when the file that it returns is gone, or when they are asked to stop.
    """

    def after(last: int) -> Path:
        from cray_agents.trainers.job import rank

        gate, step = tmp_path / f"held-{last}", rank.step

        def held(training: Any, *rest: Any) -> bool:
            while training.done == last and gate.exists() and not training.asked_to_stop():
                time.sleep(0.002)
            return step(training, *rest)

        gate.touch()
        monkeypatch.setattr(rank, "step", held)
        return gate

    return after


@pytest.fixture
def kill_at(lab: Lab, hold: Callable[[int], Path]) -> Callable[..., tuple[RunningJob, int]]:
    """Returns a function: start a job, and end it by a signal after a step; its code, too."""

    def kill(spec: JobSpec, step: int, how: int = signal.SIGKILL) -> tuple[RunningJob, int]:
        gate, job = hold(step), lab.start(spec)
        job.wait_for_step(step)
        code = job.kill(how)
        gate.unlink()
        return job, code

    return kill


@pytest.fixture(scope="session")
def shared_lab(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A home with a dataset, for trainings that several tests look at; do not change its files."""
    lab = Lab(Home(tmp_path_factory.mktemp("shared")), models)
    lab.dataset()
    return lab


@pytest.fixture(scope="session")
def undisturbed_job(shared_lab: Lab) -> Callable[[JobSpec], RunningJob]:
    """Train a job that nothing happens to, once for all tests; do not change its files."""
    done: dict[str, RunningJob] = {}

    def run(spec: JobSpec) -> RunningJob:
        if spec.id not in done:
            done[spec.id] = shared_lab.run(spec)
        job = done[spec.id]
        assert job.journal.spec().layout == spec.layout, "a layout is not part of the id"
        return job

    return run


@pytest.fixture(scope="session")
def undisturbed(
    shared_lab: Lab, undisturbed_job: Callable[[JobSpec], RunningJob]
) -> tuple[Lab, RunningJob]:
    """Such a job of eight steps, and the lab that it was trained in."""
    return shared_lab, undisturbed_job(shared_lab.spec("qwen3"))
