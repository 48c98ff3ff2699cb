"""Models through Megatron-Bridge, in float32 on CPUs: logits, losses, exports, jobs that resume.

They run where Megatron-Bridge can be imported, and else in test_bridge_environment.py.
"""

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.trainers.models.megatron_bridge.bridged_kinds import BRIDGED, why_not_installed
from cray_agents.training_jobs import Backend, Hyperparameters, Layout
from tests.support.trainers.forked_ranks import run_forked
from tests.support.trainers.tiny_families import FAMILIES, write_parent

MISSING = why_not_installed()
pytestmark = [pytest.mark.megatron, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

STEPS, BATCH, VOCAB = 20, 4, 500
HYPER = Hyperparameters(
    steps=STEPS, batch_size=BATCH, learning_rate=1e-3, max_tokens_per_microbatch=90
)
LENGTHS = (21, 40, 9)  # two of them longer than the families' windows
LAYOUTS = {
    "one": (Layout(), BRIDGED),
    "tensor": (Layout(tensor=2, sequence_parallel=True), ("qwen3", "qwen3_moe")),
    "pipeline": (Layout(pipeline=2), ("qwen3", "gpt_oss")),
    "expert": (Layout(data=2, expert=2), ("gpt_oss", "qwen3_moe")),
}


def data() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(1, VOCAB, int(size)).tolist() for size in random.integers(8, 40, 12)]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(4)
    return [random.integers(0, VOCAB, size).tolist() for size in LENGTHS]


def trained(
    parents: dict[str, Path],
    backend: Backend,
    layout: Layout,
    out: Path,
    rank: int,
    store: Any,
    _: Any,
) -> int:
    """One rank: each family's logits, its losses, and its export after a step at rate 0."""
    import torch

    from cray_agents.trainers.checkpointing.hf_export import export_weights
    from cray_agents.trainers.checkpointing.state import allocate_moments
    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    torch.set_num_threads(1)
    join_ranks(layout, rank, layout.world, store, on_cpu=True)
    known, found = BaselineLogprobs(Samples.of(data())), {}
    for name, parent in parents.items():
        # the biases of gpt-oss's experts are a matrix to transformers, which decays, and here not
        decay = 0.0 if name == "gpt_oss" else HYPER.weight_decay
        hyper = HYPER.model_copy(update={"backend": backend, "weight_decay": decay})
        model = read_architecture(parent, backend)
        still = hyper.model_copy(update={"learning_rate": 0.0})
        training = RankTraining(model, layout, still, parent, on_cpu=True)
        if backend == "megatron-bridge" and layout.pipeline == 1:
            torch.save(logits(training.chunks[0]), out / f"{name}-{rank}.pt")
        training.step(known)
        (out / name).mkdir(exist_ok=True)
        export_weights(training, out / name, file_bytes=60_000)
        training.switch_job(parent, hyper, "sft", lambda: False)
        training.take_weights()
        allocate_moments(training, 0)  # a session keeps them
        found[name] = [training.step(known).loss for _ in range(STEPS)]
    if rank == 0:
        (out / "losses.json").write_text(json.dumps(found))
    return 0


def logits(chunk: Any) -> Any:
    """This rank's share of the logits of all prompts, packed."""
    import torch

    from cray_agents.trainers.models.attention import packed_sequences

    bounds = np.cumsum([0, *LENGTHS]).astype(np.int32)
    tokens = torch.tensor([token for prompt in prompts() for token in prompt])[None]
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = packed_sequences(bounds, torch.device("cpu"))
    with torch.no_grad():
        found = chunk(tokens, places, None, packed_seq_params=packed)
    return found[0]


def expected(parent: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        parent, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return torch.cat([network(torch.tensor([prompt])).logits[0] for prompt in prompts()])


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("parents")

    def get(family: str) -> Path:
        if not (root / family).exists():
            config = FAMILIES[family]()
            if family == "gpt_oss":
                config.intermediate_size = 48  # gate and up together are no square
            write_parent(root / family, config)
        return root / family

    return get


def run(
    parents: dict[str, Path], backend: Backend, layout: Layout, out: Path
) -> dict[str, list[float]]:
    from cray_agents.trainers.models.megatron_bridge.bridged_model import load_bridge
    from cray_agents.trainers.models.megatron_fixes import load_megatron

    load_megatron()
    load_bridge()
    work = partial(trained, parents, backend, layout, out)
    assert run_forked(layout.world, out / "logs", work) is None
    return dict(json.loads((out / "losses.json").read_text()))


Measured = Callable[[str], tuple[dict[str, list[float]], Path]]


@pytest.fixture(scope="module")
def measured(parent: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """What ranks of a layout found, for the families that it can split."""
    done: dict[str, tuple[dict[str, list[float]], Path]] = {}

    def measure(name: str) -> tuple[dict[str, list[float]], Path]:
        if name not in done:
            backend: Backend = "transformers" if name == "transformers" else "megatron-bridge"
            layout, families = LAYOUTS["one" if backend == "transformers" else name]
            out = tmp_path_factory.mktemp(name)
            parents = {family: parent(family) for family in families}
            done[name] = run(parents, backend, layout, out), out
        return done[name]

    return measure


CASES = [(name, family) for name, (_, families) in LAYOUTS.items() for family in families]


@pytest.mark.parametrize(("layout", "family"), [c for c in CASES if c[0] != "pipeline"])
def test_logits_are_those_of_transformers(
    layout: str, family: str, measured: Measured, parent: Callable[[str], Path]
) -> None:
    import torch

    _, out = measured(layout)
    ranks = LAYOUTS[layout][0].tensor
    shares = [torch.load(out / f"{family}-{n}.pt") for n in range(ranks)]
    found, truth = torch.cat(shares, -1), expected(parent(family))
    assert (found - truth).abs().max() < 1e-4 * truth.abs().max()


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_losses_are_those_of_the_transformers_backend(
    layout: str, family: str, measured: Measured
) -> None:
    losses, _ = measured(layout)
    alone, _ = measured("transformers")
    assert losses[family] == pytest.approx(alone[family], abs=1e-5)


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_a_learning_rate_of_zero_gives_the_parents_tensors(
    layout: str, family: str, measured: Measured, parent: Callable[[str], Path]
) -> None:
    import torch
    from safetensors.torch import load_file

    _, out = measured(layout)
    ours, theirs = (
        {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        for folder in (out / family, parent(family))
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_a_matrix_that_does_not_come_back_is_refused(lab: Any, tmp_path: Path) -> None:
    write_parent(tmp_path / "square", FAMILIES["gpt_oss"]())
    lab.dataset()
    reason = lab.fail(
        lab.spec(tmp_path / "square", hyper={"steps": 1, "backend": "megatron-bridge"})
    )
    assert "does not give back model.layers.0.mlp.experts.gate_up_proj" in reason
    assert "ask for backend=transformers" in reason


def test_a_stopped_job_goes_on_to_the_bit(
    lab: Any, parent: Callable[[str], Path], kill_at: Any
) -> None:
    lab.dataset(method="grpo")
    changes: dict[str, Any] = {
        "method": "grpo",
        "layout": {"data": 2, "expert": 2},
        "save_every": 2,
        "recompute": "full",
    }
    hyper = {"steps": 6, "backend": "megatron-bridge"}
    whole = lab.run(lab.spec(parent("gpt_oss"), hyper=hyper, **changes))
    started = next(e for e in whole.journal.events() if e["event"] == "started")
    assert "Megatron-Bridge" in started["layers"]
    assert "no Megatron layers for gpt_oss" in started["layers"]
    stopped = lab.spec(parent("gpt_oss"), hyper=hyper, code="stopped", **changes)
    kill_at(stopped, 2, signal.SIGTERM)
    assert lab.home.checkpoint(stopped.id).exists() is False
    job = lab.run(stopped)
    assert job.losses[-1] == whole.losses[-1]
    first, second = (
        (lab.home.checkpoint(name) / "model.safetensors").read_bytes()
        for name in (whole.journal.job_id, stopped.id)
    )
    assert first == second
