"""Operations on the platform itself."""

from cray_agents.runtime.gateway.openapi.operation import Operation, Schema
from cray_agents.runtime.gateway.openapi.schemas import data, record

ANY: Schema = {"type": "object"}
ALIVE = record({"status": {"const": "ok"}})

OPERATIONS = (
    Operation("get", "/health", "health", "Platform", "Is it there", ALIVE, open=True),
    Operation("get", "/health/live", "live", "Platform", "Is it there", ALIVE, open=True),
    Operation(
        "get",
        "/health/ready",
        "ready",
        "Platform",
        "Can a replica answer",
        record({"status": {"const": "ready"}}),
        fails=("503 not_ready",),
        open=True,
    ),
    Operation("get", "/v1/platform", "platform", "Platform", "What the platform is made of", ANY),
    Operation("get", "/v1/pool", "pool", "Platform", "The replicas and what they hold", data(ANY)),
    Operation(
        "get",
        "/metrics",
        "metrics",
        "Platform",
        "Numbers for Prometheus",
        {"text/plain": {}, "application/openmetrics-text": {}},
    ),
    Operation("get", "/openapi.json", "openapi", "Platform", "This document", ANY),
)
