"""The lease of a root's controller, in processes that are killed, stopped and go on."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from cray_agents.errors import EngineError, StoreError, Superseded
from cray_agents.paths import Home
from cray_agents.ports import Command
from cray_agents.runtime import controller_lease
from cray_agents.runtime.controller_lease import ClaimWatch, ControllerLease, newest_term
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool.job_lease import ReplicaSpec, SupervisorClient
from cray_agents.runtime.pool.replica_supervisor import ReplicaSupervisor
from cray_agents.runtime.pool.vllm_process import EngineSettings
from cray_agents.runtime.registry.registry import ModelEvent, Registry
from cray_agents.runtime.scheduler.local import LocalProcesses
from tests.support.bare_models import bare_model
from tests.support.deciding_controller import claim_of, controller
from tests.support.waiting import wait_until

SHORT = 4.0  # seconds of a lease in processes: its holder has 2.7 for a heartbeat on a busy machine


def with_versions(folder: Path) -> Home:
    home = Home(folder / "home")
    registry = Registry(home)
    for content in (b"one", b"two"):
        checkpoint = registry.import_checkpoint(bare_model(folder / content.decode(), content))
        registry.register("m", *checkpoint)
    return home


class Host:
    """A holder or a standby of a host, in this process, by a clock that the test turns on."""

    def __init__(self, home: Home, name: str) -> None:
        self.home, self.name = home, name
        self.watch = ClaimWatch(home, 12)

    def take(self) -> ControllerLease:
        """The next term, before its first heartbeat."""
        claim = {"host": self.name, "pid": 1, "lease": 12.0, "token": "t", "started": 0.0}
        lease = ControllerLease.take(self.home, claim, self.watch.term, lambda message: None)
        assert lease is not None
        return lease

    def hold(self) -> ControllerLease:
        lease = self.take()
        lease.renew()
        return lease


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(controller_lease, "clock", lambda: clock.now)
    return clock


# ---- processes
class Site:
    def __init__(self, folder: Path) -> None:
        self.home = with_versions(folder)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, host: str) -> "subprocess.Popen[str]":
        self.started.append(controller(self.home.root, host, SHORT))
        return self.started[-1]

    def events(self) -> list[ModelEvent]:
        folder = self.home.models / "m/history"
        paths = sorted(folder.glob("[0-9]*.json"), key=lambda path: int(path.stem))
        return [checksums.read_record(ModelEvent, path) for path in paths]

    def decides(self, process: "subprocess.Popen[str]", after: int = 0) -> bool:
        """Whether it is the only one that decides now."""
        who = {event.who for event in self.events()[after:][-3:]}
        return claim_of(self.home.root)["pid"] == process.pid and who == {str(process.pid)}

    def check(self) -> None:
        """No decision of a lower term follows one of a higher term; each term is one process's."""
        events = self.events()
        terms = [event.term for event in events]
        assert terms == sorted(terms) and terms[0] > 0
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        of_term: dict[int, set[str]] = {}
        for event in events:
            of_term.setdefault(event.term, set()).add(event.who)
        assert all(len(who) == 1 for who in of_term.values())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for process in site.started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.slow
def test_of_two_standbys_one_follows_who_was_killed_and_the_other_the_next(site: Site) -> None:
    first = site.start("a")
    wait_until(lambda: claim_of(site.home.root) and site.decides(first))
    others = [site.start("b"), site.start("c")]
    standbys = site.home.controller / "standbys"
    wait_until(lambda: first.poll() or len(list(standbys.glob("standby_*.json"))) == 2)
    first.kill()  # on another host than theirs, so only its silence tells
    second = wait_until(lambda: next((one for one in others if site.decides(one)), None))
    (third,) = (one for one in others if one is not second)
    assert third.poll() in (None, os.EX_UNAVAILABLE)
    if third.poll():  # it followed first, and stood still for its lease
        third = site.start("d")
    assert claim_of(site.home.root)["term"] > site.events()[0].term
    second.kill()
    wait_until(lambda: site.decides(third))
    site.check()


@pytest.mark.slow
def test_one_that_was_stopped_decides_no_more(site: Site) -> None:
    first, second = site.start("a"), site.start("b")
    wait_until(lambda: claim_of(site.home.root) and any(map(site.decides, (first, second))))
    holder, other = (first, second) if site.decides(first) else (second, first)
    holder.send_signal(signal.SIGSTOP)
    wait_until(lambda: site.decides(other))
    holder.send_signal(signal.SIGCONT)
    assert holder.wait() == os.EX_UNAVAILABLE
    assert holder.stderr is not None
    assert "another one has term" in holder.stderr.read()
    before = len(site.events())
    wait_until(lambda: site.decides(other, before))
    site.check()


@pytest.mark.slow
def test_a_standby_of_the_same_host_need_not_wait_and_ends_who_is_silent(site: Site) -> None:
    first = site.start("a")
    wait_until(lambda: claim_of(site.home.root) and site.decides(first))
    second = site.start("a")
    wait_until(lambda: list((site.home.controller / "standbys").glob("standby_*.json")))
    first.send_signal(signal.SIGSTOP)
    wait_until(lambda: site.decides(second))
    assert first.wait() == -signal.SIGKILL
    token = claim_of(site.home.root)["token"]
    third = site.start("a")
    wait_until(lambda: len(list((site.home.controller / "standbys").glob("standby_*.json"))) == 1)
    second.kill()
    second.wait()
    wait_until(lambda: site.decides(third))
    assert claim_of(site.home.root)["token"] != token  # who has the port of the dead may know that
    site.check()


# ---- one host's view, by a clock that the test turns on
def test_a_lapsed_holder_goes_on_if_nobody_followed(tmp_path: Path, clock: Clock) -> None:
    home = Home(tmp_path)
    lease = Host(home, "a").hold()
    assert lease.check() == 1
    clock.now += 3600  # a laptop that was closed
    assert lease.check() == 2 == newest_term(home)
    assert claim_of(tmp_path)["term"] == 2


def test_a_lapsed_holder_ends_if_another_one_followed(tmp_path: Path, clock: Clock) -> None:
    home = Home(tmp_path)
    lease, standby = Host(home, "a").hold(), Host(home, "b")
    standby.watch.look()
    while not standby.watch.lapsed:
        clock.now += standby.watch.seconds
        standby.watch.look()
    assert standby.watch.silent > 12
    follower = standby.take()  # it has written no heartbeat yet
    for _ in range(2):
        with pytest.raises(Superseded, match="term 1; another one has term 2"):
            lease.check()
    follower.renew()
    assert follower.check() == 2 == claim_of(tmp_path)["term"]


def test_a_holder_stops_before_another_one_may_follow(tmp_path: Path, clock: Clock) -> None:
    home = Home(tmp_path / "home")
    lease, standby = Host(home, "a").hold(), Host(home, "b")
    standby.watch.look()
    (tmp_path / "home").rename(tmp_path / "away")  # for the holder alone
    (tmp_path / "home").write_text("the root is away")
    home_of_b = Home(tmp_path / "away")
    standby.watch._home = home_of_b
    decided, followed = 0.0, 0.0
    while not followed:
        try:
            lease.check()
            decided = clock.now
        except StoreError as error:
            assert "nothing is decided until it does" in str(error)
        clock.now += 0.5
        standby.watch.look()
        followed = clock.now if standby.watch.lapsed else 0.0
    assert followed - decided >= 4  # a third of the lease
    (tmp_path / "home").unlink()
    (tmp_path / "away").rename(tmp_path / "home")
    assert lease.check() == 2  # nobody did


def test_the_time_in_which_a_standby_was_stopped_does_not_count(
    tmp_path: Path, clock: Clock
) -> None:
    home = Home(tmp_path)
    lease, standby = Host(home, "a").hold(), Host(home, "b")
    standby.watch.look()
    clock.now += 3600  # both were: it looks first
    standby.watch.look()
    assert not standby.watch.lapsed
    assert lease.check() == 2
    standby.watch.look()
    assert standby.watch.silent == 0 and standby.watch.term == 2


def test_damaged_heartbeats_are_no_sign_of_life_and_are_written_anew(
    tmp_path: Path, clock: Clock
) -> None:
    home = Home(tmp_path)
    lease, standby = Host(home, "a").hold(), Host(home, "b")
    for at in range(0, home.platform.stat().st_size, 7):
        content = bytearray(home.platform.read_bytes())
        content[at] ^= 4
        home.platform.write_bytes(content)
        standby.watch.look()
        clock.now += 2.0
        lease.renew()
        standby.watch.look()
        assert standby.watch.silent == 0 and not standby.watch.lapsed
        assert lease.check() == 1
    home.platform.write_bytes(bytes(content))
    while not standby.watch.lapsed:
        clock.now += 0.5
        standby.watch.look()
    (home.controller / "terms/1.json").write_text("damaged, too")
    follower = standby.take()
    follower.renew()
    assert claim_of(tmp_path)["term"] == 2


def test_a_standby_that_sees_an_old_root_ends_who_it_took_for_dead(
    tmp_path: Path, clock: Clock
) -> None:
    """As an NFS client may: old names and contents; only what it creates goes through."""
    home = with_versions(tmp_path)
    lease = Host(home, "a").hold()
    stale = tmp_path / "stale"
    shutil.copytree(home.root, stale, ignore=shutil.ignore_patterns("terms", "models"))
    (stale / "controller").mkdir(exist_ok=True)
    for shared in ("controller/terms", "models", "checkpoints"):
        shutil.rmtree(stale / shared, ignore_errors=True)
        (stale / shared).symlink_to(home.root / shared)
    standby = Host(Home(stale), "b")
    while not standby.watch.lapsed:
        clock.now += 0.5
        lease.renew()
        standby.watch.look()
    assert lease.check() == 1
    follower = standby.take()
    follower.renew()
    with pytest.raises(Superseded):
        Registry(home, lease.check).promote("m", 1)
    assert Registry(Home(stale), follower.check).promote("m", 2).term == 2
    assert [event.term for event in Registry(home).history("m")] == [2]


def test_a_decision_is_refused_by_those_that_it_follows(tmp_path: Path) -> None:
    """A controller that sees neither the new term nor the new claim still reads the events."""
    home = with_versions(tmp_path)
    old = Host(home, "a").hold()
    assert Registry(home, old.check).promote("m", 1).term == 1
    unseen = home.platform.read_bytes()
    new = Host(home, "b").hold()
    assert Registry(home, new.check).promote("m", 2).term == 2
    home.platform.write_bytes(unseen)
    (home.controller / "terms/2.json").rename(tmp_path / "unseen")
    assert old.check() == 1
    with pytest.raises(Superseded):
        Registry(home, old.check).promote("m", 1)
    assert [event.term for event in Registry(home).history("m")] == [1, 2]


def test_events_without_a_term_stay_readable(tmp_path: Path) -> None:
    home = with_versions(tmp_path)
    event = Registry(home).promote("m", 1)  # a command's, without a platform
    assert event.term == 0
    path = home.models / "m/history/1.json"
    old = json.loads(path.read_text())
    path.write_text(json.dumps({key: old[key] for key in old if key not in ("term", "crc")}))
    assert Registry(home).history("m")[0].term == 0
    lease = Host(home, "a").hold()
    assert Registry(home, lease.check).promote("m", 2).term == 1
    assert Registry(home).reject("m", 1).term == 1


def test_jobs_are_not_started_or_ended_by_a_superseded_controller(tmp_path: Path) -> None:
    home = Home(tmp_path)
    lease = Host(home, "a").hold()
    command = Command(name="job-1", argv=["sleep", "600"], directory=str(tmp_path),
                      log=str(tmp_path / "log"))  # fmt: skip
    with LocalProcesses(home.slurm) as scheduler:
        scheduler.guard = lease.check
        Host(home, "b").take()
        with pytest.raises(Superseded):
            scheduler.submit(command)
        assert scheduler.status("job-1").state == "unknown"


async def test_a_supervisor_obeys_the_newest_controller_alone(tmp_path: Path) -> None:
    spec = ReplicaSpec(model="m", number=0, attempt=1, settings=EngineSettings(), gateway="a",
                       package="1")  # fmt: skip
    supervisor = ReplicaSupervisor(spec, tmp_path, "127.0.0.1", "secret")
    runner = web.AppRunner(supervisor.routes())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    old, new = (SupervisorClient(url, "secret", 20.0, lambda term=term: term) for term in (1, 2))  # type: ignore[misc]
    try:
        assert (await old.state()).starts == 0
        await new.state()  # as at a takeover
        for order in ("note", "stop", "exit"):
            with pytest.raises(EngineError, match="term 2 has taken this replica over"):
                await old.order(order, version="m@1", weights="")
        assert not supervisor.ended.is_set()
        await new.order("exit")
        assert supervisor.ended.is_set()
    finally:
        for client in (old, new):
            await client.close()
        await runner.cleanup()


def test_notes_of_another_form_are_no_standbys(tmp_path: Path) -> None:
    lease = Host(with_versions(tmp_path), "a").hold()
    folder = tmp_path / "home" / "controller" / "standbys"
    folder.mkdir(parents=True)
    for number, note in enumerate(([], 7, {}, {"beat": 1, "host": "b", "pid": 2, "since": 3.0})):
        for _ in range(2):
            content = checksums.with_crc(json.dumps(note).encode())
            (folder / f"standby_{number}.json").write_bytes(content)
            lease._look_at_standbys()
    assert [one["host"] for one in lease.standbys()] == ["b"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heartbeat_that_ends_by_an_error_ends_the_process(tmp_path: Path) -> None:
    host, ends = Host(with_versions(tmp_path), "a"), list[str]()
    claim = {"host": "a", "pid": 1, "lease": 0.05, "token": "t", "started": 0.0}
    lease = ControllerLease.take(host.home, claim, host.watch.term, ends.append)
    assert lease is not None
    lease.start()

    def write() -> None:  # between two heartbeats
        host.home.platform.write_bytes(checksums.with_crc(b'{"term":"one"}'))

    wait_until(lambda: write() or ends)
    assert "is renewed no more" in ends[0]
