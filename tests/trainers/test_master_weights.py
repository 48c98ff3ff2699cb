"""Master weights live on: many short jobs in bfloat16 end as one long one, however they go on."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cray_agents.runtime.disk.durable import sha256_file
from cray_agents.runtime.registry.adapters import merge
from cray_agents.runtime.registry.checkpoints import base_of, read_manifest, take_in
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.checkpointing.save import SEAL
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import JobStatus, Layout
from tests.support.trainers.running_session import RunningSession

pytestmark = pytest.mark.megatron

JOBS, STEPS = 4, 3
HYPER: dict[str, Any] = {
    "dtype": "bfloat16",
    "learning_rate": 1e-6,
    "schedule": "constant",
    "warmup_steps": 0,
    "batch_size": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "all weights": HYPER,
    "adapters": {**HYPER, "learning_rate": 1e-4, "lora": {"rank": 2}},
    "float32": {**HYPER, "dtype": "float32"},  # whose files are in bfloat16 all the same
}
EVERY_BATCH = [[5, 9, 200, 301, 17, 3, 3, 42, 77, 120]] * 2  # the same, whatever the step's number


def half(parent: Path, folder: Path) -> Path:
    """A parent whose files are in bfloat16."""
    shutil.copytree(parent, folder)
    weights = load_file(folder / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder


def kept(lab: Any, parent: Path, kind: str) -> Path:
    """The parent in the lab's root if adapters are trained: they are then published alone."""
    return lab.home.checkpoint(take_in(lab.home, parent)[0]) if kind == "adapters" else parent


class Chain:
    """Jobs on a dataset of its own, each with checkpoint and optimizer of the one before."""

    def __init__(self, lab: Any, parent: Path, hyper: dict[str, Any], name: str) -> None:
        self.lab, self.parent, self.hyper = lab, parent, hyper
        self.dataset = lab.dataset(name, ids=EVERY_BATCH)
        self.jobs: list[JobJournal] = []

    def spec(self, steps: int = STEPS, **changes: Any) -> Any:
        before = self.jobs[-1].job_id if self.jobs else None
        parent = self.lab.home.checkpoint(before) if before else self.parent
        hyper = {**self.hyper, "steps": steps, "seed": len(self.jobs)}
        dataset = self.dataset
        return self.lab.spec(parent, dataset=dataset, hyper=hyper, optimizer_from=before, **changes)

    def go_on(self, session: RunningSession, steps: int = STEPS) -> "Chain":
        return self.note(session.train(self.spec(steps)))

    def note(self, job: JobJournal) -> "Chain":
        assert job.status().state == "succeeded", (job.status(), job.log_tail())
        self.jobs.append(job)
        return self

    @property
    def statuses(self) -> list[JobStatus]:
        return [read_status(self.lab.home, job.job_id) for job in self.jobs]

    @property
    def files(self) -> dict[str, torch.Tensor]:
        folder = self.lab.home.checkpoint(self.jobs[-1].job_id)
        folder = folder if base_of(folder) is None else merge(folder)
        return load_file(folder / "model.safetensors")

    @property
    def master(self) -> Any:
        """The float32 weights of the newest resume point."""
        return np.concatenate([rows[0] for rows in numbers_of(self.jobs[-1])])


def numbers_of(job: JobJournal) -> list[Any]:
    """The weights and moments in a job's newest resume point, by rank, to be changed there."""
    files = sorted(job.resume_points[0].glob("rank-*.bin"))
    return [np.memmap(file, "<f4", "r+").reshape(3, -1) for file in files]


def change_master(job: JobJournal, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the master weights in a job's newest resume point, which stays whole."""
    point = job.resume_points[0]
    for rows in numbers_of(job):
        rows[0] = change(torch.from_numpy(np.array(rows[0]))).numpy()
        rows.base.flush()
    seal = {name: sha256_file(point / name) for name in json.loads((point / SEAL).read_bytes())}
    (point / SEAL).write_text(json.dumps(seal))


def past_step(job: JobJournal, step: int) -> bool:
    return job.step >= step


def apart(one: Chain, other: Chain) -> float:
    """How far the masters are from each other, relative to their norm."""
    return float(np.linalg.norm(one.master - other.master) / np.linalg.norm(other.master))


def equal_share(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    same = sum(int((mine[name] == theirs[name]).sum()) for name in theirs)
    return same / sum(tensor.numel() for tensor in theirs.values())


@pytest.fixture
def parent(lab: Any, tmp_path: Path) -> Path:
    return half(lab.models("qwen3"), tmp_path / "parent")


@pytest.mark.parametrize("kind", KINDS)
def test_many_jobs_of_a_session_end_as_one(lab: Any, parent: Path, kind: str) -> None:
    """Also where it is killed within a job."""
    parent = kept(lab, parent, kind)
    long, short = (Chain(lab, parent, KINDS[kind], name) for name in ("long", "short"))
    session = RunningSession(lab.home, Layout())
    long.go_on(session, JOBS * STEPS)
    for number in range(JOBS):
        if number != JOBS // 2:
            short.go_on(session)
            continue
        job = session.start(short.spec(save_every=1))
        session.until(partial(past_step, job, 2))
        os.kill(session.pid, signal.SIGKILL)
        session.wait()
        session = RunningSession(lab.home, Layout())
        session.until(job.status)
        short.note(job)
    assert session.end() == 0, session.log
    assert apart(short, long) <= 1e-6 and equal_share(short.files, long.files) >= 0.999
    assert not any(status.warnings for status in short.statuses)


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_from_files_end_as_one_unless_the_master_is_forgotten(
    lab: Any, parent: Path, kind: str
) -> None:
    """With -s it prints the figures of each job, with the master weights and without.

    Of its files: the share changed in its parent, their part of the update, the share changed since
    the first parent; then the distance of its master from the end of the one job.
    """
    names, parent = ("long", "carried", "forgotten"), kept(lab, parent, kind)
    long, carried, forgotten = (Chain(lab, parent, KINDS[kind], name) for name in names)
    session, first = RunningSession(lab.home, Layout()), load_file(parent / "model.safetensors")
    long.go_on(session, JOBS * STEPS)
    for number in range(JOBS):
        if number:
            change_master(forgotten.jobs[-1], lambda master: master.bfloat16().float())
        row = [f"{number + 1:>2}"]
        for chain in (carried, forgotten):  # neither is in memory when its turn comes
            status = chain.go_on(session).statuses[-1]
            row += [f"{status.changed_share:.2%}", f"{status.update_ratio or 0:.1%}"]
            row += [f"{1 - equal_share(chain.files, first):.2%}", f"{apart(chain, long):.1e}"]
        print(" | ".join(["", *row, ""]))
    assert session.end() == 0, session.log
    assert apart(carried, long) <= 1e-6 and equal_share(carried.files, long.files) >= 0.999
    assert apart(forgotten, long) > 1e-5
    assert not any(status.warnings for status in carried.statuses)


def test_a_rejected_candidate_costs_the_promoted_one_nothing(lab: Any, parent: Path) -> None:
    """Six jobs, each second one rejected: the next goes on from the promoted one's master."""
    first = load_file(parent / "model.safetensors")
    session = RunningSession(lab.home, Layout())
    chain, undisturbed = Chain(lab, parent, HYPER, "loop"), Chain(lab, parent, HYPER, "calm")
    changed = []
    for number in range(3):
        undisturbed.go_on(session)
        chain.go_on(session)
        changed.append(1 - equal_share(chain.files, first))
        rejected = Chain(lab, parent, HYPER, f"rejected-{number}")
        rejected.jobs = [*chain.jobs]
        rejected.go_on(session)
    assert session.end() == 0, session.log
    assert apart(chain, undisturbed) <= 1e-6
    assert 0 < changed[0] < changed[1] < changed[2], "the files move at a learning rate of 1e-6"
    assert not any(status.warnings for status in chain.statuses)


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("all weights", [{"data": 2}, {"tensor": 2}, {"pipeline": 2}, {}]),
        ("adapters", [{"tensor": 2}, {"data": 2}, {}]),
        ("transformers", [{"data": 2}, {"data": 2, "sharding": "full"}, {}]),
        ("experts", [{"data": 2, "expert": 2}, {"pipeline": 2}, {}]),
    ],
)
def test_masters_go_on_in_another_layout(
    lab: Any, tmp_path: Path, kill_at: Any, kind: str, layouts: list[dict[str, Any]]
) -> None:
    """By jobs of their own processes: nothing but the order of additions tells them from one.

    Also where one of them is killed.
    """
    hyper = KINDS.get(
        kind, {**HYPER, "backend": "transformers" if kind == "transformers" else "megatron"}
    )
    parent = half(lab.models("qwen3_moe" if kind == "experts" else "qwen3"), tmp_path / "parent")
    parent = kept(lab, parent, kind)
    short, long = (Chain(lab, parent, hyper, name) for name in ("short", "long"))
    for layout in layouts:
        spec = short.spec(layout=layout, save_every=1)
        if len(short.jobs) == 1:
            kill_at(spec, 2)
        short.note(lab.run(spec).journal)
    long.note(lab.run(long.spec(STEPS * len(layouts))).journal)
    assert not any(status.warnings for status in short.statuses)
    assert apart(short, long) < (5e-3 if kind == "adapters" else 1e-4)


def test_what_is_lost_is_told(lab: Any, parent: Path) -> None:
    """A master of another step, a base that is gone, and an update that no file shows."""
    session = RunningSession(lab.home, Layout())
    kinds = {"whole": "all weights", "adapted": "adapters"}
    chains = {name: Chain(lab, parent, KINDS[kind], name) for name, kind in kinds.items()}
    whole, adapted = (chain.go_on(session) for chain in chains.values())
    assert (whole.statuses[0].changed_share or 0) > 0 and not whole.statuses[0].warnings

    change_master(whole.jobs[-1], lambda master: master + 1)
    moved = parent.rename(parent.with_name("elsewhere"))
    for chain, why in ((whole, "do not round to the parent's"), (adapted, "are not there")):
        (told,) = chain.go_on(session).statuses[-1].warnings
        assert f"what {chain.jobs[0].job_id} learnt beyond them is lost" in told and why in told
    assert named_bases(adapted) == [str(parent), str(lab.home.checkpoint(adapted.jobs[0].job_id))]

    moved.rename(parent)
    tiny = Chain(lab, parent, {**HYPER, "learning_rate": 1e-12}, "tiny").go_on(session)
    (told,) = tiny.statuses[0].warnings
    assert f"{tiny.jobs[0].job_id} equals its parent" in told
    assert (tiny.statuses[0].changed_share, tiny.statuses[0].update_ratio) == (0.0, 0.0)
    assert session.end() == 0, session.log


def named_bases(chain: Chain) -> list[str]:
    """By job: the weights that its adapters say that they are over."""
    folders = [chain.lab.home.checkpoint(job.job_id) / "adapter" for job in chain.jobs]
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    return [config["base_model_name_or_path"] for config in configs]


def test_adapters_of_all_jobs_are_over_the_first_parent(lab: Any, parent: Path) -> None:
    """Merged with it, each is its files to the bit: never with the merged files before."""
    chain, session = Chain(lab, parent, KINDS["adapters"], "ds"), RunningSession(lab.home, Layout())
    base = load_file(parent / "model.safetensors")
    for _ in range(3):
        chain.go_on(session)
        folder = lab.home.checkpoint(chain.jobs[-1].job_id)
        adapter, compared = load_file(folder / "adapter" / "adapter_model.safetensors"), 0
        for name, weight in chain.files.items():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            expected = base[name]
            if f"{stem}.lora_A.weight" in adapter:
                a, b = (adapter[f"{stem}.lora_{x}.weight"].float() for x in "AB")
                expected, compared = (base[name].float() + b @ a * 16).bfloat16(), compared + 1
            assert torch.equal(weight, expected), name
        manifest = read_manifest(folder)
        assert manifest.base_sha256 == weights_sha256(parent) and compared == 14
    assert set(named_bases(chain)) == {str(parent)}
    assert session.end() == 0, session.log
