"""Weights as files: read in slices, written in files of bounded size, or made from a seed."""

import json
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput, JobError, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.disk.checksums import BLAKE3, hash_of
from cray_agents.runtime.registry import checkpoints
from cray_agents.trainers.checkpointing.hf_export import cut, name_files, weights_sha256
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout
from tests.support.trainers.forked_ranks import run_forked, training_in_rank

LIMIT = 40_000  # bytes a file
SHARE = 20_000  # bytes before another rank writes too


def copied(
    source: Path, folder: Path, change: Callable[[dict[str, Any]], Any], **says: Any
) -> Path:
    """A checkpoint with other tensors, and a config that says something else."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, **says}))
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def from_seed(source: Path, folder: Path, **says: Any) -> Path:
    """A config alone."""
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, **says}))
    return folder


def read(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def loaded_and_exported(
    folder: Path, layout: Layout, hyper: Hyperparameters, out: Path, rank: int, store: Any, _: Any
) -> int:
    """One rank: take the weights in and write them out again; says how many numbers it read."""
    from cray_agents.trainers.checkpointing import hf_export
    from cray_agents.trainers.models.model import build_model
    from cray_agents.trainers.models.weights import SafeTensors, load_weights

    training = training_in_rank(folder, layout, hyper, rank, store)
    model = training.model
    for name, limits in {
        ".": (LIMIT, SHARE),
        "shared": (hf_export.FILE_BYTES, SHARE),
        "as it is": (),
    }.items():
        hashes = hf_export.export_weights(training, out / name, *limits)
        paths = (out / name).glob("*.safetensors")
        assert hashes == {path.name: hash_of(path, BLAKE3) for path in paths}
    if hyper.init == "parent":
        source = Counting(SafeTensors(folder))
        load_weights(build_model(model, layout, hyper, on_cpu=True), model, source)  # type: ignore
        (out / f"read-{rank}").write_text(str(source.numbers))
    return 0


class Counting:
    """A source that counts the numbers that are read from it."""

    def __init__(self, source: Any) -> None:
        self.source, self.numbers = source, 0
        self.shape, self.dtype = source.shape, source.dtype

    def __getitem__(self, name: str) -> Any:
        return self._count(self.source[name])

    def share(self, *where: Any) -> Any:
        return self._count(self.source.share(*where))

    def _count(self, tensor: Any) -> Any:
        self.numbers += tensor.numel()
        return tensor


def through_megatron(folder: Path, out: Path, layout: Layout, **hyper: Any) -> dict[str, Any]:
    for name in ("shared", "as it is"):
        (out / name).mkdir(parents=True)
    settings = Hyperparameters(learning_rate=1e-3, steps=1, **hyper)
    work = partial(loaded_and_exported, folder, layout, settings, out)
    assert run_forked(layout.world, out / "logs", work) is None
    return read(out)


def test_a_slice_is_what_the_whole_has_there(models: Callable[[str], Path]) -> None:
    import torch

    from cray_agents.trainers.models.weights import SafeTensors

    source = SafeTensors(models("qwen3"))
    name = "model.layers.1.mlp.down_proj.weight"
    whole = source[name]
    assert source.shape(name) == tuple(whole.shape) == (64, 96)
    assert source.dtype(name) == torch.float32
    assert torch.equal(source.share(name, 0, 16, 32), whole[16:32])
    assert torch.equal(source.share(name, 1, 48, 96), whole[:, 48:])


def test_what_is_missing_is_named(models: Callable[[str], Path], tmp_path: Path) -> None:
    from cray_agents.trainers.models.weights import SafeTensors

    with pytest.raises(BadInput, match=r"lacks the tensor 'model\.layers\.7\.x'"):
        SafeTensors(models("qwen3"))["model.layers.7.x"]
    with pytest.raises(NotFound, match=r"no model\.safetensors"):
        SafeTensors(tmp_path)


def test_files_are_cut_by_size_and_named_as_transformers_does() -> None:
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 8}
    assert cut(list(sizes), sizes, 8) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert cut([], sizes, 8) == []
    assert name_files([["a"]]) == {"model.safetensors": ["a"]}
    assert list(name_files([["a"], ["b"]])) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


@pytest.fixture
def tensors() -> dict[str, Any]:
    """Tensors of all types, some of odd sizes, some larger than a block."""
    import torch

    torch.manual_seed(0)
    kinds = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int64]
    kinds += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    found = {f"{n % 7}.{n}": (9 * torch.rand(n + 1)).to(kinds[n % 10]) for n in range(20)}
    return found | {"z": torch.randn(3, 2 << 20), "a": torch.randn(5 << 20).half()}


def written(folder: Path, tensors: dict[str, Any]) -> tuple[Path, dict[str, str]]:
    """One file of the tensors, which come in another order."""
    from cray_agents.trainers.checkpointing.weight_files import in_file_order, write_files

    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    files = {"model.safetensors": in_file_order(dtypes)}
    came = reversed(tensors.items())
    return folder / "model.safetensors", write_files(folder, files, shapes, dtypes, came)


def test_a_file_is_as_safetensors_writes_it(tmp_path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save

    path, hashes = written(tmp_path, tensors)
    assert path.read_bytes() == save(tensors, metadata={"format": "pt"})
    assert hashes == {path.name: hash_of(path, BLAKE3)}


def test_pieces_of_tensors_make_the_same_file(tmp_path: Path, tensors: dict[str, Any]) -> None:
    """Pieces of all tensors come by turns, some of them empty."""
    from cray_agents.trainers.checkpointing.weight_files import in_file_order, write_files

    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    path, hashes = written(tmp_path, tensors)
    (tmp_path / "pieces").mkdir()
    cut = [(name, tensor.tensor_split([1, 3, 3])) for name, tensor in reversed(tensors.items())]
    came = ((name, pieces[n]) for n in range(4) for name, pieces in cut)
    files = {path.name: in_file_order(dtypes)}
    assert write_files(tmp_path / "pieces", files, shapes, dtypes, came) == hashes
    assert (tmp_path / "pieces" / path.name).read_bytes() == path.read_bytes()


def test_a_full_disk_is_an_error(tmp_path: Path, tensors: dict[str, Any]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            written(tmp_path, tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def published(folder: Path, out: Path, limit: str, rank: int, store: Any, _: Any) -> int:
    """One rank of two: publish a checkpoint; the second ends within its file."""
    from cray_agents.trainers.checkpointing import hf_export

    layout, hyper = Layout(data=2), Hyperparameters(learning_rate=1e-3, steps=1)
    training = training_in_rank(folder, layout, hyper, rank, store)
    if rank and limit:
        if limit == "killed":
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    spec = JobSpec(dataset="d", parent=str(folder), parent_sha256="0", hyperparameters=hyper)
    draft, final = out / ".made.1", out / "made"
    hf_export.publish(training, spec, [[1, 2, 3]], {}, None, Home(out), draft, final, share=SHARE)
    return 0


@pytest.mark.megatron
def test_a_publish_that_fails_in_the_middle_leaves_nothing(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, out = models("llama"), tmp_path / "out"
    for limit, told in {"killed": "signal 25", "disk": "rank [01] died"}.items():  # both hear of it
        with pytest.raises(JobError, match=told):
            work = partial(published, folder, out, limit)
            run_forked(2, tmp_path / "logs", work)
        assert [path.name for path in out.iterdir()] == [".made.1"]
        assert not (out / ".made.1" / checkpoints.MANIFEST).exists()
    work = partial(published, folder, out, "")
    assert run_forked(2, tmp_path / "logs", work) is None
    assert [path.name for path in out.iterdir()] == ["made"]
    manifest = checkpoints.verify(out / "made")
    assert sum(name.startswith("model-") for name in manifest.files) == 2
    assert manifest.files.keys() >= {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    }
    before = read(folder)
    assert all(bool((tensor == before[name]).all()) for name, tensor in read(out / "made").items())


def checked(folder: Path, expected: str, rank: int, store: Any, _: Any) -> int:
    """One rank of two: the check alone, without a model."""
    from cray_agents.trainers.job.weights_check import check_weights
    from cray_agents.trainers.training.parallel_groups import join_ranks

    join_ranks(Layout(data=2), rank, 2, store, on_cpu=True)
    with check_weights(folder, expected):
        pass
    return 0


@pytest.mark.megatron
def test_a_flipped_bit_is_refused_whichever_rank_reads_it(
    tmp_path: Path, tensors: dict[str, Any]
) -> None:
    written(tmp_path, tensors)
    paths = [(tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")]
    paths.append(tmp_path / "model-2.safetensors")
    paths[1].write_bytes(paths[0].read_bytes()[: 1 << 20])
    check = partial(checked, tmp_path, weights_sha256(tmp_path))
    assert run_forked(2, tmp_path / "logs", check) is None
    for path in paths:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refusal = run_forked(2, tmp_path / "logs", check)
        assert "were changed, or the path is wrong" in (refusal or "")
        path.write_bytes(whole)


@pytest.mark.megatron
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(pipeline=2)], ids=str)
def test_each_tensor_keeps_its_type_and_files_their_size(
    models: Callable[[str], Path], tmp_path: Path, layout: Layout
) -> None:
    import torch

    def several_types(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith(("v_proj.weight", "gate_proj.weight", "embed_tokens.weight")):
                tensors[name] = tensors[name].bfloat16()
            if name.endswith("o_proj.weight"):
                tensors[name] = tensors[name].half()

    folder = copied(models("qwen3"), tmp_path / "several", several_types)
    before, out = read(folder), tmp_path / "out"
    after = through_megatron(folder, out, layout)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor)

    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    files = sorted(out.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in before.values())
    assert sorted(set(index["weight_map"].values())) == [path.name for path in files]
    for path in files:
        tensors = [name for name, file in index["weight_map"].items() if file == path.name]
        assert len(tensors) == 1 or sum(before[name].nbytes for name in tensors) <= LIMIT


@pytest.mark.megatron
def test_a_rank_reads_no_more_than_its_part(models: Callable[[str], Path], tmp_path: Path) -> None:
    through_megatron(models("llama"), tmp_path / "out", Layout(tensor=2, pipeline=2))
    whole = sum(tensor.numel() for tensor in read(models("llama")).values())
    reads = [int((tmp_path / "out" / f"read-{n}").read_text()) for n in range(4)]
    norms = 5 * 64
    assert whole <= sum(reads) <= whole + norms  # tensor ranks both have a stage's norms
    assert max(reads) <= whole // 4 + norms


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 3}, "lacks the tensor 'model.layers.2."),
        ({"vocab_size": 305}, "has the shape [304, 64], and config.json implies [305, 64]"),
    ],
    ids=["missing", "other shape"],
)
def test_weights_of_another_model_are_refused(
    models: Callable[[str], Path], tmp_path: Path, change: dict[str, int], said: str
) -> None:
    folder = copied(models("llama"), tmp_path / "other", lambda tensors: None, **change)
    work = partial(
        loaded_and_exported,
        folder,
        Layout(),
        Hyperparameters(learning_rate=1e-3, steps=1),
        tmp_path,
    )
    assert said in (run_forked(1, tmp_path / "logs", work) or "")


@pytest.mark.megatron
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_a_seed_gives_the_same_model_in_every_layout(
    models: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    import torch
    from safetensors.torch import save

    parent = from_seed(models(kind), tmp_path / "parent", initializer_range=0.05, vocab_size=303)
    mixed = kind == "qwen3_moe"
    layouts = {
        "one": Layout(),
        "tensor2": Layout(tensor=2, sequence_parallel=mixed),
        "data2": Layout(data=2),
        "pipeline2": Layout(pipeline=2),
        **({"expert2": Layout(data=2, expert=2)} if mixed else {}),
    }
    made = {
        name: through_megatron(parent, tmp_path / name, layout, init="random", seed=3)
        for name, layout in layouts.items()
    }
    for name, tensors in made.items():
        shared = sorted((tmp_path / name / "shared").glob("*.safetensors"))
        assert len(shared) == layouts[name].world, "each rank writes"
        sizes = [path.stat().st_size for path in shared]
        assert max(sizes) < 0.65 * sum(sizes) or len(sizes) == 1, "about as much as the other"
        alone = sorted((tmp_path / name / "as it is").glob("*.safetensors"))
        parts = layouts[name].pipeline * layouts[name].expert
        assert len(alone) == parts, "a small model: the first holders alone"
        expected = save(tensors, metadata={"format": "pt"})
        assert parts > 1 or alone[0].read_bytes() == expected
    first = made.pop("one")
    assert first.keys() == read(models(kind)).keys()
    for name, tensor in first.items():
        assert all(torch.equal(other[name], tensor) for other in made.values())
        if name.endswith("norm.weight"):
            assert (tensor == 1).all()
        elif name.endswith(".bias"):
            assert (tensor == 0).all()
        else:
            error = 0.05 / tensor.numel() ** 0.5
            assert abs(tensor.mean()) < 5 * error
            assert abs(tensor.std() - 0.05) < 5 * error
    name = "model.embed_tokens.weight"
    other = through_megatron(parent, tmp_path / "other", Layout(), init="random", seed=4)
    assert not torch.equal(other[name], first[name])


@pytest.mark.megatron
def test_what_starts_afresh_is_stored_as_its_config_says(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    parent = from_seed(models("llama"), tmp_path / "parent", dtype="bfloat16")
    made = through_megatron(parent, tmp_path / "out", Layout(), init="random")
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    (tmp_path / "out" / "config.json").write_bytes((parent / "config.json").read_bytes())
    network: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = dict(network.named_parameters())
    assert loaded.keys() == made.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in made.items())
