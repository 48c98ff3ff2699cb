"""SFT the universal way, against a plain loop of transformers and torch's AdamW, in float32."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.training_jobs import Hyperparameters, Layout
from tests.support.trainers.tiny_families import FAMILIES, write_parent
from tests.support.trainers.toy_family import write_toy

pytestmark = pytest.mark.megatron

STEPS, BATCH, VOCAB = 20, 4, 500
HYPER = Hyperparameters(
    steps=STEPS,
    batch_size=BATCH,
    learning_rate=1e-3,
    adam_beta2=0.95,
    max_tokens_per_microbatch=90,
    way="universal",
)
ONE = ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "lfm2", "qwen3_next", "toy")
TWO = ("qwen3", "gpt_oss")


def data() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, VOCAB, int(size)).tolist() for size in random.integers(8, 40, 12)]


def trained(
    parents: dict[str, Path], layout: Layout, out: Path, rank: int, store: Any, _: Any
) -> int:
    """One rank: the losses of each family, and its export after steps at learning rate 0."""
    import torch

    from cray_agents.trainers.checkpointing.hf_export import export_weights
    from cray_agents.trainers.checkpointing.state import allocate_moments
    from cray_agents.trainers.data.baseline_logprobs import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import Training

    torch.set_num_threads(1)
    join_ranks(layout, rank, layout.world, store, on_cpu=True)
    known, found = BaselineLogprobs(Samples.of(data())), {}
    for name, parent in parents.items():
        model = read_architecture(parent, "universal")
        still = HYPER.model_copy(update={"learning_rate": 0.0})
        training = Training(model, layout, still, parent, on_cpu=True)
        training.step(known)
        (out / name).mkdir(exist_ok=True)
        export_weights(training, out / name, file_bytes=60_000, share=60_000)
        training.begin(parent, HYPER, "sft", lambda: False, in_memory=False)
        allocate_moments(training, 0)  # a session keeps them
        losses = [training.step(known).loss for _ in range(STEPS)]
        assert training.packing is not None
        found[name] = {"losses": losses, "packing": training.packing.text}
    if rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    return 0


def plain(parent: Path) -> list[float]:
    """The same steps by transformers and torch alone, one sequence after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    from cray_agents.trainers.data.packer import step_units

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(
        parent, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    named = dict(network.named_parameters())
    small = [n for n, p in named.items() if p.ndim <= 1 or n.endswith(".bias")]
    groups = [
        {"params": [p for n, p in named.items() if (n in small) == still], "weight_decay": decay}
        for still, decay in ((True, 0.0), (False, HYPER.weight_decay))
    ]
    adam = torch.optim.AdamW(groups, lr=HYPER.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    rows, losses = data(), []
    for step in range(STEPS):
        chosen = [torch.tensor(rows[i]) for i in step_units(HYPER, step, np.ones(len(rows)))]
        adam.zero_grad()
        total, count = 0.0, sum(len(row) - 1 for row in chosen)
        for row in chosen:
            logits = network(row[None, :-1], use_cache=False).logits[0].float()
            loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(list(named.values()), HYPER.clip_grad)
        adam.step()
        losses.append(total)
    return losses


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("parents")

    def get(family: str) -> Path:
        if not (root / family).exists():
            if family == "toy":
                write_toy(root / family)
            else:
                write_parent(root / family, FAMILIES[family]())
        return root / family

    return get


def run(parents: dict[str, Path], layout: Layout, out: Path) -> dict[str, Any]:
    from cray_agents.trainers.job.launch import find_placement, run_ranks
    from cray_agents.trainers.models.cpu_megatron import load_megatron
    from cray_agents.trainers.training import train_step  # noqa: F401  (loaded before the fork)

    load_megatron()
    work = partial(trained, parents, layout, out)
    ended = run_ranks(find_placement(layout.world, "universal"), out / "logs", work)
    logs = "\n".join(path.read_text()[-3000:] for path in sorted((out / "logs").glob("*")))
    assert ended.code == 0, logs
    return dict(json.loads((out / "found.json").read_text()))


@pytest.fixture(scope="module")
def one(parent: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    out = tmp_path_factory.mktemp("one")
    yield run({name: parent(name) for name in ONE}, Layout(), out), out


@pytest.fixture(scope="module")
def two(parent: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    out = tmp_path_factory.mktemp("two")
    yield run({name: parent(name) for name in TWO}, Layout(data=2), out), out


@pytest.mark.parametrize("family", ONE)
def test_losses_are_those_of_a_plain_loop(
    family: str, one: Any, parent: Callable[[str], Path]
) -> None:
    found, _ = one
    assert found[family]["losses"] == pytest.approx(plain(parent(family)), abs=1e-5)
    assert found[family]["packing"].startswith("packed: attention within each")


@pytest.mark.parametrize("family", TWO)
def test_two_ranks_give_the_same(family: str, one: Any, two: Any) -> None:
    assert two[0][family]["losses"] == pytest.approx(one[0][family]["losses"], abs=1e-5)


@pytest.mark.parametrize(("ranks", "family"), [("one", f) for f in ONE] + [("two", f) for f in TWO])
def test_a_learning_rate_of_zero_gives_the_parents_tensors(
    ranks: str, family: str, request: pytest.FixtureRequest, parent: Callable[[str], Path]
) -> None:
    import torch
    from safetensors.torch import load_file

    _, out = request.getfixturevalue(ranks)
    files = sorted((out / family).glob("*.safetensors"))
    theirs, ours = (
        {name: tensor for file in folder for name, tensor in load_file(file).items()}
        for folder in (sorted(parent(family).glob("*.safetensors")), files)
    )
    assert ours.keys() == theirs.keys() and len(files) > 1
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
