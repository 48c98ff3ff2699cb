"""Megatron against transformers, in float32: logits, gradients, losses, weights there and back.

All kinds of model that go into a layout are measured by one set of forked ranks; what transformers
says of a kind is computed once. Tolerances: logits and log-probabilities 1e-4; each tensor of the
first clipped gradient 1e-5 of its largest number; losses of 20 steps 1e-5 of themselves.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.training_jobs import Hyperparameters, Layout
from tests.support.trainers.forked_ranks import run_forked

pytestmark = pytest.mark.megatron

STEPS, FEW = 20, 2
HYPER = Hyperparameters(
    steps=STEPS,
    batch_size=6,
    learning_rate=3e-3,
    warmup_steps=2,
    schedule="cosine",
    min_learning_rate=3e-4,
    max_tokens_per_microbatch=90,
)
# longest first, as they are packed
PROMPTS = [list(range(40, 70)), [5, 9, 200, 301, 17, 3, 3, 42, 77, 120], [8, 8, 1, 250]]
SMALL_FILES = 40_000  # bytes: every checkpoint has several

LAYOUTS = {
    "one": Layout(),
    "data2": Layout(data=2),
    "tensor2": Layout(tensor=2),
    "tensor2sp": Layout(tensor=2, sequence_parallel=True),
    "pipeline2": Layout(pipeline=2),
    "interleaved": Layout(pipeline=2, interleave=2),
    "uneven": Layout(pipeline=2),
    "unevenly-interleaved": Layout(pipeline=2, interleave=2),
    "instances2": Layout(data=2, optimizer_instances=2),
    "tensor2pipeline2": Layout(tensor=2, pipeline=2),
    "context2": Layout(context=2),
    "tensor2context2": Layout(tensor=2, context=2, sequence_parallel=True),
    "expert2": Layout(data=2, expert=2),
    "tensor2expert2": Layout(data=2, tensor=2, expert=2, sequence_parallel=True),
}
DENSE = ("qwen3", "qwen3-tied", "llama", "llama-tied", "qwen2", "qwen2-tied", "mistral")
MIXED = ("qwen3_moe", "qwen3_moe:norm_topk_prob=false", "mixtral")
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [2.0 + 0.1 * i for i in range(16)],
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
TURNED = tuple(f"qwen3:rope={name}" for name in ROPES)
ODD, DEEP = "qwen3:vocab_size=303", "llama:num_hidden_layers=4"
ODD_TIED, DEEP_TIED = "qwen3-tied:vocab_size=303", "llama-tied:num_hidden_layers=4"
THREE, THREE_TIED = "llama:num_hidden_layers=3", "llama-tied:num_hidden_layers=3"
FIVE = "llama:num_hidden_layers=5"
RECOMPUTED = (
    ("selective", "qwen3"),
    ("full", "qwen3"),
    ("layernorm", "qwen3"),
    ("mlp", "qwen3"),
    ("core_attn,layernorm,mlp", "qwen3"),
    ("moe", "qwen3_moe"),
    ("layernorm,moe", "qwen3_moe"),
)
LONG = ("qwen3", "llama", "qwen2", "mistral", "qwen3_moe", "mixtral", ODD, DEEP)  # over all STEPS

KINDS = {  # layout -> the kinds of model that are measured in it, the first over all steps
    "one": (*DENSE, *MIXED, *TURNED),
    "data2": ("qwen3",),
    "tensor2": (ODD, ODD_TIED, *DENSE, "qwen3:rope=yarn"),
    "tensor2sp": (ODD, "qwen3-tied", *MIXED),
    "pipeline2": ("qwen3", *DENSE[1:], *MIXED),
    "interleaved": (DEEP, DEEP_TIED),
    "uneven": (THREE, THREE_TIED),
    "unevenly-interleaved": (FIVE,),
    "instances2": ("qwen3", "qwen3_moe"),
    "tensor2pipeline2": ("qwen3", ODD_TIED),
    "context2": ("qwen3", "llama"),
    "tensor2context2": ("qwen3",),
    "expert2": ("qwen3_moe", *MIXED[1:]),
    "tensor2expert2": ("qwen3_moe", "mixtral"),
}


@dataclass
class Measured:
    """What a layout made of a kind of model."""

    folder: Path
    scores: list[list[float]]
    tops: list[list[int]]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def logits(self, size: int) -> list[Any]:
        """Of each prompt [tokens, vocabulary], from the ranks that computed them."""
        import torch

        whole: dict[int, list[tuple[int, Any]]] = {}
        for path in sorted(self.folder.glob("logits-*.pt")):
            first, of_prompts = torch.load(path)
            for prompt, share in of_prompts.items():
                whole.setdefault(prompt, []).append((first, share))
        assert sorted(whole) == list(range(len(PROMPTS)))
        rows = [
            torch.cat([share for _, share in sorted(whole[n], key=lambda s: s[0])], -1)
            for n in range(len(PROMPTS))
        ]
        assert all((row[:, size:] == -torch.inf).all() for row in rows)
        return [row[:, :size] for row in rows]

    def tensors(self, what: str) -> dict[str, Any]:
        """All tensors in the safetensors files of a folder."""
        from safetensors.torch import load_file

        found: dict[str, Any] = {}
        for path in sorted((self.folder / what).glob("*.safetensors")):
            found |= load_file(path)
        return found


def the_samples() -> Any:
    """Learnable sequences of 10 to 40 tokens, whose first five are a prompt."""
    from cray_agents.trainers.data.samples import Samples

    random = np.random.default_rng(7)
    bounds = ((3, 303), (1, 5), (10, 41))
    rows = [[int(random.integers(*bound)) for bound in bounds] for _ in range(24)]
    samples = Samples.of([[(a + b * i) % 303 for i in range(n)] for a, b, n in rows])
    for mask in samples.masks:
        mask[:5] = 0
    return samples


# ---- what Megatron does
def measure(
    folder: Path, steps: int, out: Path, layout: Layout, hyper: Hyperparameters, recompute: str
) -> None:
    """One rank: score prompts, export the untouched weights, train, write it all down."""
    import torch
    from safetensors.torch import save_file

    from cray_agents.trainers.checkpointing import hf_export
    from cray_agents.trainers.data.packer import BaselineLogprobs, balance
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.models.tensors import tensor_shapes
    from cray_agents.trainers.models.weights import export_tensors, plan_export
    from cray_agents.trainers.planning.layouts import check_layout
    from cray_agents.trainers.training.train_step import RankTraining

    model = read_architecture(folder)
    check_layout(model, layout)
    training = RankTraining(model, layout, hyper, folder, on_cpu=True, recompute=recompute)
    seen: list[torch.Tensor] = []
    seen_whole = training.head is not None and layout.context == 1
    if seen_whole:
        layer = training.chunks[-1].output_layer
        hook = layer.register_forward_hook(lambda _, __, out: seen.append(out[0][:, 0].clone()))
    scores, tops = training.score_with_top(Samples.of(PROMPTS))
    rank = torch.distributed.get_rank()
    if seen_whole:
        hook.remove()
        costs = [len(prompt) - 1 for prompt in PROMPTS]
        batches = balance(costs, layout.data, hyper.max_tokens_per_microbatch)
        shares = {}
        for batch, logits in zip(batches[training.ranks.data_rank], seen, strict=False):
            sizes = [costs[n] for n in batch]
            rows = logits[: sum(sizes)].detach().split(sizes)
            shares |= dict(zip(batch, rows, strict=True))
        first = layer.tp_group.rank() * layer.output_size_per_partition
        torch.save((first, shares), out / f"logits-{rank}.pt")
    hf_export.export_weights(training, out / "hf", SMALL_FILES)
    measured = Measured(out, [row.tolist() for row in scores], [row.tolist() for row in tops])
    for step in range(steps):
        report = training.step(BaselineLogprobs(the_samples()))
        measured.losses.append(report.loss)
        measured.norms.append(report.grad_norm)
        if step == 0:
            put_together(training.wrapped_chunks)
            plan = plan_export(training.chunks, model, dict.fromkeys(tensor_shapes(model), 0))
            found = export_tensors(plan, model, of=attrgetter("main_grad"))
            gradients = {name: tensor.clone().contiguous() for name, tensor in found}
            save_file(gradients, out / "gradients" / f"{rank}.safetensors")
    text = json.dumps({**vars(measured), "folder": str(out)})
    (out / f"rank-{rank}.json").write_text(text)


def put_together(parts: list[Any]) -> None:
    """Give every data rank the whole gradient: the distributed optimizer has left each a share."""
    import torch

    for part in parts:
        for group in part.bucket_groups + part.expert_parallel_bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shares = list(bucket.grad_data.chunk(ranks.size()))
                torch.distributed.all_gather(shares, shares[ranks.rank()].clone(), group=ranks)


Job = tuple[Path, int, Path, Layout, Hyperparameters, str]


def measure_all(jobs: list[Job], rank: int, store: Any, stop: Any) -> int:
    """One rank: every job in turn; all are of one layout."""
    from cray_agents.trainers.training.parallel_groups import join_ranks

    layout = jobs[0][3]
    join_ranks(layout, rank, layout.world, store, on_cpu=True)
    for job in jobs:
        measure(*job)
    return 0


def run(jobs: list[Job], logs: Path) -> list[Measured]:
    """Fork the ranks of a layout for some jobs; all ranks must have said the same."""

    for job in jobs:
        (job[2] / "hf").mkdir(parents=True)
        (job[2] / "gradients").mkdir()
    world = jobs[0][3].world
    assert run_forked(world, logs, partial(measure_all, jobs)) is None
    found = []
    for job in jobs:
        ranks = [json.loads((job[2] / f"rank-{n}.json").read_bytes()) for n in range(world)]
        assert all(rank == ranks[0] for rank in ranks)
        found.append(Measured(**{**ranks[0], "folder": Path(ranks[0]["folder"])}))
    return found


# ---- what transformers does
@dataclass(frozen=True)
class Reference:
    """A kind of model, and what transformers makes of it."""

    folder: Path
    vocab: int
    logits: list[Any]  # of each prompt [tokens, vocabulary]
    gradients: dict[str, Any]  # of the first step, clipped
    losses: list[float]


def reference(folder: Path, out: Path, steps: int) -> Reference:
    """Logits of PROMPTS, and a plain AdamW loop over padded batches."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from cray_agents.trainers.data.packer import step_units
    from cray_agents.trainers.methods.learning_rate import learning_rate

    disable_progress_bar()
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = [network(torch.tensor([prompt[:-1]])).logits[0] for prompt in PROMPTS]
    shrunk = [p for p in network.parameters() if p.dim() > 1]
    kept = [p for p in network.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [
            {"params": shrunk, "weight_decay": HYPER.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ],
        betas=(HYPER.adam_beta1, HYPER.adam_beta2),
        eps=HYPER.adam_eps,
    )
    samples, losses, gradients = the_samples(), [], {}
    for step in range(steps):
        units = step_units(HYPER, step, samples.unit_weights)
        rows = [torch.from_numpy(samples.tokens[i]) for i in units]
        marks = [torch.from_numpy(samples.masks[i][1:]) for i in units]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(marks, batch_first=True)
        found = network(ids[:, :-1]).logits.float().log_softmax(-1)
        loss = -(found.gather(2, ids[:, 1:, None])[..., 0] * mask).sum() / mask.sum()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), HYPER.clip_grad)
        if step == 0:  # transformers itself renames and splits what it fused in memory
            state = dict(network.named_parameters())
            grown = {name: p.grad.clone() for name, p in state.items()}
            network.save_pretrained(out, state_dict=grown)
            gradients = load_file(out / "model.safetensors")
        for group in adam.param_groups:
            group["lr"] = learning_rate(HYPER, step)
        adam.step()
        losses.append(loss.item())
    return Reference(folder, network.config.vocab_size, logits, gradients, losses)


def altered(folder: Path, change: str, out: Path) -> Path:
    """Another model of the kind, whose config says something else."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name, _, value = change.partition("=")
    config: Any = AutoConfig.from_pretrained(folder)
    if name == "rope":
        theta = config.rope_parameters["rope_theta"]
        config.rope_parameters = {"rope_theta": theta, **ROPES[value]}
    else:
        setattr(config, name, json.loads(value))
    torch.manual_seed(5)
    network: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3)
    network.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def references(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Reference]]:
    root = tmp_path_factory.mktemp("references")

    @cache
    def get(kind: str) -> Reference:
        name, _, change = kind.partition(":")
        plain = models(name)
        out = root / kind.replace(":", "-")
        folder = altered(plain, change, out / "model") if change else plain
        return reference(folder, out / "gradients", STEPS if kind in LONG else FEW)

    yield get


@pytest.fixture(scope="module")
def found(
    references: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], dict[str, Measured]]]:
    """Layout -> kind -> what the layout made of it."""
    root = tmp_path_factory.mktemp("found")

    @cache
    def get(name: str) -> dict[str, Measured]:
        jobs = [
            (references(kind).folder, steps, root / name / str(n), LAYOUTS[name], HYPER, "none")
            for n, kind in enumerate(KINDS[name])
            for steps in [STEPS if kind in LONG and (n == 0 or name == "one") else FEW]
        ]
        return dict(zip(KINDS[name], run(jobs, root / name / "logs"), strict=True))

    yield get


def agree(measured: Measured, expected: Reference) -> None:
    """The first gradient, tensor by tensor, and the losses."""
    gradients = measured.tensors("gradients")
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        largest = expected.gradients[name].abs().max()
        assert largest > 0
        assert (gradient - expected.gradients[name]).abs().max() < 1e-5 * largest, name
    steps = len(measured.losses)
    np.testing.assert_allclose(measured.losses, expected.losses[:steps], rtol=1e-5)
    assert steps < STEPS or measured.losses[-1] < measured.losses[0] - 1
    assert all(norm > 0 for norm in measured.norms)


@pytest.mark.parametrize(
    ("layout", "kind"), [(layout, kind) for layout, kinds in KINDS.items() for kind in kinds]
)
def test_a_layout_agrees_with_transformers(
    layout: str,
    kind: str,
    references: Callable[[str], Reference],
    found: Callable[[str], dict[str, Measured]],
) -> None:
    import torch
    from safetensors.torch import load_file

    expected, measured = references(kind), found(layout)[kind]
    if LAYOUTS[layout].context == 1:  # else no rank has a whole row of them
        for mine, theirs in zip(measured.logits(expected.vocab), expected.logits, strict=True):
            assert (mine - theirs).abs().max() < 1e-4
    of = measured.scores, measured.tops
    for prompt, theirs, scores, tops in zip(PROMPTS, expected.logits, *of, strict=True):
        targets = torch.tensor(prompt[1:])[:, None]
        logprobs = theirs.log_softmax(-1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(scores, logprobs, atol=1e-4)
        assert tops == theirs.argmax(-1).tolist()
    agree(measured, expected)

    before, after = load_file(expected.folder / "model.safetensors"), measured.tensors("hf")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize(("recompute", "kind"), RECOMPUTED)
def test_recomputing_activations_changes_nothing(
    recompute: str,
    kind: str,
    references: Callable[[str], Reference],
    found: Callable[[str], dict[str, Measured]],
    tmp_path: Path,
) -> None:
    job = (references(kind).folder, FEW, tmp_path / "out", Layout(), HYPER, recompute)
    (again,) = run([job], tmp_path / "logs")
    first = found("one")[kind]
    assert again.losses == first.losses[:FEW]
    assert again.norms == first.norms[:FEW]


def test_packing_changes_nothing(references: Callable[[str], Reference], tmp_path: Path) -> None:
    jobs = []
    for limit in (40, 4096):  # a sequence or two a micro-batch; all in one
        hyper = HYPER.model_copy(update={"max_tokens_per_microbatch": limit})
        folder = references("qwen3").folder
        jobs.append((folder, STEPS, tmp_path / str(limit), Layout(), hyper, "none"))
    for measured in run(jobs, tmp_path / "logs"):
        agree(measured, references("qwen3"))
