"""Faults of a cluster: kill, stop and drain its parts, take its root away, await recovery."""

import os
import random
import signal
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from cray_agents.trainers.job.journal import JobJournal
from tests.support.dead_node import parent_of
from tests.support.faults.clients import Training
from tests.support.faults.cluster import NODES, REPLICAS, VLLM, Cluster

SESSION = "cray_agents.trainers.session.session_process"


class Faults:
    """One fault after the other; each is over when the cluster has recovered."""

    def __init__(self, cluster: Cluster, chance: random.Random, training: Training | None) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)  # to recovery, by kind
        self._cluster, self._chance, self._training = cluster, chance, training
        self._left: list[Callable[[], None]] = [
            self.kill_supervisor, self.kill_controller, self.promote, self.lose_node,
        ]  # fmt: skip
        self._kinds = [
            self.kill_engine, self.kill_supervisor, self.stop_supervisor, self.cancel_job,
            self.lose_node, self.kill_slurmd, self.kill_slurmctld, self.kill_controller,
            self.stop_controller, self.kill_standby, self.kill_gateway, self.promote,
            self.drain_node,
        ]  # fmt: skip
        if training is not None:
            self._kinds += [self.kill_rank, self.kill_launcher]
            self._kinds += [self.fail_gate] if not VLLM else []  # its GPU is a script
        self._kinds += [self.refuse_version] if not VLLM else []
        if cluster.views:
            self._kinds += [self.lose_power, self.stall_root, self.slow_root,
                            self.read_only_root, self.stall_all_roots]  # fmt: skip
        if names := os.environ.get("CRAY_TEST_FAULTS"):
            self._kinds = [getattr(self, name) for name in names.split(",")]
            self._left = [*self._kinds]
        self._due = {kind.__name__ for kind in (self._kinds if training else self._left)}
        self._begun = 0.0

    def strike(self) -> None:
        """Cause a fault, after the first four by chance, and wait until all replicas serve."""
        if not self._left:
            self._left = self._chance.sample(self._kinds, len(self._kinds))
        fault = self._left.pop()
        self._begun = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {fault.__name__}", flush=True)
        fault()
        self._cluster.keep_two()
        self._cluster.until(self._cluster.asks, f"an answer after {fault.__name__}")
        self._cluster.until(
            lambda: len(self._cluster.replicas()) == REPLICAS,
            f"all replicas after {fault.__name__}",
        )
        self.seconds[fault.__name__].append(time.monotonic() - self._begun)
        self._due.discard(fault.__name__)
        self._check_proofs()
        if self._training is not None:
            self._wait_for_training(self._training)

    @property
    def some_left(self) -> bool:
        """True until each kind was caused; without a training, until the first four were."""
        return bool(self._due)

    def table(self) -> Iterator[str]:
        """Yield rows in Markdown: kind, count, median and longest seconds to recovery."""
        yield "| fault | times | median s | longest s |\n|---|---|---|---|"
        for kind, seconds in sorted(self.seconds.items()):
            row = (kind.replace("_", " "), len(seconds), f"{statistics.median(seconds):.1f}",
                   f"{max(seconds):.1f}")  # fmt: skip
            yield "| " + " | ".join(map(str, row)) + " |"

    # ---- serving
    def kill_engine(self) -> None:
        pid, _ = self._replica()
        self._kill(pid)
        self._wait_for_successor(pid)

    def kill_supervisor(self) -> None:
        """Its engine dies with it."""
        pid, _ = self._replica()
        self._kill(parent_of(pid))
        self._wait_for_successor(pid)

    def stop_supervisor(self) -> None:
        """Its lease is late, or lapses."""
        lease = self._chance.choice(self._cluster.leases())
        os.kill(lease.pid, signal.SIGSTOP)
        time.sleep(self._chance.choice((3.0, 20.0, 45.0)))
        with suppress(ProcessLookupError):  # it was replaced meanwhile
            os.kill(lease.pid, signal.SIGCONT)

    def cancel_job(self) -> None:
        pid, replica = self._replica()
        self._cluster.command("scancel", replica["job"])
        self._wait_for_successor(pid)

    # ---- Slurm
    def lose_node(self) -> None:
        """Slurm ends the jobs of a node that is down; the others have room for them."""
        pid, replica = self._replica()
        words = ("scontrol", "update", f"nodename={replica['host']}")
        self._cluster.command(*words, "state=down", "reason=test")
        down = time.monotonic()
        self._wait_for_successor(pid)
        self._note("lose node: down to successor", down)
        self._cluster.command(*words, "state=resume")

    def kill_slurmd(self) -> None:
        """The jobs of its node go on."""
        pid = self._chance.choice(self._daemons("slurmd"))
        self._kill(pid)
        self._cluster.until(lambda: len(self._daemons("slurmd")) == NODES, "slurmd again")

    def kill_slurmctld(self) -> None:
        self._kill(*self._daemons("slurmctld"))
        self._cluster.until(lambda: "UP" in self._cluster.command("scontrol", "ping"), "slurmctld")

    def drain_node(self) -> None:
        """A node takes no more jobs; the replica that ends on it begins again elsewhere."""
        pid, replica = self._replica()
        words = ("scontrol", "update", f"nodename={replica['host']}")
        self._cluster.command(*words, "state=drain", "reason=test")
        self._cluster.command("scancel", replica["job"])
        self._wait_for_successor(pid)
        self._cluster.command(*words, "state=resume")

    def lose_power(self) -> None:
        """All processes of a node stand still; some nodes come back with them, some without."""
        pid, replica = self._replica()
        stopped = self._processes_of_node(replica["host"])
        for one in stopped:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGSTOP)
        begun = time.monotonic()
        words = ("sinfo", "-h", "-n", replica["host"], "-o", "%T")
        self._cluster.until(lambda: "down" in self._cluster.command(*words), "a node that is down")
        self._note("lose power: to Slurm's detection", begun)
        detected = time.monotonic()
        self._wait_for_successor(pid)
        self._note("lose power: detection to successor", detected)
        again = self._chance.random() < 0.5
        for one in stopped:
            with suppress(OSError):
                argv = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
                daemon = Path(argv[0].decode()).name == "slurmd"
                os.kill(one, signal.SIGCONT if again or daemon else signal.SIGKILL)

    # ---- training
    def kill_rank(self) -> None:
        """The session goes on from its newest resume point."""
        self._kill_one(self._ranks())

    def kill_launcher(self) -> None:
        """Likewise; Slurm's step ends with it."""
        self._kill_one(self._launchers())

    def fail_gate(self) -> None:
        """A node has lost its GPU when the session begins anew, which so comes to another one."""
        launchers, nodes, begun = self._launchers(), self._nodes_of_session(), time.time()
        if not nodes:
            return
        node = self._chance.choice(sorted(nodes))
        with self._cluster.lost_gpu(node):
            done = self._done()
            self._kill(*launchers)
            self._cluster.until(
                lambda: self._gate_verdict(node, begun) or self._done() > done, "a session again"
            )
            if (verdict := self._gate_verdict(node, begun)) is None:
                return  # Slurm had other nodes for it
            self._cluster.until(lambda: self._started_after(verdict), "a start on another node")
            self._cluster.until(lambda: self._done() > done, "a session on other nodes")
            assert node not in self._nodes_of_session()
            late = max(0.0, self._started_after(verdict) - verdict)
            self.seconds["fail gate: verdict to start on other nodes"].append(late)

    def _nodes_of_session(self) -> set[str]:
        found = set()
        for pid in self._launchers():
            with suppress(OSError, ValueError):  # it has ended, or is about to: no environment
                found.add(node_of(pid))
        return found

    def _done(self) -> int:
        assert self._training is not None
        return self._training.done

    def _gate_verdict(self, node: str, since: float) -> float | None:
        """The unix time of the verdict that a node failed its gate."""
        home = self._cluster.home
        for folder in home.jobs.glob("job-*"):
            for event in JobJournal(home, folder.name).events():
                new = event["event"] == "verdict" and event["time"] > since
                if new and event["node"] == node and "health gate" in event["message"]:
                    return float(event["time"])
        return None

    def _started_after(self, moment: float) -> float:
        """The unix time at which the first launcher of a session began after a moment; 0: none."""
        paths = self._cluster.home.sessions.glob("session-*/attempts/*")
        times = (path.stat().st_mtime for path in paths if path.name.isdigit())
        return min((one for one in times if one > moment), default=0.0)

    # ---- the shared root
    def stall_root(self) -> None:
        """No access of one host to the root is answered for a time."""
        view = self._cluster.views[self._chance.choice(list(self._cluster.views))]
        view.stall(self._chance.choice((2.0, 8.0, 20.0)))

    def slow_root(self) -> None:
        """Accesses of one host wait most of the time."""
        self._cluster.views[self._chance.choice(list(self._cluster.views))].slow(10.0)

    def read_only_root(self) -> None:
        """One host, or all, can make, rename and open for writing nothing for some seconds."""
        views = list(self._cluster.views.values())
        with ExitStack() as stack:
            for view in views if self._chance.random() < 0.5 else [self._chance.choice(views)]:
                stack.enter_context(view.read_only())
            time.sleep(self._chance.choice((2.0, 6.0)))

    def stall_all_roots(self) -> None:
        """The file server stands still for all hosts."""
        views = self._cluster.views.values()
        for view in views:
            view.hold()
        time.sleep(self._chance.choice((2.0, 6.0)))
        for view in views:
            view.let_go()

    # ---- control
    def kill_controller(self) -> None:
        """The standby takes over, which is a new term."""
        before = self._cluster.controller()
        self._kill(before["pid"])
        killed = time.monotonic()
        self._cluster.until(
            lambda: self._cluster.controller().get("term", 0) > before["term"], "a new term"
        )
        here = self._cluster.controller().get("host") == before["host"]
        what = f"kill controller, standby on {'its' if here else 'another'} host"
        self._note(f"{what}: to the new term", killed)
        name = f"name-{uuid.uuid4().hex[:8]}"
        model = self._cluster.new_model()

        def decided() -> bool:
            with suppress(openai.OpenAIError):
                self._cluster.call(f"/models/{name}/versions", {"checkpoint": str(model)})
                return True
            return False

        self._cluster.until(decided, "a decision of the new controller")
        self._note(f"{what}: to the next decision", killed)

    def stop_controller(self) -> None:
        """It stands still for longer than its lease; it may decide nothing when it goes on."""
        before = self._cluster.controller()
        os.kill(before["pid"], signal.SIGSTOP)
        self._cluster.until(
            lambda: self._cluster.controller().get("term", 0) > before["term"], "a new term"
        )
        self._cluster.until(self._cluster.asks, "an answer of the new controller")
        self.seconds["stop controller: to the next answer"].append(time.monotonic() - self._begun)
        with suppress(ProcessLookupError):  # who followed it on its host has ended it
            os.kill(before["pid"], signal.SIGCONT)
        (old,) = (p for p in self._cluster.processes if p.pid == before["pid"])
        self._cluster.until(lambda: old.poll() is not None, "the end of who was followed")

    def kill_standby(self) -> None:
        pid = self._cluster.controller().get("pid")
        self._kill(*(p.pid for p in self._cluster.processes if p.pid != pid))

    def kill_gateway(self) -> None:
        """A further one, of those that the controller keeps."""
        self._cluster.until(self._further_gateways, "a further gateway")
        killed = self._further_gateways()
        self._kill(*killed)
        self._cluster.until(lambda: self._further_gateways() - killed, "a further gateway again")

    def promote(self) -> None:
        """A new version, while all goes on."""
        model = self._cluster.new_model()
        version = self._cluster.call("/models/m/versions", {"checkpoint": str(model)})["number"]
        self._cluster.call("/models/m/promote", {"version": version, "who": "test"})

    def refuse_version(self) -> None:
        """One whose weights give other logprobs than its probe is not promoted."""
        model = self._cluster.new_model(proven=False)
        version = self._cluster.call("/models/m/versions", {"checkpoint": str(model)})["number"]
        with pytest.raises(openai.APIStatusError, match="not the trainer's weights"):
            self._cluster.call("/models/m/promote", {"version": version, "who": "test"})

    # ---- means
    def _replica(self) -> tuple[int, Any]:
        """Choose one, by its engine's pid, while all serve."""
        found: dict[int, Any] = {}

        def all_serve() -> bool:
            found.clear()
            found.update(self._cluster.replicas())
            return len(found) == REPLICAS

        self._cluster.until(all_serve, "all replicas")
        return self._chance.choice(sorted(found.items(), key=lambda one: one[0]))

    def _check_proofs(self) -> None:
        """Each replica that serves has proven its version by tokens of its probe."""
        for replica in self._cluster.replicas().values():
            proof = replica["probe"]
            assert proof["passed"] and proof["version"] == replica["version"], replica
            assert VLLM or proof["tokens"] == 2, replica

    def _further_gateways(self) -> set[int]:
        """The pids of those that the controller keeps."""
        found = set()
        with suppress(OSError, KeyError):
            pid = self._cluster.controller()["pid"]
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            for child in map(int, children.split()):
                if b"--gateway-only" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    found.add(child)
        return found

    def _daemons(self, name: str) -> list[int]:
        """Of this cluster."""
        return [pid for pid, words in self._processes() if Path(words[0]).name == name]

    def _launchers(self) -> list[int]:
        """The processes of the training session that have ranks as children, one a node."""
        found = self._session()
        return [pid for pid in found if parent_of(pid) not in found]

    def _ranks(self) -> list[int]:
        found = self._session()
        return [pid for pid in found if parent_of(pid) in found]

    def _session(self) -> list[int]:
        return [pid for pid, words in self._processes()
                if SESSION in words and "python" in Path(words[0]).name]  # fmt: skip

    def _processes(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the pids and command lines of the cluster's daemons and jobs."""
        mine = str(self._cluster.slurm.directory).encode()
        for pid in every_pid():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if words[0] and mine in Path(f"/proc/{pid}/environ").read_bytes():
                    yield pid, words

    def _kill_one(self, pids: list[int]) -> None:
        """There may be none just then."""
        self._kill(*self._chance.sample(pids, min(1, len(pids))))

    def _kill(self, *pids: int) -> None:
        for pid in pids:
            if pid > 1:  # else its parent has ended
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._cluster.processes:
            if process.pid in pids:
                process.wait()

    def _note(self, what: str, begun: float) -> None:
        self.seconds[what].append(time.monotonic() - begun)

    def _wait_for_training(self, training: Training) -> None:
        """Wait until some commands more have results: restarts in a row would fail a job."""
        begun, before = time.monotonic(), training.done
        self._cluster.until(
            lambda: training.failure is not None or training.done >= before + 2, "training"
        )
        self._note("to the training's next results", begun)

    def _processes_of_node(self, node: str) -> list[int]:
        """All in the mount namespaces of a node's slurmd, which nothing else is in."""
        spaces = {
            mounts_of(pid)
            for pid, words in self._processes()
            if Path(words[0]).name == "slurmd" and node in words
        }
        found = []
        for pid in every_pid():
            with suppress(OSError):
                if mounts_of(pid) in spaces:
                    found.append(pid)
        return found

    def _wait_for_successor(self, pid: int) -> None:
        """Wait until all replicas serve, without this engine."""
        self._cluster.until(
            lambda: pid not in (now := self._cluster.replicas()) and len(now) == REPLICAS,
            f"the successor of {pid}",
        )


def node_of(pid: int) -> str:
    """The name of a Slurm job's node, by the environment of one of its processes."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (name,) = (word for word in words if word.startswith(b"SLURMD_NODENAME="))
    return name.decode().partition("=")[2]


def every_pid() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def mounts_of(pid: int) -> Path:
    """The mount namespace of a process. Raises OSError if it has ended."""
    return Path(f"/proc/{pid}/ns/mnt").readlink()
