"""`doctor --node` and `--cluster`: what is broken is named with its remedy.

Programs are scripts on PATH, the kernel's files a folder, torch a package of a few lines. A host
whose files or clock are broken is a library before libc (support/broken_node.c).
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents.cli import preflight
from cray_agents.cli.doctor import check
from cray_agents.cli.platform import together
from cray_agents.cli.preflight import Node, check_node, check_slurm, describe_topology
from cray_agents.config import Config
from cray_agents.config.job_section import JobContainer, JobSettings
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.runtime.scheduler.slurm import Slurm
from tests.support.command_line import cli, refused
from tests.support.host_namespaces import namespaces

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNODE\t0-47\t0\t\tN/A
NIC0\tPIX\tNODE\t X

Legend:
"""
TOPOLOGY_WELL = TOPOLOGY.replace("NODE", "PXB")
SCRIPT = '#!/bin/sh\nFILES=${{0%/*}}/..\ncase "$*" in\n{}\nesac\n'
TORCH = """
from types import SimpleNamespace as Of
__version__, version = "2.13", Of(cuda="13.0")
class Ones:
    __matmul__ = lambda self, other: self
    sum = lambda self: 64.0**3
ones = lambda *sizes, device: Ones()
nccl = Of(version=lambda: (2, 28, 3))
cuda = Of(init=lambda: None, device_count=lambda: 2, nccl=nccl)
"""
PORT = "host/sys/class/infiniband/mlx5_{}/ports/1"
CONFIG = "ClusterName             = big\nPreemptType             = preempt/partition_prio\n"
PARTITION = "PartitionName=gpu Default=YES State=UP MaxTime=1:00:00 PreemptMode=OFF GraceTime=0\n"
WELL = {
    "bin/nvidia-smi": SCRIPT.format(
        '*name,driver*) cat "$FILES/query" ;; *ecc*) cat "$FILES/ecc" ;;\n'
        '*topo*) cat "$FILES/topo" ;; *bus_id*) exit 3 ;;'),
    "bin/scontrol": SCRIPT.format('ping) cat "$FILES/ping" ;; *config) cat "$FILES/config" ;;\n'
        '*partition) cat "$FILES/partition" ;;'),
    "bin/sinfo": SCRIPT.format('*) cat "$FILES/nodes" ;;'),
    "bin/sbatch": '#!/bin/sh\ncd "${0%/*}/.."; cat > script; cat refusal >&2; test ! -s refusal',
    "bin/apptainer": "#!/bin/sh\necho apptainer version 1.4",
    "bin/srun": "#!/bin/sh\necho --container-image=[USER@]IMAGE",
    "query": "NVIDIA H200, 580.95.05\n" * 2,
    "ecc": "0, 0, No\n1, 0, No\n",
    "topo": TOPOLOGY_WELL,
    "ping": "Slurmctld(primary) at ctl is UP\n",
    "config": CONFIG,
    "partition": PARTITION,
    "nodes": "n1 idle\nn2 mix\n",
    "refusal": "",
    "image.sif": "",
    "host/proc/driver/nvidia/version": "NVRM version",
    "host/proc/driver/nvidia-fs/stats": "GDS",
    "host/dev/shm/one": "",
    "host/dev/infiniband/uverbs0": "",
    **{f"{PORT.format(n)}/state": "4: ACTIVE\n" for n in (0, 1)},
    **{f"{PORT.format(n)}/rate": "400 Gb/sec (4X NDR)\n" for n in (0, 1)},
    **{f"{PORT.format(n)}/counters/symbol_error": "0\n" for n in (0, 1)},
    "packages/torch/__init__.py": TORCH,
    "packages/transformer_engine/__init__.py": "__version__ = '2.9'",
    "packages/transformer_engine/pytorch.py": "",
}  # fmt: skip


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node of two H200 and two ports, all of it well."""
    write(tmp_path, WELL)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    container = JobContainer(runtime="apptainer", image=str(tmp_path / "image.sif"))
    job = JobSettings(fabric="ucx", container=container)
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Node(tmp_path / "root", job, 2, host=tmp_path / "host")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


def write(folder: Path, files: dict[str, str | None]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
            path.chmod(0o755)


def by_check(rows: Any) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in rows}


@pytest.mark.slow
def test_a_node_that_is_well_passes(node: Node) -> None:
    rows = by_check(check_node(node))
    slow = {"root: durable file", "root: throughput", "disk", "memory", "locked memory"}  # of here
    assert {name: row for name, row in rows.items() if row["state"] != "pass"}.keys() <= slow, rows
    assert rows["GPUs"]["found"] == "2 x NVIDIA H200" and rows["topology"]["found"] == "1 x NV18"
    assert rows["CUDA"]["found"] == "torch 2.13, CUDA 13.0, 2 GPUs"
    assert rows["NCCL"]["found"] == "2.28.3" and rows["Transformer Engine"]["found"] == "2.9"
    assert rows["fabric"]["found"] == "2 x 400 Gb/sec (4X NDR)"
    assert not list(node.root.glob(".preflight*"))


STATE, RATE = f"{PORT.format(1)}/state", f"{PORT.format(1)}/rate"
TORCH_FILE, TE_FILE = "packages/torch/__init__.py", "packages/transformer_engine/pytorch.py"
FAULTS: list[tuple[str, dict[str, str | None], str, str, str]] = [
    ("gpus", {"query": "NVIDIA H200, 580.95.05\n"}, "GPUs", "fail", "1 x NVIDIA H200; 2 expected"),
    ("gpus", {"query": ""}, "GPUs", "fail", "nvidia-smi lists none"),
    ("gpus", {"bin/nvidia-smi": "#!/bin/sh\necho driver/library mismatch; exit 18"}, "GPUs", "fail",
     "nvidia-smi failed: driver/library mismatch"),
    ("gpus", {"query": "NVIDIA H200, 550.1\nNVIDIA H200, 580.2\n"}, "driver", "fail", "550.1"),
    ("gpus", {"ecc": "0, 0, No\n1, 3, No\n"}, "GPU errors", "fail", "GPU 1 has 3 uncorrectable"),
    ("gpus", {"topo": TOPOLOGY}, "topology", "warn", "GPU1 reaches its nearest NIC over NODE"),
    ("gpus", {"host/proc/driver/nvidia-fs/stats": None}, "GPUDirect Storage", "warn", "not loaded"),
    ("libraries", {TORCH_FILE: "raise OSError('libcudart.so.13: cannot open')"}, "CUDA", "fail",
     "libcudart.so.13"),
    ("libraries", {TORCH_FILE: TORCH.replace("init=lambda: None", "init=lambda: 1 / 0")}, "CUDA",
     "fail", "division by zero"),
    ("libraries", {TORCH_FILE: TORCH.replace("count=lambda: 2", "count=lambda: 1")}, "CUDA", "fail",
     "1 GPUs"),
    ("libraries", {TORCH_FILE: TORCH.replace("64.0**3", "7.0")}, "CUDA", "fail", "on GPU 0 is wr"),
    ("libraries", {TORCH_FILE: TORCH.replace("nccl=nccl", "x=0")}, "NCCL", "fail", "not usable"),
    ("libraries", {TE_FILE: "import transformer_engine_torch"}, "Transformer Engine", "fail",
     "No module named 'transformer_engine_torch'"),
    ("libraries", {TE_FILE: "raise ImportError('undefined symbol')"}, "Transformer Engine", "fail",
     "undefined symbol"),
    ("fabric", {STATE: "1: DOWN\n"}, "fabric", "warn", "mlx5_1:1 is DOWN"),
    ("fabric", {f"{PORT.format(n)}/state": "2: INIT\n" for n in (0, 1)}, "fabric", "fail", "INIT"),
    ("fabric", {RATE: "100 Gb/sec (2X HDR)"}, "fabric", "warn", "1 x 100 Gb/sec"),
    ("fabric", {f"{PORT.format(0)}/hw_counters/packet_seq_err": "7\n"}, "fabric counters", "warn",
     "mlx5_0:1 packet_seq_err 7"),
    ("fabric", {"host/dev/infiniband/uverbs0": None}, "RDMA devices", "fail", "0 in"),
    ("slurm_here", {"ping": "Slurmctld(primary) at ctl is DOWN\n"}, "Slurm's controller", "warn",
     "DOWN"),
    ("slurm_here", {"config": "Prolog = /none/prolog.sh\n"}, "prolog", "warn", "/none/prolog.sh"),
    ("container", {"bin/apptainer": "#!/bin/sh\necho no squashfuse >&2; exit 1"},
     "container runtime", "fail", "no squashfuse"),
    ("container", {"image.sif": None}, "container image", "fail", "image.sif"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("group", "files", "name", "state", "found"), FAULTS)
def test_a_fault_is_named(
    node: Node, tmp_path: Path, group: str, files: Any, name: str, state: str, found: str
) -> None:
    write(tmp_path, files)
    row = by_check(getattr(preflight, group)(node))[name]
    assert row["state"] == state and found in row["found"] and row["to mend it"], row


def test_other_faults_of_a_node(node: Node, tmp_path: Path, monkeypatch: Any) -> None:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    assert by_check(preflight.fabric(node))["locked memory"]["found"] == "64 KiB"
    pyxis = node.job.model_copy(update={"container": JobContainer(image="repo/image:1")})
    assert {row["state"] for row in preflight.container(replace(node, job=pyxis))} == {"pass"}
    write(tmp_path, {"bin/srun": "#!/bin/sh\necho --gres"})
    [runtime, _] = preflight.container(replace(node, job=pyxis))
    assert runtime["found"] == "srun has no --container-image" and "pyxis" in runtime["to mend it"]
    matrix = "  GPU0 GPU1 GPU2\nGPU0 X NV18 SYS\nGPU1 NV18 X NV18\nGPU2 SYS NV18 X\n"
    said, odd = describe_topology(matrix)
    assert (said, odd) == ("2 x NV18, 1 x SYS", "GPU0 and GPU2 are linked by SYS, not NVLink")
    no_port = replace(node, host=tmp_path / "empty")
    assert [row["state"] for row in preflight.fabric(no_port)] == ["fail"]  # [job] names ucx
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [row["found"] for row in preflight.gpus(node)] == ["none; 2 expected"]
    [shm] = preflight.shared_memory(replace(node, host=Path("/")))
    assert shm["found"].endswith("GiB in /dev/shm")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    [row] = preflight.slurm_here(node)
    assert (row["check"], row["state"]) == ("Slurm's controller", "warn")
    assert "scontrol: No such file" in row["found"] and "Slurm's clients" in row["to mend it"]
    assert [*preflight.slurm_here(replace(node, in_job=True))] == []  # in a container, say


def test_counters_that_grow_meanwhile_fail(node: Node, tmp_path: Path) -> None:
    grows = f"echo 9 > {tmp_path}/{PORT.format(0)}/counters/symbol_error; cat {tmp_path}/ping"
    write(tmp_path, {"bin/scontrol": f"#!/bin/sh\n{grows}"})
    rows = [row for row in check_node(node) if row["check"] == "fabric counters"]
    said = [(row["state"], row["found"]) for row in rows]
    assert ("fail", "mlx5_0:1 symbol_error grew by 9 meanwhile") in said


#: What of the root is broken: a row, what it finds, and its remedy.
BROKEN = {
    "excl": ("root: exclusive create", "a name was given twice", "NFS 4"),
    "link": ("root: hard link", "Operation not permitted", "NFS 4"),
    "rename": ("root: rename of folders", "a name was given twice", "NFS 4"),
    "clock": ("root: clock", "-", "chrony"),
    "write": ("shared root", "cannot be written: Input/output error", "--home"),
    "fsync": ("shared root", "cannot be written: Input/output error", "--home"),
    "replace": ("shared root", "cannot be written: Stale", "--home"),
}
ROWS = """
import json, os, sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from cray_agents.cli.preflight import Node, shared_memory, shared_root
from cray_agents.config.job_section import JobSettings
from cray_agents.trainers.job.failures import health_gate
for what in sys.argv[2:]:
    os.environ["BROKEN"] = f"here@{what}"
    if what in ("write", "fsync", "replace"):  # whose time to try is over at once
        health_gate.time = SimpleNamespace(monotonic=count(0, 60).__next__)
    node = Node(Path(sys.argv[1]) / "root", JobSettings(), host=Path(sys.argv[1]) / "host")
    group = shared_memory if what == "shm" else shared_root
    print(json.dumps([r for r in group(node) if r["state"] != "pass"]))
"""


@pytest.fixture(scope="module")
def broken_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("library") / "broken_node.so"
    source = Path(__file__).parents[1] / "support" / "broken_node.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.slow
def test_a_root_that_breaks_its_promises_is_named(tmp_path: Path, broken_node: Path) -> None:
    argv = [sys.executable, "-c", ROWS, str(tmp_path), "none", "slow", *BROKEN]
    environment = {**os.environ, "LD_PRELOAD": str(broken_node)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    found = dict(zip(argv[4:], map(json.loads, done.stdout.splitlines()), strict=True))
    slow = by_check(found["slow"])
    failed = {what: [row for row in found[what] if row["state"] == "fail"] for what in found}
    assert failed.pop("none") == failed.pop("slow") == [], done.stderr
    for what, (name, said, remedy) in BROKEN.items():
        [row] = failed[what]
        assert row["check"] == name and said in row["found"] and remedy in row["to mend it"], row
    skew = failed["clock"][0]["found"].split()[0]
    assert -61 < float(skew) < -20  # 60, and what the write takes less
    file, rate = slow["root: durable file"], slow["root: throughput"]
    assert float(file["found"].split()[0]) >= 60 and "metadata" in file["to mend it"]
    assert int(rate["found"].split()[1]) <= 50 and "nconnect" in rate["to mend it"]


def test_a_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").touch()
    [row] = preflight.shared_root(Node(tmp_path / "root", JobSettings()))
    assert (row["check"], row["state"]) == ("shared root", "fail") and "--home" in row["to mend it"]


@pytest.mark.slow
@pytest.mark.skipif(not namespaces(), reason="lacks namespaces")
def test_a_small_dev_shm_is_named(tmp_path: Path) -> None:
    (tmp_path / "host/dev/shm").mkdir(parents=True)
    mount = f'mount -t tmpfs -o size=64m none {tmp_path}/host/dev/shm && exec "$@"'
    rows = [sys.executable, "-c", ROWS, str(tmp_path), "shm"]
    argv = [*namespaces(), "sh", "-c", mount, "sh", *rows]
    [[row]] = [json.loads(line) for line in subprocess.check_output(argv).splitlines()]
    assert row["found"] == "0.0625 GiB in /dev/shm" and "emptyDir" in row["to mend it"]


# ---- Slurm
SITE_FAULTS: list[tuple[dict[str, str], str, str, str]] = [
    ({}, "", "", ""),
    ({"partition": PARTITION.replace("gpu", "cpu")}, "partition", "fail", "gpu: none"),
    ({"partition": PARTITION.replace("UP", "DRAIN")}, "partition", "fail", "gpu: State DRAIN"),
    ({"partition": PARTITION.replace("OFF", "REQUEUE")}, "preemption", "warn", "after 0 s"),
    ({"partition": PARTITION.replace("OFF GraceTime=0", "GANG,SUSPEND GraceTime=90")}, "preemption",
     "warn", "SUSPEND"),
    ({"refusal": "Requested time limit is invalid"}, "a training job", "fail", "time limit"),
    ({"nodes": "n1 idle\nn2 drain*\n"}, "nodes", "warn", "n2 is drain*"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "name", "state", "found"), SITE_FAULTS)
def test_a_fault_of_a_site_is_named(
    node: Node, tmp_path: Path, files: Any, name: str, state: str, found: str
) -> None:
    write(tmp_path, files)
    config = Config(home=tmp_path / "root", train_gpu="H200", train_gpus_per_node=2,
                    train_minutes=60, slurm_options=["--partition=gpu"])  # fmt: skip
    slurm = Slurm(tmp_path / "slurm", options=config.slurm_options, settings=config.job)
    rows = by_check(check_slurm(config, slurm))
    bad = [row for row in rows.values() if row["state"] != "pass"]
    assert [(row["check"], row["state"]) for row in bad] == ([(name, state)] if name else []), rows
    assert not bad or (found in bad[0]["found"] and bad[0]["to mend it"])
    assert "#SBATCH --gpus-per-node=2" in (tmp_path / "script").read_text()


def test_options_several_nodes_and_a_missing_site(tmp_path: Path) -> None:
    refused(cli("doctor", "--node", "--cluster", cwd=tmp_path), "leave one of them out")
    told = [{"node": f"n{n}", **check("driver", True, str(n % 2), "")} for n in range(5)]
    [merged] = together([*told])
    assert (merged["node"], merged["found"]) == ("n0, n1, n2 and 2 more", "0; 1")
    away = cli("doctor", "--cluster", cwd=tmp_path, SLURM_CONF="/nowhere/slurm.conf")
    refused(away, "no Slurm controller answers", "--node")


def silent(node: str) -> dict[str, str]:
    return preflight.at(node, preflight.judge("an answer", False, "none"))


def test_what_a_node_sees_late_old_or_half_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    """The nodes' answers are there before they are asked for: late by a lease of no time."""
    monkeypatch.setattr(preflight, "ANSWER_SECONDS", 0)
    file, values = tmp_path / "value.json", [b'{"value":%d}' % number for number in range(4)]
    one, two, three = map(checksums.with_crc, values[1:])
    for text, why in ((one, "old content"), (two[:-9], "not whole"), (three, "held 3"), (two, "")):
        file.write_bytes(text)
        assert why in (said := preflight.watch_change(file)) and bool(why) == bool(said)
    for seconds, state in ((4, "pass"), (6, "warn"), (11, "fail")):
        row = preflight.judge_delay("a new file", seconds, 10)
        assert row["state"] == state and f"after {seconds}.00 s" in row["found"]
    half = range(preflight.RACES // 2, preflight.RACES)  # that are not taken here
    won = [f"{kind} {number}" for kind in ("O_EXCL", "link") for number in half]
    answers: dict[str, tuple[float, Any]] = {  # how far its clock is, and what else it says
        "n1": (0, {"changed": "", "race": won, "sum": [True, "1 GB/s"]}),
        "n2": (60, {"changed": "half", "race": [], "sum": [False, "wrong"]}),
        "n3": (-5, {"changed": "", "race": []}),
        "n4": (0, {"changed": ""}),
    }
    failed = {("n2", "clock"), ("n2", "a changed file"), ("n4", "an answer"),
              *((node, "a sum over the nodes") for node in ("n2", "n3"))}  # fmt: skip
    late = {(node, f"a {kind} file") for node in answers for kind in ("new", "changed")}
    for lease, expected in ((1e9, failed), (0.0, failed | late)):
        (folder := tmp_path / f"{lease}").mkdir()
        for node, (skew, more) in answers.items():
            for kind, said in {"new": time.time() + skew, **more}.items():
                preflight.tell(folder, kind, node, said)
        told = preflight.talk(folder, [*answers], lease, lambda: set(), silent)
        rows = {(row.get("node", ""), row["check"]): row for row in told}
        assert {key for key, row in rows.items() if row["state"] == "fail"} == expected, rows
        assert rows["n3", "clock"]["state"] == "warn" and rows["", "claims of one name"]
        assert rows["n2", "a changed file"]["found"] == "half"
        assert rows["n3", "a sum over the nodes"]["found"] == "no answer"
        assert all(rows[key]["to mend it"] for key in expected)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.skipif(bool(missing_programs()), reason=f"lacks {missing_programs()}")
def test_a_cluster_is_checked_by_a_job_on_its_nodes(tmp_path: Path, broken_node: Path) -> None:
    """Then one has neither exclusive create nor whole files, one a wrong clock, one no start."""
    cluster = PrivateCluster(tmp_path / "slurm", nodes=3, cpus=1, gpus=[])
    cluster.start()

    def rows(**broken: str) -> dict[tuple[str, str], dict[str, str]]:
        job = json.dumps({"cpu_bind": "none", "environment": broken})
        done = cli("doctor", "--cluster", "--json", "--home", tmp_path / "root", cwd=tmp_path,
                   SLURM_CONF=str(cluster.configuration), CRAY_AGENTS_JOB=job,
                   CRAY_AGENTS_TRAIN_RANKS="1")  # fmt: skip
        assert done.stdout, done.stderr
        said = json.loads(done.stdout)
        failed = any(row["state"] == "fail" for row in said)
        assert done.returncode == (2 if failed else 0), said
        return {(row.get("node", ""), row["check"]): row for row in said}

    first, second, third = cluster.nodes
    try:
        well = rows()
        assert {key for key, row in well.items() if row["state"] == "fail"} == set(), well
        for node in cluster.nodes:
            assert "by gloo" in well[node, "a sum over the nodes"]["found"]
            assert well[node, "clock"]["state"] == "pass" == well[node, "root: hard link"]["state"]
            assert "answered after" in well[node, "a changed file"]["found"]
        assert well["", "claims of one name"]["found"] == "one winner of each of 32"
        assert well["", "partition"]["found"].startswith("all: State UP")
        broken = f"{first}@excl {first}@half {second}@clock {second}@sum {third}@die"
        ill = rows(LD_PRELOAD=str(broken_node), BROKEN=broken)
        failed = {key for key, row in ill.items() if row["state"] == "fail"}
        assert failed >= {(first, "root: exclusive create"), (second, "root: clock"),
                          (second, "clock"), (third, "an answer"), (first, "a changed file"),
                          (second, "a sum over the nodes"),
                          ("", "claims of one name")}, ill  # fmt: skip
        assert "it was not whole" in ill[first, "a changed file"]["found"]
        assert "came out wrong in" in ill[second, "a sum over the nodes"]["found"]
        skew, *_, doubt = ill[second, "clock"]["found"].split()
        assert abs(float(skew) - 60) <= float(doubt) + 0.1
        assert "cannot start on this node" in ill[third, "an answer"]["found"]
        assert f"O_EXCL 0 by this host and {first}" in ill["", "claims of one name"]["found"]
        assert not list((tmp_path / "root").glob(".preflight*"))
    finally:
        cluster.close()
