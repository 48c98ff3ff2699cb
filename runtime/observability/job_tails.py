"""Job tails: the newest numbers of training jobs, from the ends of their event files.

An events file is only appended to, so each look reads the new lines. A restart replaces the file,
which is then read anew. Called by file_metrics.py.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from cray_agents.errors import Corrupt
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.disk.journal import Tail

#: Families of a job's newest event of a kind: (event, field) -> (name, help).
NUMBERS = {
    ("step", "step"): ("cray_job_step", "Steps done"),
    ("step", "loss"): ("cray_job_loss", "Loss of the newest step (nats)"),
    ("step", "lr"): ("cray_job_learning_rate", "Learning rate"),
    ("step", "grad_norm"): ("cray_job_grad_norm", "Norm of the gradient"),
    ("step", "tokens_per_second"): ("cray_job_tokens_per_second", "Tokens read a second"),
    ("step", "mfu"): ("cray_job_mfu", "Model FLOPs utilization (fraction)"),
    ("step", "communication"): (
        "cray_job_communication",
        "Share of the step in which the first rank waited for the sum of gradients (fraction)",
    ),
    ("step", "memory_gib"): ("cray_job_memory_gib", "Memory of the fullest rank (GiB)"),
    ("step", "seconds"): ("cray_job_step_seconds", "Seconds of the newest step"),
    ("step", "time"): ("cray_job_last_step_time", "Unix seconds of the newest step"),
    ("agreement", "max_difference"): (
        "cray_job_agreement_max",
        "Largest difference of trainer's and engine's logprobs (nats)",
    ),
    ("agreement", "mean_difference"): ("cray_job_agreement_mean", "Mean of these differences"),
    ("saved", "seconds"): ("cray_job_save_seconds", "Seconds of the newest resume point"),
    ("straggler", "ratio"): (
        "cray_job_straggler_ratio",
        "The slowest rank's own work in a step, as a multiple of the median rank's",
    ),
}
MOST_BYTES = 4 << 20  # read of a file at the first look: the newest numbers are at its end


@dataclass
class JobTail:
    """An events file as far as it was read, and the newest event of each kind."""

    path: Path
    newest: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tail, self._replaced = Tail(self.path, MOST_BYTES), 0

    def read(self) -> None:
        """Read the whole lines that are new. Raises OSError; a damaged line is left out."""
        lines = self._tail.read()
        if self._tail.replaced != self._replaced:
            self._replaced, self.newest = self._tail.replaced, {}
        for line in lines:
            try:
                event = checksums.parse(line, self.path)
            except Corrupt:
                continue
            if event.get("median"):
                event["ratio"] = event["seconds"] / event["median"]
            self.newest[str(event.get("event"))] = event


class JobTails:
    """The jobs of a root: their states, and the numbers of the `most` that changed last."""

    def __init__(self, home: Home, most: int) -> None:
        self._home, self._most = home, most
        self._tails: dict[str, JobTail] = {}

    def families(self) -> Iterator[Metric]:
        """Yield the families. Raises OSError, Corrupt."""
        states, changed = Counter[str](), []
        folder = self._home.jobs
        for job in folder.iterdir() if folder.is_dir() else ():
            if not (job / "spec.json").exists():
                continue
            states[_state(job)] += 1
            events = job / "events.jsonl"
            if events.exists():
                changed.append((events.stat().st_mtime, job.name))
        listed = [name for _, name in sorted(changed, reverse=True)[: self._most]]
        self._tails = {name: self._tail(name) for name in listed}
        jobs = GaugeMetricFamily("cray_jobs", "Training jobs by state", labels=["state"])
        for state in ("queued", "running", "succeeded", "failed", "cancelled"):
            jobs.add_metric([state], states[state])
        yield jobs
        for (kind, value), (name, about) in NUMBERS.items():
            family = GaugeMetricFamily(name, about, labels=["job"])
            for job_id, tail in self._tails.items():
                number = tail.newest.get(kind, {}).get(value)
                if isinstance(number, int | float):
                    family.add_metric([job_id], number)
            yield family

    def _tail(self, name: str) -> JobTail:
        tail = self._tails.get(name) or JobTail(self._home.job(name) / "events.jsonl")
        tail.read()
        return tail


def _state(job: Path) -> str:
    """Return a job's state by its files; its scheduler knows more."""
    if (job / "status.json").exists():
        return str(checksums.read_json(job / "status.json").get("state"))
    return "running" if (job / "attempts").exists() else "queued"
