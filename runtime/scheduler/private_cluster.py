"""Private cluster: a real Slurm of one host, for a laptop and CI (munged, slurmctld, slurmd).

`choose.py` starts one where no site's Slurm answers; `slurm.py` talks to it as to any other. The
directory holds the controller's state, so that job ids and queued jobs survive a restart. Sockets,
spools and the key are in a short folder under the system's temporary directory, which the symlink
`run` names while the cluster is up. Unix socket paths end at 107 bytes, and munged wants no
group-writable parents.

The cluster serves only its own user and root. Any process that reaches munged's socket can
authenticate, and a slurmd that is not root's runs all steps as its own user. So no other user may
enter the short folder, the partition takes jobs of no other user, and the daemons and their clients
listen on loopback alone.

A job that ran when its cluster died is not run again: it comes back as NODE_FAIL. Read next:
supervised.py, which ends all processes; slurm.py, the client.
"""

import ipaddress
import os
import pwd
import random
import re
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cray_agents.errors import SchedulerError, SetupError
from cray_agents.runtime.disk import durable
from cray_agents.runtime.scheduler.gpu_placement import host_gpus
from cray_agents.runtime.scheduler.site_environment import (
    INSTALL_LINE,
    clean_environment,
    missing_programs,
)
from cray_agents.runtime.scheduler.supervised import Supervised, remove_scratch

START_SECONDS = 20.0
#: Group of the partition. Root and SlurmUser may always use it, so no other user is left.
PARTITION_GROUP = "root"
PORTS = range(20000, 32000)  # below the ephemeral range
FIXED_SETTINGS = """\
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=1,bf_continue
PriorityType=priority/basic
JobRequeue=0
ReturnToService=2
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
KillWait=10
InactiveLimit=0
EnforcePartLimits=ALL
MinJobAge=864000
UnkillableStepTimeout=60
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
LogTimeFormat=iso8601_ms
"""


class PrivateCluster:
    """One private cluster: `start` it, use `environment` to talk to it, `close` it.

    Args:
        nodes: virtual nodes on this host.
        cpus: of each node. Default: those that this process may use.
        gpus: ids of the GPUs that jobs may use, as CUDA_VISIBLE_DEVICES names them. Default: those
            of this host that this process may use. Slurm only counts them: batch_script.py turns
            its numbers into the ids.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 1,
        cpus: int | None = None,
        gpus: Sequence[str] | None = None,
    ) -> None:
        self.directory = directory.resolve()
        self.nodes = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
        self.cpus = cpus or len(os.sched_getaffinity(0))
        self.gpus = host_gpus() if gpus is None else list(gpus)
        self.configuration = self.directory / "slurm.conf"
        self.last_id = self.directory / "last-id"  # holds the highest job id ever returned
        self._supervised: Supervised | None = None

    @property
    def environment(self) -> dict[str, str]:
        """A client's environment. Jobs inherit its mark, by which a sweep finds them."""
        mark = {"CRAY_AGENTS_SUPERVISED": str(self.directory)}
        return clean_environment({"SLURM_CONF": str(self.configuration), **mark})

    @property
    def alive(self) -> bool:
        """True while the supervisor lives. It keeps the daemons up."""
        return self._supervised is not None and self._supervised.alive

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        if self._supervised is None:
            raise SchedulerError("the private Slurm cluster is not started")
        return self._supervised.pid

    def start(self) -> None:
        """Start the cluster, also again after a crash. Raises SetupError with the logs' tails."""
        if missing := missing_programs():
            raise SetupError(
                f"Slurm is not installed here: {', '.join(missing)}. As root: {INSTALL_LINE}"
            )
        user_name()
        loopback_address()  # like user_name, not helped by a second attempt
        self.close()
        for folder in ("state", "log"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        for attempt in (1, 2):  # a free port may be taken a moment later
            try:
                self._start()
                return
            except SchedulerError as error:
                tails = self._log_tails()
                self.close()
                if attempt == 2:
                    raise SetupError(f"no private Slurm cluster: {error}\n{tails}") from error

    def close(self) -> None:
        """Stop the cluster and all its jobs, within about a second. Safe to call twice."""
        if self._supervised:
            self._supervised.close()
            self._supervised = None
            remove_scratch(self.directory / "run")

    def remember_id(self, job_id: int) -> None:
        """Remember an id that a caller knows, so that no later job gets it."""
        durable.replace_file(self.last_id, str(job_id).encode())

    def resume_drained(self) -> None:
        """Resume drained nodes. Called while jobs wait.

        slurmd drains its node when a controller that was killed asks it to start a running job
        again. On a private cluster no administrator drains nodes, or would resume them. A node that
        is down stays so: Slurm would send jobs to it.
        """
        if drained := set(self._call("sinfo", "-h", "-N", "-t", "drain", "-o", "%N").split()):
            self._call("scontrol", "update", f"nodename={','.join(drained)}", "state=resume")

    def _start(self) -> None:
        link, short = self.directory / "run", tempfile.gettempdir()
        short = short if len(short) < 40 else "/tmp"
        run = Path(tempfile.mkdtemp(prefix="cray-slurm-", dir=short))  # this user's alone
        self._supervised = supervised = Supervised(self.directory, run)
        remove_scratch(link)
        link.symlink_to(run)
        (run / "home").symlink_to(self.directory)  # slurm.conf takes no path with spaces
        self._write_configuration(run)

        def daemon(name: str, *argv: str, polite: bool = False) -> None:
            log = str(self.directory / "log" / f"{name}.out")
            options = {"env": self.environment, "cwd": str(run), "log": log, "polite": polite}
            supervised.start(name, list(argv), daemon=True, **options)

        daemon("munged", "munged", *munge_options(run))
        self._wait_until((run / "munge.sock").exists, "munged's socket")
        daemon("slurmctld", "slurmctld", "-D", polite=True)
        # first the controller: a slurmd without one tries again only after a second
        self._wait_until(lambda: "UP" in self._call("scontrol", "ping"), "slurmctld")
        self._fail_lost_jobs()
        for node in self.nodes:
            daemon(f"slurmd-{node}", "slurmd", "-D", "-N", node)
        self._wait_until(self._nodes_ready, "its nodes")
        supervised.keep_daemons()

    def _fail_lost_jobs(self) -> None:
        """Turn the jobs that ran when the cluster died into NODE_FAIL."""
        if self._call("squeue", "-h", "-a", "-t", "running,suspended,completing", "-o", "%A"):
            node = f"nodename={','.join(self.nodes)}"
            self._call("scontrol", "update", node, "state=down", "reason=cluster-restarted")
            self._call("scontrol", "update", node, "state=resume")

    def _nodes_ready(self) -> bool:
        states = self._call("sinfo", "-h", "-N", "-o", "%t").split()
        usable = {"idle", "mix", "alloc", "comp"}  # not idle: queued jobs start at once
        return len(states) == len(self.nodes) and set(states) <= usable

    def _call(self, *argv: str) -> str:
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout.strip()

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if not self.alive or time.monotonic() > deadline:
                raise SchedulerError(f"{what} did not come up")
            time.sleep(0.02)

    def _log_tails(self, lines: int = 8) -> str:
        tails = []
        for log in sorted((self.directory / "log").glob("*.out")):
            last = log.read_text(errors="replace").splitlines()[-lines:]
            tails.append("\n".join([f"--- {log}", *last]))
        return "\n".join(tails)

    def _write_configuration(self, run: Path) -> None:
        """Write the daemons' configuration files."""
        address = loopback_address()
        controller, *ports = free_ports(1 + len(self.nodes), address)
        host = socket.gethostname().split(".")[0]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (1 << 20)  # MiB
        # a killed controller may not have saved its last jobs
        first_id = int(self.last_id.read_text()) + 1 if self.last_id.exists() else 1
        lines = [
            f"ClusterName={self._cluster_name()}",
            f"SlurmctldHost={host}({address})",
            f"SlurmctldPort={controller}",
            f"SlurmUser={user_name()}",
            f"SlurmdUser={user_name()}",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            f"AuthInfo=socket={run}/munge.sock,cred_expire=5",
            f"FirstJobId={first_id}",
            f"StateSaveLocation={run}/home/state",
            f"SlurmdSpoolDir={run}/%n",
            f"SlurmctldPidFile={run}/slurmctld.pid",
            f"SlurmdPidFile={run}/slurmd-%n.pid",
            FIXED_SETTINGS.rstrip(),
        ]
        gres = ""
        if self.gpus:
            files = [run / f"gpu{number}" for number in range(len(self.gpus))]
            for file in files:  # Slurm wants devices that it can number, and opens none
                file.symlink_to(os.devnull)
            devices = f"Name=gpu File={','.join(map(str, files))}"
            nodes = f"NodeName={','.join(self.nodes)}"
            (self.directory / "gres.conf").write_text(f"AutoDetect=off\n{nodes} {devices}\n")
            lines.append("GresTypes=gpu")
            gres = f" Gres=gpu:{len(self.gpus)}"
        for node, port in zip(self.nodes, ports, strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr={address} Port={port} Boards=1 "
                f"SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1 "
                f"RealMemory={memory}{gres} State=UNKNOWN"
            )
        lines.append(
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP "
            f"AllowGroups={PARTITION_GROUP}"
        )
        self.configuration.write_text("\n".join(lines) + "\n")
        if slurm_version() >= (24, 5):  # older ones need no cgroup.conf and do not know this word
            (self.directory / "cgroup.conf").write_text("CgroupPlugin=disabled\n")

    def _cluster_name(self) -> str:
        """Return the cluster's name, made once: a controller refuses another name's state."""
        file = self.directory / "cluster-name"
        if not file.exists():
            file.write_text(f"cray{secrets.token_hex(4)}")
        return file.read_text().strip()


def munge_options(run: Path) -> list[str]:
    """Return the options for a munged in the foreground, with its own key, socket and seed.

    Without --force it would not start where other users cannot reach its socket, as intended here.
    """
    key = run / "munge.key"
    key.touch(mode=0o400)
    key.chmod(0o600)
    key.write_bytes(secrets.token_bytes(128))
    return [
        "--foreground",
        "--force",
        "--num-threads=2",
        "--group-update-time=-1",
        f"--key-file={key}",
        f"--socket={run}/munge.sock",
        f"--pid-file={run}/munged.pid",
        f"--seed-file={run}/munge.seed",
        f"--log-file={run}/munged.log",
    ]


def loopback_address() -> str:
    """Return the address that the daemons listen on: the one of this host's name.

    Daemons that may not listen on all addresses use this one, and no option sets it. Raises
    SetupError if it is not a loopback address, as other hosts could then reach the daemons.
    """
    name = socket.gethostname()
    remedy = f"write the line `127.0.0.1 {name}` into /etc/hosts"
    try:
        addresses = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(
            f"this host's name, {name}, leads nowhere ({error}), and Slurm's daemons listen where "
            f"it leads: {remedy}"
        ) from error
    address = str(addresses[0][4][0])
    if not ipaddress.ip_address(address).is_loopback:
        raise SetupError(
            f"this host's name, {name}, leads to {address}, and Slurm's daemons would listen "
            f"there, for all who can reach it: {remedy}"
        )
    return address


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return ports of an address that no process listens on now."""
    ports: list[int] = []
    for port in random.sample(PORTS, 500):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise SetupError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")


def slurm_version() -> tuple[int, int]:
    """Return Slurm's version, such as (22, 5)."""
    done = subprocess.run(
        ["slurmctld", "-V"], env=clean_environment(), capture_output=True, text=True, check=True
    )
    match = re.search(r"(\d+)\.(\d+)", done.stdout)
    if not match:
        raise SetupError(f"slurmctld -V says {done.stdout.strip()!r}: no version")
    return int(match[1]), int(match[2])


def user_name() -> str:
    """Return this process's user, whom the daemons run as. Raises SetupError if it has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise SetupError(
            f"user {os.getuid()} has no name on this host, and Slurm runs nothing for such a one: "
            "add it to /etc/passwd"
        ) from error
