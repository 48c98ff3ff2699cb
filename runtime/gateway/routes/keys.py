"""API keys: list, create and revoke them, what each used, and what that cost."""

import asyncio
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter
from cray_agents.runtime.accounting.cost_table import (
    GROUPS,
    PAGE,
    CostQuery,
    CostTable,
    check,
    cost_table,
    run_cost,
)
from cray_agents.runtime.disk import paging
from cray_agents.runtime.gateway.http.api_keys import (
    KeyRecord,
    Keys,
    Role,
    id_of_key,
    key_names,
    role_named,
)
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import json_response, page
from cray_agents.runtime.gateway.http.fields import (
    After,
    Bucket,
    DataList,
    Fields,
    Limit,
    ListPage,
    MaybeReal,
    named,
    names_in,
)
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.services import Current
from cray_agents.runtime.views.usage import check_groups, usage_table
from cray_agents.runtime.views.view_records import NewKey, ShownKey, UsageTable

router = Router("Platform")


class KeyRequest(Fields):
    """A key to make."""

    name: str
    role: Literal["use", "train", "admin"] = "use"


@router.get("/v1/keys", Role.admin, answer=ListPage[ShownKey])
async def list_keys(services: Current, limit: Limit = 100, after: After = None) -> Response:
    """List every API key that was ever made, newest first, without its secret."""
    keys = Keys(services.home)
    pairs, damaged = await asyncio.to_thread(lambda: (keys.list(), keys.damaged()))
    rows = [_key_fields(record, revoked) for record, revoked in reversed(pairs)]
    listed = paging.after(rows, lambda row: row["id"], after, limit, "key")
    return json_response(page(*listed, damaged=damaged))


@router.post("/v1/keys", Role.admin, answer=NewKey, fails="400 invalid_value")
async def create_key(services: Current, body: KeyRequest) -> Response:
    """Make an API key. Its secret is in this answer and nowhere else.

    On loopback the first key ends the time without keys: from then on every request needs one.
    """
    role = role_named(body.role)
    record, secret = await asyncio.to_thread(lambda: Keys(services.home).create(body.name, role))
    return json_response({**_key_fields(record, False), "secret": secret})


@router.delete("/v1/keys/{key}", Role.admin, answer=DataList[ShownKey])
async def revoke_key(services: Current, key: Annotated[str, named("key", "key")]) -> Response:
    """End the key of this id, or every key of this name. It stops working within a second."""
    records = await asyncio.to_thread(lambda: Keys(services.home).revoke(key))
    return json_response({"data": [_key_fields(record, True) for record in records]})


@router.get("/v1/usage", Role.use, answer=UsageTable, long=True)
def read_usage(
    services: Current,
    request: Request,
    by: Annotated[str, Query(description="With commas: key, model; neither unless given.")] = "",
    bucket: Bucket = None,
    since: MaybeReal = None,
    until: MaybeReal = None,
    limit: Limit = 1000,
) -> dict[str, Any]:
    """Sum up runs, calls, tokens and seconds by API key, model and time.

    It counts recorded runs, each at its start and with its last version, so what was forgotten or
    refused is not in it. Callers below `admin` see their own key's runs only. Of more groups than
    `limit` (1000) the largest are kept.
    """
    groups, caller = names_in(by), caller_of(request)
    check_groups(groups)
    owner = None if caller.role is Role.admin else caller.key_id
    names = key_names(services.home) if "key" in groups else {}
    which = RunFilter(since=since, until=until)
    return usage_table(
        services.store, which, groups, names, bucket=bucket, owner=owner, limit=limit
    )


@router.get("/v1/cost", Role.use, answer=CostTable, fails="404 not_found", long=True)
def read_cost(
    services: Current,
    request: Request,
    by: Annotated[str | None, Query(json_schema_extra={"enum": list(GROUPS)})] = None,
    bucket: Bucket = None,
    key: Annotated[
        str | None, Query(description="The id or name of a key; none: requests without one.")
    ] = None,
    loop: str | None = None,
    run: Annotated[str | None, Query(description="A run, with its requests; alone.")] = None,
    since: MaybeReal = None,
    until: MaybeReal = None,
    limit: Annotated[int, Query(ge=0, le=PAGE)] = PAGE,
    after: After = None,
) -> CostTable:
    """Return what was held of GPUs and cores, and who it was for, in seconds and by your prices.

    `by=use` (if nothing is given) says what came of all that was held. `by=key` and `by=model` give
    the time in which replicas answered to requests, by their tokens, and divide it by `bucket` of
    whole hours. `by=loop` and `by=iteration` (of a `loop`) need the role `train`, and add
    training, with the cost of a success and of a point of held-out success; so does `by=job`, of
    the kept steps of jobs. `since` and `until` are
    rounded to whole hours. Callers below `admin` see the requests of their own key.
    """
    caller = caller_of(request)
    if run is not None:
        if len(request.query_params) > 1:
            raise BadInput("run: give it alone", param="run")
        names = key_names(services.home)
        return run_cost(services.home, services.store, services.prices, run, names)
    grouped = "iteration" if loop is not None else "key" if key is not None else "use"
    question = CostQuery(
        by=by or grouped,
        bucket=bucket,
        key=key,
        loop=loop,
        since=since or 0.0,
        until=until,
        owner=None if caller.role is Role.admin else caller.key_id,
        after=after,
        limit=limit,
    )
    check(question)
    if question.key not in (None, caller.key_id, caller.name):
        caller.check_role(Role.admin, "the cost of another key")
    if question.loop is not None or question.by in ("loop", "iteration", "job"):
        caller.check_role(Role.train, "the cost of loops and jobs")
    names = key_names(services.home)
    known = None if question.key is None else id_of_key(question.key, names)
    question = replace(question, key=known)
    return cost_table(services.home, services.store, services.prices, question, names)


def _key_fields(record: KeyRecord, revoked: bool) -> dict[str, Any]:
    fields = {"id": record.id, "name": record.name, "role": record.role.name}
    return {**fields, "created": record.created, "revoked": revoked}
