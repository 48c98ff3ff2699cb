"""File metrics: loops, jobs, batches, store and costs of a root, as families for Prometheus.

Jobs and loops are processes without a port. What they write on the shared root is read here, at
most every `LOOK` seconds however often somebody scrapes, in the caller's thread. Finished records
never change, so each is read once, and a job's events only as far as they are new. A restart
replaces these, and they are then read anew.

Labels are bounded: of loops and jobs those that changed last have series, of keys the largest,
under the hash of their id. Made by the gateway's Services.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cray_agents.config.settings import PriceSettings
from cray_agents.errors import Corrupt, CrayError, NewerFormat
from cray_agents.paths import Home
from cray_agents.runtime.accounting.cost_account import Amount, CostAccount, CostAmount, account_of
from cray_agents.runtime.accounting.cost_table import CostQuery, CostRow, cost_rows
from cray_agents.runtime.accounting.holdings import read_holdings
from cray_agents.runtime.batches.batch_records import Status
from cray_agents.runtime.batches.queue import BatchQueue
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.disk.journal import Tail, parse_line
from cray_agents.runtime.registry.canary import Canary
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.loop_records import LoopRecords
from cray_agents.runtime.telemetry.call_metrics import OTHER, family, key_label

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
STATES = ("queued", "running", "succeeded", "failed", "cancelled")
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
                event = parse_line(line, self.path)
            except (Corrupt, NewerFormat):
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
            with suppress(FileNotFoundError):  # it has not begun
                changed.append(((job / "events.jsonl").stat().st_mtime, job.name))
        listed = [name for _, name in sorted(changed, reverse=True)[: self._most]]
        self._tails = {name: self._tail(name) for name in listed}
        yield family(
            "cray_jobs", "Training jobs by state", {each: states[each] for each in STATES}, "state"
        )
        for (kind, value), (name, about) in NUMBERS.items():
            numbers = {
                job_id: _number(tail.newest.get(kind, {}).get(value))
                for job_id, tail in self._tails.items()
            }
            yield family(name, about, numbers, "job")

    def _tail(self, name: str) -> JobTail:
        tail = self._tails.get(name) or JobTail(self._home.job(name) / "events.jsonl")
        tail.read()
        return tail


def _state(job: Path) -> str:
    """Return a job's state by its files; its scheduler knows more."""
    with suppress(FileNotFoundError):  # it has none yet, or is tried again
        return str(checksums.read_json(job / "status.json").get("state"))
    return "running" if (job / "attempts").exists() else "queued"


MOST_KEYS = 50
Labels = tuple[str, ...]
ABOUT = "Seconds of GPUs and of cores that were held, by holder and what came of them"


def cost_families(
    home: Home, store: Store, prices: PriceSettings, loops: Collection[str]
) -> Iterator[Metric]:
    """Yield the families, of all time. `loops`: those that get series. Raises CrayError."""
    account = account_of(read_holdings(home), store, prices)
    yield from _held_families(account)
    rows = cost_rows(home, store, account, CostQuery(by="loop"), {})
    yield from _loop_families([row for row in rows if row.loop in loops])
    yield from _key_families(cost_rows(home, store, account, CostQuery(by="key"), {}))


def _held_families(account: CostAccount) -> Iterator[Metric]:
    seconds: dict[Labels, float] = {}
    for line, amount in account.lines.items():
        _add_seconds(seconds, line, amount)
    records = {line: amount.to_record(account.prices) for line, amount in account.lines.items()}
    energy = {line: record.joules for line, record in records.items()}
    money = {line: record.cost for line, record in records.items()}
    yield family("cray_held_seconds", ABOUT, seconds, "kind", "use", "unit")
    about = "Energy that GPUs measured themselves"
    yield family("cray_energy_joules", about, energy, "kind", "use")
    yield family("cray_cost", "Price of what was held, by [prices]", money, "kind", "use")


def _loop_families(rows: list[CostRow]) -> Iterator[Metric]:
    seconds: dict[Labels, float] = {}
    for row in rows:
        _add_seconds(seconds, (str(row.loop), "serving"), row.serving)
        _add_seconds(seconds, (str(row.loop), "training"), row.training)
    about = "Seconds of GPUs and of cores for a loop's runs and for its training"
    yield family("cray_loop_device_seconds", about, seconds, "loop", "use", "unit")
    for name, field_name, about in (
        ("cost", "spent", "Price of a loop's runs and training"),
        ("cost_per_success", "per_success", "... for each run with a reward of 1 or more"),
        ("cost_per_point", "per_point", "... for each hundredth of held-out success gained"),
    ):
        amounts = {str(row.loop): getattr(row, field_name) for row in rows}
        money = {loop: amount and amount.cost for loop, amount in amounts.items()}
        yield family(f"cray_loop_{name}", about, money, "loop")


def _key_families(rows: list[CostRow]) -> Iterator[Metric]:
    seconds: dict[Labels, float] = {}
    money: dict[str | Labels, float | None] = {}
    for row in rows[:MOST_KEYS]:
        _add_seconds(seconds, (key_label(row.key or ""),), row.spent)
        money[key_label(row.key or "")] = row.spent.cost
    rest = Amount()
    for row in rows[MOST_KEYS:]:
        rest.gpu_seconds += row.spent.gpu_seconds
        rest.core_seconds += row.spent.core_seconds
        rest.money += row.spent.cost or 0.0
    if rows[MOST_KEYS:]:
        _add_seconds(seconds, (OTHER,), rest)
        money[OTHER] = None if rows[0].spent.cost is None else rest.money
    about = "Seconds of GPUs and of cores in which replicas answered a key"
    yield family("cray_key_device_seconds", about, seconds, "key", "unit")
    yield family("cray_key_cost", "Price of these", money, "key")


def _add_seconds(
    seconds: dict[Labels, float], labels: tuple[str, ...], amount: Amount | CostAmount
) -> None:
    seconds[*labels, "gpu"] = amount.gpu_seconds
    seconds[*labels, "core"] = amount.core_seconds


LOOK = 10.0  # seconds between two looks at files
ACCOUNT = 60.0  # seconds between two readings of the ledger, which is read whole
ACCOUNT_SHARE = 0.01  # ... of the time, at most, that they take
MOST_LOOPS = MOST_JOBS = 20  # with series of their own: those that changed last
MOST_BATCHES = 50  # newest ones that are counted
_LOOP_NUMBERS = {  # an iteration's fields as families
    "iteration": "Number of the last finished iteration",
    "holdout_success": "Mean reward on held-out tasks",
    "evidence": "Evidence that the candidate is better: the wealth of the promotion test",
    "idle_share": "Share of the iteration in which no replica had a request",
    "wall": "Seconds of the last iteration",
    "zero_variance_groups": "Tasks whose attempts all got the same reward",
    "probe_max_logprob_diff": "Difference in the logprob check after the swap (nats)",
    "trained_tokens": "Tokens trained on in the last iteration",
    "loss_last": "Loss of the last step (nats)",
}
_RUNS = {"runs": "sampled", "accepted_runs": "kept", "failed_runs": "failed", "carried": "carried"}

log = logging.getLogger(__name__)


class FileCollector(Collector):
    """A collector of what files of the root say; see `Metrics.add`."""

    def __init__(
        self,
        home: Home,
        store: Store,
        registry: Registry,
        batches: BatchQueue,
        prices: PriceSettings,
    ) -> None:
        self._home, self._store, self._prices = home, store, prices
        self._registry, self._batches = registry, batches
        self._loops = _NewestIterations(home)
        self._jobs = JobTails(home, MOST_JOBS)
        self._lock = threading.Lock()
        self._families: list[Metric] = []
        self._ledger: list[Metric] = []
        self._looked = self._next_account = float("-inf")

    def collect(self) -> Iterator[Metric]:
        """Yield all families. Blocks: call in a thread."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= LOOK:
                self._families = list(self._look())
                self._looked = now
            if now >= self._next_account:
                self._ledger = list(_read(self._costs))
                took = time.monotonic() - now
                self._next_account = now + max(ACCOUNT, took / ACCOUNT_SHARE)
            families = [*self._families, *self._ledger]
        yield from self._store_families()
        yield from families

    def _look(self) -> Iterator[Metric]:
        readers = (
            self._segments, self._disk, self._loop_families, self._jobs.families,
            self._batch_families, self._canaries,
        )  # fmt: skip
        for reader in readers:
            yield from _read(reader)

    def _store_families(self) -> Iterator[Metric]:
        commits = self._store.commits
        for name, about, value in (
            ("cray_store_commits", "Groups of events put on the disk", commits.groups),
            ("cray_store_commit_seconds", "Seconds of writing and syncing them", commits.seconds),
            ("cray_store_committed_appends", "Appends in these groups", commits.items),
        ):
            yield family(name, about, value, counter=True)
        about = "Events on the disk but not in the index"
        yield family("cray_store_index_lag", about, self._store.index_lag)

    def _segments(self) -> Iterator[Metric]:
        count, size = Counter({"open": 0, "sealed": 0}), Counter({"open": 0, "sealed": 0})
        folder = self._home.segments
        for entry in os.scandir(folder) if folder.is_dir() else ():
            kind = {".jsonl": "open", ".zst": "sealed"}.get(Path(entry.name).suffix)
            with suppress(FileNotFoundError):  # it is sealed or compacted meanwhile
                if kind is not None:
                    size[kind] += entry.stat().st_size
                    count[kind] += 1
        yield family("cray_store_segments", "Files of the store", count, "form")
        yield family("cray_store_bytes", "Their bytes", size, "form")
        yield family("cray_store_problems", "Damaged places found", len(self._store.problems))

    def _disk(self) -> Iterator[Metric]:
        status = os.statvfs(self._home.root)
        free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        disk = {"free": free, "size": size}
        yield family("cray_disk_bytes", "Disk of the shared root", disk, "kind")

    def _loop_families(self) -> Iterator[Metric]:
        newest = self._loops.newest()
        records = {loop: record for loop, record, *_ in newest}
        for name, about in _LOOP_NUMBERS.items():
            numbers = {loop: _number(record.get(name)) for loop, record in records.items()}
            yield family(f"cray_loop_{name}", about, numbers, "loop")
        phases = {
            (loop, phase): seconds
            for loop, record in records.items()
            for phase, seconds in (record.get("seconds") or {}).items()
        }
        runs = {
            (loop, kind): record.get(name) or 0
            for loop, record in records.items()
            for name, kind in _RUNS.items()
        }
        decided = {
            (loop, outcome): count
            for loop, _, promoted, rejected, _ in newest
            for outcome, count in (("promoted", promoted), ("rejected", rejected))
        }
        ended = {loop: at for loop, *_, at in newest}
        about = "Seconds of the last iteration"
        yield family("cray_loop_phase_seconds", about, phases, "loop", "phase")
        yield family("cray_loop_runs", "Runs of the last iteration", runs, "loop", "kind")
        yield family("cray_loop_iterations", "Finished iterations", decided, "loop", "outcome",
                     counter=True)  # fmt: skip
        yield family("cray_loop_last_iteration_time", "Unix seconds of its end", ended, "loop")

    def _batch_families(self) -> Iterator[Metric]:
        statuses, lines, oldest = Counter[str](), Counter[str](), 0.0
        for batch in self._batches.page(None, MOST_BATCHES).rows:
            statuses[batch.status] += 1
            counts = batch.request_counts
            if batch.status in ("validating", "in_progress", "finalizing"):
                lines["completed"] += counts.completed
                lines["failed"] += counts.failed
                lines["waiting"] += counts.total - counts.completed - counts.failed
                oldest = max(oldest, time.time() - batch.created_at)
        by_status = {status: statuses[status] for status in get_args(Status)}
        by_state = {state: lines[state] for state in ("completed", "failed", "waiting")}
        yield family("cray_batches", "Batches by status", by_status, "status")
        yield family("cray_batch_lines", "Lines of batches under way", by_state, "state")
        yield family("cray_batch_oldest_seconds", "Age of the oldest batch under way", oldest)

    def _canaries(self) -> Iterator[Metric]:
        share: dict[str, float] = {}
        failed: dict[Labels, float] = {}
        reward: dict[Labels, float | None] = {}
        for name in self._registry.names():
            if (start := self._registry.canary(name)) is None:
                continue
            canary = Canary.load(self._home, start)
            share[canary.version] = canary.test.share
            numbers = canary.numbers()
            for arm in ("canary", "control"):
                if answered := numbers[arm]["answered"]:
                    failed[canary.version, arm] = numbers[arm]["failed"] / answered
                reward[canary.version, arm] = numbers[arm]["reward"]
        about = "Share of live sessions that a canary answers"
        yield family("cray_canary_share", about, share, "version")
        about = "Share of failed sessions"
        yield family("cray_canary_failed_share", about, failed, "version", "arm")
        yield family("cray_canary_reward", "Mean reward", reward, "version", "arm")

    def _costs(self) -> Iterator[Metric]:
        loops = {row[0] for row in self._loops.newest()}
        return cost_families(self._home, self._store, self._prices, loops)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _read(reader: Callable[[], Iterator[Metric]]) -> list[Metric]:
    """Return a reader's families; none, with a warning, where files cannot be read."""
    try:
        return list(reader())
    except (CrayError, OSError, KeyError, TypeError, ValueError) as error:
        log.warning("metrics are left out: %s", error)
        return []


class _NewestIterations:
    """The finished iterations of all loops. A record never changes, and is read once."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._seen: dict[str, dict[int, bool]] = {}  # of each loop: number -> promoted
        self._newest: dict[str, tuple[dict[str, Any], float]] = {}

    def newest(self) -> list[tuple[str, dict[str, Any], int, int, float]]:
        """Return name, newest record, promoted, rejected, and the time of the newest record."""
        for folder in self._home.loops.glob("*"):
            self._read_new(folder.name)
        rows = [
            (name, record, sum(self._seen[name].values()), at)
            for name, (record, at) in self._newest.items()
        ]
        rows.sort(key=lambda row: row[-1], reverse=True)
        return [
            (name, record, promoted, len(self._seen[name]) - promoted, at)
            for name, record, promoted, at in rows[:MOST_LOOPS]
        ]

    def _read_new(self, loop: str) -> None:
        seen = self._seen.setdefault(loop, {})
        records = LoopRecords(self._home, loop)
        for number in records.numbers():
            if number in seen:
                continue
            try:
                record, at = records.content(number), records.ended(number)
            except (OSError, CrayError) as error:
                log.warning("loop %s: %s", loop, error)
                continue
            seen[number] = bool(record.get("promoted"))
            if number == max(seen):
                self._newest[loop] = record, at
