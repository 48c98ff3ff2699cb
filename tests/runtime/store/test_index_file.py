"""The index's file: damage, other versions and roots, several processes."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cray_agents.errors import StoreError
from cray_agents.paths import CACHE, Home
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store.index import Index, cache_of, database, identity_of, sweep_caches
from cray_agents.runtime.store.segments.line_format import LinePlace, Placed
from tests.support.store.made_up_facts import call, described, placed, reward

WRITER = """
import sys
from pathlib import Path
from cray_agents.runtime.store.index import Index
from tests.support.store.made_up_facts import call, described, placed

path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
index = Index(path)
for n in range(count):
    facts = [call(f"{name}-c{n}", f"run_{n}"), described(f"{name}-d{n}", f"run_{n}", n)]
    start = 200 * n
    assert index.add(f"segment_{name}", start, start + 200, placed(facts, "s", start)) == 2
    print(n, flush=True)
index.close()
"""


def writer(path: Path, name: str, count: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def some(count: int = 300) -> list[Placed]:
    facts = []
    for n in range(count):
        facts += [
            call(f"c{n}", f"run_{n}"),
            described(f"d{n}", f"run_{n}"),
            reward(f"r{n}", "run_0"),
        ]
    return placed(facts)


def filled(path: Path, identity: str = "root") -> Index:
    index = Index(path, identity)
    index.add("segment_a", 0, 90_000, some())
    return index


@pytest.mark.parametrize("damage", ["text", "empty", "header", "version", "identity"])
def test_what_is_no_index_of_this_root_is_started_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "index.sqlite"
    filled(path).close()
    identity = "root"
    if damage == "text":
        path.write_text("not a database " * 1000)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "header":
        path.write_bytes(os.urandom(4096) + path.read_bytes()[4096:])
    elif damage == "identity":
        identity = "another root"
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 77")
    index = Index(path, identity)
    assert index.progress() == {}
    assert list(index.iterate(RunQuery())) == []
    assert index.add("segment_a", 0, 90_000, some()) == 900
    assert index.count(RunFilter()) == 300
    index.close()


def test_an_index_of_another_boot_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.sqlite"
    filled(path).close()
    boot = tmp_path / "boot_id"
    boot.write_text("another boot\n")
    monkeypatch.setattr("cray_agents.runtime.store.index.database.boot_id", boot.read_text)
    index = Index(path, "root")
    assert index.progress() == {}
    index.close()


def test_damage_found_while_it_is_used_is_told_and_it_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    index = filled(path)
    index.close()
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(os.urandom(path.stat().st_size - 3 * 4096))
    index = Index(path, "root")
    if index.progress():  # the quick checks saw nothing
        with pytest.raises(StoreError, match="ask again"):
            list(index.iterate(RunQuery()))
            index.places([f"run_{n}" for n in range(300)])
            index.drop(["segment_a"])
    assert index.progress() == {}
    assert index.add("segment_a", 0, 90_000, some()) == 900
    assert index.count(RunFilter()) == 300
    index.close()


def test_a_deleted_file_is_made_anew_also_for_another_who_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    one, two = filled(path), Index(path, "root")
    assert two.known("c1")
    database.remove(path)
    assert two.progress() == {} and not two.known("c1")
    assert two.add("segment_a", 100, 200, some()[1:2]) == -1
    assert two.add("segment_a", 0, 100, some()[:1]) == 1
    assert one.known("c0") and one.progress() == {"segment_a": 100}
    path.unlink()
    assert one.add("segment_a", 0, 100, some()[:1]) == 1
    assert two.known("c0")
    one.close()
    two.close()


@pytest.mark.slow
def test_two_processes_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    count = 150
    children = [writer(path, name, count) for name in ("one", "two", "three")]
    for child in children:
        child.communicate()
        assert child.returncode == 0
    index = Index(path)
    assert set(index.progress().values()) == {200 * count}
    runs = list(index.iterate(RunQuery()))
    assert len(runs) == count and {run.calls for run in runs} == {3}
    assert all(index.places([f"run_{n}"])[f"run_{n}"].run for n in range(count))
    index.close()


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_transactions(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    for wait in (1, 40, 90):
        child = writer(path, f"at_{wait}", 100_000)
        assert child.stdout is not None
        for _ in range(wait):
            child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        index = Index(path)
        progress = index.progress()
        calls = sum(run.calls for run in index.iterate(RunQuery()))
        assert progress[f"segment_at_{wait}"] >= 200 * wait
        assert 200 * calls == sum(progress.values())
        index.close()


def test_a_broken_fact_undoes_its_transaction(tmp_path: Path) -> None:
    index = filled(tmp_path / "index.sqlite")
    good = call("new", "run_new", model="other@7", tags=["unheard-of"])
    with pytest.raises(KeyError):
        index.add("segment_b", 0, 200, placed([good, call("bad", "run_1")._replace(about={})]))
    far = Placed(
        good, LinePlace("segment_b", 2**70, 99)
    )  # found too late: names have their numbers
    with pytest.raises(OverflowError):
        index.add("segment_b", 0, 200, [far])
    assert not index.known("new") and index.run("run_new") is None
    assert "segment_b" not in index.progress()
    assert index.add("segment_b", 0, 100, placed([good], "segment_b")) == 1
    assert [run.run_id for run in list(index.iterate(RunQuery(model="other")))] == ["run_new"]
    assert index.count(RunFilter(tags=["unheard-of"])) == 1
    index.close()


@pytest.mark.slow
def test_threads_ask_while_another_adds(tmp_path: Path) -> None:
    index = filled(tmp_path / "index.sqlite")
    failed: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                assert index.known("c7")
                assert len(list(index.iterate(RunQuery(order="newest", limit=50)))) == 50
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for n in range(200):
        facts = placed([call(f"x{n}", f"run_{n % 500}")], "segment_x", 100 * n)
        assert index.add("segment_x", 100 * n, 100 * n + 100, facts) == 1
    done.set()
    for thread in threads:
        thread.join(60)
    index.close()
    assert not failed


@pytest.mark.slow
def test_a_long_reader_does_not_hold_the_log(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    index = Index(path)
    index.add("segment_a", 0, 1, placed([described(f"d{n}", f"run_{n:05}") for n in range(2500)]))
    reader = index.iterate(RunQuery())
    next(reader)
    for n in range(300):
        facts = [described(f"e{n}-{i}", f"run_{i:05}", 2.0 + n) for i in range(100)]
        index.add("segment_b", n, n + 1, placed(facts, "segment_b"))
    log = path.with_name(f"{path.name}-wal")
    assert log.stat().st_size < 64 * 2**20
    with sqlite3.connect(path) as connection:
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert not busy and log.stat().st_size == 0
    assert sum(1 for _ in reader) == 2499
    index.close()


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    one, two = Home(tmp_path / "one"), Home(tmp_path / "two")
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    path = cache_of(one)
    assert path == cache_of(Home(tmp_path / "link")) != cache_of(two)
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700
    assert path.is_relative_to(tmp_path / "cache" / f"cray-agents-{os.getuid()}")
    assert identity_of(one) == identity_of(one) != identity_of(two)
    Index(path, identity_of(one)).close()
    assert sweep_caches() == []
    for name in ("segments/.root-id", "segments", ""):
        gone = tmp_path / "two" / name
        gone.unlink() if gone.is_file() else gone.rmdir()
    assert sweep_caches() == [str(tmp_path / "two")]
    assert path.exists() and len(list(path.parent.parent.iterdir())) == 1


def test_versions_have_a_file_each_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    home = Home(tmp_path / "home")
    ours = cache_of(home)
    filled(ours).close()
    monkeypatch.setattr(database, "INDEX_VERSION", database.INDEX_VERSION + 1)
    newer = cache_of(home)
    assert newer != ours
    filled(newer).close()
    index = Index(ours, "root")
    assert index.progress() == {}  # a file of another version under this name is no index
    index.close()
    week = 8 * 86_400
    for path in ours.parent.glob("index*.sqlite*"):  # nobody has used any of them for a week
        os.utime(path, (path.stat().st_mtime - week,) * 2)
    for number in range(5):
        (ours.parent / f"index-old{number}.sqlite").touch()
    assert cache_of(home) == newer
    left = sorted(ours.parent.glob("index*.sqlite"))
    assert newer in left and ours not in left and len(left) == 4
    assert set(ours.parent.glob("*.turn")) == {newer.with_name(f"{newer.name}.turn")}


def test_a_root_made_anew_at_the_same_path_has_another_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    home = Home(tmp_path / "home")
    first = identity_of(home)
    filled(cache_of(home), first).close()
    home.root_id.unlink()
    assert identity_of(home) != first
    index = Index(cache_of(home), identity_of(home))
    assert index.progress() == {}
    index.close()


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    mine = tmp_path / f"cray-agents-{os.getuid()}"
    mine.mkdir(mode=0o777)
    mine.chmod(0o777)
    cache_of(Home(tmp_path / "home"))
    assert mine.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    mine.rename(tmp_path / "cray-agents-12345")
    with pytest.raises(StoreError, match="not this user's"):
        cache_of(Home(tmp_path / "home"))
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=CACHE):
        cache_of(Home(tmp_path / "home"))


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot use the index"):
        Index(tmp_path / "file" / "index.sqlite")
