"""The index's file: damage, other versions and roots, several processes, filling in bulk."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cray_agents.errors import StoreError
from cray_agents.paths import CACHE, Home
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store.index import Index, cache_of, identity_of, sweep_caches
from cray_agents.runtime.store.segments.line_format import LinePlace, Placed
from tests.support.store.made_up_facts import call, described, placed, reward

WRITER = """
import sys
from pathlib import Path
from cray_agents.runtime.store.index import Index
from tests.support.store.made_up_facts import call, described, placed

path, name, count, bulk = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "bulk"
index = Index(path)

def add():
    for n in range(count):
        facts = [call(f"{name}-c{n}", f"run_{n}"), described(f"{name}-d{n}", f"run_{n}", n)]
        start = 200 * n
        assert index.add(f"segment_{name}", start, start + 200, placed(facts, "s", start)) == 2
        print(n, flush=True)

if bulk:
    with index.bulk():
        add()
else:
    add()
index.close()
"""


def writer(path: Path, name: str, count: int, how: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(path), name, str(count), how]
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


def test_it_lasts(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    filled(path).close()
    index = Index(path, "root")
    assert index.progress() == {"segment_a": 90_000}
    assert index.count(RunFilter()) == 300
    index.close()


@pytest.mark.parametrize("damage", ["text", "empty", "header", "tables", "version", "identity"])
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
            wrong = "PRAGMA user_version = 77" if damage == "version" else "DROP TABLE events"
            connection.execute(wrong)
    index = Index(path, identity)
    assert index.progress() == {}
    assert index.select(RunQuery()) == []
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
    monkeypatch.setattr("cray_agents.runtime.store.index.schema.BOOT", boot)
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
    one.reset()
    assert two.progress() == {} and not two.known("c1")
    assert two.add("segment_a", 100, 200, some()[1:2]) == -1
    assert two.add("segment_a", 0, 100, some()[:1]) == 1
    assert one.known("c0") and one.progress() == {"segment_a": 100}
    path.unlink()
    assert one.add("segment_a", 0, 100, some()[:1]) == 1
    assert two.known("c0")
    one.close()
    two.close()


def test_two_processes_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    count = 150
    children = [writer(path, name, count) for name in ("one", "two", "three")]
    for child in children:
        child.communicate(timeout=120)
        assert child.returncode == 0
    index = Index(path)
    assert set(index.progress().values()) == {200 * count}
    runs = list(index.iterate(RunQuery()))
    assert len(runs) == count and {run.calls for run in runs} == {3}
    assert all(index.places([f"run_{n}"])[f"run_{n}"].run for n in range(count))
    index.close()


@pytest.mark.parametrize("how", ["", "bulk"])
def test_a_killed_writer_leaves_whole_transactions(tmp_path: Path, how: str) -> None:
    path = tmp_path / "index.sqlite"
    for wait in (1, 40, 90):
        child = writer(path, "one" if how else f"at_{wait}", 100_000, how)
        assert child.stdout is not None
        for _ in range(wait):
            child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        child.communicate(timeout=60)
        index = Index(path)
        progress = index.progress()
        calls = sum(run.calls for run in index.iterate(RunQuery()))
        if how:  # a draft was never put in place
            assert progress == {} and calls == 0
        else:
            assert progress[f"segment_at_{wait}"] >= 200 * wait
            assert 200 * calls == sum(progress.values())
        index.close()


def test_filling_in_bulk_gives_the_same_index(tmp_path: Path) -> None:
    plain, bulk = Index(tmp_path / "a" / "x.sqlite"), Index(tmp_path / "b" / "x.sqlite")
    facts = some()
    facts[500:500] = facts[100:200]  # some of them twice
    other = Index(tmp_path / "b" / "x.sqlite")
    with bulk.bulk():
        assert bulk.progress() == {}
        for at in range(0, len(facts), 90):
            start = bulk.progress().get("segment_a", 0)
            bulk.add("segment_a", start, start + 1, facts[at : at + 90])
            plain.add("segment_a", start, start + 1, facts[at : at + 90])
        assert other.progress() == {}
    assert list(bulk.iterate(RunQuery())) == list(plain.iterate(RunQuery()))
    assert other.progress() == bulk.progress() == plain.progress()
    runs = [f"run_{n}" for n in range(300)]
    assert other.places(runs) == plain.places(runs)
    with other.bulk():
        assert other.add("segment_b", 0, 100, placed([call("new", "run_1")], "segment_b")) == 1
        assert bulk.known("new")  # a file that is not empty is added to
    assert not (tmp_path / "b" / "x.sqlite.draft").exists()
    for index in (plain, bulk, other):
        index.close()


def test_a_filling_that_fails_keeps_what_was_added_before(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    with pytest.raises(FileNotFoundError), index.bulk():
        index.add("segment_a", 0, 300, some()[:3])
        raise FileNotFoundError("a segment went away")
    assert index.progress() == {"segment_a": 300}
    index.reset()
    broken = some()[4]
    broken = broken._replace(fact=broken.fact._replace(about={}))
    with index.bulk():
        index.add("segment_a", 0, 300, some()[:3])
        with pytest.raises(KeyError):
            index.add("segment_a", 300, 500, [some()[3], broken])
        assert index.progress() == {}  # the draft cannot be trusted
        assert index.add("segment_a", 0, 600, some()[:6]) == 6
    assert index.progress() == {"segment_a": 600}
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
    assert [run.run_id for run in index.select(RunQuery(model="other"))] == ["run_new"]
    assert index.count(RunFilter(tags=["unheard-of"])) == 1
    index.close()


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
    until, n = time.monotonic() + 1.0, 0
    while time.monotonic() < until:
        facts = placed([call(f"x{n}", f"run_{n % 500}")], "segment_x", 100 * n)
        assert index.add("segment_x", 100 * n, 100 * n + 100, facts) == 1
        n += 1
    done.set()
    for thread in threads:
        thread.join(60)
    index.close()
    assert not failed and n > 10


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


OPENED = """
import sys
from pathlib import Path
from cray_agents.paths import Home
from cray_agents.runtime.store.index import Index, cache_of, identity_of
from tests.support.store.made_up_facts import call, placed

home = Home(Path(sys.argv[1]))
index = Index(cache_of(home), identity_of(home))
print(len(index.progress()))
index.add("segment_a", 0, 9, placed([call("c1", "run_1")]))
index.close()
"""


def test_two_versions_of_the_code_leave_each_others_index_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(__file__).parents[3]
    for package in ("cray_agents", "tests/support/store"):
        shutil.copytree(here / package, tmp_path / "other" / package)
    with (tmp_path / "other/cray_agents/runtime/store/index/codes.py").open("a") as source:
        source.write("\n# another version\n")
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))

    def opened(where: Path) -> str:
        command = [sys.executable, "-c", OPENED, str(tmp_path / "home")]
        environment = {**os.environ, "PYTHONPATH": str(where)}
        return subprocess.check_output(command, text=True, env=environment, cwd=where).strip()

    places = (here, tmp_path / "other")
    assert [opened(place) for place in places * 2] == ["0", "0", "1", "1"]
    folder = cache_of(Home(tmp_path / "home")).parent
    assert len(list(folder.glob("index*.sqlite"))) == 2
    ours, week = cache_of(Home(tmp_path / "home")), 8 * 86_400
    for path in folder.glob("index*.sqlite*"):  # nobody has used any of them for a week
        os.utime(path, (path.stat().st_mtime - week,) * 2)
    for number in range(5):
        (folder / f"index-{number}.sqlite").touch()
    assert cache_of(Home(tmp_path / "home")) == ours
    left = sorted(folder.glob("index*.sqlite"))
    assert (
        ours in left
        and len(left) == 4
        and not set(folder.glob("*.turn")) - {ours.with_name(f"{ours.name}.turn")}
    )


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


def test_a_hundred_thousand_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How fast it is, on this machine; printed, not asserted."""
    count, batch = 100_000, 2000
    index = Index(tmp_path / "index.sqlite")
    spent, start = 0.0, time.perf_counter()
    with index.bulk():
        for at in range(0, count, batch):
            facts = []
            for n in range(at, at + batch):
                about = {
                    "loop": f"loop-{n % 7}",
                    "generation": n * 50 // count,
                    "task": f"t{n // 8}",
                }
                reward = [["correct", "function", float(n % 2), 1.0, None, ""]]
                facts.append(
                    described(f"end_{n}", f"run_{n:08}", float(n), **about, rewards=reward)
                )
            some = placed(facts, "segment_a", 100 * at)
            began = time.perf_counter()
            assert index.add("segment_a", 100 * at, 100 * (at + batch), some) == len(facts)
            spent += time.perf_counter() - began
        began = time.perf_counter()
    spent += time.perf_counter() - began
    lines = [f"{count / spent:,.0f} events/s filled ({time.perf_counter() - start:.1f} s in all)"]
    for order in ("id", "newest", "oldest", "task"):
        query = RunQuery(loop="loop-3", generation=49, min_reward=1.0, order=order, limit=100)
        began = time.perf_counter()
        assert len(index.select(query)) == 100
        lines.append(f"{1e3 * (time.perf_counter() - began):.1f} ms a page in order {order}")
    index.close()
    with capsys.disabled():
        print(*["", *lines], sep="\n  ")
