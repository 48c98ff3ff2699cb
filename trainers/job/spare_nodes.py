"""Spare nodes: a Slurm job goes on in its own allocation when one of its nodes is lost.

A job with `spare_nodes` has a launcher on each node it holds. The first nodes train, the others
wait, with Megatron imported. A round is what the launchers do between two losses: an attempt of the
job. They agree on the next one by files in a folder of this start on the shared root, and wait for
no word of Slurm, which takes minutes to notice a dead node:

    alive-<node>    changes as long as the launcher there lives
    left-<node>     the launcher there has ended without a word (written by the batch script)
    <round>-<node>  the launcher there has seen the round before end, and can go on
    <round>.json    the decision, created exclusively: who trains now, or how the job ended
    ended-<node>    the launcher there has ended, and this is its exit code

A launcher answers when its own ranks end badly, or when another one does. Spare ones also answer
when all that train have shown no life for the silence limit of ranks. If all that trained answer or
have ended, no node was lost: the job ends, and its trainer finds cause and remedy. One that is
busy, such as with its inputs, is waited for while it shows life, ten minutes at most. Else spare
nodes take the places of those that did not answer. Each rank that lives stays on its node, where
its launcher forks or spawns it anew. Where too few spare nodes answer, the job ends, too, and is
queued again. Called by job.py. Read next: launch.py.
"""

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from cray_agents.errors import SetupError
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.trainers.job.failures.rank_monitor import node_name, silence_limit
from cray_agents.trainers.job.launch import MEETING_SECONDS, START, RankPlacement, share_of

SIGNS = 40  # of life that a launcher gives in the silence limit of ranks
PATIENCE = SIGNS // 8  # signs that a launcher may miss while the others wait for its answer
POLL = 0.2
#: Set by the batch script: the names of all nodes, how many of them are spare, and the folder.
NODES, SPARES, FOLDER = "RANKS_NODES", "RANKS_SPARES", "RANKS_FOLDER"


class RoundDecision(Record):
    """Who trains in a round, in the order of ranks. Nobody: the job ended, with this exit code.

    `lost`: the nodes of the round before that did not answer. `spares`: those that wait now.
    """

    nodes: list[str] = Field(default_factory=list)
    spares: list[str] = Field(default_factory=list)
    lost: list[str] = Field(default_factory=list)
    code: int = 0


class HeldNodes:
    """The nodes that a Slurm job holds, seen from the launcher on one of them.

    `training`: those of this round, in the order of ranks. `spares`: those that wait.
    """

    def __init__(self, folder: Path, nodes: list[str], spares: int, here: str) -> None:
        self.training, self.spares = nodes[:-spares], nodes[-spares:]
        self.here, self.round = here, 0
        self._script_node = nodes[0]  # Slurm runs the batch script on the first one
        self._folder = folder
        self._signs: dict[str, str] = {}  # of life: the newest of each node
        self._missed = Counter[str]()  # by node, in a row
        self._next_look = 0.0

    @classmethod
    def of_job(cls) -> "HeldNodes | None":
        """Return the nodes of this launcher's job; None if it has no spare ones.

        Raises SetupError if this node is none of them.
        """
        if FOLDER not in os.environ:
            return None
        names, spares = os.environ[NODES].split(), int(os.environ[SPARES])
        if (here := node_name()) not in names:
            raise SetupError(
                f"this node is called {here}, and the job's nodes are {', '.join(names)}: let its"
                " container keep the variable SLURMD_NODENAME"
            )
        return cls(Path(os.environ[FOLDER]), names, spares, here)

    @property
    def trains(self) -> bool:
        """True if this node trains in this round."""
        return self.here in self.training

    def placement(self, world: int, job_id: str) -> RankPlacement:
        """Return this launcher's ranks in this round. Raises BadInput."""
        nodes = len(self.training)
        share_of(world, nodes, "node")
        host = "127.0.0.1" if nodes == 1 else self.here
        start = f"{job_id}-{os.environ.get(START, '0')}.{self.round}"
        number = self.training.index(self.here) if self.trains else 0
        return RankPlacement(number, nodes, world, host, 0, start)

    def show_life(self) -> None:
        """Give signs of life in a thread, until this process ends."""

        def give_signs() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            for number in itertools.count():
                with suppress(OSError):  # the shared root may be away for a moment
                    (self._folder / f"alive-{self.here}").write_text(str(number))
                time.sleep(silence_limit() / SIGNS)

        threading.Thread(target=give_signs, name="signs of life", daemon=True).start()

    def _silent(self, signs: int) -> set[str]:
        """Return the nodes that missed so many signs of life in a row, in calls to this."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + silence_limit() / SIGNS
            names = durable.names_in(self._folder)
            for node in (*self.training, *self.spares):
                sign = self._signs.get(node, "")
                with suppress(OSError):
                    file = self._folder / f"alive-{node}"
                    sign = file.read_text() if file.name in names else ""
                self._missed[node] = self._missed[node] + 1 if sign == self._signs.get(node) else 0
                self._signs[node] = sign
        return {node for node, missed in self._missed.items() if missed >= signs}

    def round_ended(self) -> bool:
        """Tell whether a launcher of this round was lost, or has seen the round end."""
        names, following = durable.names_in(self._folder), str(self.round + 1)
        ended = any(re.split("[-.]", name)[0] == following for name in names)
        return ended or any(f"left-{node}" in names for node in self.training)

    def await_end(self) -> None:
        """Wait, on a spare node, for the end of this round, or until none that trains lives."""
        while not self.round_ended() and not self._silent(SIGNS).issuperset(self.training):
            time.sleep(POLL)

    def agree(self) -> RoundDecision:
        """Answer for this node, and return the decision on the next round, which begins."""
        self.round += 1
        file = self._folder / f"{self.round}.json"
        durable.create_file(self._folder / f"{self.round}-{self.here}", b"")
        deadline = time.monotonic() + MEETING_SECONDS
        while file.name not in (names := durable.names_in(self._folder)):
            every = [*self.training, *self.spares]
            here = [node for node in every if f"{self.round}-{node}" in names]
            ended = [node for node in every if f"ended-{node}" in names]
            lost = [node for node in self.training if node not in (*here, *ended)]
            left = [node for node in every if f"left-{node}" in names]
            awaited = set(every) - {*here, *ended, *left} - self._silent(PATIENCE)
            if not lost or not awaited or time.monotonic() > deadline:
                durable.create_file(file, checksums.record_text(self._decide(here, lost)))
            else:
                time.sleep(POLL)
        decision = checksums.read_record(RoundDecision, file)
        if decision.nodes:
            self.training, self.spares = decision.nodes, decision.spares
        return decision

    def end(self, code: int) -> None:
        """Say that this launcher ends; the first one of the round ends the job for all."""
        durable.create_file(self._folder / f"ended-{self.here}", str(code).encode())
        if self.here == self.training[0]:
            ended = checksums.record_text(RoundDecision(code=code))
            durable.create_file(self._folder / f"{self.round + 1}.json", ended)
            script_lost = self._script_node not in (*self.training, *self.spares)
            if script_lost and f"left-{self._script_node}" not in durable.names_in(self._folder):
                with suppress(OSError):  # no scancel in this container: Slurm.status does it
                    subprocess.run(["scancel", os.environ["SLURM_JOB_ID"]], check=False)

    def _decide(self, here: list[str], lost: list[str]) -> RoundDecision:
        """Return who trains next: the nodes `here` have answered, those of `lost` are gone."""
        spares = [node for node in self.spares if node in here]
        free = len(self.training) - len(set(self.training) & set(here))
        if not lost or len(spares) < free:
            return RoundDecision(lost=lost, code=1)
        nodes = [node if node in here else spares.pop(0) for node in self.training]
        return RoundDecision(nodes=nodes, spares=spares, lost=lost)
