"""Resume points: in the same layout the same bits, in another the same numbers, or nothing."""

import json
import os
import resource
import shutil
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.errors import Corrupt, JobError, NewerFormat
from cray_agents.paths import SCRATCH
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.training_jobs import JobSpec, Layout
from tests.support.trainers.forked_ranks import run_forked, training_in_rank
from tests.trainers.test_faults import flip

pytestmark = pytest.mark.megatron


@dataclass(frozen=True)
class Course:
    """What ranks do: load a point, save at once, go on to `steps` and save there."""

    folder: Path
    dataset: Path
    steps: int
    load: Path | None = None
    may_publish: bool = True
    file_bytes: int | None = None  # the largest file that the system lets a rank write
    keep: int = 9
    polls_late: bool = False
    slow_root: bool = False  # its first point is published when the last one is written
    loses: bool = False  # rank 1 loses what is on its node's disk, and not published then


def sail(spec: JobSpec, course: Course, rank: int, store: Any, stop: Any) -> int:
    import torch

    from cray_agents.trainers.checkpointing import resume
    from cray_agents.trainers.checkpointing.save import Saver
    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import read_samples

    training = training_in_rank(Path(spec.parent), spec.layout, spec.hyperparameters, rank, store)
    known = BaselineLogprobs(read_samples(course.dataset))
    told: list[int] = []
    lasted: list[float] = []

    writers: list[int] = []  # the threads that publish: that of local points comes first
    released = threading.Event()

    def may_publish() -> bool:
        writers.append(writer := threading.get_ident())
        if course.slow_root and writer != writers[0]:
            released.wait()
        return course.may_publish

    def report(step: int, seconds: float) -> None:
        told.append(step)
        lasted.append(seconds)

    saver = Saver(training, course.folder, 1, course.keep, may_publish, report)
    losses: list[float] = [0.0] * 9
    if course.load is not None:
        losses = resume.load(training, course.load)["losses"]
        saver.save({"losses": losses})
    if course.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (course.file_bytes, resource.RLIM_INFINITY))
    while training.done < course.steps:
        losses[training.done] = training.step(known).loss
        begun = time.monotonic()
        if training.done % 2 == 0:
            saver.save({"losses": losses})
        if course.polls_late and saver._ends:
            saver._ends[0][1].result()
            written = time.monotonic() - begun
            time.sleep(0.1)
            saver.poll()
            assert lasted[-1] <= written
        saver.poll()
    if course.slow_root:
        if saver._staging is not None:  # `poll` did not hear its end
            saver._staging.result()
        torch.distributed.barrier()  # no rank tidies up its own disk any more
        if course.loses and rank == 1:
            shutil.rmtree(os.environ[SCRATCH])
        torch.distributed.barrier()
    released.set()
    saver.finish()
    last = course.folder / f"step-{training.done:08d}" / "SEALED.json"
    assert last.exists() == course.may_publish  # when `finish` returns, on every rank
    (course.folder / f"told-{rank}.json").write_text(json.dumps([told, losses]))
    return 0


def run(spec: JobSpec, course: Course) -> list[float]:
    """The losses of the steps so far."""

    course.folder.mkdir(parents=True)
    work = partial(sail, spec, course)
    if (refusal := run_forked(spec.layout.world, course.folder / "logs", work)) is not None:
        raise ValueError(refusal)
    losses: list[float] = json.loads((course.folder / "told-0.json").read_bytes())[1]
    return losses


def contents(point: Path, rows: int) -> dict[str, Any]:
    """name -> [3, ...]: every weight and its moments, whole; a vocabulary without its padding."""
    wholes: dict[str, Any] = {}
    boxes: dict[str, Any] = {}
    for path in sorted(point.glob("rank-*.json")):
        pieces = json.loads(path.read_bytes())["pieces"]
        numbers = np.fromfile(path.with_suffix(".bin"), "<f4").reshape(3, -1)
        ends = np.cumsum([piece["count"] for piece in pieces])
        for piece, end in zip(pieces, ends, strict=True):
            name = f"{piece['key']} {piece['offset']}"
            box = boxes.setdefault(
                name, (piece, np.full((3, int(np.prod(piece["shape"]))), np.nan, np.float32))
            )
            first, count = piece["first"], piece["count"]
            box[1][:, first : first + count] = numbers[:, end - count : end]
    for piece, values in boxes.values():
        whole = wholes.setdefault(piece["key"], np.full((3, *piece["whole"]), np.nan, np.float32))
        place = [slice(o, o + s) for o, s in zip(piece["offset"], piece["shape"], strict=True)]
        whole[(slice(None), *place)] = values.reshape(3, *piece["shape"])
    vocabulary = ("word_embeddings.weight", "output_layer.weight")
    return {k: w[:, :rows] if k.endswith(vocabulary) else w for k, w in wholes.items()}


def odd_model(lab: Any, folder: Path) -> Path:
    """Four layers, for interleaving, and 303 tokens, which two tensor ranks fill up to 304."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(
        lab.models("qwen3"), num_hidden_layers=4, vocab_size=303, layer_types=["full_attention"] * 4
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(lab.models("qwen3") / name, folder)
    return folder


TENSORS = {"tensor": 2, "sequence_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "data": ("qwen3", {}, {}, {"data": 2}),
    "sequence": ("qwen3", {}, TENSORS, {}),
    "tied": ("qwen3-tied", {}, {"pipeline": 2}, {"data": 2}),
    "interleaved": ("odd", {}, {"pipeline": 2, "interleave": 2}, {"tensor": 2}),
    "padded": ("odd", {}, {"tensor": 2}, {"pipeline": 2}),
    "experts": ("qwen3_moe", {}, {"data": 2, "expert": 2}, {}),
    "to experts": ("qwen3_moe", {}, {}, {"data": 2, "expert": 2}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}, {"data": 2}, TENSORS),
    "lora": ("qwen3", {"lora": {"rank": 4, "dropout": 0.1}}, {"tensor": 2}, {"data": 2}),
    "context": ("qwen3", {}, {"context": 2}, {}),
    "uneven": ("odd", {}, {"pipeline": 3}, {"data": 2}),
    "instances": ("qwen3", {}, {"data": 2, "optimizer_instances": 2}, {"data": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_job_goes_on_in_its_own_layout_and_in_another(
    lab: Any, tmp_path: Path, case: str
) -> None:
    """Its own: bit for bit. Another: the same state to the bit, and losses within 1e-6 of theirs.

    In bfloat16 and with dropout, losses under another layout are other losses.
    """
    kind, hyper, layout, other = CASES[case]
    ids = [[(7 * i + (1 + i % 3) * j) % 303 for j in range(12 + i)] for i in range(24)]
    lab.dataset(ids=ids)
    model = odd_model(lab, tmp_path / "odd") if kind == "odd" else lab.models(kind)
    spec = lab.spec(model, hyper=hyper, layout=layout)
    course = Course(tmp_path / "whole", lab.home.dataset("ds"), steps=4)
    losses = run(spec, course)
    point = course.folder / "step-00000002"

    again = replace(course, folder=tmp_path / "again", load=point)
    assert run(spec, again) == losses
    for name in ("step-00000002", "step-00000004"):
        ours, theirs = (sorted((c.folder / name).glob("rank-*.bin")) for c in (again, course))
        assert len(ours) == spec.layout.world
        assert [f.read_bytes() for f in ours] == [f.read_bytes() for f in theirs]

    elsewhere = replace(course, folder=tmp_path / "elsewhere", load=point)
    moved = spec.model_copy(update={"layout": Layout(**other)})
    found = run(moved, elsewhere)
    before, after = contents(point, 303), contents(elsewhere.folder / point.name, 303)
    assert before.keys() == after.keys() and len(before) > 4
    for name, values in before.items():
        np.testing.assert_array_equal(values, after[name], name)
        assert values[2].any(), name
    exact = "dtype" not in hyper and "lora" not in hyper
    np.testing.assert_allclose(found, losses, rtol=1e-6 if exact else 5e-3)


def test_the_last_points_are_kept_and_each_is_told_of(lab: Any, tmp_path: Path) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2})
    course = Course(tmp_path / "points", lab.home.dataset("ds"), steps=6, keep=2)
    run(spec, course)
    assert sorted(p.name for p in course.folder.glob("*step*")) == [
        "step-00000004",
        "step-00000006",
    ]
    assert json.loads((course.folder / "told-0.json").read_bytes())[0] == [2, 4, 6]
    assert json.loads((course.folder / "told-1.json").read_bytes())[0] == []


@pytest.mark.parametrize("loses", [False, True], ids=["whole", "lost"])
def test_where_the_shared_root_is_slow_training_does_not_wait_and_points_are_left_out(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: bool
) -> None:
    """The last one is not: where its file is lost it is written from memory again."""
    lab.dataset()
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    course = Course(tmp_path / "points", lab.home.dataset("ds"), steps=8, slow_root=True)
    run(lab.spec("qwen3", layout={"data": 2}), replace(course, loses=loses))
    told = json.loads((course.folder / "told-0.json").read_bytes())[0]
    assert told[-1] == 8 and len(told) <= 2
    assert not list(course.folder.glob("*local-*"))


def test_the_seconds_are_those_of_the_writing(lab: Any, tmp_path: Path) -> None:
    """Also where training looks later if the point is written, as between two commands."""
    lab.dataset()
    course = Course(tmp_path / "points", lab.home.dataset("ds"), steps=2, polls_late=True)
    run(lab.spec("qwen3"), course)


def test_the_fence_is_asked_before_the_rename(lab: Any, tmp_path: Path) -> None:
    lab.dataset()
    course = Course(tmp_path / "points", lab.home.dataset("ds"), steps=2, may_publish=False)
    run(lab.spec("qwen3"), course)
    assert not list(course.folder.glob("*step*"))


def test_a_disk_that_takes_no_more_is_the_jobs_error(lab: Any, tmp_path: Path) -> None:
    lab.dataset()
    course = Course(tmp_path / "points", lab.home.dataset("ds"), steps=4, file_bytes=200_000)
    with pytest.raises(JobError, match=r"rank 0 died \(exit code 1\)") as caught:
        run(lab.spec("qwen3"), course)
    assert "the resume point of step 2 could not be written" in caught.value.log_tail
    assert "File too large" in caught.value.log_tail
    assert not list(course.folder.glob("step-*"))


@pytest.fixture(scope="module")
def trained(shared_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The points of steps 2, 4 and 6 of two ranks. Tests change copies of them."""
    folder = tmp_path_factory.mktemp("trained") / "points"
    course = Course(folder, shared_lab.home.dataset("ds"), steps=6)
    run(shared_lab.spec("qwen3", layout={"data": 2}), course)
    return folder


@pytest.fixture
def points(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "points"))


def test_only_what_is_whole_is_loaded(points: Path) -> None:
    from cray_agents.trainers.checkpointing import resume

    folder, names = points, [f"step-0000000{n}" for n in (2, 4, 6)]
    assert resume.choose(folder) == (folder / names[2], [])
    flip(folder / names[2] / "rank-00000.bin")
    (folder / names[1] / "SEALED.json").unlink()
    with pytest.raises(Corrupt, match="no readable SEALED"):
        resume.verify(folder / names[1])
    with pytest.raises(Corrupt, match=r"rank-00000.bin is not what was written"):
        resume.verify(folder / names[2])
    resume.set_aside(folder / names[2])  # as ranks do that have checked it together
    found, problems = resume.choose(folder)
    assert found == folder / names[0] and len(problems) == 1 and names[1] in problems[0]
    (folder / names[0] / "rank-00000.json").unlink()
    assert resume.choose(folder)[0] is None
    assert sorted(p.name for p in folder.glob("*step*")) == [f".corrupt-{n}" for n in names]


def test_a_rank_reads_what_it_owns_and_checks_its_share(points: Path) -> None:
    """Of a point of two ranks: any stretch of a weight, and of its files each in one share."""
    from cray_agents.trainers.checkpointing import resume
    from cray_agents.trainers.checkpointing.state import TensorRange, TensorSlice

    point = points / "step-00000002"
    wholes, saved = contents(point, 304), resume._SavedPoint(point)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    whole = wholes[name]
    shape = whole.shape[1:]
    ours = TensorRange(TensorSlice(name, shape, (0, 0), shape), 0, padded=False, copy=False)
    rows = TensorSlice(name, shape, (shape[0] // 2, 0), (shape[0] // 2, shape[1]))
    columns = TensorSlice(name, shape, (0, shape[1] // 2), (shape[0], shape[1] // 2))
    for slice_ in (ours.slice_, rows, columns):
        where = tuple(slice(o, o + s) for o, s in zip(slice_.offset, slice_.shape, strict=True))
        for first, count in ((0, slice_.size), (5, slice_.size // 3), (slice_.size - 3, 3)):
            for number in range(3):
                before = bytes_read()
                found = saved.read(replace(ours, slice_=slice_), number, first, count)
                read = bytes_read() - before
                expected = whole[number][where].reshape(-1)[first : first + count]
                np.testing.assert_array_equal(found.numpy(), expected)
                assert slice_ is columns or read < 4 * count + 9_000
    for file in point.iterdir():
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        noticed = 0
        for rank in range(3):
            try:
                resume.verify(point, rank, 3)
            except Corrupt:
                noticed += 1
        assert noticed == (3 if file.name == "SEALED.json" else 1), file.name
        file.write_bytes(content)
    resume.verify(point)


def bytes_read() -> int:
    """What this process has read so far, by system calls."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"])


def test_moments_of_other_weights_are_refused_by_name(
    lab: Any, trained: Path, tmp_path: Path
) -> None:
    lab.dataset()
    lora = lab.spec("qwen3", hyper={"lora": {"rank": 4}})
    point = trained / "step-00000002"
    wrong = Course(tmp_path / "wrong", lab.home.dataset("ds"), steps=2, load=point)
    with pytest.raises(
        ValueError, match=r"no decoder.*\.a, which this job trains.*leave optimizer_from out"
    ):
        run(lora, wrong)
    assert weights_sha256(lab.models("qwen3")) == lora.parent_sha256


@pytest.mark.parametrize("version", [{}, {"version": 1}, {"version": 2}, {"version": "x"}])
def test_a_point_of_a_newer_version_is_refused(version: dict[str, Any], tmp_path: Path) -> None:
    """One without a number is of the first."""
    from cray_agents.trainers.checkpointing import resume

    (tmp_path / "point.json").write_text(json.dumps({"step": 2, "common": {"a": 1}, **version}))
    if version.get("version", 1) == 1:
        assert resume.read_common(tmp_path) == {"a": 1}
    else:
        newer = version["version"] == 2
        told = "reads formats up to 1: upgrade it" if newer else "is no version"
        with pytest.raises(NewerFormat if newer else Corrupt, match=told):
            resume.read_common(tmp_path)


def test_a_point_with_a_gap_is_not_sealed(tmp_path: Path) -> None:
    from cray_agents.trainers.checkpointing.save import refuse_gaps

    halves = [
        {"key": "w", "whole": [4, 2], "offset": [row, 0], "shape": [2, 2], "first": 0, "count": 4}
        for row in (0, 2)
    ]
    files = [tmp_path / f"rank-0000{rank}.json" for rank in (0, 1)]
    for file, half in zip(files, halves, strict=True):
        file.write_text(json.dumps({"pieces": [half]}))
    refuse_gaps(files)
    files[1].write_text(json.dumps({"pieces": [{**halves[1], "count": 3}]}))
    with pytest.raises(JobError, match=r"'w'.*report it"):
        refuse_gaps(files)
