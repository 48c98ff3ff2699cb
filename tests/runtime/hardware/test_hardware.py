"""Hardware of a node: fake trees of sysfs, a fake NVML, the real sampler, ledger, view, command.

The NVML is a stand-in for GPUs, which this machine lacks: a small library with NVML's interface.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cray_agents.cli import app
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime import fsck
from cray_agents.runtime.accounting.holdings import read_holdings
from cray_agents.runtime.accounting.ledger import read_ledger
from cray_agents.runtime.disk import checksums, journal
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.scheduler.nvml import describe_gpus, nvml, read_joules, read_load
from cray_agents.runtime.scheduler.sampler import HardwareSampler, memory_of_job
from cray_agents.runtime.scheduler.slurm_reports import NO_ACCOUNT, parse_usage, read_usage
from cray_agents.runtime.views.job_hardware import job_hardware, pool_hardware
from cray_agents.training_jobs import Hyperparameters, JobSpec, JobStatus
from tests.support.scripted_pool import checkpoint
from tests.support.scripted_server import PROGRAM

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with two GPUs; the first has taken 1 kJ."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, to build the stand-in for NVML")
    folder = tmp_path_factory.mktemp("nvml")
    built = folder / "libnvidia-ml.so.1"
    source = ROOT / "tests" / "support" / "fake_nvml.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source], check=True)
    (folder / "energy").write_text("1000000")
    os.environ["FAKE_NVML_ENERGY"] = str(folder / "energy")
    return built


def put(folder: Path, **texts: object) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A /sys with an InfiniBand port that is up and an EFA port that is down."""
    sys_root = tmp_path / "sys"
    put(
        sys_root / "class/infiniband/mlx5_0/ports/1",
        state="4: ACTIVE",
        counters__port_xmit_data=1000,
        counters__port_rcv_data=2000,
        counters__symbol_error=7,
        hw_counters__out_of_sequence=5,
        hw_counters__lifespan=10,
    )
    put(
        sys_root / "class/infiniband/rdmap0s6/ports/1",
        state="1: DOWN",
        hw_counters__tx_bytes=100,
        hw_counters__rx_bytes=50,
        hw_counters__tx_pkts="not a number",
    )
    return sys_root


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def samples(sampler: HardwareSampler) -> list[dict[str, Any]]:
    lines = list(journal.read(sampler.path)) if sampler.path.exists() else []
    return [line for line in lines if line["event"] == "sample"]


def end(sampler: HardwareSampler) -> None:
    """Let it take its last sample, also where it is so late that `close` leaves it behind."""
    sampler.close()
    sampler._thread.join()


def test_gpus_tell_what_they_have_and_no_more(library: Path) -> None:
    with nvml(str(library)) as driver:
        assert driver is not None
        names = [each["name"] for each in describe_gpus(driver, ["0", "1", "7"])]
        assert names == ["NVIDIA H100 0", "NVIDIA H100 1"]
        first, second = read_load(driver, "0"), read_load(driver, "GPU-b")
        assert first == {
            "utilization": 0.73, "memory_bytes": 20 << 30, "memory_total_bytes": 80 << 30,
            "power_watts": 512.5, "temperature_celsius": 61, "sm_clock_mhz": 1980,
            "memory_clock_mhz": 2619, "ecc_corrected": 4, "ecc_uncorrected": 0, "slowed": 1,
            "slowed_by": "power cap, heat",
        }  # fmt: skip
        assert "power_watts" not in second and second["slowed"] == 0
        assert read_load(driver, "7") == {} and read_load(driver, "MIG-x") == {}
        assert read_joules(driver, ["0"]) == 1000.0
        for gpus in (["0", "1"], ["7"], []):
            assert read_joules(driver, gpus) is None
    with nvml("libnone.so.1") as driver:
        assert driver is None and read_joules(driver, ["0"]) is None


def test_rates_and_grown_errors_follow_from_counters(library: Path, tree: Path) -> None:
    sampler = HardwareSampler(tree, [os.getpid()], sys=tree, library=str(library), gpus=["0"])
    first = sampler.sample()
    assert first["mlx5_0:1.up"] == 1 and first["rdmap0s6:1.up"] == 0 and first["host.load"] >= 0
    assert not any("per_second" in name or "symbol" in name for name in first)
    put(tree / "class/infiniband/mlx5_0/ports/1", counters__port_xmit_data=1500,
        counters__symbol_error=9)  # fmt: skip
    put(tree / "class/infiniband/rdmap0s6/ports/1", hw_counters__tx_bytes=40)
    second = sampler.sample()
    sent, received = (second[f"mlx5_0:1.{way}_bytes_per_second"] for way in ("sent", "received"))
    assert sent > 0 and received == 0 and second["mlx5_0:1.symbol_error"] == 2
    assert "mlx5_0:1.out_of_sequence" not in second
    assert "rdmap0s6:1.sent_bytes_per_second" not in second  # its counter was reset
    assert second["rdmap0s6:1.received_bytes_per_second"] == 0
    assert second["host.rank_cores"] >= 0 and second["host.memory_available_bytes"] > 0


def test_cores_are_those_of_processes_that_run(tree: Path) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    sampler = HardwareSampler(tree, [busy.pid], sys=tree, library="none", gpus=[])
    assert "host.rank_cores" not in sampler.sample()
    until(lambda: sampler.sample().get("host.rank_cores", 0) > 0)
    busy.kill()
    busy.wait()
    assert "host.rank_cores" not in sampler.sample()


def test_a_sampler_writes_to_its_end_and_goes_on_after_a_kill(library: Path, tree: Path) -> None:
    options: dict[str, Any] = {
        "sys": tree,
        "library": str(library),
        "gpus": ["0", "1"],
        "every": 0.01,
    }
    sampler = HardwareSampler(tree, **options)
    sampler.start()
    until(lambda: len(samples(sampler)) > 2)
    end(sampler)
    count = len(samples(sampler))
    with sampler.path.open("ab") as file:
        file.write(b'{"event":"sample","time":1')
    again = HardwareSampler(tree, **options)
    again.start()
    until(lambda: len(samples(again)) > count)
    end(again)
    lines = list(journal.read(again.path))
    assert [line["event"] for line in lines].count("node") == 2
    assert lines[0]["gpus"][0]["name"] == "NVIDIA H100 0"
    assert lines[1]["gpu0.power_watts"] == 512.5 and "gpu1.power_watts" not in lines[1]


def test_a_long_jobs_file_stays_small_and_has_its_beginning(tree: Path) -> None:
    sampler = HardwareSampler(tree, sys=tree, library="none", gpus=[], every=0.001, most=6000)
    sampler.start()
    until(lambda: len(samples(sampler)) > 2)
    begin, sizes = list(journal.read(sampler.path))[:2], [0]

    def has_shrunk() -> bool:
        sizes.append(sampler.path.stat().st_size)
        return sizes[-1] < max(sizes)

    until(has_shrunk)
    end(sampler)
    lines = list(journal.read(sampler.path))
    assert lines[:2] == begin and max(sizes) <= 6000
    times = [line["time"] for line in lines]
    assert times == sorted(times)


@pytest.mark.parametrize("folder", ["jobs/job-1", "sessions/session-1"])
def test_fsck_names_a_damaged_sample(tree: Path, tmp_path: Path, folder: str) -> None:
    home = Home(tmp_path / "home")
    (home.root / folder).mkdir(parents=True)
    sampler = HardwareSampler(home.root / folder, sys=tree, gpus=[])
    sampler.start()
    end(sampler)
    assert not list(fsck.check(home))
    damaged = bytearray(sampler.path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    sampler.path.write_bytes(damaged)
    [finding] = fsck.check(home)
    assert (finding.path, finding.kind) == (str(sampler.path), "damaged")


def test_a_sampler_that_cannot_write_says_so_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler = HardwareSampler(tmp_path / "gone", gpus=[], every=0.01)
    sampler.start()
    end(sampler)
    assert capsys.readouterr().out.count("not sampled any more: FileNotFoundError") == 1


def ended_job(home: Home, **fields: Any) -> JobStatus:
    """A job's folder with its spec and a straggler, and its status."""
    spec = JobSpec(
        dataset="d",
        parent="p",
        parent_sha256="0" * 64,
        hyperparameters=Hyperparameters(learning_rate=1e-3, steps=3),
    )
    folder = home.job(spec.id)
    folder.mkdir(parents=True, exist_ok=True)
    slow = {"rank": 3, "node": "n2", "seconds": 3.0, "median": 1.0, "steps": 50, "after_step": 50}
    (folder / "spec.json").write_bytes(checksums.with_crc(spec.model_dump_json().encode()))
    events = [{"event": "started", "time": 10.0}, {"event": "straggler", "time": 20.0, **slow}]
    write_lines(folder / "events.jsonl", events)
    return JobStatus(id=spec.id, state="running", **fields)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [checksums.with_crc(json.dumps(line).encode()) + b"\n" for line in lines]
    path.write_bytes(b"".join(texts))


def test_a_job_is_shown_on_its_nodes(tmp_path: Path) -> None:
    home = Home(tmp_path)
    status = ended_job(home)
    for node in ("n1", "n2"):
        write_lines(
            home.job(status.id) / f"hardware.{node}.jsonl",
            [{"event": "node", "time": 0.5, "node": node, "gpus": [{"gpu": "0"}]}]
            + [{"event": "sample", "time": float(n), "gpu0.utilization": n / 100,
                "gpu0.slowed_by": "heat"} for n in range(1, 101)],
        )  # fmt: skip
    damaged = home.job(status.id) / "hardware.n2.jsonl"
    damaged.write_bytes(damaged.read_bytes().replace(b": 7.0", b": 8.0") + b'{"event": "sam')
    shown = job_hardware(home, status, points=10)
    assert [node.node for node in shown.nodes] == ["n1", "n2"] and not shown.has_more
    curve = shown.nodes[0].series["gpu0.utilization"]
    assert len(curve) == 10 and curve[0] == (1.0, 0.01) and curve[-1] == (100.0, 1.0)
    assert shown.nodes[0].newest == {"gpu0.utilization": 1.0, "gpu0.slowed_by": "heat"}
    whole = job_hardware(home, status, ["gpu0.utilization"], 1000, limit=1, after="n1")
    assert len(whole.nodes[0].series["gpu0.utilization"]) == 99  # without the damaged line
    assert job_hardware(home, status, limit=1).has_more
    assert shown.slowest is not None and (shown.slowest.rank, shown.slowest.node) == (3, "n2")
    with pytest.raises(BadInput, match="no node has 'age'"):
        job_hardware(home, status, ["age"])
    waits = job_hardware(
        home, status.model_copy(update={"state": "queued", "reason": "Priority"})
    ).waits
    assert waits is not None and "higher priority" in waits.meaning


def test_a_job_of_a_session_has_the_samples_of_its_time(tmp_path: Path) -> None:
    home = Home(tmp_path)
    status = ended_job(home, session="s")
    lines = [{"event": "sample", "time": float(n), "host.load": 1.0} for n in range(0, 31, 5)]
    write_lines(home.sessions / "s" / "hardware.n1.jsonl", lines)
    (node,) = job_hardware(home, status).nodes
    assert [time for time, _ in node.series["host.load"]] == [10.0, 15.0, 20.0]


def test_the_command_shows_gpus_ports_and_the_slowest_rank(library: Path, tree: Path) -> None:
    home = Home(tree)
    status = ended_job(home)
    sampler = HardwareSampler(
        home.job(status.id), sys=tree, library=str(library), gpus=["0", "1"], every=0.01
    )
    sampler.start()
    until(lambda: len(samples(sampler)) > 1)
    end(sampler)
    argv = ["jobs", "show", "--hardware", status.id, "--home", str(tree)]
    printed = CliRunner(env={"COLUMNS": "200"}).invoke(app, argv).stdout
    for text in ("rank 3 on n2, 3.0 times", "NVIDIA H100 0", "73%", "512.5", "power cap, heat",
                 "mlx5_0:1", "GPU 0", "down"):  # fmt: skip
        assert text in printed
    shown = json.loads(CliRunner().invoke(app, [*argv, "--json"]).stdout)
    assert shown["nodes"][0]["series"]["gpu0.power_watts"]
    failed = CliRunner().invoke(
        app, ["jobs", "show", "--hardware", "job-none", "--home", str(tree)]
    )
    assert "no job 'job-none'" in str(failed.exception)


@pytest.mark.slow
async def test_replicas_are_sampled_on_their_nodes(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    settings = EngineSettings(program=PROGRAM, dtype="float32", start_timeout=100)
    replica = VllmProcess("m", settings, home.logs / "replica-1.log")
    try:
        for _ in range(2):  # a restart goes on in the same file
            await replica.start(checkpoint(tmp_path, 1), "m@1")
    finally:
        await replica.stop()
    attempt = home.replicas / "4" / "attempt" / "engine.txt.d"
    write_lines(attempt / "hardware.n2.jsonl", [{"event": "sample", "time": 1.0, "host.load": 3.0}])
    other, own = pool_hardware(home)
    assert own.node == f"replica-1 on {os.uname().nodename}" and other.node == "4 on n2"
    assert len(own.series["host.load"]) >= 4 and own.newest["host.memory_available_bytes"]
    assert len(own.series["host.rank_cores"]) >= 1, "the cores of the server are counted"
    command = ["status", "--hardware", "--home", str(home.root)]
    printed = CliRunner(env={"COLUMNS": "200"}).invoke(app, command).stdout
    assert "replica-1 on" in printed and "load 3.0" in printed
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [node["node"] for node in told] == [other.node, own.node]
    bare = CliRunner().invoke(app, ["status", "--hardware", "--home", str(tmp_path / "none")])
    assert "no replica was sampled" in bare.stdout
    both = CliRunner().invoke(app, [*command, "--watch"])
    assert "give one of --watch, --events and --hardware" in str(both.exception)


HOLD = """
import asyncio, os, sys
from pathlib import Path
from cray_agents.runtime.pool.vllm_process import EngineSettings
from cray_agents.runtime.pool.job_lease import ReplicaSpec
from cray_agents.runtime.pool.replica_supervisor import ReplicaSupervisor
from cray_agents.runtime.scheduler.nvml import EnergyTotal
from cray_agents.runtime.scheduler.nvml import nvml
from cray_agents.runtime.accounting.ledger import HeldDevices, LedgerFile, holding, keep_ledger

folder, counter = Path(sys.argv[1]), Path(os.environ["FAKE_NVML_ENERGY"])

def spend(joules):
    counter.write_text(str(int(counter.read_text()) + 1000 * joules))

counter.write_text("5000000")
for gpus in (("0",), ("1",), ()):
    with holding(folder, kind="job", holder="job-" + "".join(gpus), gpus=gpus):
        spend(40)

place = {"version": "m@1", "state": "serving", "host": "a", "job": None, "busy_seconds": 0.0}

async def serve():
    with nvml() as driver:
        spec = ReplicaSpec(
            number=2, attempt=1, model="m", settings=EngineSettings(), gateway="a", package="1")
        energy = EnergyTotal(driver, ["0"])
        supervisor = ReplicaSupervisor(spec, folder, "127.0.0.1", "s", energy=energy)
        await account(supervisor)

async def account(supervisor):
    replicas = [place, place | {"job": "7"}, place | {"job": "8", "joules": None}]
    replicas[2]["joules"] = supervisor.state()["joules"]
    devices = [HeldDevices(("0",)) for _ in replicas]
    file = LedgerFile(folder, "platform")
    keeping = asyncio.create_task(
        keep_ledger(file, lambda: replicas, lambda: 0, devices, every=0.01, beat=0.05))
    while not list(folder.glob("platform*")):  # until it is written, nobody measures
        await asyncio.sleep(0.01)
    spend(30)
    replicas[2] = replicas[2] | {"joules": supervisor.state()["joules"]}
    await asyncio.sleep(0.1)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)

asyncio.run(serve())
"""


@pytest.mark.slow
def test_energy_of_jobs_and_replicas_is_in_their_holdings(library: Path, tmp_path: Path) -> None:
    home = Home(tmp_path)
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}
    argv = [sys.executable, "-c", HOLD, str(home.ledger)]
    subprocess.run(argv, check=True, env=environment)
    lines = [line for lines in read_ledger(home.ledger) for line in lines]

    def joules(holder: str) -> list[float | None]:
        return [line.joules for line in lines if line.holder == holder]

    assert joules("job-0") == [0.0, 40.0]
    assert joules("job-1") == joules("job-") == [None, None]
    assert sum(each or 0 for each in joules("replica-0")) == 30.0
    assert set(joules("replica-1")) == {None}  # its GPUs are another host's, which says nothing
    assert sum(each or 0 for each in joules("replica-2")) == 30.0  # its supervisor measured them
    pieces = read_holdings(home).pieces
    spent = {kind: sum(piece.joules for piece in pieces if piece.line.kind == kind)
             for kind in ("job", "replica")}  # fmt: skip
    assert spent == pytest.approx({"job": 40.0, "replica": 60.0})
    shown = CliRunner().invoke(app, ["usage", "cost", "--home", str(tmp_path), "--json"])
    total = json.loads(shown.stdout)["total"]
    assert total["joules"] == pytest.approx(100.0) and 0 < total["measured_share"] < 1


def test_slurms_account_is_read_where_there_is_one() -> None:
    printed = (
        "17|3600|1-02:03:04.500|||job-a.1234\n"
        "17.batch|3600|00:30.100|2048K|700000|batch\n"
        "17.0|3590|26:03:04.400|3.5G|690000|python|odd\n"
    )
    usage = parse_usage(printed, "job-a")
    assert usage.seconds == 3600 and usage.cpu_seconds == pytest.approx(93784.5)
    assert usage.memory_bytes == int(3.5 * 2**30) and usage.joules == 700000
    none = parse_usage("17|5|00:01|||job-a\n17.batch|5|00:01||0|batch\n", "job-a")
    assert none.joules is None and none.memory_bytes is None and none.cpu_seconds == 1
    for other in ("", printed.replace("job-a", "job-b")):
        assert "does not have this job" in parse_usage(other, "job-a").why_unknown


@pytest.mark.slow
def test_without_accounting_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    assert read_usage("1", "job-a").why_unknown == NO_ACCOUNT


@pytest.mark.parametrize(("kind", "names"), [
    ("", ("max", "current", "")),
    ("memory", ("limit_in_bytes", "usage_in_bytes", "total_")),
])  # fmt: skip
def test_a_job_has_the_memory_that_its_cgroups_leave(
    tmp_path: Path, kind: str, names: tuple[str, str, str]
) -> None:
    """Pages of files count as used there, and are given up when others need them."""
    limit, used, prefix = names
    job = tmp_path / "sys/fs/cgroup" / kind / "slurm/job_7"
    for folder, most in ((job, "10000"), (job / "step_0", "max" if not kind else str(2**63 - 1))):
        folder.mkdir(parents=True)
        (folder / f"memory.{limit}").write_text(f"{most}\n")
        (folder / f"memory.{used}").write_text("7000\n")
        (folder / "memory.stat").write_text(f"anon 4000\n{prefix}inactive_file 3000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    own = tmp_path / "proc/self/cgroup"
    own.write_text(f"12:cpu:/\n3:{kind}:/slurm/job_7/step_0\n")
    assert memory_of_job(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   50 kB\n")
    assert memory_of_job(tmp_path) == 6000
    own.write_text("12:cpu:/slurm/job_7\n")
    assert memory_of_job(tmp_path) == 50 * 1024
