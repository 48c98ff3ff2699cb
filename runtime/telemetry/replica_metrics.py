"""Replica metrics: each replica's state, and its vLLM's own metrics, for Prometheus.

Replicas answer only with the platform's secret, so Prometheus cannot scrape them: the gateway does.
Each sample gets the labels `replica`, `host` and `version`. A label of that name that vLLM gave is
renamed `exported_...`, as Prometheus itself does. `cray_engine_up` tells which replicas answered.
`_created` samples are left out. Read next: pool.py (`engines`), routes/platform.py.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from cray_agents.errors import EngineError
from cray_agents.runtime.pool.vllm_engine import ReplicaServer

BY = ["replica", "host"]


def replica_families(replicas: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the families of the replicas, by what `Pool.status` returns.

    A further gateway knows less of them: a number that it lacks has no sample.
    """
    info = GaugeMetricFamily(
        "cray_replica_info",
        "1: the version and state of a replica",
        labels=[*BY, "version", "state"],
    )
    flight = GaugeMetricFamily("cray_replica_requests", "Requests in flight", labels=BY)
    busy = CounterMetricFamily(
        "cray_replica_busy_seconds", "Seconds with at least one request in flight", labels=BY
    )
    restarts = CounterMetricFamily("cray_replica_restarts", "Restarts of a replica", labels=BY)
    probe = GaugeMetricFamily(
        "cray_probe_logprob_diff",
        "Difference from the trainer's logprobs on the golden probe (nats): max, mean, p99, "
        "tolerance",
        labels=[*BY, "version", "kind"],
    )
    passed = GaugeMetricFamily(
        "cray_probe_passed", "1 if the last golden probe passed", labels=[*BY, "version"]
    )
    phases = GaugeMetricFamily(
        "cray_replica_change_seconds",
        "Seconds by phase of the last change of version",
        labels=[*BY, "version", "phase"],
    )
    for number, replica in enumerate(replicas):
        place = (str(number), str(replica.get("host") or ""))
        version = str(replica.get("version") or ", ".join(replica.get("versions") or ()))
        info.add_metric([*place, version, str(replica.get("state"))], 1)
        flight.add_metric(place, replica.get("in_flight") or 0)
        if "busy_seconds" in replica:
            busy.add_metric(place, replica["busy_seconds"])
            restarts.add_metric(place, replica.get("restarts") or 0)
        if report := replica.get("probe"):
            for kind in ("max", "mean", "p99"):
                value = report[f"{kind}_logprob_diff"]
                probe.add_metric([*place, report["version"], kind], value)
            probe.add_metric([*place, report["version"], "tolerance"], report["tolerance"])
            passed.add_metric([*place, report["version"]], float(report["passed"]))
            for phase, seconds in report["seconds"].items():
                phases.add_metric([*place, report["version"], phase], seconds)
    yield from (info, flight, busy, restarts, probe, passed, phases)


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
        up = GaugeMetricFamily("cray_engine_up", "1 if a replica's vLLM answered", labels=LABELS)
        families: dict[str, Metric] = {}
        for labels, text in self._texts:
            whole = text
            try:
                for family in text_string_to_metric_families(_CREATED.sub("", text or "")):
                    self._add(families, family, dict(zip(LABELS, labels, strict=True)))
            except ValueError:  # it is no text of Prometheus
                whole = None
            up.add_metric(labels, float(whole is not None))
        yield up
        yield from families.values()

    @staticmethod
    def _add(families: dict[str, Metric], family: Metric, labels: Mapping[str, str]) -> None:
        merged = families.setdefault(
            family.name, Metric(family.name, family.documentation, family.type, family.unit)
        )
        for sample in family.samples:
            own = {
                f"exported_{name}" if name in LABELS else name: value
                for name, value in sample.labels.items()
            }
            merged.samples.append(sample._replace(labels={**own, **labels}))
