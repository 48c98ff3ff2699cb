"""`maintain prune models`: what nobody needs goes; what somebody needs stays, as all records."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import NotFound
from cray_agents.iteration import Iteration
from cray_agents.paths import Home
from cray_agents.records import canonical
from cray_agents.runtime import fsck
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.lineage import lineage_of
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.retention import Prunable, find_set_aside, prune
from cray_agents.training_commands import Publish, Save, TrainingCommand
from cray_agents.training_jobs import Hyperparameters, JobSpec, JobStatus
from tests.support.command_line import claimed, cli
from tests.support.in_process_engine import InProcessEngine
from tests.support.killable_loop import KINDS, echo, shape, site_loop
from tests.support.scripted_gateway import checkpoint, served
from tests.support.scripted_platform import PROBE, platform
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.waiting import wait_until

# a prune that is killed when it has set aside what it wants to delete
KILLED = """
import os, sys
from pathlib import Path
from cray_agents.paths import Home
from cray_agents.runtime import retention
retention.time.sleep = lambda seconds: os.kill(os.getpid(), 9)
retention.prune(Home(Path(sys.argv[1])), keep=1)
"""


class Site:
    """A shared root whose versions are made by a job each, in a row: calc@2 from calc@1, ..."""

    def __init__(self, directory: Path) -> None:
        self.home, self.directory = Home(directory / "home"), directory
        self.registry = Registry(self.home)
        self.trainer = ScriptedTrainer(self.home, probe=PROBE)
        base = checkpoint(directory / "base")
        self.registry.register("calc", *self.registry.import_checkpoint(base))
        self.registry.promote("calc", 1)

    def spec(self, parent: int, dataset: str, **more: Any) -> JobSpec:
        version = self.registry.resolve(f"calc@{parent}")
        return JobSpec(
            dataset=dataset,
            parent=str(self.home.checkpoint(version.checkpoint)),
            parent_sha256=version.weights_sha256,
            hyperparameters=Hyperparameters(steps=2),
            **more,
        )

    def make(self, parent: int, step: int | None = None, loop: str = "l", **more: Any) -> int:
        """The next version; `step` of a loop, if one is given."""
        dataset = f"ds-{len(self.registry.versions('calc'))}"
        self.home.dataset(dataset).mkdir(parents=True)
        about = {"loop": loop, "step": step} if step is not None else {}
        (self.home.dataset(dataset) / "manifest.json").write_text(json.dumps(about))
        job = self.trainer.submit(self.spec(parent, dataset, **more))
        folder = self.home.job(job.id) / "megatron" / "step-00000002"
        folder.mkdir(parents=True)
        (folder / "rank-00000.bin").write_bytes(b"moments")
        made = self.registry.register(
            "calc", *self.registry.import_checkpoint(job.checkpoint or "")
        )
        return made.number

    def iteration(self, number: int, version: int, loop: str = "l", **more: Any) -> None:
        record = Iteration(
            iteration=number, holdout_success=0, holdout_tasks=0, version=f"calc@{version}", **more
        )
        path = self.home.loop(loop) / "generations" / f"{number}.json"
        durable.create_file(path, canonical(record.model_dump(mode="json")))

    def folder(self, number: int) -> Path:
        return self.home.checkpoint(self.registry.resolve(f"calc@{number}").checkpoint)

    def prune(self, **options: Any) -> Prunable:
        return prune(self.home, **{"keep": 1, "grace": 0.0} | options)

    @property
    def left(self) -> list[int]:
        """The versions whose weights are there."""
        numbers = [version.number for version in self.registry.versions("calc")]
        return [number for number in numbers if (self.folder(number) / "manifest.json").exists()]

    @property
    def points(self) -> list[int]:
        """The versions whose jobs have a resume point."""
        found = []
        for version in self.registry.versions("calc"):
            folder = self.home.job(version.job or "none") / "megatron"
            found += [version.number for _ in folder.glob("step-*")]
        return found


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def row(site: Site, count: int) -> None:
    """So many versions in a row, of which nothing but their making is known."""
    for number in range(1, count):
        site.make(number)


def test_what_is_neither_promoted_nor_the_newest_goes(site: Site) -> None:
    row(site, 6)
    for number in (2, 4):
        site.registry.promote("calc", number)
    site.registry.reject("calc", 5, who="loop l")
    untouched = site.left, site.points
    planned = site.prune(dry_run=True)
    assert (site.left, site.points) == untouched == ([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6])
    done = site.prune()
    assert done.weights.keys() == planned.weights.keys() == {"calc@1", "calc@3", "calc@5"}
    assert done.weights == planned.weights and done.points == planned.points
    assert done.bytes == planned.bytes > 0
    assert done.kept == {
        "calc@4": "promoted",
        "calc@2": "was promoted before",
        "calc@6": "the newest",
    }
    assert site.left == site.points == [2, 4, 6]
    assert site.prune().bytes == 0
    assert not list(site.folder(1).parent.glob(".*"))


def test_keep_says_how_far_back_a_rollback_may_go(site: Site) -> None:
    row(site, 6)
    for number in (2, 3, 4):
        site.registry.promote("calc", number)
    site.registry.roll_back("calc", 3)
    assert site.prune(keep=2).kept.keys() == {"calc@2", "calc@3", "calc@4", "calc@1", "calc@6"}
    assert site.prune(keep=1).weights.keys() == {"calc@1"}  # 4 served before 3, 2 before that
    assert site.registry.rollback_target("calc").id == "calc@2" and 2 in site.left


def test_records_of_what_was_pruned_stay(site: Site) -> None:
    row(site, 4)
    site.registry.reject("calc", 2, who="loop l", reason="worse")
    before = {one["id"]: one["parent"] for one in lineage_of(site.registry, "calc")}
    site.prune()
    assert site.left == [1, 4]
    assert {one["id"]: one["parent"] for one in lineage_of(site.registry, "calc")} == before
    assert [event.version for event in site.registry.history("calc")] == [1, 2]
    record = checkpoints.manifest_of(site.folder(2))
    assert (record.job, record.metrics["steps"]) == (site.registry.resolve("calc@2").job, 2)
    for use in (checkpoints.read_manifest, checkpoints.verify, checkpoints.config_sha256):
        with pytest.raises(NotFound, match="by `cray-agents maintain prune models`") as refused:
            use(site.folder(2))
        assert refused.value.code == "pruned"


def test_kv_in_files_goes_with_its_weights(site: Site, tmp_path: Path) -> None:
    row(site, 3)  # of the same weights
    site.prune()
    pruned = checkpoints.manifest_of(site.folder(2))
    other = checkpoints.Pruned(manifest=pruned.model_copy(update={"weights_sha256": "f" * 64}))
    (site.folder(2).parent / "other.pruned").write_bytes(
        checksums.with_crc(other.model_dump_json().encode())
    )
    for name in (pruned.weights_sha256, "f" * 64, "not-ours"):
        (tmp_path / "kv" / name).mkdir(parents=True)
        (tmp_path / "kv" / name / "block.kv").write_bytes(bytes(100))
    assert site.prune(kv_tier=tmp_path / "kv", dry_run=True).blocks == {}
    assert site.prune(kv_tier=tmp_path / "kv").blocks == {"other": 100}
    left = {path.name for path in (tmp_path / "kv").iterdir()}
    assert left == {pruned.weights_sha256, "not-ours"}


def test_what_was_pruned_can_be_taken_in_again(site: Site) -> None:
    row(site, 3)
    site.registry.promote("calc", 2)
    site.registry.promote("calc", 3)
    site.prune()
    assert site.left == [2, 3]
    again = site.registry.import_checkpoint(site.directory / "base")
    assert site.registry.register("calc", *again).number == 1
    assert site.left == [1, 2, 3]


def test_what_jobs_and_replicas_need_stays(site: Site) -> None:
    row(site, 7)
    later = ScriptedTrainer(site.home, by_hand=True)
    source = site.registry.resolve("calc@4").job
    for number, more in ((2, {}), (3, {"optimizer_from": source})):
        later.submit(site.spec(number, f"later-{number}", **more))
    done = site.prune(in_use=lambda: ["calc@5", "calc@9", "other@1"])
    assert site.left == [1, 2, 3, 5, 7]
    assert site.points == [2, 3, 4, 5, 7]  # of 4 the optimizer goes on
    assert done.kept["calc@5"] == "a replica holds it"
    assert done.kept["calc@2"].endswith("which has not ended")
    for folder in site.home.jobs.iterdir():
        if not (folder / "status.json").exists():
            later.cancel(folder.name)
    site.prune()
    assert (site.left, site.points) == ([1, 7], [7])


def test_a_kept_state_stays_as_long_as_its_weights(site: Site) -> None:
    """Also of a run that has not ended, and for one that begins with it."""
    run = site.spec(1, "", commands="mine")
    job = site.trainer.submit(run).id
    keep = Save(keep_state=True)
    steps: list[TrainingCommand] = [keep, Publish(keep_state=True), keep, Publish(), keep]
    for number, command in enumerate(steps, 1):
        site.trainer.command(job, number, command)
    megatron = site.home.job(job) / "megatron"
    for number in (2, 4):
        name = site.trainer.result(job, number).checkpoint
        site.registry.register("calc", *site.registry.import_checkpoint(name))

    def left() -> list[int]:
        return [n for n in range(1, 6) if durable.kept_state(megatron, n).is_dir()]

    later = ScriptedTrainer(site.home, by_hand=True)
    begun = later.submit(run.model_copy(update={"commands": "other", "state_from": f"{job}/3"})).id
    assert left() == [1, 2, 3, 5]
    assert job in site.prune(dry_run=True).points and left() == [1, 2, 3, 5]
    site.prune()
    assert (site.left, left()) == ([1, 3], [1, 3, 5])
    later.cancel(begun)
    site.prune()
    assert left() == [1, 5]


@pytest.mark.parametrize("trained_on", [False, True])
def test_a_canary_and_what_an_adapter_is_over_stay(site: Site, trained_on: bool) -> None:
    row(site, 3)
    base = site.registry.import_checkpoint(checkpoint(site.directory / "another", b"other"))
    assert site.registry.register("calc", *base).number == 4
    site.make(4)
    site.make(1)
    (site.folder(5) / checkpoints.ADAPTER).mkdir()
    if trained_on:  # its parent is another version with an adapter over the same weights
        manifest = checkpoints.read_manifest(site.folder(5))
        over = {"parent_sha256": "0" * 64, "base_sha256": manifest.parent_sha256}
        text = manifest.model_copy(update=over).model_dump_json()
        (site.folder(5) / checkpoints.MANIFEST).write_text(text)
    site.registry.promote("calc", 5)
    site.registry.start_canary("calc", 2, who="me", reason="", numbers={})
    done = site.prune()
    assert site.left == [1, 2, 4, 5, 6]
    assert done.kept["calc@2"] == "its canary runs"
    assert done.kept["calc@4"] == "calc@5 is an adapter over it"


def test_a_base_stays_as_long_as_an_adapter_version_whose_name_is_not_pruned(site: Site) -> None:
    row(site, 3)
    other, manifest = site.registry.import_checkpoint(checkpoint(site.directory / "o", b"other"))
    another = site.registry.import_checkpoint(checkpoint(site.directory / "p", b"another"))
    site.registry.register("other", other, manifest)
    site.registry.promote("other", site.registry.register("other", *another).number)
    alone = site.folder(2)  # nothing else needs it
    (alone / checkpoints.ADAPTER).mkdir()
    over = {"base": other, "base_sha256": manifest.weights_sha256}
    text = checkpoints.read_manifest(alone).model_copy(update=over).model_dump_json()
    (alone / checkpoints.MANIFEST).write_text(text)
    assert checkpoints.base_of(alone) == site.home.checkpoint(other)
    assert "other@1" not in site.prune(name="other", dry_run=True).weights
    weights = next(site.home.checkpoint(other).glob("*.safetensors"))
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + b"?")
    found = [finding.message for finding in fsck.check(site.home)]
    assert sum(str(weights) in message for message in found) == 2, "of both versions"
    weights.write_bytes(before)
    assert set(site.prune().weights) >= {"calc@2", "other@1"}


def test_a_loop_finds_what_it_goes_on_from(site: Site) -> None:
    """Candidates that were passed on unpromoted, an iteration that is under way, two loops."""
    site.iteration(0, 1)
    for step in (1, 2, 3):
        number = site.make(step, step)
        site.iteration(step, number, promoted=False, onward=f"calc@{number}")
    candidate = site.make(4, 4)  # its iteration has no record yet
    newest = site.make(1, None)
    assert (candidate, newest) == (5, 6)
    done = site.prune()
    assert (site.left, site.points) == ([1, 4, 5, 6], [4, 5, 6])
    assert done.kept["calc@4"] == "loop l goes on from it"
    assert done.kept["calc@5"] == "iteration 4 of loop l has not ended"
    site.iteration(4, candidate, promoted=False)  # rejected: it goes on from the promoted one
    site.prune()
    assert site.left == [1, 6]


def test_a_loop_that_samples_from_older_versions_finds_them(site: Site) -> None:
    site.iteration(0, 1)
    for step in (1, 2, 3, 4):
        number = site.make(step, step)
        site.iteration(step, number, promoted=False, onward=f"calc@{number}")
    path = site.home.loop("l") / "journal" / "settings-1.json"
    durable.create_file(path, canonical({"sampling": {"max_staleness": 2}}))
    site.prune()
    assert site.left == [1, 3, 4, 5]


def test_teachers_of_jobs_and_loops_stay(site: Site) -> None:
    row(site, 5)
    taught = {"teacher": str(site.folder(2)), "teacher_sha256": "0" * 64}
    later = ScriptedTrainer(site.home, by_hand=True)
    job = later.submit(site.spec(5, "later", method="distill", **taught))
    path = site.home.loop("l") / "journal" / "settings-1.json"  # it has no iteration yet
    durable.create_file(path, canonical({"stages": {"1": {"teacher": "calc@3"}, "9": {}}}))
    done = site.prune()
    assert site.left == [1, 2, 3, 5]
    assert done.kept["calc@2"] == f"the teacher of {job.id}, which has not ended"
    assert done.kept["calc@3"] == "loop l goes on from it"


def test_one_name_is_pruned_alone(site: Site) -> None:
    row(site, 4)
    for number in (1, 2, 3):
        version = site.registry.resolve(f"calc@{number}")
        manifest = checkpoints.read_manifest(site.folder(number))
        if number == 2:
            site.registry.register("other", version.checkpoint, manifest)
    assert site.prune(name="other").weights == {}
    assert site.left == [1, 2, 3, 4]
    done = site.prune(name="calc")
    assert done.weights.keys() == {"calc@3"} and site.left == [1, 2, 4]
    assert done.kept["calc@2"] == "the same checkpoint as other@1"
    with pytest.raises(NotFound, match="nobody"):
        site.prune(name="nobody")


def test_what_is_chosen_meanwhile_comes_back(site: Site) -> None:
    """Between setting aside and deleting, a replica has come to hold calc@2."""
    row(site, 4)
    looks: list[int] = []

    def versions_in_use() -> list[str]:
        looks.append(len(site.left))
        return ["calc@2"] if len(looks) == 2 else []

    done = site.prune(in_use=versions_in_use)
    assert looks == [4, 2]
    assert site.left == [1, 2, 4] and done.weights.keys() == {"calc@3"}
    assert checkpoints.verify(site.folder(2)).job is not None
    assert not checkpoints.pruned_file(site.folder(2)).exists()


def test_a_killed_prune_is_finished_by_the_next(site: Site) -> None:
    row(site, 5)
    argv = [sys.executable, "-c", KILLED, str(site.home.root)]
    assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
    assert site.left == [1, 5] and len(find_set_aside(site.home)) == 3
    with pytest.raises(NotFound, match="prune models"):
        checkpoints.read_manifest(site.folder(3))
    done = site.prune(in_use=lambda: ["calc@3"])  # as of a swap that was under way
    assert site.left == [1, 3, 5] and not find_set_aside(site.home)
    assert len(done.drafts) == 2 and done.bytes > 0
    checkpoints.verify(site.folder(3))


def test_drafts_of_dead_processes_are_swept(site: Site) -> None:
    folder = site.folder(1).parent
    for name in (".hf-1.draft_old", ".hf-2.draft_young", ".job-3.1", ".x.aside_y", ".x.old_y"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"half")
    ago = time.time() - 2 * checkpoints.DRAFT_SECONDS
    for name in (".hf-1.draft_old", ".job-3.1", ".x.aside_y"):
        for path in (folder / name / "model.safetensors", folder / name):
            os.utime(path, (ago, ago))
    assert checkpoints.delete_leftovers(site.home) == 3 * len(b"half")
    assert sorted(p.name for p in folder.glob(".*")) == [".hf-2.draft_young", ".x.aside_y"]
    assert site.prune().drafts.keys() == {".x.aside_y"}
    assert site.left == [1]


def test_jobs_that_failed_or_were_cancelled_keep_no_resume_points(site: Site) -> None:
    trainer = ScriptedTrainer(site.home, failures={0: "no luck"})
    failed = trainer.submit(site.spec(1, "a"))
    by_hand_trainer = ScriptedTrainer(site.home, by_hand=True)
    cancelled, going = (by_hand_trainer.submit(site.spec(1, dataset)) for dataset in ("b", "c"))
    by_hand_trainer.cancel(cancelled.id)
    for job in (failed, cancelled, going):
        for name in ("step-00000001", "step-00000002", ".step-00000003.1"):
            point = site.home.job(job.id) / "megatron" / name
            point.mkdir(parents=True)
            (point / "rank-00000.bin").write_bytes(b"moments")
    assert site.prune().points == {failed.id: 21, cancelled.id: 21}
    assert len(list((site.home.job(going.id) / "megatron").iterdir())) == 3


class Pointed(ScriptedTrainer):
    """Leaves a resume point of each job, and finds that which its optimizer goes on from."""

    def submit(self, spec: JobSpec) -> JobStatus:
        if spec.optimizer_from is not None:
            assert list((self.home.job(spec.optimizer_from) / "megatron").glob("step-*")), spec
        (self.home.job(spec.id) / "megatron" / "step-00000001").mkdir(parents=True, exist_ok=True)
        return super().submit(spec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rft", "async"])
def test_a_loop_beside_which_it_is_pruned_all_the_while_ends_the_same(
    tmp_path: Path, kind: str
) -> None:
    """Its versions, its optimizers and, in the asynchronous one, what it still samples from."""

    def run(root: Path, *, pruned: bool) -> list[Any]:
        over, found = threading.Event(), list[Prunable]()

        def work(url: str) -> None:
            def versions_in_use() -> list[str]:
                with urllib.request.urlopen(f"{url}/v1/pool") as answer:
                    return [v for r in json.load(answer)["data"] for v in r["versions"]]

            while not over.is_set():
                found.append(prune(Home(root), keep=1, in_use=versions_in_use, grace=0.1))

        trainer = Pointed(Home(root), {"trained_tokens": 5, "seconds": 1.0}, PROBE)
        with platform(root, ScriptedEngine(echo), trainer=trainer) as where:
            thread = threading.Thread(target=work, args=(where.url,))
            if pruned:
                thread.start()
            try:
                done = []
                for iteration in site_loop(platform=where, **KINDS[kind]).run_sync(4):
                    done.append(iteration)
                    if len(done) > 3:  # the last one goes on without some of the weights
                        wait_until(lambda: not pruned or any(one.weights for one in found))
                wait_until(lambda: not pruned or any(one.points for one in found))
                return shape(done)
            finally:
                over.set()
                if pruned:
                    thread.join()

    assert run(tmp_path / "pruned", pruned=True) == run(tmp_path / "undisturbed", pruned=False)


@pytest.mark.slow
async def test_the_command_beside_a_platform(tmp_path: Path) -> None:
    site = Site(tmp_path)
    row(site, 5)
    engines = [ScriptedEngine(lambda request, version: version) for _ in range(2)]

    async def command(*words: str) -> subprocess.CompletedProcess[str]:
        home = str(site.home.root)
        return await asyncio.to_thread(partial(cli, *words, "--home", home, cwd=tmp_path))

    with ExitStack() as stack:
        async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
            stack.enter_context(claimed(site.home, gateway.url, "calc"))
            assert (await gateway.call("POST", "/v1/models/calc/versions/3/stage"))[0] == 200
            dry = json.loads(
                (await command("maintain", "prune", "models", "calc", "--dry-run", "--json")).stdout
            )
            assert dry["weights"].keys() == {"calc@2", "calc@4"} and dry["dry_run"]
            assert dry["kept"]["calc@3"] == "a replica holds it"
            done = await command("maintain", "prune", "models", "calc")
            assert done.returncode == 0 and "calc@3 stays: a replica holds it" in done.stdout
            assert "given back" in done.stdout and site.left == [1, 3, 5]
            reason = "removed by `cray-agents maintain prune models`"
            for path, body in (
                ("calc/versions/2/stage", {}),
                ("calc/promote", {"version": 2}),
                ("calc/rollback", {"to": 2, "force": True}),
            ):
                status, refused = await gateway.call("POST", f"/v1/models/{path}", json=body)
                assert status == 404 and reason in refused["error"]["message"], path
            site.home.dataset("ds").mkdir()
            job = {"dataset": "ds", "parent": "calc@2", "hyperparameters": {"steps": 1}}
            status, refused = await gateway.call("POST", "/v1/jobs", json=job)
            assert (status, refused["error"]["param"]) == (404, "parent")
            assert reason in refused["error"]["message"]
            assert (await gateway.ask("hi")).text == "calc@1"
            rows = json.loads((await command("models", "list", "--json")).stdout)
            assert [row["id"] for row in rows if not row["weights"]] == ["calc@2", "calc@4"]
            shown = json.loads((await command("models", "show", "calc@2", "--json")).stdout)
            assert shown["manifest"]["metrics"]["steps"] == 2 and not shown["weights"]
        done = await command("maintain", "prune", "models")
        assert done.returncode == 2 and "try again in a moment" in " ".join(done.stderr.split())
