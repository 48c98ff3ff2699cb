"""Replicas as Slurm jobs: found by their leases, replaced when they are lost, followed in time."""

import asyncio
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cray_agents.errors import EngineUnavailable
from cray_agents.ports import Command, EngineCall
from cray_agents.processes import alive
from cray_agents.records import ProbePrompt
from cray_agents.runtime.pool import slurm_replica
from cray_agents.runtime.pool.job_lease import attempts
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.replica_certificates import tls_folder
from cray_agents.runtime.pool.slurm_replica import cancel_surplus
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_http import client_context
from cray_agents.runtime.pool.vllm_process import EngineSettings, NodeShare, command
from cray_agents.runtime.pool.weight_transfer import TransferSettings
from cray_agents.runtime.scheduler.batch_script import batch_script
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.trainers.checkpointing.weight_sender import WeightSender
from tests.support.scripted_pool import checkpoint, probe
from tests.support.slurm_pool import Callers, Site, ask
from tests.support.strangers import ONLY_ASKED, listeners, needs_root, taker
from tests.support.waiting import until

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateCluster]:
    if missing := missing_programs():
        pytest.skip(f"Slurm is not installed: {missing}")
    cluster = PrivateCluster(tmp_path_factory.mktemp("slurm"), nodes=2, cpus=2, gpus=[])
    cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture
async def site(cluster: PrivateCluster, tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(cluster, tmp_path)
    yield site
    await site.close()


def first(folder: Path) -> tuple[Path, str, list[ProbePrompt]]:
    return checkpoint(folder, 1), "m@1", probe(1)


def replica(pool: Pool, number: int = 0) -> dict[str, Any]:
    return pool.status()[number]


async def test_replicas_give_their_jobs_back_and_get_others(site: Site) -> None:
    pool = site.pool(site.hosts(2))
    await pool.start(*first(site.folder), 1)
    assert [each["state"] for each in pool.status()] == ["serving", "away"]
    assert len(site.jobs()) == 1
    assert pool.call_back()
    await until(lambda: pool.serving == 2)
    assert len(site.jobs()) == 2
    assert pool.give_back() and pool.give_back()
    await until(lambda: not site.run("squeue", "-h"))
    assert [(each["state"], each["host"], each["job"]) for each in pool.status()] == [
        ("away", "", None),
        ("away", "", None),
    ]
    waiting = asyncio.create_task(ask(pool, "m@1"))
    await until(pool.call_back)
    await waiting
    assert len(site.jobs()) == 1
    assert sum(each["restarts"] for each in pool.status()) == 0


async def test_a_replica_serves_and_swaps_and_keeps_others_out(site: Site) -> None:
    pool = site.pool(site.hosts(1))
    await pool.start(*first(site.folder))
    status, lease = replica(pool), site.lease()
    assert (status["state"], status["version"]) == ("serving", "m@1")
    assert status["probe"]["tokens"] == 2
    assert status["host"] == lease.host and status["host"].startswith("127.0.0.")
    assert [status["job"]] == [lease.job] == site.jobs()
    assert (lease.address, lease.attempt) == ("127.0.0.1", 1)
    assert alive(lease.pid) and alive(status["pid"]) and status["pid"] != lease.pid
    assert stat.S_IMODE((site.folder / "replicas/0/1/secret").stat().st_mode) == 0o600
    assert await ask(pool, "m@1") == "m@1: hello"
    async with aiohttp.ClientSession(headers={"x-cray-secret": "guess"}) as stranger:
        for url in (f"{lease.url}/state", f"http://127.0.0.1:{status['port']}/v1/models"):
            async with stranger.get(url) as answer:
                assert answer.status == 403
        async with stranger.post(f"{lease.url}/exit") as answer:
            assert answer.status == 403
    await pool.swap(checkpoint(site.folder, 2), "m@2", probe(2))
    assert await ask(pool, "m@2") == "m@2: hello"
    assert replica(pool)["pid"] == status["pid"]
    await until(lambda: site.lease().version == "m@2")
    await site.close()
    await until(lambda: not alive(status["pid"]) and not alive(lease.pid))
    await until(lambda: not site.jobs())


async def test_whatever_dies_is_followed_and_every_call_is_answered(site: Site) -> None:
    pool = site.pool(site.hosts(1), wait_timeout=100)
    await pool.start(*first(site.folder))
    callers = Callers(pool, "m@1")

    async def serve_again(before: dict[str, Any]) -> dict[str, Any]:
        def followed() -> bool:
            now = replica(pool)
            return bool(now["state"] == "serving" and now["pid"] not in (None, before["pid"]))

        await until(followed)
        count = len(callers.answers)
        await until(lambda: len(callers.answers) > count + 3)
        return replica(pool)

    one = replica(pool)
    os.kill(one["pid"], signal.SIGKILL)
    two = await serve_again(one)
    assert two["job"] == one["job"]  # the place stays
    os.kill(site.lease().pid, signal.SIGKILL)
    three = await serve_again(two)
    assert three["job"] != two["job"] and not alive(two["pid"])
    site.run("scancel", three["job"])
    four = await serve_again(three)
    assert four["job"] != three["job"]
    site.run("scontrol", "update", f"nodename={four['host']}", "state=down", "reason=test")
    try:
        five = await serve_again(four)
    finally:
        site.run("scontrol", "update", f"nodename={four['host']}", "state=resume", check=False)
    assert five["job"] != four["job"]
    assert "NODE_FAIL" in five["last_restart"]["why"]
    assert set(await callers.end()) == {"m@1: hello"}
    assert site.jobs() == [five["job"]]


async def test_a_supervisor_that_stands_still_loses_its_lease(site: Site) -> None:
    pool = site.pool(site.hosts(1, lapse=6.0), wait_timeout=100)
    await pool.start(*first(site.folder))
    before, lease = replica(pool), site.lease()
    os.kill(lease.pid, signal.SIGSTOP)  # Slurm goes on to say that the job runs
    await until(lambda: replica(pool)["job"] not in (None, before["job"]))
    await until(lambda: replica(pool)["state"] == "serving")
    assert "its lease lapsed" in replica(pool)["last_restart"]["why"]
    assert await ask(pool, "m@1") == "m@1: hello"
    await until(lambda: before["job"] not in site.jobs())


async def test_a_restarted_gateway_takes_over_what_it_finds(site: Site) -> None:
    pool = site.pool(site.hosts(2))
    await pool.start(*first(site.folder))
    before = pool.status()
    await site.abandon(pool)
    again = site.pool(site.hosts(2))
    await again.start(*first(site.folder))
    places = [(r["job"], r["pid"]) for r in again.status()]
    assert places == [(r["job"], r["pid"]) for r in before]
    assert all(r["probe"]["passed"] and "start" in r["probe"]["seconds"] for r in again.status())
    assert await ask(again, "m@1") == "m@1: hello"
    await site.abandon(again)
    # meanwhile another version was promoted: it is loaded in place
    third = site.pool(site.hosts(2))
    await third.start(checkpoint(site.folder, 2), "m@2", probe(2))
    assert [(r["job"], r["pid"]) for r in third.status()] == places
    assert await ask(third, "m@2") == "m@2: hello"
    await site.abandon(third)
    # one replica less, and another configuration: neither is taken over
    site.settings = type(site.settings)(**vars(site.settings) | {"max_model_len": 2048})
    fourth = site.pool(site.hosts(1))
    await fourth.start(*first(site.folder))
    assert replica(fourth)["job"] not in {job for job, _ in places}
    assert attempts(site.folder / "replicas" / "0") == [1, 2]
    cancel_surplus(site.folder / "replicas", site.scheduler, 1)
    await until(lambda: site.jobs() == [replica(fourth)["job"]])


async def test_a_gateway_that_dies_over_received_weights_leaves_none_of_them(site: Site) -> None:
    """The replica lives on with weights of no checkpoint; files take their place in its process."""
    sessions = site.folder / "sessions"
    site.settings = replace(site.settings, transfer=TransferSettings("nccl", sessions))
    pool = site.pool(site.hosts(1))
    await pool.start(*first(site.folder))
    before = replica(pool)
    sender = WeightSender(sessions / "session-1", 0, 1, no_link, early=True)
    with closing(sender):
        list(sender.keep(iter([]), {}, "job-1"))  # scripted servers have no tensors to replace
        assert await pool.receive("job-1", displace=True)
        assert replica(pool)["state"] == "unproven"
        await site.abandon(pool)
        again = site.pool(site.hosts(1))
        await again.start(*first(site.folder))
    now = replica(again)
    assert (now["job"], now["pid"]) == (before["job"], before["pid"])
    assert now["probe"]["passed"] and await ask(again, "m@1") == "m@1: hello"
    # one that was left in the middle of an update, and cannot answer, is started afresh
    host: Any = again._slots[0].engine_host
    await host.engine._control("/start_weight_update", None)
    await site.abandon(again)
    third = site.pool(site.hosts(1))
    await third.start(*first(site.folder))
    assert replica(third)["job"] == now["job"] and replica(third)["pid"] != now["pid"]
    assert await ask(third, "m@1") == "m@1: hello"


def no_link(gpus: Sequence[str]) -> Any:
    raise AssertionError(f"nothing is sent, and {gpus} were asked to receive")


async def test_tls_covers_both_servers_and_what_is_without_it_is_not_taken_over(site: Site) -> None:
    site.tls = tls_folder("on", site.folder / "tls")
    pool = site.pool(site.hosts(1, nodes=2))
    await pool.start(*first(site.folder))
    await until(lambda: len(headless(site.folder)) == 1)  # the further node has reached the first
    lease, status = site.lease(), replica(pool)
    assert lease.url.startswith("https://")
    assert stat.S_IMODE((site.folder / "replicas/0/1/key.pem").stat().st_mode) == 0o600
    trust = client_context(site.folder / "tls" / "ca.pem")
    secret = (site.folder / "replicas/0/1/secret").read_text()
    async with aiohttp.ClientSession(headers={"x-cray-secret": secret}) as http:
        for port, path in ((lease.port, "/state"), (status["port"], "/v1/models")):
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"http://127.0.0.1:{port}{path}")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.get(f"https://127.0.0.1:{port}{path}")
        async with http.get(f"{lease.url}/state", ssl=trust) as answer:
            assert answer.status == 200
        async with http.get(f"https://127.0.0.1:{status['port']}/", ssl=trust) as answer:
            assert answer.status == 403  # the lock stays
    await pool.swap(checkpoint(site.folder, 2), "m@2", probe(2))
    assert await ask(pool, "m@2") == "m@2: hello"
    await site.abandon(pool)
    again = site.pool(site.hosts(1, nodes=2))
    await again.start(checkpoint(site.folder, 2), "m@2", probe(2))
    assert (replica(again)["job"], replica(again)["pid"]) == (status["job"], status["pid"])
    await site.abandon(again)
    site.tls = None
    plain = site.pool(site.hosts(1))
    await plain.start(*first(site.folder))
    assert replica(plain)["job"] != status["job"] and site.lease().url.startswith("http://")


@needs_root
@pytest.mark.parametrize("tls", ["off", "on"])
async def test_another_user_gets_no_port_of_a_place_and_hears_nothing_at_a_lost_one(
    site: Site, tls: str
) -> None:
    site.tls = tls_folder(tls, site.folder / "tls")
    pool = site.pool(site.hosts(1), wait_timeout=100)
    await pool.start(*first(site.folder))
    before, lease = replica(pool), site.lease()
    published = pool.published().replicas[0]
    secrets = [(site.folder / "replicas/0/1/secret").read_text(), published.secret]
    places = [("127.0.0.1", lease.port), ("127.0.0.1", before["port"])]
    assert {one.place for one in listeners(lease.pid)} == set(places)
    with taker(site.folder, *places) as stranger:
        os.kill(before["pid"], signal.SIGKILL)
        await until(lambda: replica(pool)["pid"] not in (None, before["pid"]))
        await until(lambda: replica(pool)["state"] == "serving")
        now = replica(pool)
        assert (now["job"], now["port"]) == (before["job"], before["port"])
        assert not stranger.taken()
        old = pool.published().replicas[0]
        secrets.append(old.secret)
        os.kill(lease.pid, signal.SIGKILL)  # with which the engine dies, and both ports are free
        await until(lambda: len(stranger.taken()) == 2)
        trust = None if site.tls is None else client_context(site.tls / "ca.pem")
        late = VllmEngine(old.url, old.names["m@1"], old.secret, tls=trust)  # a further gateway's
        call = EngineCall("/v1/chat/completions", {"messages": "a prompt"}, "1", "m@1")
        with pytest.raises(EngineUnavailable):
            [_ async for _ in late.answer(call)]
        await late.close()
        assert await ask(pool, "m@1") == "m@1: hello"
        now = replica(pool)
        assert now["job"] != before["job"] and now["state"] == "serving"
        assert "forged" not in str(now["last_restart"])
        heard = stranger.heard()
        assert heard and not [word for word in (*secrets, "a prompt") if word.encode() in heard]
        assert tls == "on" or ONLY_ASKED.fullmatch(heard), heard


async def test_a_successor_is_ready_before_the_place_is_left(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_replica, "DRAIN", 0.0)  # the successor has 25 s from the middle
    ends = {"SLURM_JOB_END_TIME": str(time.time() + 50)}
    (host,) = site.hosts(1, environment=ends)
    pool = site.pool([host], wait_timeout=100)
    await pool.start(*first(site.folder))
    host._command = site.hosts(1)[0]._command  # the successor's job has no limit
    before, callers = replica(pool), Callers(pool, "m@1", text="slow")
    states = set()

    def moved() -> bool:
        states.add(replica(pool)["state"])
        return bool(replica(pool)["job"] != before["job"])

    await until(moved)
    assert states == {"serving"} and not replica(pool)["restarts"]
    await until(lambda: not alive(before["pid"]))  # once its last answers had ended
    assert set(await callers.end()) == {"m@1: slow"}
    # a warning of Slurm, as before a preemption, comes without a time
    before, callers = replica(pool), Callers(pool, "m@1", text="slow")
    site.run("scancel", "--signal=TERM", before["job"])  # to the job's tasks
    await until(lambda: replica(pool)["job"] != before["job"])
    await until(lambda: replica(pool)["state"] == "serving")
    await until(lambda: not alive(before["pid"]))
    assert set(await callers.end()) == {"m@1: slow"} and not replica(pool)["restarts"]


async def test_a_roll_goes_in_waves_and_leaves_out_what_waits_for_a_place(site: Site) -> None:
    pool = site.pool(site.hosts(5), swap_share=0.5)  # on four cores
    starting = asyncio.create_task(pool.start(*first(site.folder)))

    def waits() -> list[dict[str, Any]]:
        told = "job {job} waits for a place"
        return [r for r in pool.status() if told.format(**r) in str(r["error"])]

    (waiting,) = await until(lambda: waits() if pool.serving == 4 else [])
    callers, away = Callers(pool, "m@1", count=4), set[int]()

    async def watch() -> None:
        while True:
            away.add(sum(r["state"] == "swapping" for r in pool.status()))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await pool.swap(checkpoint(site.folder, 2), "m@2", probe(2))
    watching.cancel()
    callers.version = "m@2"
    assert [r["version"] for r in pool.status()] == ["m@2"] * 5
    assert 2 in away and max(away) == 2
    index = next(n for n, r in enumerate(pool.status()) if r["state"] == "serving")
    lost = replica(pool, index)
    site.run("scontrol", "update", f"jobid={waiting['job']}", "nice=-100")
    site.run("scancel", lost["job"])  # its place goes to the one that waits
    await until(lambda: any(r["job"] == waiting["job"] and r["state"] == "serving"
                            for r in pool.status()))  # fmt: skip
    assert set(await callers.end()) == {"m@1: hello", "m@2: hello"}
    (came,) = [r for r in pool.status() if r["job"] == waiting["job"]]
    assert came["probe"]["version"] == "m@2" and not came["restarts"]
    starting.cancel()


def headless(folder: Path) -> set[int]:
    """The pids of the further nodes' shares of the servers on a folder's checkpoints."""
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (process / "cmdline").read_bytes()
            if b"--headless" in line and str(folder).encode() in line:
                pids.add(int(process.name))
    return pids


async def test_a_replica_over_two_nodes_starts_and_ends_as_one(site: Site) -> None:
    pool = site.pool(site.hosts(1, nodes=2), wait_timeout=100)
    await pool.start(*first(site.folder))
    await until(lambda: len(headless(site.folder)) == 1)
    before, (share,) = replica(pool), headless(site.folder)
    words = Path(f"/proc/{share}/cmdline").read_bytes().decode().split("\0")
    assert words[words.index("--nnodes") :][:4] == ["--nnodes", "2", "--node-rank", "1"]
    os.kill(before["pid"], signal.SIGKILL)  # the engine of the first node: both start again
    await until(lambda: headless(site.folder) - {share})
    await until(lambda: replica(pool)["state"] == "serving")
    assert replica(pool)["job"] == before["job"] and not alive(share)
    (share,) = headless(site.folder)
    os.kill(share, signal.SIGKILL)  # a share: the whole job ends, and another one follows
    await until(lambda: replica(pool)["job"] not in (None, before["job"]))
    await until(lambda: replica(pool)["state"] == "serving")
    assert await ask(pool, "m@1") == "m@1: hello"
    await site.close()
    await until(lambda: not headless(site.folder))


def test_the_command_lines_of_two_nodes() -> None:
    settings = EngineSettings(engine_args=("--tensor-parallel-size", "16"))
    lines = [
        command(Path("/m"), ("m",), settings, share=NodeShare(2, n, "10.0.0.1", 29))
        for n in range(2)
    ]
    shared = ["--nnodes", "2", "--node-rank", "{}", "--master-addr", "10.0.0.1"]
    shared += ["--master-port", "29"]
    for rank, line in enumerate(lines):
        at = line.index("--nnodes")
        assert line[at : at + 8] == [word.format(rank) for word in shared]
        assert ("--headless" in line) == (rank == 1)
    assert "--nnodes" not in command(Path("/m"), ("m",), settings)
    job = Command(name="r", argv=["run"], directory="/", log="/l", nodes=2, ranks=16, gpus=True)
    script = batch_script(job, Path("/ledger"))
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 " in script


@pytest.mark.vllm
@pytest.mark.skipif(os.environ.get("CRAY_TEST_REPLICAS") != "all", reason="make soak")
async def test_a_vllm_is_taken_over_with_its_weights_and_with_others(
    cluster: PrivateCluster, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    from tests.support.vllm_pool import manifest_of

    models = [tiny_model(tmp_path / f"model-{n}", tie=False, seed=n) for n in (1, 2)]
    probes = [manifest_of(model).probe for model in models]
    site = Site(cluster, tmp_path, EngineSettings(threads=1))
    site.tls = tls_folder("on", tmp_path / "tls")
    pid = None
    for number in (0, 0, 1):
        pool = site.pool(site.hosts(1), wait_timeout=100)
        await pool.start(models[number], f"m@{number + 1}", probes[number])
        status = replica(pool)
        assert status["probe"]["tokens"] > 0 and pid in (None, status["pid"])
        assert await ask(pool, f"m@{number + 1}", "hello there")
        pid = status["pid"]
        await site.abandon(pool)
    last = site.pool(site.hosts(1))
    await last.start(models[1], "m@2", probes[1])
    assert replica(last)["pid"] == pid
    await site.close()
    await until(lambda: not alive(pid))
