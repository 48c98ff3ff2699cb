"""Resume points on the nodes' own disks: jobs go on from them where they can, and end as ever."""

import hashlib
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cray_agents.config.job_section import JobSettings
from cray_agents.paths import SCRATCH
from cray_agents.ports import Command
from cray_agents.runtime import fsck
from cray_agents.runtime.disk.durable import replace_file
from cray_agents.runtime.scheduler.site_environment import command_variables
from cray_agents.trainers.checkpointing.save import rank_folder
from cray_agents.trainers.checkpointing.save import step_of as step
from cray_agents.training_jobs import JobSpec, Layout
from tests.trainers.test_faults import flip, points_of, ranks_of, until

EVERY = 3
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def two_ranks(lab: Any) -> JobSpec:
    return spec_of(lab, "qwen3", {"data": 2})


def spec_of(lab: Any, model: str, layout: dict[str, Any], steps: int = 24) -> JobSpec:
    lab.dataset()
    spec: JobSpec = lab.spec(model, layout=layout, hyper={"steps": steps}, save_every=EVERY)
    return spec


def launch(lab: Any, spec: JobSpec, scratch: Path, *nodes: str) -> list[Any]:
    """A launcher on each node; they are this host, with disks of their own."""
    places, before = nodes or NODES[:1], lab.home.job(spec.id) / "attempts"
    start = f"after-{len(list(before.glob('*')))}"
    several = {"SLURM_NNODES": str(len(places)), "RANKS_START": start}
    variables = {SCRATCH: str(scratch), **(several if nodes else {})}
    return [
        lab.start(spec, **variables, SLURM_NODEID=str(number), SLURMD_NODENAME=name)
        for number, name in enumerate(places)
    ]


def killed(lab: Any, spec: JobSpec, scratch: Path, *nodes: str, last: int = EVERY) -> list[Path]:
    """Kill a job that has points on its own disks alone; return the newest two of those.

    The shared root takes none of its first attempt after step `last`.
    """
    megatron = lab.home.job(spec.id) / "megatron"
    megatron.mkdir(parents=True)
    for number in range(last + EVERY, spec.hyperparameters.steps + 1, EVERY):
        (megatron / f".step-{number:08d}.1").touch()
    jobs = launch(lab, spec, scratch, *nodes)
    job = jobs[-1]
    # two that stay: the first one goes as soon as the shared root has it
    until(lambda: sum(step(one) > last for one in local_points(job)) > 1, lambda: job.log)
    for pid in ranks_of(job)[-1:]:  # none: it came to its end, which the shared root did not take
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert [job.wait() for job in jobs] == [1] * len(jobs), job.log
    for file in megatron.glob(".step-*.1"):
        file.unlink()
    assert shared_step(lab, spec) <= last, job.log  # 0: a newer one was whole by then
    newest, before, *others = local_points(job)
    for gone in others:  # some ranks may have removed their files already
        shutil.rmtree(gone)
    return [newest, before]


def shared_step(lab: Any, spec: JobSpec) -> int:
    """The step of the newest point on the shared root; 0 without one."""
    points = (lab.home.job(spec.id) / "megatron").glob("step-*")
    return max(map(step, points), default=0)


def local_points(job: Any) -> list[Path]:
    return points_of(job, "local-*")[::-1]


def starts(job: Any) -> list[int]:
    return [e["from_step"] for e in job.journal.events() if e["event"] == "started"]


def warnings(job: Any) -> list[str]:
    return [e["message"] for e in job.journal.events() if e["event"] == "warning"]


def check(job: Any, scratch: Path, undisturbed: Any) -> None:
    """It ended as an undisturbed one, whose last point is on the shared root, and nowhere else."""
    assert job.losses == undisturbed.losses
    steps = undisturbed.journal.spec().hyperparameters.steps
    assert points_of(job, "step-*")[-1].name == f"step-{steps:08d}"
    assert not points_of(job, "*local-*") and not points_of(job, ".*")
    assert not [path for path in scratch.rglob("*") if path.is_file()]


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("model", "layout", "steps"),
    [
        ("qwen3", {}, 27),  # a layout is not part of the id
        ("qwen3-tied", {"pipeline": 2}, 24),
        ("llama", {"tensor": 2, "sequence_parallel": True}, 24),
        ("qwen2", {"data": 2, "optimizer_instances": 2}, 24),
    ],
    ids=["one rank", "tied embeddings", "tensor ranks", "optimizer instances"],
)
def test_a_killed_job_goes_on_from_its_own_disk(
    lab: Any, scratch: Path, undisturbed_job: Any, model: str, layout: dict[str, Any], steps: int
) -> None:
    """Also where ranks hold what others own, too: each reads its own files alone."""
    spec = spec_of(lab, model, layout, steps)
    newest = killed(lab, spec, scratch)[0]
    assert step(newest) > EVERY
    assert not [found for found in fsck.check(lab.home) if "megatron" in str(found)]
    (job,) = launch(lab, spec, scratch)
    assert job.wait() == 0, job.log
    assert starts(job)[-1] == step(newest)
    check(job, scratch, undisturbed_job(spec))


@pytest.mark.megatron
@pytest.mark.parametrize("damage", ["newest flipped", "all flipped", "gone"])
def test_where_a_ranks_file_is_damaged_or_gone_all_go_on_from_an_older_point(
    lab: Any,
    scratch: Path,
    undisturbed_job: Any,
    two_ranks: JobSpec,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    points = killed(lab, two_ranks, scratch)
    hurt = points[:1] if damage == "newest flipped" else points
    monkeypatch.setenv(SCRATCH, str(scratch))
    monkeypatch.setenv("SLURMD_NODENAME", NODES[0])
    for file in (rank_folder(point, 1) / "rank-00001.bin" for point in hurt):
        flip(file)
        if damage == "gone":
            file.unlink()
    before = shared_step(lab, two_ranks)
    (job,) = launch(lab, two_ranks, scratch)
    assert job.wait() == 0, job.log
    assert starts(job)[-1] == (before if hurt == points else step(points[1]))
    why = "cannot be read on its node" if damage == "gone" else "is not what was written"
    for point, message in zip(hurt, warnings(job), strict=True):
        assert point.name in message and f"rank-00001.bin {why}" in message
    check(job, scratch, undisturbed_job(two_ranks))


@pytest.mark.megatron
@pytest.mark.parametrize("damage", ["none", "of its copy", "of the file", "with tensor ranks"])
def test_of_several_nodes_each_reads_its_own_disk(
    lab: Any, scratch: Path, undisturbed_job: Any, two_ranks: JobSpec, damage: str
) -> None:
    """Also its copy of the shared root's file; but not tensor ranks, which read all files."""
    tensor = {"tensor": 2, "sequence_parallel": True} if "tensor" in damage else {}
    spec = spec_of(lab, "llama", tensor) if tensor else two_ranks
    newest = killed(lab, spec, scratch, *NODES[:2], last=4 * EVERY)[0]
    assert {path.parent.name for path in scratch.glob("*/*/*/*")} == {*NODES[:2]}
    before, second = shared_step(lab, spec), NODES[1 if damage == "none" else 2]
    file = lab.home.job(spec.id) / "megatron" / f"step-{before:08d}" / "rank-00000.bin"
    (own,) = scratch.glob(f"*/*/{NODES[0]}/*/rank-00000/local-{before:08d}.1/{file.name}")
    assert own.read_bytes() == file.read_bytes()
    if second != NODES[1]:
        flip(own if "copy" in damage else file)
    jobs = launch(lab, spec, scratch, NODES[0], second)
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].log
    begun = starts(jobs[0])[-1]
    assert begun < before if tensor else begun == (step(newest) if damage == "none" else before)
    for lost in [*scratch.glob(f"*/*/{NODES[1]}"), *file.parents[1].glob(".corrupt-*")]:
        shutil.rmtree(lost)
    check(jobs[0], scratch, undisturbed_job(spec))


@pytest.mark.megatron
def test_under_another_layout_it_goes_on_from_the_shared_root(
    lab: Any, scratch: Path, two_ranks: JobSpec
) -> None:
    killed(lab, two_ranks, scratch)
    moved = two_ranks.model_copy(update={"layout": Layout()})
    replace_file(lab.home.job(moved.id) / "spec.json", moved.model_dump_json().encode())
    before = shared_step(lab, moved)
    (job,) = launch(lab, moved, scratch)
    assert job.wait() == 0, job.log
    assert starts(job)[-1] == before and len(job.losses) == 24
    assert not local_points(job) and not warnings(job)


@pytest.mark.megatron
@pytest.mark.parametrize("how", ["missing", "one rank's"])
def test_a_disk_that_takes_nothing_costs_no_job(
    lab: Any, scratch: Path, undisturbed_job: Any, two_ranks: JobSpec, how: str
) -> None:
    """It is told, once, and points go to the shared root."""
    folder = scratch / "gone" if how == "missing" else scratch
    if how == "one rank's":
        root = hashlib.sha256(os.fsencode(lab.home.root)).hexdigest()[:16]
        scratch_of = f"cray-agents-{os.getuid()}/{root}/{NODES[0]}/{two_ranks.id}"
        (scratch / scratch_of).mkdir(parents=True, mode=0o700)
        (scratch / scratch_of / "rank-00001").touch()
    (job,) = launch(lab, two_ranks, folder)
    assert job.wait() == 0, job.log
    (told,) = warnings(job)
    assert "from here on resume points go to the shared root alone" in told
    assert how != "missing" or f"this node has no folder {folder}, which" in told
    for file in scratch.glob("*/*/*/*/rank-00001"):
        file.unlink()
    check(job, scratch, undisturbed_job(two_ranks))


def test_only_what_trains_is_told_of_the_folder() -> None:
    site = JobSettings(scratch="/local/nvme")
    asked = Command(name="a", argv=[], directory="", log="")
    assert command_variables(site, asked)[SCRATCH] == "/local/nvme"
    other = asked.model_copy(update={"kind": "replica"})
    assert SCRATCH not in command_variables(site, other) | command_variables(JobSettings(), asked)
    with pytest.raises(ValidationError, match="no whole path: write it as /local/nvme"):
        JobSettings(scratch="local/nvme")
