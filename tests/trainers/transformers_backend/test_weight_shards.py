"""Full sharding (Megatron's FSDP, ZeRO-3) beside the distributed optimizer alone (ZeRO-1)."""

import ctypes
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cray_agents.errors import BadInput
from cray_agents.runtime.registry import checkpoints
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.models.architecture import Architecture, read_architecture
from cray_agents.trainers.models.transformers_backend.parent_files import ParentFiles
from cray_agents.trainers.planning.arithmetic import GATHERED, SUMMED, estimate_memory
from cray_agents.trainers.planning.layouts import check_layout, possible_layouts
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout, Lora
from tests.support.trainers.forked_ranks import run_forked
from tests.support.trainers.tiny_families import FAMILIES, write_parent

pytestmark = pytest.mark.megatron

STEPS, VOCAB = 3, 500
ONE, FULL = Layout(data=2), Layout(data=2, sharding="full")
HYPER = Hyperparameters(
    steps=STEPS,
    batch_size=4,
    learning_rate=1e-3,
    max_tokens_per_microbatch=60,
    backend="transformers",
)
THOROUGH = "CRAY_TEST_FAMILIES" in os.environ
KINDS = os.environ.get("CRAY_TEST_FAMILIES", "qwen3").split(",")  # it has tied embeddings


def data() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, VOCAB, int(size)).tolist() for size in random.integers(8, 40, 12)]


def course(training: Any, known: Any) -> list[float]:
    return [training.step(known).loss for _ in range(STEPS)]


def both(parents: dict[str, Path], out: Path, rank: int, store: Any, _: Any) -> int:
    """One of two ranks: train each model in both ways of sharding; write down what was seen."""
    from cray_agents.trainers.checkpointing import resume
    from cray_agents.trainers.checkpointing.hf_export import export_weights
    from cray_agents.trainers.checkpointing.save import Saver
    from cray_agents.trainers.checkpointing.state import allocate_moments
    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.training.offload import Offload, gradients, storages_of, trained
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    torch.set_num_threads(1)
    join_ranks(ONE, rank, 2, store, on_cpu=True)
    samples = Samples.of(data())
    known, found = BaselineLogprobs(samples), {}

    def build(name: str, layout: Layout, recompute: str = "none", **more: Any) -> RankTraining:
        model, hyper = (
            read_architecture(parents[name], "transformers"),
            HYPER.model_copy(update=more),
        )
        training = RankTraining(
            model, layout, hyper, parents[name], on_cpu=True, recompute=recompute
        )
        allocate_moments(training, 0)
        return training

    def score(training: RankTraining) -> list[float]:
        rows: list[float] = np.concatenate(training.score(samples)).tolist()
        return rows

    def write(training: RankTraining, name: str) -> None:
        training.finish()
        (out / name).mkdir(exist_ok=True)
        export_weights(training, out / name, file_bytes=60_000, share=60_000)

    def save(training: RankTraining, name: str) -> Path:
        saver = Saver(training, out / name / "megatron", 1, 2, lambda: True)
        saver.save({})
        saver.finish()
        saver.close()
        return out / name / "megatron" / f"step-{training.done:08d}"

    for name in parents:
        seen: dict[str, Any] = {"scores": {}, "losses": {}}
        found[name], scores, losses = seen, seen["scores"], seen["losses"]
        still = build(name, FULL, learning_rate=0.0)
        scores["before"] = score(still)
        still.step(known)
        write(still, f"{name}-still")
        trainings = {"optimizer": build(name, ONE), "full": still}
        still.switch_job(parents[name], HYPER, "sft", lambda: False)
        still.take_weights()
        allocate_moments(still, 0)  # a session's next job keeps them
        points = {}
        for way, training in trainings.items():
            losses[way] = course(training, known)
            training.finish()
            scores[way] = score(training)
            points[way] = save(training, f"{name}-{way}")
            write(training, f"{name}-{way}")
            losses[f"{way} after"] = training.step(known).loss
        for source, point in points.items():
            for way, training in trainings.items():
                resume.load(training, point)
                losses[f"{source} to {way}"] = training.step(known).loss
        shards, training = still.shards, still
        assert shards is not None
        storages = storages_of(shards.storages(), training).values()
        seen["weights"] = sum(storage.nbytes() for storage in storages)
        seen["gradients"] = sum(each.nbytes for each in gradients(training))
        resume.load(training, points["full"])
        before = [each.clone() for each in trained(training)]
        offload = Offload(training)
        offload.move_out()
        seen["freed"] = offload.nbytes
        offload.move_in()
        same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)  # padding may be anything
        assert all(map(same, before, trained(training)))
        losses["offloaded"] = training.step(known).loss
        losses["recompute"] = course(build(name, FULL, "full"), known)
        if THOROUGH:
            for layout in (ONE, FULL):
                half = build(name, layout, dtype="bfloat16")
                if (shards := half.shards) is not None:
                    parts = [shards.of(each) for each in half.chunks[0].network.parameters()]
                    assert all(torch.equal(one.main, one.weights.float()) for one in parts if one)
                losses[f"bfloat16 {layout.sharding}"] = course(half, known)
        small = training.hyper.model_copy(update={"dtype": "bfloat16"})
        training.switch_job(
            parents[name], small, "distill", lambda: False
        )  # for the teacher's type
        teacher = training.scorer(read_architecture(parents[name], "transformers"), parents[name])
        scores["teacher"] = score(teacher)
        assert teacher.shards is not None
        seen["teacher"] = sum(each.nbytes for each in teacher.shards.storages())
        assert not list(teacher.shards.gradients())
    if rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    return 0


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parents")
    for name in {*KINDS, "qwen3", "gpt_oss"}:
        write_parent(root / name, FAMILIES[name]())
    return {name: root / name for name in {*KINDS, "qwen3", "gpt_oss"}}


@pytest.fixture(scope="module")
def ran(parents: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("ran")
    work = partial(both, {kind: parents[kind] for kind in KINDS}, out)
    assert run_forked(2, out / "logs", work) is None
    return json.loads((out / "found.json").read_text()), out


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_whole_weights(kind: str, ran: Any) -> None:
    losses, scores = ran[0][kind]["losses"], ran[0][kind]["scores"]
    assert losses["full"] == pytest.approx(losses["optimizer"], abs=1e-5)
    assert losses["recompute"] == pytest.approx(losses["full"], abs=1e-5)
    assert losses["full"][-1] < losses["full"][0] - 0.003
    assert scores["full"] == pytest.approx(scores["optimizer"], abs=1e-4)
    assert max(abs(np.subtract(scores["full"], scores["before"]))) > 0.1
    assert scores["teacher"] == pytest.approx(scores["before"], abs=0.1)
    if THOROUGH:
        assert losses["bfloat16 full"] == pytest.approx(losses["bfloat16 optimizer"], abs=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_are_those_of_whole_weights(kind: str, ran: Any, parents: dict[str, Path]) -> None:
    _, out = ran
    theirs, still = tensors(parents[kind]), tensors(out / f"{kind}-still")
    assert still.keys() == theirs.keys()
    assert all(torch.equal(still[name], tensor) for name, tensor in theirs.items())
    whole, sharded = (tensors(out / f"{kind}-{way}") for way in ("optimizer", "full"))
    assert sharded.keys() == whole.keys() == theirs.keys()
    for name, tensor in whole.items():
        assert sharded[name].dtype == tensor.dtype
        torch.testing.assert_close(sharded[name].float(), tensor.float(), atol=1e-2, rtol=1e-2)
    moved = [name for name in whole if not torch.equal(sharded[name], theirs[name])]
    assert len(moved) > len(whole) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_point_of_one_sharding_goes_on_in_the_other(kind: str, ran: Any) -> None:
    losses = ran[0][kind]["losses"]
    after = losses["optimizer to optimizer"]
    for case in ("full to optimizer", "optimizer to full", "full to full", "offloaded"):
        assert losses[case] == pytest.approx(after, abs=1e-5), case
    assert losses["full after"] == pytest.approx(losses["optimizer after"], abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_keeps_its_part_alone(kind: str, ran: Any, parents: dict[str, Path]) -> None:
    """What lasts is half the weights and gradients, and the estimate of it is from above."""
    seen, model = ran[0][kind], read_architecture(parents[kind], "transformers")
    whole = 4 * model.counted[0]
    for name in ("weights", "gradients"):
        assert 0.5 * whole <= seen[name] < 0.6 * whole, name
    assert seen["weights"] < estimate_memory(model, FULL, HYPER, sequence_length=30).weights
    assert seen["freed"] > 3 * seen["weights"]  # gradients and moments too
    assert 0.5 * whole / 2 <= seen["teacher"] < 0.6 * whole / 2  # in bfloat16, and nothing beside
    half = HYPER.model_copy(update={"dtype": "bfloat16", "max_tokens_per_microbatch": 1})
    planned = estimate_memory(model, FULL, half, sequence_length=1, teacher=model)
    logits = planned.teacher - planned.weights
    assert 0 < logits < 0.1 * planned.weights


def test_a_rank_reads_its_weights_part_by_part(tmp_path: Path) -> None:
    """What a rank other than the first does before and after its weights are divided.

    The memory that the system gave it is looked at while parameters are read, and at each weight.
    """
    config = FAMILIES["llama"]()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 512, 1536, 10
    config.head_dim = 128
    write_parent(tmp_path, config)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed would be given out again unseen
    most: list[int] = []

    class Watched(ParentFiles):
        def fill(self, module: Any, put: Any = torch.Tensor.copy_) -> None:
            super().fill(module, lambda *both: (put(*both), most.append(own_bytes() - before)))

    source, before = Watched(tmp_path), own_bytes()
    elsewhere = source.build(torch.float32, "meta")
    assert {parameter.device.type for parameter in elsewhere.parameters()} == {"meta"}
    network = source.build(torch.float32, filled=False)
    whole = 4 * sum(parameter.numel() for parameter in network.parameters())
    assert whole > 100e6
    for parameter in network.parameters():
        assert parameter.device.type == "cpu" and parameter.detach().sum().numel() == 1
    source.fill(network, lambda tensor, weights: None)
    assert max(most) < whole / 4
    source.fill(network)
    assert own_bytes() - before > whole / 2  # so it can be seen


def own_bytes() -> int:
    """This process's memory, without the pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def test_a_job_publishes_and_its_teacher_is_sharded_too(lab: Any, parents: dict[str, Path]) -> None:
    lab.dataset(method="distill", samples=12)
    teacher = {"teacher": str(parents["qwen3"])}
    teacher["teacher_sha256"] = weights_sha256(parents["qwen3"])
    hyper = {"steps": 2, "learning_rate": 1e-3}
    parent = parents["gpt_oss"]
    spec = lab.spec(parent, method="distill", hyper=hyper, layout=FULL.model_dump(), **teacher)
    job = lab.run(spec)
    first = next(e for e in job.journal.events() if e["event"] == "step")
    assert "reverse_kl" in first
    assert checkpoints.verify(lab.home.checkpoint(spec.id)).probe


# ---- what is refused, and what is planned
def test_what_cannot_be_sharded_is_refused_by_name(
    parents: dict[str, Path], models: Callable[[str], Path]
) -> None:
    from cray_agents.trainers.models.transformers_backend.passes import Packing
    from cray_agents.trainers.models.transformers_backend.weight_shards import wrap_fully

    of_megatron = read_architecture(models("qwen3"))
    with pytest.raises(BadInput, match=r"sharding=full divides transformers' own.*data=2"):
        check_layout(of_megatron, FULL)
    of_transformers = read_architecture(parents["qwen3"], "transformers")
    check_layout(of_transformers, FULL)
    with pytest.raises(BadInput, match=r"no effect with data=1"):
        check_layout(of_transformers, Layout(sharding="full"))
    with pytest.raises(BadInput, match=r"optimizer_instances=2.*sharding=full"):
        check_layout(of_transformers, Layout(data=4, optimizer_instances=2))
    with pytest.raises(ValueError, match=r"'full' divides the weights.*lora"):
        JobSpec(
            dataset="ds",
            parent="p",
            parent_sha256="0",
            hyperparameters=HYPER.model_copy(update={"lora": Lora()}),
            layout=FULL,
        )

    class Odd(torch.nn.Linear):
        config = None

    for shape, reached, trained, why in (
        ("rows", True, True, "computed as rows padded"),
        ("packed", False, True, "some batches give"),
        ("packed", True, False, "no batch gives"),
        ("packed", True, True, "are its layers is not known"),
    ):
        chunk = SimpleNamespace(
            network=Odd(2, 2),
            packing=Packing(shape, None),  # type: ignore[arg-type]
            always_reached=reached,
        )
        chunk.network.weight.requires_grad_(trained)
        with pytest.raises(BadInput, match=rf"Odd.*{why}.*sharding=optimizer"):
            wrap_fully(chunk, HYPER)


def test_full_sharding_is_planned_where_nothing_else_fits(parents: dict[str, Path]) -> None:
    from cray_agents.trainers.planning.layouts import LayoutQuestion, choose_layout

    model = large(read_architecture(parents["qwen3"], "transformers"))
    assert [layout.sharding for layout in possible_layouts(model, 8)] == ["optimizer", "full"]
    hyper = HYPER.model_copy(update={"dtype": "bfloat16", "max_tokens_per_microbatch": 4096})
    whole = estimate_memory(model, Layout(data=8), hyper, sequence_length=4096)
    sharded = estimate_memory(model, Layout(data=8, sharding="full"), hyper, sequence_length=4096)
    weights, tables = model.counted[0], 2 * model.vocab * model.hidden
    layer = (weights - tables) / model.layers
    assert sharded.weights == pytest.approx(2 * (weights / 8 + tables + GATHERED * layer))
    assert sharded.gradients == pytest.approx(4 * (weights / 8 + tables + SUMMED * layer))
    assert sharded.optimizer == whole.optimizer
    assert (whole.weights, whole.gradients) == (2 * weights, 4 * weights)

    def choose(gib: float, **more: Any) -> Any:
        sizes = hyper.model_copy(update=more)
        return choose_layout(LayoutQuestion(model, sizes, 8, gib, 8, 4096))

    assert choose(1000).layout == Layout(data=8)
    tight = choose(140)
    assert tight.fits and tight.layout == Layout(data=8, sharding="full")
    assert any("sharding=full: weights and gradients" in reason for reason in tight.reasons)
    assert choose(140, lora=Lora()).layout.sharding == "optimizer"


def large(model: Architecture) -> Architecture:
    """Sizes like those of a dense model of 32 billion weights."""
    from dataclasses import replace

    return replace(
        model, layers=64, hidden=5120, ffn=25600, heads=64, kv_heads=8, head_size=128,
        vocab=151936, tied=False, counted=(32_762_000_000, 0),
    )  # fmt: skip


def test_a_teacher_is_planned_for(parents: dict[str, Path]) -> None:
    """It is there before activations are kept, and takes more than these if it is large."""
    student = read_architecture(parents["qwen3"], "transformers")
    size = HYPER.model_copy(update={"dtype": "bfloat16", "max_tokens_per_microbatch": 4096})
    alone = estimate_memory(student, ONE, size, sequence_length=4096)
    small, big = (
        estimate_memory(student, ONE, size, sequence_length=4096, teacher=teacher)
        for teacher in (student, large(student))
    )
    assert small.total == alone.total and small.teacher > 2 * student.counted[0]
    lasting = alone.weights + alone.gradients + alone.optimizer
    assert big.total == lasting + big.teacher > 2 * 32_762_000_000
    assert big.teacher > big.activations + big.logits
