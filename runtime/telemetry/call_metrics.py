"""Call metrics: counters of recorded model calls by version, key, class and finish reason.

Labels are bounded: a key is the hash of its id, and beyond `MOST_SERIES` combinations version and
key become "other". http/metrics.py holds one object; model_calls/answer.py reports each call.

`family` is how all other metrics are made: those that are read when somebody scrapes.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from cray_agents.errors import EngineError
from cray_agents.runtime.pool.vllm_engine import ReplicaServer

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
FINISHES = ("stop", "length", "tool_calls", "error", "cancelled")
OTHER = "other"
NO_KEY = "none"
MOST_SERIES = 500  # combinations of version, key and class
CLASSES = {False: "interactive", True: "batch"}

Samples = Mapping[Any, float | None]  # by the value of the label, or of each


def family(
    name: str, about: str, samples: Samples | float, *labels: str, counter: bool = False
) -> Metric:
    """Return a gauge, or a counter, with its samples; None is no sample.

    Without labels it is a number.
    """
    made = (CounterMetricFamily if counter else GaugeMetricFamily)(name, about, labels=labels)
    given = samples if isinstance(samples, Mapping) else {(): samples}
    for values, number in given.items():
        if number is not None:
            made.add_metric((values,) if isinstance(values, str) else values, number)
    return made


class CallMetrics:
    """The families of model calls, in a gateway's registry. Seconds are seen at the gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by = ["version", "key", "class"]

        def seconds(name: str, about: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, about, ["class"], buckets=buckets, registry=registry)

        self._requests = Counter(
            "cray_model_requests", "Recorded model calls", [*by, "finish"], registry=registry
        )
        self._tokens = Counter(
            "cray_model_tokens",
            "Tokens of recorded model calls (prompt, sampled)",
            [*by, "kind"],
            registry=registry,
        )
        self._malformed = Counter(
            "cray_malformed_tool_calls",
            "Sampled tool calls whose arguments are no JSON object",
            by,
            registry=registry,
        )
        self._scans = Counter(
            "cray_scans",
            "Looks of scanners at runs by outcome (found, clear, unjudged)",
            ["scanner", "version", "outcome"],
            registry=registry,
        )
        self._scan_series: set[tuple[str, str]] = set()
        self._first = seconds(
            "cray_first_token_seconds", "Seconds from a request to a stream's first event"
        )
        self._between = seconds(
            "cray_inter_token_seconds",
            "Mean seconds between the tokens of a stream, once a stream",
            TOKEN_SECONDS,
        )
        self._waits = seconds("cray_queue_wait_seconds", "Seconds that a call waited for a place")
        self.append_seconds = Histogram(
            "cray_store_append_seconds",
            "Seconds until a call was durable in the store",
            buckets=SECONDS,
            registry=registry,
        )
        for kind in CLASSES.values():  # listed also before the first call
            for family in (self._first, self._between, self._waits):
                family.labels(kind)
        self._known: dict[tuple[str, str, str], tuple[str, str, str]] = {}
        self._series: dict[tuple[str, ...], Callable[[float], None]] = {}

    def count(
        self,
        version: str,
        key: str,
        batch: bool,
        finish: str | None,
        tokens: tuple[int, int],
        waited: float,
        malformed: int = 0,
    ) -> None:
        """Count a call.

        Args:
            version: the `name@N` that answered.
            key: the id of the API key; "" for none.
            batch: whether the call was of the batch class.
            finish: the finish reason of its first sequence.
            tokens: of the prompt and sampled, of all sequences.
            waited: seconds until it got a place at the engines.
            malformed: tool calls that it sampled with arguments that are no JSON object.
        """
        labels = self._bounded(version, key, CLASSES[batch])
        finish = finish if finish in FINISHES else OTHER
        self._add((*labels, finish), self._requests, 1)
        for kind, count in zip(("prompt", "sampled"), tokens, strict=True):
            self._add((*labels, kind), self._tokens, count)
        if malformed:
            self._add(labels, self._malformed, malformed)
        self._waits.labels(CLASSES[batch]).observe(waited)

    def streamed(self, batch: bool, first: float, rest: float, sampled: int) -> None:
        """Count a whole stream: seconds to its first event, seconds after it, tokens sampled."""
        self._first.labels(CLASSES[batch]).observe(first)
        if sampled > 1:
            self._between.labels(CLASSES[batch]).observe(rest / (sampled - 1))

    def scanned(self, source: str, version: str, value: float) -> None:
        """Count a finding of a scanner, by its source, in a run of this version."""
        kind, _, scanner = source.partition(":")
        outcome = "unjudged" if kind != "scan" else "found" if value else "clear"
        if (scanner, version) not in self._scan_series and len(self._scan_series) >= MOST_SERIES:
            scanner, version = OTHER, OTHER
        self._scan_series.add((scanner, version))
        self._scans.labels(scanner, version, outcome).inc()

    def _bounded(self, version: str, key: str, kind: str) -> tuple[str, str, str]:
        labels = self._known.get((version, key, kind))
        if labels is None:
            if len(self._known) >= MOST_SERIES:
                return OTHER, OTHER, kind
            labels = self._known[version, key, kind] = (version, key_label(key), kind)
        return labels

    def _add(self, labels: tuple[str, ...], family: Counter, count: int) -> None:
        """Add to a series, which is looked up once: look-ups cost most."""
        add = self._series.get(labels)
        if add is None:
            add = self._series[labels] = family.labels(*labels).inc
        add(count)


def key_label(key: str) -> str:
    """Return the label of an API key's id: a hash, so that boards do not tell names."""
    return hashlib.sha256(key.encode()).hexdigest()[:12] if key else NO_KEY


# ---- Replica metrics: each replica's state, and its vLLM's own metrics, for Prometheus
# Replicas answer only with the platform's secret, so Prometheus cannot scrape them: the gateway
# does. Each sample gets the labels `replica`, `host` and `version`. A label of that name that vLLM
# gave is renamed `exported_...`, as Prometheus itself does. `cray_engine_up` tells which replicas
# answered. `_created` samples are left out.
BY = ["replica", "host"]


def replica_families(replicas: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the families of the replicas, by what `Pool.status` returns.

    A further gateway knows less of them: a number that it lacks has no sample.
    """
    info: dict[tuple[str, ...], float] = {}
    flight, busy, restarts = dict(info), dict(info), dict(info)
    probe, passed, phases, starts = dict(info), dict(info), dict(info), dict(info)
    for number, replica in enumerate(replicas):
        place = (str(number), str(replica.get("host") or ""))
        version = str(replica.get("version") or ", ".join(replica.get("versions") or ()))
        info[*place, version, str(replica.get("state"))] = 1
        flight[place] = replica.get("in_flight") or 0
        if "busy_seconds" in replica:
            busy[place] = replica["busy_seconds"]
            restarts[place] = replica.get("restarts") or 0
        if begun := replica.get("last_start"):
            starts |= {(*place, phase): took for phase, took in begun["seconds"].items()}
        if report := replica.get("probe"):
            proved = (*place, report["version"])
            for kind in ("max", "mean", "p99"):
                probe[*proved, kind] = report[f"{kind}_logprob_diff"]
            probe[*proved, "tolerance"] = report["tolerance"]
            passed[proved] = float(report["passed"])
            for phase, seconds in report["seconds"].items():
                phases[*proved, phase] = seconds
    yield family("cray_replica_info", "1: the version and state of a replica",
                 info, *BY, "version", "state")  # fmt: skip
    yield family("cray_replica_requests", "Requests in flight", flight, *BY)
    yield family("cray_replica_busy_seconds", "Seconds with at least one request in flight",
                 busy, *BY, counter=True)  # fmt: skip
    yield family("cray_replica_restarts", "Restarts of a replica", restarts, *BY, counter=True)
    about = "Difference from the trainer's logprobs in the logprob check (nats)"
    yield family("cray_probe_logprob_diff", about, probe, *BY, "version", "kind")
    yield family("cray_probe_passed", "1 if the last logprob check passed", passed, *BY, "version")
    yield family("cray_replica_change_seconds", "Seconds by phase of the last change of version",
                 phases, *BY, "version", "phase")  # fmt: skip
    yield family("cray_replica_start_seconds", "Seconds by phase of the last start or awakening",
                 starts, *BY, "phase")  # fmt: skip


TIMEOUT = 5.0  # seconds for a replica to answer
LABELS = ("replica", "host", "version")

_CREATED = re.compile(r"^(?:# (?:HELP|TYPE) )?[a-zA-Z_:][\w:]*_created[ {].*\n?", re.MULTILINE)


class EngineText(NamedTuple):
    """The metrics of one replica as it sent them; None if it did not answer."""

    labels: tuple[str, str, str]
    text: str | None


async def scrape(engines: Sequence[ReplicaServer], timeout: float = TIMEOUT) -> list[EngineText]:
    """Ask all replicas at once for their metrics. One that does not answer in time has no text."""

    async def ask(placed: ReplicaServer) -> EngineText:
        text: str | None = None
        if placed.engine is not None:
            try:
                async with asyncio.timeout(timeout):
                    text = await placed.engine.metrics(timeout)
            except (EngineError, TimeoutError):
                text = None
        return EngineText(placed[:3], text)

    return list(await asyncio.gather(*map(ask, engines)))


class EngineCollector:
    """A collector of what `scrape` returned, for prometheus_client's encoders."""

    def __init__(self, texts: Iterable[EngineText]) -> None:
        self._texts = list(texts)

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of all replicas."""
        up: dict[tuple[str, ...], float] = {}
        families: dict[str, Metric] = {}
        for labels, text in self._texts:
            whole = text
            try:
                for parsed in text_string_to_metric_families(_CREATED.sub("", text or "")):
                    self._add(families, parsed, dict(zip(LABELS, labels, strict=True)))
            except ValueError:  # it is no text of Prometheus
                whole = None
            up[labels] = float(whole is not None)
        yield family("cray_engine_up", "1 if a replica's vLLM answered", up, *LABELS)
        yield from families.values()

    @staticmethod
    def _add(families: dict[str, Metric], parsed: Metric, labels: Mapping[str, str]) -> None:
        merged = families.setdefault(
            parsed.name, Metric(parsed.name, parsed.documentation, parsed.type, parsed.unit)
        )
        for sample in parsed.samples:
            own = {
                f"exported_{name}" if name in LABELS else name: value
                for name, value in sample.labels.items()
            }
            merged.samples.append(sample._replace(labels={**own, **labels}))
