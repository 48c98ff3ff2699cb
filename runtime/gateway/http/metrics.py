"""Metrics: the counters of the gateway for Prometheus.

Every application has a registry of its own. Labels come from closed sets: route templates, methods
that a route has, status classes, and error codes up to a bound. So no client can make series at
will. Label lookups are cached, for they cost most. middleware.py counts requests; other callers
report through the methods here. routes/platform.py serves GET /metrics.
"""

from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from cray_agents.runtime.background import FAILURES
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.pool.published_replicas import State
from cray_agents.runtime.telemetry.call_metrics import OTHER, SECONDS, CallMetrics, replica_families

SWAP_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
MOST_CODES = 100  # error codes with a series of their own, ours and those of engines
GONE = "gone"  # status class of a client that left before the answer


class _Series(NamedTuple):
    """The series of one route, method and status, looked up once."""

    requests: Counter
    first_byte: Histogram
    seconds: Histogram


class Metrics:
    """The counters of one gateway.

    `gateway`: its name, which is a label of every series where several gateways share a port.
    """

    def __init__(self, gateway: str = "") -> None:
        self.gateway = gateway
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter("cray_requests", "HTTP requests", ["route", "method", "status"])
        about = "Seconds from a request's head to the end of its answer"
        self.request_seconds = histogram("cray_request_seconds", about, ["route"], buckets=SECONDS)
        about = "Seconds from a request's head to the head of its answer"
        self.first_byte_seconds = histogram(
            "cray_first_byte_seconds", about, ["route"], buckets=SECONDS
        )
        self.errors = counter("cray_errors", "Errors by code", ["code"])
        self.tokens = counter("cray_tokens", "Tokens of recorded calls (prompt, sampled)", ["kind"])
        self.calls = counter("cray_calls_recorded", "Model calls in the store")
        about = "Seconds until all replicas held new weights, or did not"
        self.swap_seconds = histogram("cray_swap_seconds", about, ["outcome"], buckets=SWAP_SECONDS)
        self.model_calls = CallMetrics(registry)
        self._collectors: list[Collector] = []
        self._replica_states: Sequence[Mapping[str, Any]] = ()
        self.in_flight = 0  # HTTP requests in the gateway now
        self.sampled_tokens = 0  # of all recorded calls so far
        self._prompt, self._sampled = self.tokens.labels("prompt"), self.tokens.labels("sampled")
        self._swapped = {
            good: self.swap_seconds.labels(outcome)
            for good, outcome in ((True, "done"), (False, "failed"))
        }
        self._series: dict[tuple[str, str, int], _Series] = {}
        self._codes: set[str] = set()
        self._states: set[str] = set(get_args(State))  # all are listed, also with 0
        self._in_flight = gauge("cray_requests_in_flight", "HTTP requests now")
        about = "Model requests by class (interactive, batch), inside at the engines or waiting"
        self._places = gauge("cray_admission_requests", about, ["class", "place"])
        self._capacity = gauge("cray_admission_capacity", "Requests the engines take at once")
        self._replicas = gauge("cray_replicas", "Replicas by state", ["state"])

    def add(self, collector: Collector) -> None:
        """Let `collect` also yield the metrics of a collector."""
        self._collectors.append(collector)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, as a registry does."""
        states = replica_families(self._replica_states)
        own = (self.registry.collect(), states, [_task_failures()])
        for metric in chain(*own, *(one.collect() for one in self._collectors)):
            if self.gateway:
                metric.samples = [
                    sample._replace(labels={**sample.labels, "gateway": self.gateway})
                    for sample in metric.samples
                ]
            yield metric

    def request(self, route: str, method: str, status: int, first: float, total: float) -> None:
        """Count a request: seconds to its answer's head and end. Status 0: the client left."""
        key = (route, method, status // 100)
        kept = self._series.get(key)
        if kept is None:
            label = f"{status // 100}xx" if status else GONE
            kept = self._series[key] = _Series(
                self.requests.labels(route, method, label),
                self.first_byte_seconds.labels(route),
                self.request_seconds.labels(route),
            )
        kept.requests.inc()
        if status:
            kept.first_byte.observe(first)
        kept.seconds.observe(total)

    def error(self, code: str) -> None:
        """Count a failed request or stream by its code."""
        if code not in self._codes:
            if len(self._codes) >= MOST_CODES:
                code = OTHER
            self._codes.add(code)
        self.errors.labels(code).inc()

    def recorded(self, prompt: int, sampled: int, calls: int = 1) -> None:
        """Count recorded calls and the sum of their tokens."""
        self.sampled_tokens += sampled
        self.calls.inc(calls)
        self._prompt.inc(prompt)
        self._sampled.inc(sampled)

    def swapped(self, seconds: float, good: bool) -> None:
        """Count a swap of the whole pool that has ended."""
        self._swapped[good].observe(seconds)

    def set_gauges(self, admission: Admission, replicas: Sequence[Mapping[str, Any]]) -> None:
        """Set the gauges to the present state; `replicas` is what `Pool.status` returns."""
        self._replica_states = replicas
        self._in_flight.set(self.in_flight)
        self._capacity.set(admission.capacity)
        for name, batch in (("interactive", False), ("batch", True)):
            self._places.labels(name, "inside").set(admission.inside(batch))
            self._places.labels(name, "waiting").set(admission.waiting(batch))
        counts = Counts(str(replica.get("state")) for replica in replicas)
        self._states |= counts.keys()
        for state in self._states:
            self._replicas.labels(state).set(counts[state])


def _task_failures() -> Metric:
    """Return how often the background tasks of this process failed."""
    about = "Unforeseen failures of background tasks, after which they were started again"
    family = CounterMetricFamily("cray_task_failures", about, labels=["task"])
    for name, failure in list(FAILURES.by_task.items()):
        family.add_metric([name], failure.number)
    return family
