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
from prometheus_client.parser import text_string_to_metric_families

from cray_agents.errors import EngineError
from cray_agents.runtime.pool.vllm_engine import ReplicaServer
from cray_agents.runtime.telemetry.call_metrics import family

BY = ["replica", "host"]


def replica_families(replicas: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the families of the replicas, by what `Pool.status` returns.

    A further gateway knows less of them: a number that it lacks has no sample.
    """
    info: dict[tuple[str, ...], float] = {}
    flight, busy, restarts = dict(info), dict(info), dict(info)
    probe, passed, phases = dict(info), dict(info), dict(info)
    for number, replica in enumerate(replicas):
        place = (str(number), str(replica.get("host") or ""))
        version = str(replica.get("version") or ", ".join(replica.get("versions") or ()))
        info[*place, version, str(replica.get("state"))] = 1
        flight[place] = replica.get("in_flight") or 0
        if "busy_seconds" in replica:
            busy[place] = replica["busy_seconds"]
            restarts[place] = replica.get("restarts") or 0
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
