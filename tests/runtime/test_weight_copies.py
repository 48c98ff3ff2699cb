"""Weight copies: verified, shared by processes, dropped, and never needed."""

import dataclasses
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cray_agents.processes import python
from cray_agents.records import Manifest
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.pool.weight_copies import WeightCopies
from cray_agents.runtime.registry.checkpoints import MANIFEST, hash_files
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from tests.support.scripted_pool import probe, until
from tests.support.scripted_server import PROGRAM
from tests.support.slurm_pool import SCRIPTED, Site

HOLD = """
import asyncio, sys
from pathlib import Path
from cray_agents.runtime.pool.weight_copies import WeightCopies
copies = WeightCopies(Path(sys.argv[1]))
print(*asyncio.run(copies.make(Path(sys.argv[2]))), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return model(tmp_path, 1)


def model(folder: Path, number: int) -> Path:
    directory = folder / f"m{number}"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"%d" % number * 5000)
    (directory / "config.json").write_text("{}")
    manifest = Manifest(
        files=hash_files(directory), weights_sha256=str(number), probe=probe(number), job="j"
    )
    (directory / MANIFEST).write_bytes(checksums.record_text(manifest))
    return directory


def copied(place: Path) -> list[Path]:
    """The files of weights in all copies of all processes; some may be removed meanwhile."""
    name = "model.safetensors"
    return sorted(Path(folder, name) for folder, _, names in os.walk(place) if name in names)


@pytest.fixture
def holder(place: Path, checkpoint: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that has a copy of the checkpoint."""
    argv = [*python("-c", HOLD), str(place), str(checkpoint)]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": root},
    ) as process:  # fmt: skip
        assert process.stdout is not None and "nvme" in process.stdout.readline()
        yield process
        process.kill()


async def test_a_copy_is_the_same_and_of_several_the_last_is_kept(
    tmp_path: Path, place: Path, checkpoint: Path
) -> None:
    copies, other = WeightCopies(place), model(tmp_path, 2)
    await copies.make(checkpoint)
    read, why = await copies.make(other)
    assert not why and copies.find(other) == read != other
    assert (
        hash_files(read) == hash_files(other)
        and (read / MANIFEST).read_bytes() == (other / MANIFEST).read_bytes()
    )
    await copies.keep(other)
    assert copies.find(other) == read and copied(place) == [read / "model.safetensors"]
    assert copies.find(checkpoint) == checkpoint
    shutil.rmtree(read)
    await copies.keep(other)
    assert copies.find(other) == other
    await copies.close()
    assert not list(place.rglob("*/*/*"))


async def test_what_another_process_has_is_linked_and_a_killed_ones_is_removed(
    place: Path, checkpoint: Path, holder: "subprocess.Popen[str]"
) -> None:
    (theirs,) = copied(place)
    copies = WeightCopies(place)
    assert not (await copies.make(checkpoint))[1]
    ours = copies.find(checkpoint) / "model.safetensors"
    assert ours != theirs and ours.samefile(theirs)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    another = WeightCopies(place)
    assert not (await another.make(checkpoint))[1] and not theirs.exists()
    assert another.find(checkpoint).joinpath("model.safetensors").samefile(ours)
    await copies.close()
    await another.close()


async def test_no_copy_is_made_of_damaged_files_or_without_room_or_a_folder(
    tmp_path: Path, place: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no folder" in (await WeightCopies(tmp_path / "gone").make(checkpoint))[1]
    copies = WeightCopies(place)
    monkeypatch.setattr("cray_agents.runtime.pool.weight_copies._SPARE", 2**62)
    _, why = await copies.make(checkpoint)
    assert "replica_scratch" in why and "stay free" in why
    monkeypatch.undo()
    (checkpoint / "config.json").write_text("{ }")
    _, why = await copies.make(checkpoint)
    assert "config.json is damaged" in why
    assert copies.find(checkpoint) == checkpoint and copied(place) == []
    await copies.close()


async def test_a_replica_loads_and_starts_from_its_copy(
    tmp_path: Path, place: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scripted server scores by the manifest beside the weights that it was told to load."""
    settings = EngineSettings(program=PROGRAM, dtype="float32", scratch=place)
    replica, new = VllmProcess("m", settings, tmp_path / "log.txt"), model(tmp_path, 2)
    prompts = [prompt.token_ids for prompt in probe(2)]
    try:
        await replica.start(checkpoint, "m@1")
        await replica.stage(new)
        hidden = (new / MANIFEST).read_bytes()
        await replica.engine.load(new, "m@2")
        (new / MANIFEST).unlink()
        assert await replica.engine.score(prompts)
        (new / MANIFEST).write_bytes(hidden)
        await replica.start(new, "m@2")
        (new / MANIFEST).unlink()
        assert await replica.engine.score(prompts)
        (new / MANIFEST).write_bytes(hidden)
        place.rename(tmp_path / "lost")
        for _ in range(2):
            await replica.stage(checkpoint)
            await replica.engine.load(checkpoint, "m@1")
        assert caplog.text.count("reads weights from the shared root") == 1
    finally:
        await replica.release()


@pytest.mark.slurm
async def test_a_replica_in_slurm_loads_from_a_copy_on_its_node(
    tmp_path: Path, place: Path, checkpoint: Path
) -> None:
    cluster = PrivateCluster(tmp_path / "slurm", nodes=1, cpus=1, gpus=[])
    cluster.start()
    site = Site(cluster, tmp_path, dataclasses.replace(SCRIPTED, scratch=place))
    try:
        pool, new = site.pool(site.hosts(1)), model(tmp_path, 2)
        await pool.start(checkpoint, "m@1", probe(1))
        await pool.swap(new, "m@2", probe(2))
        (copy,) = copied(place)
        assert copy.read_bytes() == (new / "model.safetensors").read_bytes()
        (new / MANIFEST).unlink()
        engine = pool._slots[0].engine_host.engine
        assert await engine.score([prompt.token_ids for prompt in probe(2)])
        await pool.stop()
        await until(lambda: not copied(place))  # they end with its job
    finally:
        await site.close()
        cluster.close()
