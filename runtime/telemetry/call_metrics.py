"""Call metrics: counters of recorded model calls by version, key, class and finish reason.

Labels are bounded: a key is the hash of its id, and beyond `MOST_SERIES` combinations version and
key become "other". http/metrics.py holds one object; model_calls/answer.py reports each call.

`family` is how all other metrics are made: those that are read when somebody scrapes.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
