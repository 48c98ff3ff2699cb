"""Operations on the platform itself."""

from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.openapi.operation import Operation, Schema
from cray_agents.runtime.gateway.openapi.schemas import record, some

TEXT: Schema = {"type": "string"}
ANY: Schema = {"type": "object"}
LEASE = record(
    {"holder": TEXT, "version": TEXT, "displaced": some(TEXT), "seconds_left": {"type": "number"}}
)
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
    Operation(
        "get",
        "/v1/whoami",
        "whoami",
        "Platform",
        "Which key one calls with, and what it may do",
        record(
            {
                "key": {"type": ["string", "null"], "description": "Its id; null without one."},
                "name": {"type": "string"},
                "role": {"enum": list(Role.__members__)},
            }
        ),
    ),
    Operation(
        "get",
        "/v1/pool",
        "pool",
        "Platform",
        "The replicas and what they hold",
        record(
            {"data": some(ANY), "spares": some(ANY), "lease": {"anyOf": [LEASE, {"type": "null"}]}}
        ),
        more="`spares`: replicas that were started for versions that no other holds. `lease`: who "
        "has the only replica hold another version than the promoted one.",
    ),
    Operation(
        "post",
        "/v1/pool/lease",
        "renewLease",
        "Platform",
        "Keep what was staged by force for a while more",
        LEASE,
        takes=record({"holder": TEXT}, {"seconds": {"type": "number"}}),
        more="With 0 seconds what is promoted is loaded again. A stage with `force` begins it.",
        fails=("404 no_lease",),
    ),
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
