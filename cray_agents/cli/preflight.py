"""Preflight: `doctor --node`, deep checks of a machine, and `--cluster`, of the nodes of a Slurm.

A check is a row of doctor.py. What it looks at are programs on PATH, /proc, /sys and /dev below
`Node.host`, and the shared root. For a cluster a job starts `main` on each node with room, in a
step of its own. Nodes write their rows to a folder of the shared root, and answer doctor there:

    new        doctor makes a file; a node says when it saw it: the delay, and the node's clock
    changed    doctor replaces a file that the nodes have read; none may see half of it
    race       all nodes claim the same names, half of them taken here: each must have one winner
    sum        the nodes add numbers by NCCL, or by gloo without GPUs: the trainer's own check

None of it was run on a GPU or on a fabric.
"""

import json
import os
import re
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired, run
from typing import Any

from cray_agents.cli import doctor
from cray_agents.cli.doctor import INSTALL, OLDEST_DRIVER, check
from cray_agents.cli.screen import errors, open_root
from cray_agents.config import Config
from cray_agents.config.job_section import JobKind, JobSettings
from cray_agents.errors import BadInput, Corrupt, CrayError, SchedulerError, SetupError
from cray_agents.ports import Command
from cray_agents.processes import python
from cray_agents.records import canonical, new_id
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.scheduler.choose import run_client, site_cluster
from cray_agents.runtime.scheduler.site_environment import with_shared_root
from cray_agents.runtime.scheduler.slurm import LEDGER, UNUSABLE, Slurm, node_states
from cray_agents.runtime.scheduler.slurm_reports import describe_reason
from cray_agents.runtime.store.index import identity_of

Row = dict[str, Any]
#: What mends a check's failure.
REMEDIES = dict(line.split(" | ") for line in """\
GPUs | reset or drain the node; in Slurm ask for GPUs; in a pod set nvidia.com/gpu, runtime nvidia
driver | CUDA 13 needs a driver of 580 or newer
GPU errors | reset the GPU (nvidia-smi -r), or drain the node and have it repaired
topology | look at nvidia-smi nvlink -s, at nvidia-fabricmanager, and at the slots of the NICs
GPUDirect Storage | not needed; modprobe nvidia-fs and gdscheck -p: weights skip the host's memory
CUDA | install the extra gpu; look at driver, nvidia-fabricmanager, and the container's NVIDIA hook
NCCL | install the extra gpu: torch's CUDA build brings it
fabric | look at cable, switch and ibstat; in a pod ask for the RDMA resource; one node needs none
fabric counters | look at cable, transceiver and switch port; perfquery -R resets them
locked memory | slurmd: LimitMEMLOCK=infinity, no propagation of MEMLOCK; in a pod: IPC_LOCK
RDMA devices | let this user read and write /dev/infiniband; pass it into a pod or container
shared memory | NCCL and vLLM need 1 GiB; in a pod an emptyDir with medium: Memory at /dev/shm
shared root | choose another: --home DIR; the same path on all nodes; mount the volume in a pod
root: names | put the root on NFS 4, Lustre, Weka, CephFS or a disk: names must be exclusive
root: clock | run chrony here and on the file server
root: durable file | each answer of the gateway waits for one: ask for faster metadata
root: throughput | stripe the folder, or mount with nconnect and a larger rsize
Slurm's controller | is it up, and munged? a node needs Slurm's clients, slurm.conf and the key
prolog | put it on each node, executable: slurmd drains a node whose prolog fails
container runtime | install apptainer, or enroot with pyxis in plugstack.conf, on all nodes
container image | mend image in [job.container], or put the image there
partition | name one that is up, in slurm_options; sinfo lists them
a training job | change train_nodes, train_gpus_per_node, train_minutes or slurm_options
preemption | a preempted job must have time to save: raise GraceTime; no SUSPEND for these jobs
nodes | look at sinfo -R; scontrol update nodename=NODE state=resume
an answer | look at the end of its log, as found here, and at slurmd on that node
a new file | mount with shorter caches of attributes (acregmax, acdirmax), as NFS needs
a changed file | mount with shorter caches of attributes; no write-back cache without leases
claims of one name | the file system must hold O_EXCL and link for all hosts: NFS 4, local_lock=none
clock | run chrony on all nodes
a sum over the nodes | look at NCCL_SOCKET_IFNAME and the firewall; run with NCCL_DEBUG=INFO
""".splitlines())  # fmt: skip
#: Links of nvidia-smi's topology between a GPU and a NIC, the nearest first.
LINKS = ("PIX", "PXB", "PHB", "NODE", "SYS")
#: Of a port, below counters/ or hw_counters/: errors of its link, and packets sent again.
COUNTERS = (
    *("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors"),
    *("packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err"),
)
SCRIPTS = ("Prolog", "TaskProlog", "Epilog", "TaskEpilog")
SHM_GIB, SLOW_MB, SLOW_MS = 1, 200, 50.0  # GiB; MB/s; ms of a small durable file
SKEW_WARNING = 1.0  # seconds; the health gate refuses more
GRACE_SECONDS = 30  # that a job needs at least to save
QUEUE_SECONDS, REPORT_SECONDS, ANSWER_SECONDS, SUM_SECONDS = 600.0, 600.0, 60.0, 180.0
KINDS: tuple[JobKind, ...] = ("training", "session", "replica")
MINUTES, RACES, POLL = 30, 16, 0.05
DOCTOR = ".doctor"  # who tells, beside the nodes
#: Runs in a Python of its own: a library that breaks may take its process with it.
LIBRARIES = """
import json, torch
said = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": 0, "te": "", "te_why": ""}
try:
    torch.cuda.init()
    said["gpus"] = torch.cuda.device_count()
    said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for device in range(said["gpus"]):
        ones = torch.ones(64, 64, device=f"cuda:{device}")
        assert float((ones @ ones).sum()) == 64**3, f"a product on GPU {device} is wrong"
except Exception as error:
    said["why"] = str(error) or repr(error)
try:
    import transformer_engine.pytorch
    said["te"] = str(getattr(transformer_engine, "__version__", "installed"))
except Exception as error:
    missing = isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine"
    said["te_why"] = "" if missing else str(error) or repr(error)
print("\\n" + json.dumps(said))
"""


@dataclass(frozen=True)
class Node:
    """What is checked: this machine as jobs see it.

    `gpus`: how many it is to have; None: what is there. `in_job`: in the job of `--cluster`, and
    so in its container. `host`: where /proc, /sys and /dev are.
    """

    root: Path
    job: JobSettings
    gpus: int | None = None
    in_job: bool = False
    host: Path = Path("/")

    @property
    def has_gpus(self) -> bool:
        """NVIDIA's driver is here, and this process may use GPUs."""
        driver = (self.host / "proc/driver/nvidia/version").exists()
        smi = shutil.which("nvidia-smi") is not None
        return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and (driver or smi)

    @property
    def ports(self) -> dict[str, Path]:
        """The ports of InfiniBand, RoCE and EFA, such as `mlx5_0:1`."""
        found = sorted((self.host / "sys/class/infiniband").glob("*/ports/*"))
        return {f"{port.parent.parent.name}:{port.name}": port for port in found}


def judge(name: str, good: bool, found: str, *, required: bool = True) -> Row:
    """Return a row with its remedy: fail if not `good` and `required`, else warn."""
    known = "root: names" if name.startswith("root: ") and name not in REMEDIES else name
    return check(name, good, found, REMEDIES[known], required=required)


def check_node(node: Node) -> list[Row]:
    """Return the rows of this machine."""
    before, rows = read_counters(node), [*doctor.python(), *doctor.packages()]
    rows += doctor.machine(node.root)
    for group in (shared_memory, gpus, libraries, fabric, shared_root, slurm_here, container):
        name = group.__name__.replace("_", " ")
        try:
            rows += group(node)
        except ModuleNotFoundError as error:  # the light install
            rows.append(check(name, False, f"{error.name} is not installed", INSTALL))
        except (CrayError, OSError, ValueError, LookupError) as error:
            rows.append(check(name, False, f"it could not be checked: {error!r}", "mend that"))
    for key, count in (read_counters(node) - before).items():
        rows.append(judge("fabric counters", False, f"{key} grew by {count} meanwhile"))
    return rows


def ask(*argv: str, seconds: float = 60.0) -> tuple[str, str]:
    """Return a program's output, and why there is none ("" where there is)."""
    try:
        done = run(argv, capture_output=True, text=True, errors="replace", timeout=seconds)
    except TimeoutExpired:
        return "", f"{argv[0]} did not answer within {seconds:g} s"
    except OSError as error:
        return "", f"{argv[0]}: {error.strerror}"
    said = [*(done.stderr.strip() or done.stdout.strip()).splitlines(), "no message"]
    return done.stdout, f"{argv[0]} failed: {said[-2 if said[1:] else 0]}" * bool(done.returncode)


# ---- GPUs, and the libraries on them
def gpus(node: Node) -> Iterator[Row]:
    """Check the driver, the GPUs and how they are linked."""
    if not node.has_gpus:
        yield judge("GPUs", not node.gpus, f"none; {node.gpus} expected" if node.gpus else "none")
        return
    text, why = ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    found = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    if why or not found:
        yield judge("GPUs", False, why or "nvidia-smi lists none")
        return
    kinds = Counter(row[0] for row in found)
    said = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    said += f"; {node.gpus} expected" if len(found) < (node.gpus or 0) else ""
    yield judge("GPUs", "expected" not in said and len(kinds) == 1, said)
    drivers = sorted({row[1] for row in found})
    old = any(int(one.split(".")[0]) < OLDEST_DRIVER for one in drivers)
    yield judge("driver", not old, ", ".join(drivers))

    from cray_agents.trainers.job.failures.health_gate import check_gpus

    try:
        check_gpus()
        yield judge("GPU errors", True, "none")
    except SetupError as error:
        yield judge("GPU errors", False, str(error).removeprefix("health gate: "))
    said, why = ask("nvidia-smi", "topo", "-m")
    said, problem = ("", why) if why else describe_topology(said)
    yield judge("topology", not problem, problem or said, required=False)
    direct = (node.host / "proc/driver/nvidia-fs/stats").exists()
    said = "nvidia-fs is loaded" if direct else "nvidia-fs is not loaded"
    yield judge("GPUDirect Storage", direct, said, required=False)


def describe_topology(text: str) -> tuple[str, str]:
    """Return what `nvidia-smi topo -m` says in a line, and what is odd in it ("": nothing)."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    columns = [word for word in lines[0].split() if re.fullmatch(r"(GPU|NIC)\d+", word)]
    links: dict[str, dict[str, str]] = {}
    for name, *cells in (line.split() for line in lines[1:] if line.startswith("GPU")):
        links[name] = dict(zip(columns, cells, strict=False))
    odd, kinds = [], Counter[str]()
    for number, (gpu, row) in enumerate(links.items()):
        kinds.update(row[other] for other in list(links)[number + 1 :])
        nics = [link for other, link in row.items() if other[0] == "N" and link in LINKS]
        if nics and not set(nics).intersection(LINKS[:3]):
            odd.append(f"{gpu} reaches its nearest NIC over {min(nics, key=LINKS.index)}")
    if any(kind.startswith("NV") for kind in kinds):
        odd += [f"{gpu} and {other} are linked by {link}, not NVLink"
                for gpu, row in links.items() for other, link in row.items()
                if gpu < other and other in links and not link.startswith("NV")]  # fmt: skip
    said = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return said or "one GPU", "; ".join(odd)


def libraries(node: Node) -> Iterator[Row]:
    """Check what trains on GPUs: torch's CUDA, NCCL, Transformer Engine."""
    if not node.has_gpus:
        return
    from cray_agents.trainers.models.layer_choice import INSTALL_TE

    text, why = ask(*python("-c", LIBRARIES), seconds=doctor.IMPORT_SECONDS)
    said: Row = {"gpus": 0, "why": why} if why else json.loads(text.splitlines()[-1])
    found = f"torch {said.get('torch')}, CUDA {said.get('cuda')}, {said['gpus']} GPUs"
    good = "why" not in said and said["gpus"] >= max(1, node.gpus or 0)
    yield judge("CUDA", good, said.get("why", found))
    yield judge("NCCL", "nccl" in said, said.get("nccl", "not usable"))
    te, why = said.get("te", ""), said.get("te_why", "")
    yield check("Transformer Engine", bool(te), te or why or "none", INSTALL_TE, required=bool(why))


# ---- the fabric
def read_counters(node: Node) -> Counter[str]:
    """Return the error counters of all ports, such as `mlx5_0:1 symbol_error`."""
    counts = Counter[str]()
    for port, folder in node.ports.items():
        for name in COUNTERS:
            for path in (folder / "counters" / name, folder / "hw_counters" / name):
                with suppress(OSError, ValueError):
                    counts[f"{port} {name}"] += int(path.read_text())
    return counts


def fabric(node: Node) -> Iterator[Row]:
    """Check the ports of InfiniBand, RoCE or EFA, their errors, and what RDMA needs."""
    if not node.ports:
        needed = node.job.fabric in ("efa", "ucx")
        if needed or node.has_gpus:
            yield judge("fabric", False, "no RDMA device: NCCL takes TCP", required=needed)
        return
    states = {name: (port / "state").read_text().split()[-1] for name, port in node.ports.items()}
    down = [f"{name} is {state}" for name, state in states.items() if state != "ACTIVE"]
    rates = Counter((port / "rate").read_text().strip() for name, port in node.ports.items()
                    if states[name] == "ACTIVE")  # fmt: skip
    said = "; ".join([*(f"{count} x {rate}" for rate, count in rates.items()), *down])
    yield judge("fabric", not down and len(rates) == 1, said, required=not rates)
    bad = [f"{key} {count}" for key, count in read_counters(node).items() if count]
    yield judge("fabric counters", not bad, "; ".join(bad) or "no errors", required=False)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    free = limit == resource.RLIM_INFINITY
    yield judge("locked memory", free, "unlimited" if free else f"{limit >> 10} KiB")
    devices = [*(node.host / "dev/infiniband").glob("uverbs*")]
    usable = any(os.access(device, os.R_OK | os.W_OK) for device in devices)
    yield judge("RDMA devices", usable, f"{len(devices)} in /dev/infiniband")


# ---- this machine as a node of Slurm
def shared_memory(node: Node) -> Iterator[Row]:
    """Check the memory that processes share, of which pods and containers often have little."""
    disk = os.statvfs(node.host / "dev/shm")
    gib = disk.f_blocks * disk.f_frsize / 2**30
    yield judge("shared memory", gib >= SHM_GIB, f"{gib:.3g} GiB in /dev/shm")


def slurm_here(node: Node) -> Iterator[Row]:
    """Check that Slurm's programs reach the controller with their key, and the prolog is here."""
    if node.in_job and shutil.which("scontrol") is None:  # in a container, which needs none
        return
    text, why = ask("scontrol", "ping", seconds=20)
    said = " ".join((text or why).split())
    yield judge("Slurm's controller", " UP" in text, said, required=node.in_job)
    if " UP" not in text:
        return
    values = [value for name, value in slurm_configuration().items() if name in SCRIPTS]
    scripts = [path for value in values for path in value.split(",") if path.startswith("/")]
    lost = [path for path in scripts if "*" not in path and not os.access(path, os.X_OK)]
    said = f"not here, or not executable: {', '.join(lost)}" if lost else ", ".join(scripts)
    yield judge("prolog", not lost, said or "none", required=node.in_job)


def container(node: Node) -> Iterator[Row]:
    """Check the runtime that starts the site's container, and its image."""
    if (chosen := node.job.container) is None or node.in_job:
        found = ", ".join(filter(shutil.which, ("enroot", "apptainer", "podman"))) or "none"
        said = f"these checks ran in {chosen.image}" if chosen else f"not set; installed: {found}"
        yield judge("container runtime", True, said)
        return
    pyxis, option = chosen.runtime == "pyxis", "--container-image"
    text, why = ask(*(("srun", "--help") if pyxis else ("apptainer", "--version")))
    why = why or f"srun has no {option}" * (pyxis and option not in text)
    yield judge("container runtime", not why, why or chosen.runtime)
    there = not chosen.image.startswith("/") or Path(chosen.image).exists()
    yield judge("container image", there, chosen.image)


# ---- the shared root
def shared_root(node: Node) -> Iterator[Row]:
    """Check from this machine what the platform relies on, and how fast the root is."""
    from cray_agents.trainers.job.failures.health_gate import (
        ROOT_TRIALS,
        SKEW_SECONDS,
        check_root,
        root_speed,
    )

    folder = node.root / f".{new_id('preflight')}"
    try:
        folder.mkdir(parents=True)
        check_root(folder)
        yield judge("root: write, fsync, rename", True, "works")
        for name, trial in ROOT_TRIALS.items():
            try:
                said = "works" if trial(folder) else "a name was given twice"
            except OSError as error:
                said = error.strerror or str(error)
            yield judge(f"root: {name}", said == "works", said)
        began, clock = time.time(), folder / "clock"
        durable.write_file(clock, b"now")
        at = clock.stat().st_mtime  # to write it may have taken seconds
        skew = at - min(max(at, began), time.time())
        far, said = abs(skew) > SKEW_SECONDS, f"{skew:+.2f} s from this machine's"
        yield judge("root: clock", abs(skew) < SKEW_WARNING, said, required=far)
        slow, wrote, read = root_speed(folder)
        yield judge("root: durable file", slow < SLOW_MS, f"{slow:.1f} ms", required=False)
        said = f"writes {wrote:.0f} MB/s, reads {read:.0f} MB/s: 16 GB in {16e3 / read:.0f} s"
        yield judge("root: throughput", min(wrote, read) >= SLOW_MB, said, required=False)
    except (SetupError, OSError) as error:
        yield judge("shared root", False, str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- a cluster: Slurm's own settings
def slurm_configuration() -> dict[str, str]:
    """Return Slurm's settings by name, those of cgroups too; none where no controller answers."""
    text = run_client("scontrol", "show", "config") or ""
    return dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))


def check_slurm(config: Config, slurm: Slurm) -> Iterator[Row]:
    """Check the partitions, limits, preemption and nodes of a site's Slurm for a root's jobs."""
    from cray_agents.trainers.planning.cluster_resources import resources_of

    found, text = slurm_configuration(), run_client("scontrol", "-o", "show", "partition") or ""
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]
    partitions = {row["PartitionName"]: row for row in rows if "PartitionName" in row}
    default = [name for name, row in partitions.items() if row.get("Default") == "YES"]
    options = [option for kind in KINDS for option in slurm.partition(kind) or ["--partition="]]
    for name in sorted({option.partition("=")[2] or "".join(default) for option in options}):
        row = partitions.get(name, {})
        facts = [f"{key} {row[key]}" for key in ("State", "MaxTime", "MaxNodes") if key in row]
        yield judge("partition", row.get("State") == "UP", f"{name}: {', '.join(facts) or 'none'}")
        mode, grace = row.get("PreemptMode", "OFF"), row.get("GraceTime", "0")
        preempts = found.get("PreemptType", "preempt/none") != "preempt/none" and mode != "OFF"
        brief = not grace.isdecimal() or int(grace) < GRACE_SECONDS
        bad = preempts and ("SUSPEND" in mode or brief)
        said = f"{name}: {mode}, after {grace} s" if preempts else f"{name}: none"
        yield judge("preemption", not bad, said, required=False)
    work = resources_of(config)
    command = Command(
        name="preflight-trial", argv=["true"], directory="/", log="/dev/null", ranks=work.ranks,
        nodes=work.nodes, cpus_per_rank=work.cpus_per_rank, gpus=work.gpus is not None,
        minutes=work.minutes)  # fmt: skip
    try:
        slurm.try_out(command)
        yield judge("a training job", True, f"{work}: Slurm would take it")
    except SchedulerError as error:
        yield judge("a training job", False, f"{work}: {error}")
    states = node_states(run_client("sinfo", "-h", "-N", "-o", "%N %t") or "")
    down = [f"{node} is {state}" for node, state in states.items() if state.startswith(UNUSABLE)]
    yield judge("nodes", not down, "; ".join(down) or f"{len(states)} are up", required=False)


# ---- a cluster: a job on its nodes, which doctor talks to in files
def tell(folder: Path, kind: str, who: str, said: Any) -> None:
    """Write what a node, or DOCTOR, says."""
    text = checksums.with_crc(canonical({"said": said}))
    durable.replace_file(folder / f"{kind}.{who}.json", text)


def hear(
    folder: Path, kind: str, names: Iterable[str], seconds: float,
    going: Callable[[], set[str]] = lambda: {DOCTOR},
) -> dict[str, tuple[float, Any]]:  # fmt: skip
    """Return what each says, and when it was seen here (unix seconds).

    Those that say nothing are left out, after `seconds` or when they are no longer `going`.
    """
    heard: dict[str, tuple[float, Any]] = {}
    files, deadline = {name: f"{kind}.{name}.json" for name in names}, time.monotonic() + seconds
    while True:
        alive = going() if time.monotonic() < deadline else set()
        present = durable.names_in(folder)
        for name in [name for name, file in files.items() if file in present]:
            now = time.time()
            with suppress(OSError, Corrupt):  # not seen whole yet
                heard[name] = now, checksums.read_json(folder / files[name])["said"]
                del files[name]
        if not alive.intersection(files):
            return heard
        time.sleep(POLL)


def main(folder: Path) -> None:
    """Check this node for `doctor --cluster`, then answer it."""
    from cray_agents.trainers.job.failures.health_gate import claim_names, sum_over_nodes
    from cray_agents.trainers.job.failures.rank_monitor import node_name

    spec, me = checksums.read_json(folder / "spec.json"), node_name()
    job = JobSettings.model_validate(spec["job"])
    tell(folder, "report", me, check_node(Node(Path(spec["root"]), job, spec["gpus"], in_job=True)))
    for seen, _ in hear(folder, "new", [DOCTOR], REPORT_SECONDS).values():
        (folder / "value.json").read_bytes()  # so that an old copy of it may be kept
        tell(folder, "new", me, seen)
    tell(folder, "changed", me, watch_change(folder / "value.json"))
    tell(folder, "race", me, claim_names(folder, RACES))
    for _, names in hear(folder, "sum", [DOCTOR], 3 * ANSWER_SECONDS).values():
        if me in names:
            try:
                said = [True, sum_over_nodes(folder, names.index(me), len(names), SUM_SECONDS)]
            except (ImportError, CrayError, RuntimeError, OSError) as error:
                said = [False, str(error).partition("\n")[0]]
            tell(folder, "sum", me, said)


def watch_change(file: Path) -> str:
    """Read a file until it has its second value. Return what was wrong; "": nothing."""
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        while (value := checksums.read_json(file)["value"]) == 1:
            if time.monotonic() > deadline:
                return f"it had its old content after {ANSWER_SECONDS:g} s"
            time.sleep(POLL)
    except (OSError, Corrupt, LookupError) as error:
        return f"it was not whole: {error}"
    return "" if value == 2 else f"it held {value!r}"


def check_cluster(config: Config) -> list[Row]:
    """Return the rows of Slurm, of its nodes with room, and between them.

    Raises BadInput where no Slurm answers, SchedulerError if it takes no job.
    """
    if site_cluster() is None:
        problem = "no Slurm controller answers here (`scontrol ping`): run this where jobs are"
        problem += " submitted, or check this machine alone by --node"
        raise BadInput(problem, param="cluster")
    home = open_root(config, new=True)
    settings = with_shared_root(config.job, str(home.root)).model_copy(update={"tasks": "node"})
    slurm = Slurm(home.slurm, options=config.slurm_options, settings=settings,
                  root=f"preflight of {identity_of(home)}")  # fmt: skip
    rooms = slurm.room("training")
    gpus = max((room.gpus for room in rooms), default=0) if config.train_gpus != "off" else 0
    gpus = min(gpus, config.train_gpus_per_node or gpus)
    ranks = max(1, gpus)
    names = [room.name for room in rooms if room.free_gpus >= gpus and room.free_cores >= ranks]
    rows = [*check_slurm(config, slurm)]
    for room in rooms:
        if room.name not in names:
            said = f"not checked: {room.free_cores} cores and {room.free_gpus} GPUs are free"
            rows.append(at(room.name, judge("an answer", False, said, required=False)))
    if not names:
        return [*rows, judge("an answer", False, "no node has room")]
    folder = home.root / f".{new_id('preflight')}"
    folder.mkdir()
    spec = {"root": str(home.root), "job": config.job.model_dump(mode="json"), "gpus": gpus}
    durable.write_file(folder / "spec.json", checksums.with_crc(canonical(spec)))
    command = Command(
        name=folder.name.strip("."), argv=python("-m", __name__, str(folder)), ranks=ranks,
        directory=str(folder), log=str(folder / "log.txt"), gpus=bool(gpus), minutes=MINUTES,
        spare_nodes=len(names) - 1, slurm_options=[f"--nodelist={','.join(names)}"])  # fmt: skip
    ledger = home.slurm / LEDGER / command.name
    try:
        with errors.status(f"checking {len(names)} nodes"):
            slurm.submit(command)
            rows += follow(slurm, command, names, config.lease_seconds, ledger)
    finally:
        slurm.cancel(command.name)
        durable.remove(folder)
        durable.remove(ledger)
    return rows


def follow(
    slurm: Slurm, command: Command, names: Sequence[str], lease: float, ledger: Path
) -> Iterator[Row]:
    """Yield the rows that nodes report as the job runs, then those of what they answer."""
    deadline = time.monotonic() + QUEUE_SECONDS
    while (status := slurm.status(command.name)).state == "queued":
        if time.monotonic() > deadline:
            why, step = describe_reason(status.reason)
            yield check("an answer", False, f"the job waits: {why}", step)
            return
        time.sleep(1)

    folder, log = Path(command.directory), Path(command.log)

    def going() -> set[str]:  # the batch script notes whose step has ended
        left = {path.name[len("left-") :] for path in ledger.glob("*.nodes/left-*")}
        return set(names) - left if slurm.status(command.name).state == "running" else set()

    def silence(name: str) -> Row:
        end = log.read_text(errors="replace")[-300:] if log.exists() else "it has no log"
        return at(name, judge("an answer", False, f"none in time: {' '.join(end.split())}"))

    heard = hear(folder, "report", names, REPORT_SECONDS, going)
    yield from (at(name, row) for name, (_, rows) in heard.items() for row in rows)
    yield from (silence(name) for name in sorted(set(names) - heard.keys()))
    yield from talk(folder, sorted(heard), lease, going, silence)


def talk(
    folder: Path, names: Sequence[str], lease: float,
    going: Callable[[], set[str]], silence: Callable[[str], Row],
) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of what goes between the nodes and here: this module's first lines."""
    from cray_agents.trainers.job.failures.health_gate import SKEW_SECONDS, claim_names

    durable.write_file(folder / "value.json", checksums.with_crc(canonical({"value": 1})))
    won = {"this host": claim_names(folder, RACES // 2)}  # which no node may win now
    began = time.time()
    tell(folder, "new", DOCTOR, "")
    seen = hear(folder, "new", names, ANSWER_SECONDS, going)
    for name, (now, clock) in seen.items():
        yield at(name, judge_delay("a new file", now - began, lease))
        skew, doubt = clock - (now + began) / 2, (now - began) / 2
        said, far = f"{skew:+.2f} s from here, give or take {doubt:.2f}", abs(skew) - doubt
        row = judge("clock", far < SKEW_WARNING, said, required=far > SKEW_SECONDS)
        yield at(name, row)
    durable.replace_file(folder / "value.json", checksums.with_crc(canonical({"value": 2})))
    began = time.time()
    for name, (now, said) in hear(folder, "changed", seen, 2 * ANSWER_SECONDS, going).items():
        row = judge_delay("a changed file", now - began, lease)
        yield at(name, judge("a changed file", False, said) if said else row)
    raced = hear(folder, "race", seen, ANSWER_SECONDS, going)
    yield judge_race(won | {name: claims for name, (_, claims) in raced.items()})
    yield from (silence(name) for name in names if name not in raced)
    if len(raced) > 1:
        tell(folder, "sum", DOCTOR, sorted(raced))
        sums = hear(folder, "sum", raced, 2 * SUM_SECONDS, going)
        for name in raced:
            good, said = sums[name][1] if name in sums else (False, "no answer")
            yield at(name, judge("a sum over the nodes", good, said))


def at(node: str, row: Row) -> Row:
    """Return a row with its node."""
    return {"node": node, **row}


def judge_race(won: dict[str, list[str]]) -> Row:
    """Return the row of the claims that each node won."""
    odd = []
    for one in (f"{kind} {number}" for kind in ("O_EXCL", "link") for number in range(RACES)):
        who = [name for name, claims in won.items() if one in claims]
        odd += [f"{one} by {' and '.join(who) or 'none'}"] * (len(who) != 1)
    said = f"{len(odd)} of {2 * RACES} were won wrongly: {', '.join(odd[:2])}" if odd else ""
    return judge("claims of one name", not odd, said or f"one winner of each of {2 * RACES}")


def judge_delay(name: str, seconds: float, lease: float) -> Row:
    """Return the row of an answer: leases must be renewed and seen well within their time."""
    said = f"answered after {seconds:.2f} s"
    return judge(name, seconds < lease / 2, said, required=seconds > lease)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
