"""Scraped metrics: texts of Prometheus as values by labels, and a root with a loop and a job."""

from pathlib import Path
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums

Samples = dict[str, dict[tuple[str, ...], float]]


def parse(text: str) -> Samples:
    """Of each sample's name the values, by the labels' values in the order of their names."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), sample
            found[sample.name][labels] = sample.value
    return found


def labels_of(text: str) -> dict[str, set[str]]:
    """Of each sample's name the labels that all of its samples have."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, set(sample.labels)) & set(sample.labels)
    return found


def put(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join([*(checksums.with_crc(orjson.dumps(one)) for one in records), b""]))


def write_loop_and_jobs(home: Home) -> None:
    """Loop `calc` with two iterations, job-1 that runs, job-2 that failed."""
    iterations = home.loop("calc") / "generations"
    record = {"iteration": 0, "promoted": True, "holdout_success": 0.25, "version": "calc@1"}
    put(iterations / "0.json", record)
    later = {
        "iteration": 1, "promoted": False, "holdout_success": 0.5, "runs": 8, "accepted_runs": 3,
        "seconds": {"train": 4.0}, "evidence": 1.5, "idle_share": 0.25, "wall": 9.0,
        "zero_variance_groups": 2, "trained_tokens": 100, "loss_last": None,
    }  # fmt: skip
    put(iterations / "1.json", record | later)
    put(home.job("job-1") / "spec.json", {})
    put(home.job("job-1") / "attempts" / "1", {})
    put(
        home.job("job-1") / "events.jsonl",
        {"event": "started", "time": 1.0},
        {"event": "agreement", "time": 1.5, "max_difference": 0.5, "mean_difference": 0.01},
        {"event": "step", "time": 2.0, "step": 1, "loss": 2.0, "mfu": 0.4},
        {"event": "straggler", "time": 2.5, "seconds": 3.0, "median": 2.0},
        {"event": "step", "time": 3.0, "step": 2, "loss": 1.5, "mfu": 0.5, "grad_norm": 0.1,
         "seconds": 1.0, "tokens_per_second": 70.0, "lr": 0.1, "communication": 0.2},
        {"event": "saved", "time": 3.0, "seconds": 0.1},
    )  # fmt: skip
    put(home.job("job-2") / "spec.json", {})
    put(home.job("job-2") / "status.json", {"state": "failed"})
