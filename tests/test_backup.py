"""Backups: whole, incremental and verified, also of a root at work, and after any kill."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.records import ModelVersion
from cray_agents.runtime import fsck
from cray_agents.runtime.disk import checksums, durable, journal
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.backup import back_up
from tests.support import flipped_root
from tests.support.campaign import Campaign, Children, kills
from tests.support.command_line import cli, refused
from tests.support.scripted_platform import bare_model
from tests.support.waiting import wait_until

#: Readers of what belongs to living processes, which no backup has.
LIVING = {"standbys", "serving", "order of a replica", "lease of a replica", "platform"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A root with some files."""
    home = Home(tmp_path / "root")
    for number in range(20):
        durable.create_file(
            home.loops / "l" / f"{number}.json", checksums.with_crc(b'{"n":%d}' % number)
        )
    (home.uploads / "u" / "parts").mkdir(parents=True)
    return home


def backup(home: Home, *words: object) -> subprocess.CompletedProcess[str]:
    return cli("maintain", *words, "--home", home.root, cwd=home.root.parent)


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files_under(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of all files and folders."""
    return {
        path.relative_to(folder).as_posix(): (
            path.stat().st_mode,
            b"" if path.is_dir() else path.read_bytes(),
        )
        for path in folder.rglob("*")
    }


@pytest.mark.slow
def test_every_kind_of_file_is_restored(tmp_path: Path) -> None:
    home, new = flipped_root.make(tmp_path / "root"), Home(tmp_path / "new")
    told(backup(home, "backup", tmp_path / "dest", "--json"))
    told(backup(new, "restore", tmp_path / "dest", "--json"))
    assert list(fsck.check(new)) == []
    readers = flipped_root.readers(home)
    assert readers.keys() == flipped_root.readers(new).keys()
    for name in readers.keys() - LIVING:
        assert readers[name](new) == readers[name](home), name
    assert not new.platform.exists() and not new.replicas.exists()


def test_only_what_changed_is_copied(home: Home, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    first = told(backup(home, "backup", dest, "--json"))
    assert (first["files"], first["copied"]) == (20, first["bytes"])
    before = files_under(home.root)
    assert told(backup(home, "backup", dest, "--json"))["copied"] == 0
    durable.replace_file(home.loops / "l" / "0.json", b'{"n":"other"}')
    (home.loops / "l" / "1.json").unlink()
    third = told(backup(home, "backup", dest, "--json"))
    assert (third["files"], third["copied"]) == (19, len(b'{"n":"other"}'))
    told(backup(Home(tmp_path / "newest"), "restore", dest, "--json"))
    assert files_under(tmp_path / "newest") == files_under(home.root)
    told(backup(Home(tmp_path / "oldest"), "restore", first["path"], "--json"))
    assert files_under(tmp_path / "oldest") == before
    stored = sorted(dest.glob("blobs/??/*"))
    assert len(stored) == 21 and dest.stat().st_mode & 0o077 == 0
    for path in sorted(dest.glob("*.jsonl"))[:2]:
        path.unlink()
    for path in stored:
        os.utime(path, (0, 0))
    told(backup(home, "backup", dest, "--json"))
    assert len(list(dest.glob("blobs/??/*"))) == 19, "what no backup names is deleted"


def test_a_killed_backup_reads_nothing_twice(home: Home, tmp_path: Path) -> None:
    whole = back_up(home, tmp_path / "dest").path
    _, *entries, _ = whole.read_bytes().splitlines(keepends=True)
    part = whole.with_name(".backup_1.part")
    part.write_bytes(b"".join(entries[:-5]) + entries[-5][:20])  # as a kill leaves it
    whole.unlink()
    made = back_up(home, tmp_path / "dest")
    lost = [json.loads(line) for line in entries[-5:]]
    assert 0 < made.copied == sum(entry["size"] for entry in lost) < made.bytes


def test_damage_is_named_before_anything_is_written(home: Home, tmp_path: Path) -> None:
    dest, new = tmp_path / "dest", Home(tmp_path / "new")
    told(backup(home, "backup", dest, "--json"))
    flipped, missing = sorted(dest.glob("blobs/??/*"))[:2]
    content = bytearray(flipped.read_bytes())
    content[3] ^= 1
    flipped.write_bytes(content)
    missing.unlink()
    for words in ((), ("--dry-run",)):
        done = backup(new, "restore", dest, "--json", *words)
        rows = {row["content"]: row for row in json.loads(done.stdout)}
        assert done.returncode == 1 and rows.keys() == {str(flipped), str(missing)}
        assert "is damaged" in rows[str(flipped)]["reason"]
        assert "is missing" in rows[str(missing)]["reason"]
        assert all((home.root / row["path"]).is_file() for row in rows.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "root"]
    flipped.unlink()  # what is missing in the backup is copied again
    told(backup(home, "backup", dest, "--json"))
    assert told(backup(new, "restore", dest, "--dry-run", "--json"))["dry_run"]
    assert not new.root.exists()


def test_what_is_refused(home: Home, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    made = Path(told(backup(home, "backup", dest, "--json"))["path"])
    before = files_under(tmp_path)
    for place in (home.root / "inside", home.root, tmp_path):
        refused(backup(home, "backup", place), "lie within each other")
    (other := tmp_path / "other").mkdir()
    (other / "notes.txt").write_text("mine")
    refused(backup(home, "backup", other), "notes.txt is no backup", "name a folder")
    refused(backup(home, "backup", other / "notes.txt"), "is no backup")
    refused(backup(Home(tmp_path / "none"), "backup", tmp_path / "to"), "nothing is stored")
    refused(backup(home, "restore", dest), "is not empty", "--home")
    refused(backup(Home(dest / "new"), "restore", dest), "lies within the backup")
    refused(backup(Home(tmp_path / "new"), "restore", other), "there is no backup")
    head, *lines, count = made.read_bytes().splitlines()
    new = Home(tmp_path / "new")
    for change, *said in (
        ({"backup": 2}, "has format 2, and cray-agents", "reads formats up to 1: upgrade it"),
        ({"bytes": 10**18}, f"{10**18} more bytes"),
    ):
        row = json.loads(head if "backup" in change else count)
        odd = journal.line_of({key: row[key] for key in row if key != "crc"} | change)
        text = [odd, *lines, count] if "backup" in change else [head, *lines, odd]
        made.write_bytes(b"\n".join([*text, b""]))
        refused(backup(new, "restore", dest), *said)
        if "backup" in change:  # its contents must not be deleted by this version either
            refused(backup(home, "backup", dest), *said)
    for cut in ([head, *lines], [head, *lines[1:], count], lines, []):
        made.write_bytes(b"".join(line + b"\n" for line in cut))
        done = backup(new, "restore", dest)
        assert done.returncode == 1 and str(made.name) in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    made.write_bytes(b"\n".join([head, *lines, count, b""]))
    shutil.rmtree(other)
    assert files_under(tmp_path).keys() == before.keys()


@pytest.mark.slow
def test_a_full_disk_is_said_and_the_backup_goes_on(home: Home, tmp_path: Path) -> None:
    (home.loops / "l" / "large.json").write_bytes(os.urandom(2**20))
    (dest := tmp_path / "dest").mkdir()
    shell = """mount -t tmpfs -o size=512k tmpfs "$1" && "$0" -m cray_agents maintain backup "$1" \\
        --home "$2"; code=$?; mount -o remount,size=8m "$1"
        "$0" -m cray_agents maintain backup "$1" --home "$2" && exit $code"""
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", shell, sys.executable]
    done = subprocess.run(
        [*words, dest, home.root],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    refused(done, "No space left", "make room and repeat the command")
    assert "21 files" in done.stdout


# ---- a root at work
@contextmanager
def living(folder: Path, chance: random.Random) -> "Iterator[Living]":
    made = Living(folder)
    try:
        yield made
    finally:
        made.stop()


class Living:
    """A root at which writers, a compactor and a trainer work, and its backups."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.home, self.dest = Home(folder / "root"), folder / "dest"
        self.new = Home(folder / "new")
        self.written: set[str] = set()  # what was durable before the last backup
        self.version: ModelVersion | None = None  # that was promoted then
        self.children = Children(folder)
        self._stopped = threading.Event()
        self._model = bare_model(folder / "model")
        self._trainer = threading.Thread(target=self._train)
        for name in ("one", "two"):
            self.children.start(name, "tests.support.store.writer_process", self.home.root, name)
        self.children.start("keeper", "tests.support.store.maintainer_process", self.home.root)
        self._trainer.start()  # not before: they are forks, and would keep what it has locked
        wait_until(lambda: len(self.acknowledged()) > 20)

    def _train(self) -> None:
        """Publish resume points, of which two stay, and promote versions."""
        registry, megatron = Registry(self.home), self.home.job("job-1") / "megatron"
        megatron.mkdir(parents=True)
        step = 0
        while not self._stopped.wait(0.02):
            step += 1
            draft = durable.draft_directory(megatron / f"step-{step:08d}")
            parts = {f"rank-{rank}.bin": os.urandom(5000) for rank in range(8)}
            for name, content in parts.items():
                durable.write_file(draft / name, content)
            seal = {name: durable.sha256(content) for name, content in parts.items()}
            durable.write_file(draft / fsck.SEAL, checksums.with_crc(json.dumps(seal).encode()))
            durable.publish_directory(draft, megatron / f"step-{step:08d}")
            durable.keep_newest(megatron, 2)
            weights = self._model / "model.safetensors"
            other = weights.read_bytes()[:-4] + step.to_bytes(4, "little")  # another checkpoint
            weights.write_bytes(other)
            registry.register("m", *registry.import_checkpoint(self._model))
            registry.promote("m", step)

    def acknowledged(self) -> set[str]:
        """The ids of events that the writers were told of as durable."""
        logs = [(self.children.folder / f"{name}.log").read_text() for name in ("one", "two")]
        return {line for log in logs for line in log.split("\n")[:-1] if line.startswith("run-")}

    def start(self, name: str) -> subprocess.Popen[bytes]:
        words = {"backup": (self.dest, "--home", self.home.root),
                 "restore": (self.dest, "--home", self.new.root)}[name]  # fmt: skip
        with (self.children.folder / f"{name}.log").open("ab") as log:  # no fork: a thread is busy
            argv = [sys.executable, "-m", "cray_agents", "maintain", name, *map(str, words)]
            return subprocess.Popen(argv, stdout=log, stderr=log)

    def kill(self, name: str, chance: random.Random) -> bool:
        """Start a command and kill it once it writes; whether it had not ended by then."""
        draft = {"backup": "dest/.*.part", "restore": ".new.of-*"}[name]

        def count() -> int:
            found = self.children.folder.glob(draft)
            return sum(1 + sum(len(files) for _, _, files in os.walk(top)) for top in found)

        before, process = count(), self.start(name)
        wait_until(lambda: process.poll() is not None or count() != before)
        time.sleep(chance.uniform(0, 0.5))
        process.kill()
        if process.wait() == -signal.SIGKILL:
            return True
        assert process.returncode == 0
        return False

    def run(self, name: str) -> None:
        assert self.start(name).wait() == 0

    def stop(self) -> None:
        self._stopped.set()
        self._trainer.join()
        self.children.stop()


def hurt(site: Living, chance: random.Random, enough: int) -> Counter[str]:
    """Kill backups, and let one end; then likewise with restores of it."""
    hits = Counter[str]()
    while hits["backup"] < -(-enough // 2):
        hits["backup"] += site.kill("backup", chance)
    site.written, site.version = site.acknowledged(), Registry(site.home).promoted("m")
    site.run("backup")
    while hits.total() < enough and not site.new.root.exists():
        hits["restore"] += site.kill("restore", chance)
    if not site.new.root.exists():
        site.run("restore")
    return hits


def check(site: Living) -> None:
    """What was durable when the last backup began is in the new root, and all of that is whole."""
    assert list(fsck.check(site.new)) == []
    store, registry = Store(site.new), Registry(site.new)
    assert [event for event in site.written if not store.has(event)] == []
    versions = registry.versions("m")
    promoted = registry.promoted("m")
    assert promoted is not None and site.version is not None
    assert site.version.number <= promoted.number <= len(versions)
    for version in versions:
        assert (site.new.checkpoint(version.checkpoint) / "manifest.json").is_file()


@pytest.mark.slow
def test_a_root_at_work_is_backed_up_whole_through_kills(tmp_path: Path) -> None:
    Campaign(living, hurt, check).run(tmp_path, kills(4))
