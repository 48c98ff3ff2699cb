"""API keys: list, create and revoke them, and what each used."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter
from cray_agents.runtime.gateway.http.api_keys import (
    KeyRecord,
    Keys,
    Role,
    key_names,
    role_named,
)
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    answer_read,
    bucket_seconds,
    field,
    json_response,
    names_in,
    number,
    page,
    path_id,
    read_json,
    real,
)
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    AFTER,
    BUCKET,
    REAL,
    TEXT,
    Described,
    count_up_to,
    data_of,
    object_of,
    page_of,
)
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.views.usage import check_groups, usage_table
from cray_agents.runtime.views.view_records import NewKey, ShownKey, UsageTable

PAGE_LIMIT = 1000  # keys or rows of usage in an answer

router = Router("Platform")


@router.get(
    "/v1/keys",
    Role.admin,
    query={"limit": count_up_to(PAGE_LIMIT), "after": AFTER},
    answer=page_of(ShownKey),
)
async def list_keys(services: Services, request: Request) -> Response:
    """List every API key that was ever made, newest first, without its secret."""
    params = query(request)
    limit, after = number(params, "limit", 100, PAGE_LIMIT), params.get("after")
    keys = Keys(services.home)
    pairs, damaged = await asyncio.to_thread(lambda: (keys.list(), keys.damaged()))
    rows = [_key_fields(record, revoked) for record, revoked in reversed(pairs)]
    if after is not None:
        ids = [row["id"] for row in rows]
        if after not in ids:
            raise BadInput(f"after: no key {after[:200]!r} is listed here", param="after")
        rows = rows[ids.index(after) + 1 :]
    return json_response(page(rows[:limit], len(rows) > limit, damaged=damaged))


@router.post(
    "/v1/keys",
    Role.admin,
    body=object_of({"name": TEXT}, {"role": {"enum": list(Role.__members__)}}),
    answer=NewKey,
    fails="400 invalid_value",
)
async def create_key(services: Services, request: Request) -> Response:
    """Make an API key. Its secret is in this answer and nowhere else.

    On loopback the first key ends the time without keys: from then on every request needs one.
    """
    body = await read_json(request, services.max_settings)
    name, role = field(body, "name", str), field(body, "role", str, "use")
    try:
        wanted = role_named(role)
    except BadInput as error:
        raise BadInput(str(error), param="role") from error
    record, secret = await asyncio.to_thread(lambda: Keys(services.home).create(name, wanted))
    return json_response({**_key_fields(record, False), "secret": secret})


@router.delete("/v1/keys/{key}", Role.admin, answer=data_of(ShownKey), fails="404 not_found")
async def revoke_key(services: Services, request: Request) -> Response:
    """End the key of this id, or every key of this name. It stops working within a second."""
    key = path_id(request, "key", "key")
    records = await asyncio.to_thread(lambda: Keys(services.home).revoke(key))
    return json_response({"data": [_key_fields(record, True) for record in records]})


@router.get(
    "/v1/usage",
    Role.use,
    query={
        "by": Described(TEXT, "With commas: key, model; neither unless given."),
        "bucket": BUCKET,
        "since": REAL,
        "until": REAL,
        "limit": count_up_to(PAGE_LIMIT),
    },
    answer=UsageTable,
)
async def read_usage(services: Services, request: Request) -> Response:
    """Sum up runs, calls, tokens and seconds by API key, model and time.

    It counts recorded runs, each at its start and with its last version, so what was forgotten or
    refused is not in it. Callers below `admin` see their own key's runs only. Of more groups than
    `limit` (1000) the largest are kept.
    """
    params, caller = query(request), caller_of(request)
    by, bucket = names_in(params, "by"), bucket_seconds(params)
    check_groups(by)
    bounds = {name: real(params, name, 0.0) for name in ("since", "until") if name in params}
    limit = number(params, "limit", PAGE_LIMIT, PAGE_LIMIT)
    owner = None if caller.role is Role.admin else caller.key_id

    def read() -> dict[str, Any]:
        names = key_names(services.home) if "key" in by else {}
        which = RunFilter(**bounds)
        return usage_table(
            services.store, which, by, names, bucket=bucket, owner=owner, limit=limit
        )

    return await answer_read(request, read, long=True)


def _key_fields(record: KeyRecord, revoked: bool) -> dict[str, Any]:
    fields = {"id": record.id, "name": record.name, "role": record.role.name}
    return {**fields, "created": record.created, "revoked": revoked}
