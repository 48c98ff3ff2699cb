"""Slurm scheduler: run commands as jobs of a site's cluster, or of a private one on this host.

`MegatronTrainer` calls this through `ports.Scheduler`; `choose.py` opens it. The text interfaces
used (sbatch, squeue, scontrol, scancel) are the same in Slurm 22.05 to 26.05. A job is named after
its command and its shared root. So it is found again after any crash on either side, and never
confused with the same job of another root. Read next: batch_script.py, a job's script;
private_cluster.py.
"""

import hashlib
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cray_agents.config.job_section import JobKind, JobSettings
from cray_agents.errors import Corrupt, SchedulerError
from cray_agents.ports import Command, CommandState, CommandStatus
from cray_agents.records import canonical
from cray_agents.runtime.controller_lease import Guard, unguarded
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.scheduler.batch_script import REFUSED, batch_script
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import INSTALL_LINE, clean_environment

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
SEPARATOR = "\x1f"  # in no job name
QUEUE_SECONDS = 1.9  # that an output of a site's squeue is used: just less than a poll takes
PRIVATE_QUEUE_SECONDS = 0.3  # ... of a private cluster's, which nobody else asks
HELP_INTERVAL = 2.0  # between checks for drained nodes while jobs wait
CLIENT_SECONDS = 60.0  # that one client may take
PATIENCE_SECONDS = 20.0  # that a controller may be away

LEDGER = "ledger"  # folder of claims, exit codes and orders to leave
PREEMPTED = ".preempted"  # in the ledger: how the name of a job ends that was asked to leave
SIGNALLED = 128  # and the signal's number: the exit code of a process that a signal ended
TOP_PRIORITY = "--priority=4294901760"  # above that of all jobs of a private cluster
NODE_COLUMNS = ("NodeList", "StateCompact", "CPUsState", "Gres", "GresUsed")
GPU_COUNT = re.compile(r"\bgpu(?::[^:,()]+)?:([0-9]+)")

#: Slurm's job states by our names. Any other state holds resources and counts as running.
QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
FAILED = {
    "FAILED",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "TIMEOUT",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "REVOKED",
}
#: How the states of nodes begin that take no job.
UNUSABLE = ("down", "drain", "drng", "fail", "maint", "unk", "plnd", "pow", "inval")
UNREACHABLE = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "connection reset",
    "transport endpoint",
    "broken pipe",
    "zero bytes",
    "temporarily",
    "try again",
    "munge",
)


@dataclass(frozen=True)
class Job:
    """A line of squeue."""

    id: int
    state: CommandState
    word: str  # Slurm's own name of the state
    reason: str
    name: str
    nodes: str = ""  # as Slurm abbreviates several
    since: float = 0.0  # unix seconds of its start; 0 before
    script_node: str = ""  # where its batch script runs

    @property
    def lost_script(self) -> str:
        """The node that was lost with the batch script, if the job outlived it; else ""."""
        known = self.script_node and self.nodes and self.state != "queued"
        return self.script_node if known and self.script_node not in node_names(self.nodes) else ""


@dataclass(frozen=True)
class NodeRoom:
    """A node that takes jobs: its cores and GPUs, and those that no job has."""

    name: str
    cores: int
    free_cores: int
    gpus: int = 0
    free_gpus: int = 0


@dataclass(frozen=True)
class Preemption:
    """The time (unix seconds) at which a job was asked to leave its nodes, and the reason."""

    time: float
    why: str


class Slurm:
    """A Scheduler over a Slurm cluster. `close` also stops a private cluster.

    Args:
        directory: a folder on the shared root, for claims and exit codes.
        options: for the site's sbatch, such as `("--partition=gpu", "--account=me")`.
        settings: the site's `[job]`.
        root: the shared root's id, where another root may have jobs of the same names.

    `guard` is called before a job is submitted or cancelled: a controller's `check`.
    """

    name = "slurm"

    def __init__(
        self,
        directory: Path,
        cluster: PrivateCluster | None = None,
        *,
        options: Sequence[str] = (),
        settings: JobSettings | None = None,
        root: str = "",
        reason: str = "",
    ) -> None:
        self.reason = reason
        self.settings = settings or JobSettings()
        self.cluster = cluster
        self._ledger = directory.resolve() / LEDGER
        self._options = options
        self.guard: Guard = unguarded
        self._suffix = f".{hashlib.sha256(root.encode()).hexdigest()[:8]}" if root else ""
        self._closed = False
        self._next_help = 0.0
        self._lock = threading.RLock()
        self._queue: dict[str, list[Job]] = {}
        self._queue_time = float("-inf")
        self._exits: dict[tuple[int, str], int | None] = {}
        self._failed_nodes: dict[int, str] = {}

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def on_this_host(self) -> bool:
        """True if all commands run on this host, as those of a private cluster do."""
        return self.cluster is not None

    @property
    def gpus(self) -> Sequence[str] | None:
        """The ids of this host's GPUs that commands may use; None if they run elsewhere."""
        return self.cluster.gpus if self.cluster else None

    @property
    def _queue_seconds(self) -> float:
        return PRIVATE_QUEUE_SECONDS if self.cluster else QUEUE_SECONDS

    def close(self) -> None:
        """Stop a private cluster and its jobs. A site's jobs go on. Safe to call twice."""
        self._closed = True
        if self.cluster:
            self.cluster.close()

    def submit(self, command: Command) -> str:
        """Queue a command, or find its live job. Raises SchedulerError.

        A job that waits leaves out the command's nodes from then on, and no others.
        """
        if not NAME.fullmatch(command.name):
            raise SchedulerError(f"{command.name!r} is no job's name: it must match {NAME.pattern}")
        script, left_out = self.script(command), self._left_out(command)
        options = [f"--exclude={left_out}"] if command.exclude and left_out else []
        if self.cluster and command.kind == "replica":
            options.append(TOP_PRIORITY)  # a node that training leaves for it is not training's
        with self._lock:
            (self._ledger / command.name).mkdir(parents=True, exist_ok=True)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while True:
                # also after an unclear failure: Slurm may have accepted the job
                if live := self._live_jobs(command.name):
                    if live[-1].state == "queued":
                        self._leave_out(command.name, live[-1].id, left_out)
                    return str(live[-1].id)
                self.guard()
                try:
                    printed = self._run("sbatch", "--parsable", *options, script=script)
                    break
                except Unreachable as error:
                    self._wait_to_retry(deadline, error)
            self._queue_time = float("-inf")
            with _reading("sbatch", printed):
                job_id = int(printed.strip().split(";")[0])  # "id" or "id;cluster"
            if self.cluster:
                self.cluster.remember_id(job_id)
            return str(job_id)

    def _leave_out(self, name: str, job_id: int, nodes: str) -> None:
        """Let a job that waits leave out these nodes, and no others. Raises SchedulerError."""
        self.guard()
        try:
            self._call("scontrol", "update", f"jobid={job_id}", f"excnodelist={nodes}")
        except SchedulerError:
            jobs = self._live_jobs(name)
            if any(job.id == job_id and job.state == "queued" for job in jobs):
                raise  # else it has started meanwhile

    def script(self, command: Command) -> str:
        """Return the batch script of a command. Raises SchedulerError."""
        lock = self.cluster.directory / "run" / f"{command.name}.lock" if self.cluster else None
        named = command.model_copy(update={"name": self.job_name(command.name)})
        ledger = self._ledger / command.name
        return batch_script(named, ledger, lock, self.gpus or (), self.settings, self._options)

    def status(self, name: str) -> CommandStatus:
        """Return the status of the name's newest job. Raises SchedulerError without an answer."""
        jobs = self._jobs().get(self.job_name(name))
        if not jobs:
            return self._status_from_ledger(name)
        job = max(jobs, key=lambda job: job.id)
        if job.lost_script and job.state == "running" and not self._has_steps(job):
            self.guard()
            self._call("scancel", str(job.id))  # nobody else would end it
        elif job.state in ("queued", "running"):
            return CommandStatus(state=job.state, id=str(job.id), reason=job.reason)
        code = self._exit_code(job)
        if code != 0 and (why := self._preempted(name, job.id, code)):
            return CommandStatus(state="failed", id=str(job.id), exit_code=code, reason=why)
        if job.lost_script and not self._we_cancelled(name, job):
            why = f"NODE_FAIL: {job.lost_script}, which ran the job's script, was lost"
            return CommandStatus(state="failed", id=str(job.id), reason=why, node=job.lost_script)
        if job.state == "succeeded":
            return CommandStatus(state="succeeded", id=str(job.id), exit_code=code)
        reason = f"{job.word}: {job.reason}" if job.reason else job.word
        lost = job.state == "cancelled" or code == REFUSED
        if lost and self.cluster and not self._we_cancelled(name, job):
            # by a controller that was killed before it saved the start: it may start the job again
            known = self._status_from_ledger(name)
            if known.id == str(job.id) and known.exit_code == 0:
                return known
            if job.state == "cancelled":
                reason = "its controller was killed, and did not know it any more"
                return CommandStatus(state="failed", id=str(job.id), exit_code=code, reason=reason)
        if job.state == "failed" and any((self._ledger / name).glob(f"{job.id}.*.term")):
            reason = "TIMEOUT: it ended when it got SIGTERM, before its time limit"
        if code == REFUSED:
            reason = "this start was refused, see the log"
        node = self._failed_node(job)
        return CommandStatus(
            state=job.state, id=str(job.id), exit_code=code, reason=reason, node=node
        )

    def cancel(self, name: str) -> None:
        """Send SIGTERM to all processes of the job, and SIGKILL after the cluster's KillWait."""
        with self._lock:
            if ids := [str(job.id) for job in self._live_jobs(name)]:
                self.guard()
                (self._ledger / name).mkdir(parents=True, exist_ok=True)
                for job_id in ids:
                    (self._ledger / name / f"{job_id}.cancelled").touch()
                self._call("scancel", *ids)
                self._queue_time = float("-inf")

    def preempt(self, name: str, why: str, *, at_once: bool = False) -> bool:
        """Ask a running command to save and leave its nodes; `status` then says that it failed.

        Its reason is PREEMPTED and `why`, unless the command comes to its end meanwhile. Its tasks
        get SIGTERM, without a limit of time; `at_once`: and SIGKILL after the cluster's KillWait.
        Return False if it does not run. Raises SchedulerError.
        """
        with self._lock:
            running = [job for job in self._live_jobs(name) if job.state == "running"]
            if not running:
                return False
            self.guard()
            note = checksums.with_crc(canonical({"why": why, "time": time.time()}))
            for job in running:
                durable.create_file(self._ledger / name / f"{job.id}{PREEMPTED}", note)
                self._call("scancel", *(() if at_once else ("--signal=TERM",)), str(job.id))
            self._queue_time = float("-inf")
            return True

    def live(self) -> dict[str, Job]:
        """Return the newest job of each command of this root that waits or runs now, by name."""
        live: dict[str, Job] = {}
        for name, jobs in self._jobs(fresh=True).items():
            job = max(jobs, key=lambda job: job.id)
            if name.endswith(self._suffix) and not has_ended(job):
                live[name.removesuffix(self._suffix)] = job
        return live

    def preemption(self, name: str, job_id: int | str) -> Preemption | None:
        """Return when and why a job was asked to leave its nodes; None if it was not."""
        return read_preemption(self._ledger, name, job_id)

    def partition(self, kind: JobKind) -> list[str]:
        """Return the option of sbatch that names the partition of a kind; [] for the default."""
        given = [*self._options, *self.settings.slurm_options.get(kind, [])]
        return [option for option in given if option.startswith("--partition=")][-1:]

    def try_out(self, command: Command) -> None:
        """Raise SchedulerError if Slurm would refuse a command. Nothing is queued."""
        self._run("sbatch", "--test-only", script=self.script(command))

    def room(self, kind: JobKind) -> list[NodeRoom]:
        """Return the nodes on which commands of a kind may run. Raises SchedulerError."""
        columns = ",".join(f"{name}:250" for name in NODE_COLUMNS)
        rows = self._call("sinfo", "-h", "-N", *self.partition(kind), "-O", columns).splitlines()
        nodes = [read_node(row) for row in rows]
        return list({node.name: node for node in nodes if node is not None}.values())

    def _left_out(self, command: Command) -> str:
        """Return the nodes to leave out, as Slurm takes them; "": none.

        Of the command's own the most important ones stay, as long as enough others are left. Those
        of the site's and the command's `--exclude` stay all: what is given later wins over them.
        """
        given = [*self._options, *self.settings.slurm_options.get(command.kind, [])]
        given += command.slurm_options
        own = [o.partition("=")[2] for o in given if o.startswith("--exclude=")][-1:]
        if not command.exclude:
            return ",".join(own)
        partition = [option for option in given if option.startswith("--partition=")][-1:]
        states = node_states(self._call("sinfo", "-h", "-N", *partition, "-o", "%N %t"))
        usable = {node for node, state in states.items() if not state.startswith(UNUSABLE)}
        wanted = [node for node in dict.fromkeys(command.exclude) if node in states]
        while wanted and len(usable - set(wanted)) < command.nodes + command.spare_nodes:
            wanted.pop()
        return ",".join([*own, *wanted])

    def _has_steps(self, job: Job) -> bool:
        """Tell whether a job still runs something on the nodes that it has."""
        steps = self._call("squeue", "-h", "-s", f"--jobs={job.id}", "-o", "%i %N")
        return not step_nodes(steps).isdisjoint(node_names(job.nodes))

    def _failed_node(self, job: Job) -> str:
        """Return the node where a job failed; of several, the one that is not up. Cached."""
        if job.state != "failed":
            return ""
        if not set(job.nodes) & set("[,"):
            return job.nodes
        if job.id not in self._failed_nodes and job.word in ("NODE_FAIL", "BOOT_FAIL"):
            rows = self._call("sinfo", "-h", "-N", "-n", job.nodes, "-o", "%N %t")
            states = node_states(rows)
            down = [node for node, state in states.items() if state.startswith(UNUSABLE)]
            self._failed_nodes[job.id] = down[0] if len(down) == 1 else ""
        return self._failed_nodes.get(job.id, "")

    def job_name(self, name: str) -> str:
        """Return a command's name in Slurm."""
        return name + self._suffix

    def _live_jobs(self, name: str) -> list[Job]:
        """Return the pending and running jobs of a name, as of now."""
        jobs = self._jobs(fresh=True).get(self.job_name(name), [])
        return sorted((job for job in jobs if not has_ended(job)), key=lambda job: job.id)

    def _jobs(self, *, fresh: bool = False) -> dict[str, list[Job]]:
        """Return all jobs of this user by name in Slurm, from a squeue of the last moment."""
        with self._lock:
            now = time.monotonic()
            if fresh or now - self._queue_time > self._queue_seconds:
                columns = SEPARATOR.join(("%A", "%T", "%r", "%j", "%N", "%S", "%B"))
                me = f"--user={os.getuid()}"
                listing = self._call("squeue", "-h", "-a", "-t", "all", me, "-o", columns)
                self._queue = {}
                for line in listing.splitlines():
                    job = read_job(line)
                    self._queue.setdefault(job.name, []).append(job)
                self._queue_time = now
                self._resume_drained()
            return self._queue

    def _resume_drained(self) -> None:
        """Resume a private cluster's drained nodes while jobs wait, every HELP_INTERVAL."""
        waiting = any(job.state == "queued" for jobs in self._queue.values() for job in jobs)
        if self.cluster and waiting and time.monotonic() > self._next_help:
            self.cluster.resume_drained()
            self._next_help = time.monotonic() + HELP_INTERVAL

    def _exit_code(self, job: Job) -> int | None:
        """Return an ended job's exit code, 128 + n if signal n ended it. Cached."""
        key = (job.id, job.word)
        if key not in self._exits:
            description = self._call("scontrol", "-o", "show", "job", str(job.id))
            match = re.search(r"\bExitCode=(\d+):(\d+)", description)
            code = int(match[1]) or (128 + int(match[2]) if int(match[2]) else 0) if match else None
            self._exits[key] = None if code == 0 and job.state != "succeeded" else code
        return self._exits[key]

    def _we_cancelled(self, name: str, job: Job) -> bool:
        return (self._ledger / name / f"{job.id}.cancelled").exists()

    def _preempted(self, name: str, job_id: int | str, code: int | None) -> str:
        """Return the reason of a job that saved and left when it was asked to, or was killed then.

        "" for others: also one that failed by itself meanwhile, or that somebody cancelled.
        """
        if code is not None and 0 < code < SIGNALLED and code != REFUSED:
            return ""
        preemption = self.preemption(name, job_id)
        cancelled = (self._ledger / name / f"{job_id}.cancelled").exists()
        return f"PREEMPTED: {preemption.why}" if preemption and not cancelled else ""

    def _status_from_ledger(self, name: str) -> CommandStatus:
        """Return the status of a job that Slurm has forgotten, from the jobs' own files."""
        files = list((self._ledger / name).glob("*.ended"))
        if not files:
            return CommandStatus(state="unknown", reason="Slurm has no job of this name")
        newest = max(files, key=lambda path: [int(part) for part in path.name.split(".")[:2]])
        try:
            code = int(newest.read_text())
        except ValueError as error:
            raise Corrupt(f"{newest} is damaged: it holds no exit code") from error
        job_id = newest.name.split(".")[0]
        return CommandStatus(
            state="failed" if code else "succeeded",
            id=job_id,
            exit_code=code,
            reason=self._preempted(name, job_id, code) if code else "",
        )

    def _call(self, *argv: str) -> str:
        """Run a client, and again while the controller is away for a moment."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self._run(*argv)
            except Unreachable as error:
                self._wait_to_retry(deadline, error)

    def _wait_to_retry(self, deadline: float, error: "Unreachable") -> None:
        """Wait before another try, or raise the error after the deadline."""
        if time.monotonic() > deadline or self._closed:
            raise error
        time.sleep(0.2)

    def _run(self, *argv: str, script: str = "") -> str:
        if self._closed:
            raise SchedulerError("this scheduler is closed")
        if self.cluster and not self.cluster.alive:
            with self._lock:  # of several threads that find it killed one starts it
                if not (self.cluster.alive or self._closed):
                    self.cluster.start()  # a client without a controller would take long
        environment = self.cluster.environment if self.cluster else clean_environment()
        environment |= {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s"}
        if argv[0] == "sbatch":
            argv = (*argv, "--export=ALL")  # of this small environment, not the site's default
        # a file: `communicate` cannot go on with an input after a timeout
        with tempfile.TemporaryFile("w+") as stdin:
            stdin.write(script)
            stdin.seek(0)
            try:
                process = subprocess.Popen(
                    argv, env=environment, stdin=stdin, stdout=-1, stderr=-1, errors="replace"
                )
            except FileNotFoundError as error:
                message = f"{argv[0]} is not installed; as root: {INSTALL_LINE}"
                raise SchedulerError(message) from error
        with process:
            stdout, stderr = self._communicate(process)
        if process.returncode == 0:
            return stdout
        message = f"{argv[0]} ended with {process.returncode}: {stderr.strip()}"
        killed = process.returncode < 0  # by a signal: Slurm has refused nothing
        if killed or any(sign in message.lower() for sign in UNREACHABLE):
            raise Unreachable(message)
        raise SchedulerError(message)

    def _communicate(self, process: "subprocess.Popen[str]") -> tuple[str, str]:
        """Return a client's output. Without its cluster a client may hang for a minute."""
        deadline = time.monotonic() + CLIENT_SECONDS
        while True:
            try:
                return process.communicate(timeout=0.5)
            except subprocess.TimeoutExpired as error:
                gone = self.cluster is not None and not self.cluster.alive
                if gone or time.monotonic() > deadline:
                    process.kill()
                    raise Unreachable("no Slurm controller answers") from error


class Unreachable(SchedulerError):
    """Slurm gave no answer: its controller is away, or the client was killed by a signal."""


def has_ended(job: Job) -> bool:
    """Tell whether a job will never run again."""
    return job.state not in ("queued", "running")


@contextmanager
def _reading(program: str, text: str) -> Iterator[None]:
    """Raise SchedulerError where a client printed something else than Slurm documents."""
    try:
        yield
    except (ValueError, LookupError) as error:
        raise SchedulerError(f"{program} printed what is not Slurm's: {text[:200]!r}") from error


def node_states(listing: str) -> dict[str, str]:
    """Return the states of nodes by sinfo's output of `%N %t`. Raises SchedulerError."""
    with _reading("sinfo", listing):
        return dict(row.split() for row in listing.splitlines())


def read_job(line: str) -> Job:
    """Parse a line of squeue's output. Raises SchedulerError."""
    with _reading("squeue", line):
        number, word, reason, name, nodes, *rest = line.split(SEPARATOR)
        job_id, word = int(number), word.split()[0]
    state: CommandState = "running"
    if word in QUEUED:
        state = "queued"
    elif word in FAILED:
        state = "failed"
    elif word == "COMPLETED":
        state = "succeeded"
    elif word.startswith("CANCELLED"):
        state = "cancelled"
    start, script_node = [*rest, "", ""][:2]
    script_node = "" if script_node == "n/a" else script_node
    since = float(start) if start.isdecimal() and state != "queued" else 0.0
    reason = "" if reason == "None" else reason
    return Job(job_id, state, word, reason, name, nodes, since, script_node)


def node_names(nodes: str) -> list[str]:
    """Return the names that Slurm abbreviates: `n[1-2,5],m` are n1, n2, n5 and m.

    Raises SchedulerError.
    """
    names = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]+\])?", nodes):
        name, _, spans = part.rstrip("]").partition("[")
        for span in spans.split(",") if spans else ():
            low, _, high = span.partition("-")
            with _reading("squeue", nodes):
                numbers = range(int(low), int(high or low) + 1)
            names += [f"{name}{number:0{len(low)}d}" for number in numbers]
        names += [] if spans else [name]
    return names


def step_nodes(listing: str) -> set[str]:
    """Return the nodes of a job's steps, by squeue's output of `%i %N`, but of Slurm's own steps.

    These are the batch script's, and one that some sites have on all nodes. Raises SchedulerError.
    """
    steps = (row.partition(" ") for row in listing.splitlines())
    own = (nodes for step, _, nodes in steps if not step.endswith((".batch", ".extern")))
    return {name for nodes in own for name in node_names(nodes)}


def read_node(line: str) -> NodeRoom | None:
    """Parse a line of sinfo's output by NODE_COLUMNS; None for a node that takes no job.

    Raises SchedulerError.
    """
    with _reading("sinfo", line):
        name, state, cores, gpus, used_gpus = line.split()
        if state.startswith(UNUSABLE):
            return None
        taken, _, _, every = map(int, cores.split("/"))  # allocated/idle/other/total
    has, used = (sum(map(int, GPU_COUNT.findall(text))) for text in (gpus, used_gpus))
    return NodeRoom(name, every, every - taken, has, has - used)


def read_preemption(ledger: Path, name: str, job_id: int | str) -> Preemption | None:
    """Return what `Slurm.preempt` noted of a job; None if it was not asked to leave."""
    try:
        noted = checksums.read_json(ledger / name / f"{job_id}{PREEMPTED}")
        return Preemption(float(noted["time"]), str(noted["why"]))
    except FileNotFoundError:
        return None
    except Corrupt as error:
        return Preemption(time.time(), str(error))
    except (KeyError, TypeError, ValueError) as error:
        return Preemption(time.time(), f"its note is of another form: {error!r}")
