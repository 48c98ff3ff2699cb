"""MetricBoard files: Prometheus' configuration, alerts and Grafana's boards, made of catalog.py.

    prometheus.yml                        scrapes /metrics and /metrics/engines of targets.json
    targets.json                          the gateways; Prometheus follows its changes
    alerts.yml                            the alerts
    grafana/dashboards/<board>.json       the boards
    grafana/provisioning/...              lets Grafana load the boards and Prometheus by itself

Written by `cray-agents observability init`. YAML is written by hand: JSON texts are YAML, too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cray_agents.runtime.observability.boards.catalog import (
    ALERTS,
    BOARDS,
    Alert,
    BoardPanel,
    MetricBoard,
)

SOURCE = {"type": "prometheus", "uid": "${source}"}
PATHS = {"cray-agents": "/metrics", "cray-agents-engines": "/metrics/engines"}
_WIDTH, _HEIGHT = 12, 8  # of a panel; a row is 24 wide


def board_files(targets: Sequence[str], key_file: str | None = None) -> dict[Path, str]:
    """Return each file's text by its path within the folder.

    `targets`: gateways as host:port. `key_file`: a file with an API key, for Prometheus to read.
    """
    boards = Path("grafana/dashboards")
    provisioning = Path("grafana/provisioning")
    return {
        Path("prometheus.yml"): _prometheus(key_file),
        Path("targets.json"): _json([{"targets": list(targets)}]),
        Path("alerts.yml"): _alerts(ALERTS),
        **{boards / f"{board.name}.json": _json(grafana_board(board)) for board in BOARDS},
        provisioning / "datasources/prometheus.yml": _DATASOURCE,
        provisioning / "dashboards/cray-agents.yml": _PROVIDER,
    }


def grafana_board(board: MetricBoard) -> dict[str, Any]:
    """Return a board as Grafana's JSON model."""
    return {
        "uid": f"cray-agents-{board.name}",
        "title": f"cray-agents: {board.title}",
        "tags": ["cray-agents"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "hide": 0}]
        },
        "panels": [_panel(panel, number) for number, panel in enumerate(board.panels)],
    }


def _panel(panel: BoardPanel, number: int) -> dict[str, Any]:
    across = 24 // _WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {
            "x": number % across * _WIDTH,
            "y": number // across * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend,
             "datasource": SOURCE}
            for place, (expression, legend) in enumerate(panel.curves)
        ],
    }  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _prometheus(key_file: str | None) -> str:
    lines = ["global: {scrape_interval: 10s, evaluation_interval: 10s}"]
    lines += ["rule_files: [alerts.yml]", "scrape_configs:"]
    for job, path in PATHS.items():
        lines += [f"  - job_name: {job}", f"    metrics_path: {path}"]
        if key_file is not None:
            lines += [f"    authorization: {{credentials_file: {json.dumps(key_file)}}}"]
        lines += ["    file_sd_configs: [{files: [targets.json]}]"]
    return "\n".join([*lines, ""])


def _alerts(alerts: Sequence[Alert]) -> str:
    lines = ["groups:", "  - name: cray-agents", "    rules:"]
    for alert in alerts:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.minutes}m",
            f"        labels: {{severity: {alert.severity}}}",
            f"        annotations: {{summary: {json.dumps(alert.summary)}}}",
        ]
    return "\n".join([*lines, ""])


_DATASOURCE = """\
apiVersion: 1
datasources:
  - name: Prometheus
    type: prometheus
    access: proxy
    url: http://127.0.0.1:9090
    isDefault: true
"""

_PROVIDER = """\
apiVersion: 1
providers:
  - name: cray-agents
    folder: cray-agents
    type: file
    options: {path: /var/lib/grafana/dashboards}
"""
