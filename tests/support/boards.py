"""Boards and alerts as they are in deploy/observability/, for Grafana and Prometheus."""

import json
from pathlib import Path
from typing import Any

import yaml

OBSERVABILITY = Path(__file__).parents[2] / "deploy/observability"
BOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((OBSERVABILITY / "grafana/dashboards").glob("*.json"))
}
PANELS = [
    (f"{name}: {panel['title']}", panel)
    for name, board in BOARDS.items()
    for panel in board["panels"]
]
(_GROUP,) = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
ALERTS: list[dict[str, Any]] = _GROUP["rules"]
