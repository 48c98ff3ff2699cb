"""Replica metrics: version, proof and work of each replica, as families for Prometheus."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
