"""Render deploy/chart, and check its objects by Kubernetes' schemas: run by .venv-chart's Python.

Reads a list of values as JSON. Prints for each `refused`, what the schema of the values or a
template said; or `objects`, and their `faults` by the chart's oldest Kubernetes and the newest. An
argument is the folder of another copy of the chart.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError

CHART = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[3] / "deploy" / "chart"
VERSIONS = ("1.30", kubernetes_validate.latest_version())


def render(chart: Any, values: dict[str, Any]) -> dict[str, Any]:
    try:
        chart.validate_schema(values)
        files = chart.render(values, name="cray", namespace="agents")
    except HelmError as error:
        return {"refused": str(error)}
    objects = [one for text in files.values() for one in yaml.safe_load_all(text) if one]
    linted = lint(CHART, values)["messages"]
    faults = [message["error"] for message in linted if message["severity"] > 1]
    return {"objects": objects, "faults": faults + [f for one in objects for f in found(one)]}


def found(one: dict[str, Any]) -> Iterator[str]:
    """What is wrong with an object; of a custom resource, with the pod that it describes."""
    if one["apiVersion"].startswith("monitoring"):
        return
    if one["apiVersion"].startswith("slinky"):
        one = pod_of(one)
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path))
            yield f"{version}: {one['kind']} {one['metadata']['name']}: {path}: {error.message}"


def pod_of(resource: dict[str, Any]) -> dict[str, Any]:
    spec = resource["spec"]
    roles = {"slurmctld", "reconfigure", "logfile", "slurmrestd", "slurmd", "initconf", "login"}
    containers = [{"name": role} | spec[role] for role in sorted(roles & set(spec))]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": resource["metadata"]["name"]} | spec["template"]["metadata"],
        "spec": spec["template"]["spec"] | {"containers": containers},
    }


with Chart.load(CHART) as loaded:
    print(json.dumps([render(loaded, values) for values in json.load(sys.stdin)]))
