"""Costs: what requests, keys, loops and successes took of GPUs, cores, energy and money."""

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.runtime.accounting.cost_table import (
    GROUPS,
    PAGE,
    CostQuery,
    check,
    cost_table,
    run_cost,
)
from cray_agents.runtime.gateway.http.api_keys import Role, id_of_key, key_names
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import answer_read, bucket_seconds, number, real
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    AFTER,
    BUCKET,
    REAL,
    TEXT,
    Described,
    count_up_to,
)
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.views.view_records import CostTable

router = Router("Platform")


@router.get(
    "/v1/cost",
    Role.use,
    query={
        "by": {"enum": list(GROUPS)},
        "bucket": BUCKET,
        "key": Described(TEXT, "The id or name of a key; none: requests without one."),
        "loop": TEXT,
        "run": Described(TEXT, "A run, with its requests; alone."),
        "since": REAL,
        "until": REAL,
        "limit": count_up_to(PAGE),
        "after": AFTER,
    },
    answer=CostTable,
    fails="404 not_found",
)
async def read_cost(services: Services, request: Request) -> Response:
    """Return what was held of GPUs and cores, and who it was for, in seconds and by your prices.

    `by=use` (if nothing is given) says what came of all that was held. `by=key` and `by=model` give
    the time in which replicas answered to requests, by their tokens, and divide it by `bucket` of
    whole hours. `by=loop` and `by=generation` (of a `loop`) need the role `train`, and add
    training, with the cost of a success and of a point of held-out success. `since` and `until` are
    rounded to whole hours. Callers below `admin` see the requests of their own key.
    """
    params, caller = query(request), caller_of(request)
    run = params.get("run")
    if run is not None:
        if len(params) > 1:
            raise BadInput("run: give it alone", param="run")
        return await answer_read(request, lambda: _run(services, run), long=True)
    grouped = "generation" if "loop" in params else "key" if "key" in params else "use"
    question = CostQuery(
        by=params.get("by", grouped),
        bucket=bucket_seconds(params),
        key=params.get("key"),
        loop=params.get("loop"),
        since=real(params, "since", 0.0),
        until=real(params, "until", 0.0) if "until" in params else None,
        owner=None if caller.role is Role.admin else caller.key_id,
        after=params.get("after"),
        limit=number(params, "limit", PAGE, PAGE),
    )
    check(question)
    if question.key not in (None, caller.key_id, caller.name):
        caller.check_role(Role.admin, "the cost of another key")
    if question.loop is not None or question.by in ("loop", "generation"):
        caller.check_role(Role.train, "the cost of loops")
    return await answer_read(request, lambda: _rows(services, question), long=True)


def _rows(services: Services, question: CostQuery) -> dict[str, Any]:
    names = key_names(services.home)
    if question.key is not None:
        question = replace(question, key=id_of_key(question.key, names))
    table = cost_table(services.home, services.store, services.prices, question, names)
    return table.model_dump(mode="json")


def _run(services: Services, run: str) -> dict[str, Any]:
    names = key_names(services.home)
    table = run_cost(services.home, services.store, services.prices, run, names)
    return table.model_dump(mode="json")
