"""Trajectories: append, list, show, reward and forget runs."""

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.records import Event, Reward, Run, Split, StopReason, Usage, digest
from cray_agents.runtime.disk.turns import INLINE
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import Caller, caller_of
from cray_agents.runtime.gateway.http.bodies import (
    ID,
    answer_read,
    field,
    json_response,
    number,
    page,
    parse,
    path_id,
    read_json,
    read_record,
    size_of,
)
from cray_agents.runtime.gateway.http.bounds import (
    ANSWER,
    MAX_DESCRIPTIONS,
    MAX_EVENTS,
    check_count,
)
from cray_agents.runtime.gateway.http.client_work import aside
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    AFTER,
    ANY,
    COUNT,
    DELETED,
    FLAG,
    REAL,
    REAL_OR_NONE,
    TEXT,
    TEXT_OR_NONE,
    Described,
    NamedShape,
    Shape,
    all_of,
    list_of,
    object_of,
    page_of,
)
from cray_agents.runtime.gateway.ownership import check_claims
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.feedback import (
    CLOCK_SKEW,
    Feedback,
    check_feedback,
    check_rewards,
    give_feedback,
)
from cray_agents.runtime.views.run_pages import with_heads

_LISTS = ("generations", "tags", "without_tags")
FILTERS = tuple(name for name in RunFilter.model_fields if name not in _LISTS)
PAGE_LIMIT = 1000  # runs in one answer
FEW = 20  # events that are checked and written on the event loop
TOKEN_LISTS: dict[str, Any] = {"prompt_token_ids": [], "token_ids": [], "logprobs": []}

_FILTER_SHAPES: dict[str, Shape] = {
    "generation": COUNT,
    "split": {"enum": list(get_args(Split))},
    "stop_reason": {"enum": list(StopReason)},
    **dict.fromkeys(("min_reward", "max_reward", "min_seconds", "max_seconds"), REAL),
    **dict.fromkeys(("since", "until"), REAL),
    **dict.fromkeys(("min_turns", "max_turns", "min_tokens", "max_tokens"), COUNT),
}
#: The query parameters that select runs.
WHICH: dict[str, Shape | Described] = {
    **{name: _FILTER_SHAPES.get(name, TEXT) for name in FILTERS},
    "tag": Described(list_of(TEXT), "The run has each of these tags."),
}
EVENT = NamedShape(
    "Event",
    object_of(
        {"kind": {"enum": ["run", "reward"]}, "body": ANY},
        {"id": TEXT_OR_NONE, "time": REAL_OR_NONE},
    ),
)
APPENDED = object_of({"appended": COUNT, "duplicates": COUNT})
RUN = NamedShape("ShownRun", all_of(Run, object_of({"reward": REAL_OR_NONE, "usage": Usage})))

router = Router("Training")


@router.get(
    "/v1/trajectories",
    Role.train,
    query={
        **WHICH,
        "order": {"enum": list(get_args(RunQuery.model_fields["order"].annotation))},
        "limit": {**COUNT, "minimum": 1, "maximum": PAGE_LIMIT},
        "after": AFTER,
        "tokens": Described(FLAG, "Calls with their tokens."),
        "view": Described(
            {"enum": ["whole", "summary"]}, "A summary has no messages and no calls."
        ),
    },
    answer=page_of(RUN),
)
async def list_runs(services: Services, request: Request) -> Response:
    """List the matching runs.

    Without `tokens` the three token lists of each call are empty; `usage` still counts them.
    `error` is a type of error, or `*` for any. `text` is searched in the runs that match the other
    filters. In another order than `id`, an unknown `after` is refused with 404 not_found.
    """
    params = query(request)
    limit = number(params, "limit", 100, PAGE_LIMIT)
    runs = run_query(request, params, limit + 1)
    brief = one_of(params, "view", ("whole", "summary")) == "summary"
    tokens = one_of(params, "tokens", ("false", "true")) == "true"
    if brief and tokens:
        raise BadInput("a summary has no tokens: leave out view, or tokens", param="tokens")
    read = partial(_summaries, services) if brief else partial(_runs, services, tokens)
    return await answer_read(request, lambda: _page(read(runs), limit), long=True)


@router.get("/v1/trajectories/{run_id}", Role.use, answer=RUN, fails="404 not_found")
async def retrieve_run(services: Services, request: Request) -> Response:
    """Return a run, with its tokens."""
    run_id = path_id(request, "run_id", "run")
    return await answer_read(request, lambda: _render(services.store.run(run_id), tokens=True))


@router.delete(
    "/v1/trajectories/{run_id}",
    Role.admin,
    answer=object_of({"id": TEXT, "object": {"const": "trajectory"}, "deleted": DELETED}),
    fails="404 not_found",
)
async def delete_run(services: Services, request: Request) -> Response:
    """Forget a run.

    It is gone from every answer at once, from the disk when segments are compacted.
    """
    run_id = path_id(request, "run_id", "run")
    await asyncio.to_thread(services.store.run, run_id)  # NotFound
    await services.store.forget([run_id], "deleted over HTTP")
    return json_response({"id": run_id, "object": "trajectory", "deleted": True})


@router.post(
    "/v1/trajectories/events",
    Role.use,
    body=object_of({"events": list_of(all_of(EVENT, object_of({"run_id": TEXT})))}),
    answer=APPENDED,
)
async def append_events_of_runs(services: Services, request: Request) -> Response:
    """Append events to several runs; all of them, or none.

    Events are those of one run, with a `run_id` each.
    """
    return await _append(services, request, None)


@router.post(
    "/v1/trajectories/{run_id}/events",
    Role.use,
    body=object_of({"events": list_of(EVENT)}),
    answer=APPENDED,
)
async def append_events(services: Services, request: Request) -> Response:
    """Append events to a run: a description or rewards.

    An event's body is a Run or a Reward. An event without an id is named by its content, so the
    same event again changes nothing. The newest `run` event of a run counts, and the newest reward
    of each name, source and turn. Calls inside turns are dropped: tokens come from the engines. The
    run is new or the caller's. Keys of role `use` cannot describe a loop's run, an imported run, or
    one on a held-out task. The `giver` of a reward is the caller's key.
    """
    return await _append(services, request, path_id(request, "run_id", "run"))


@router.post(
    "/v1/trajectories/{run_id}/rewards",
    Role.use,
    body=Feedback,
    answer=Reward,
    fails="404 not_found, 400 invalid_value",
)
async def give_reward(services: Services, request: Request) -> Response:
    """Reward a run, or one of its turns.

    A reward replaces the earlier one of the same source, name and turn. Datasets built afterwards
    see it.
    """
    run_id = path_id(request, "run_id", "run")
    feedback = await read_record(Feedback, request, services.max_body)
    check_rewards([Reward(**feedback.model_dump())], services.reward_limit)
    caller = caller_of(request)
    await services.run_owners.owners(caller, (), [run_id])
    await asyncio.to_thread(check_feedback, services.store, run_id, feedback)
    reward = await give_feedback(services.store, run_id, feedback, caller.key_name)
    await services.versions.live.note_reward(run_id)
    return json_response(reward.model_dump(mode="json"))


async def _append(services: Services, request: Request, run_id: str | None) -> Response:
    body = await read_json(request, services.max_body)
    values = field(body, "events", list)
    check_count(values, MAX_EVENTS, "events", "events")
    runs = [value for value in values if isinstance(value, dict) and value.get("kind") == "run"]
    check_count(runs, MAX_DESCRIPTIONS, "descriptions of runs", "events")
    caller = caller_of(request)

    def read() -> list[Event]:
        limit = services.reward_limit
        return [_event(run_id, v, f"events.{n}", caller, limit) for n, v in enumerate(values)]

    many = len(values) > FEW or size_of(request) > INLINE
    events = await aside(request, read) if many else read()
    described = [event.run_id for event in events if event.kind == "run"]
    run_ids = (event.run_id for event in events)
    owners = await services.run_owners.owners(caller, described, run_ids)
    for event in events:
        if event.kind == "run":
            event.body["owner"] = owners[event.run_id]
    appended = await services.store.append(events, many=many)
    if services.traces is not None and appended.appended:
        for event in events:
            if event.kind == "run":
                services.traces.end_run(await asyncio.to_thread(_redacted, services.store, event))
    for changed in {event.run_id for event in events}:
        await services.versions.live.note_reward(changed)
    return json_response(appended._asdict())


def run_query(request: Request, params: dict[str, str], limit: int | None) -> RunQuery:
    """Return the query for the runs that a request selects. Raises BadInput."""
    values: dict[str, Any] = {name: params[name] for name in FILTERS if name in params}
    if "generation" in params:
        values["generation"] = number(params, "generation", 0)
    paging = {name: params[name] for name in ("order", "after") if name in params}
    tags = request.query_params.getlist("tag")
    return parse(RunQuery, {**values, **paging, "tags": tags, "limit": limit})


def one_of(params: dict[str, str], name: str, known: Sequence[str]) -> str:
    """Return a query parameter that is one of a few words; the first is the default."""
    text = params.get(name, known[0]).lower()
    if text not in known:
        raise BadInput(f"{name} must be {' or '.join(known)}, not {text!r}", param=name)
    return text


def _event(run_id: str | None, value: Any, at: str, caller: Caller, reward_limit: float) -> Event:
    """Return an event from its JSON. Raises BadInput, AccessDenied.

    run_id: the run of the path; None where each event names its own. An event without an id is
    named by its content. Ids of callers other than admins get the key's id as a prefix: no caller
    can occupy the event id of another.
    """
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise BadInput(f"{at} must be an object with kind and body", param=at)
    if run_id is None:
        run_id = value.get("run_id")
    if not isinstance(run_id, str) or not ID.fullmatch(run_id):
        raise BadInput(f"{at}.run_id: {run_id!r} is no run's id", param=f"{at}.run_id")
    kind, body = value.get("kind"), value["body"]
    event_id = value.get("id") or f"{run_id}.{kind}.{digest(body)}"
    when = value.get("time") or time.time()
    if not isinstance(event_id, str) or not isinstance(when, float | int):
        raise BadInput(f"{at}: id must be a string, and time unix seconds", param=at)
    if not -math.inf < when <= time.time() + CLOCK_SKEW:
        raise BadInput(f"{at}.time: {when} is no unix time up to now", param=f"{at}.time")
    if caller.role is not Role.admin:
        event_id = f"{caller.key_id}.{event_id}"
    record: Run | Reward
    if kind == "run":
        record = _without_calls(parse(Run, {"id": run_id, **body}, f"{at}.body"))
        if record.id != run_id:
            raise BadInput(f"{at}.body.id is {record.id!r}, not {run_id!r}", param=f"{at}.body.id")
        check_claims(caller, record, f"{at}.body")
        check_rewards(record.rewards, reward_limit, f"{at}.body.rewards")
        rewards = [_with_giver(caller, reward) for reward in record.rewards]
        record = record.model_copy(update={"rewards": rewards})
    elif kind == "reward":
        record = _with_giver(caller, parse(Reward, body, f"{at}.body"))
        check_rewards([record], reward_limit, f"{at}.body")
    else:
        raise BadInput(f"{at}.kind must be 'run' or 'reward', not {kind!r}", param=f"{at}.kind")
    return Event(
        id=event_id, run_id=run_id, kind=kind, body=record.model_dump(mode="json"), time=float(when)
    )


def _redacted(store: Store, event: Event) -> Run:
    return Run.model_validate(store.redacted(event).body)


def _with_giver(caller: Caller, reward: Reward) -> Reward:
    """Return the reward with the caller as its giver; only an admin may name another giver."""
    if caller.role is Role.admin and reward.giver:
        return reward
    return reward.model_copy(update={"giver": caller.key_name})


def _without_calls(run: Run) -> Run:
    """Return the run without its calls: tokens come from the engine alone, never from a client."""
    turns = [turn.model_copy(update={"call": None}) for turn in run.trajectory.turns]
    return run.model_copy(update={"trajectory": run.trajectory.model_copy(update={"turns": turns})})


def _page(runs: Iterable[dict[str, Any]], limit: int) -> bytes:
    """Return a page of at most `limit` runs, and of one more than `ANSWER` bytes."""
    rows: list[dict[str, Any]] = []
    texts: list[orjson.Fragment] = []
    size = 0
    for run in runs:
        if len(rows) == limit or size > ANSWER:
            return dump_json({**page(rows, True), "data": texts})
        text = dump_json(run)
        rows.append({"id": run["id"]})
        texts.append(orjson.Fragment(text))
        size += len(text)
    return dump_json({**page(rows, False), "data": texts})


def _runs(services: Services, tokens: bool, runs: RunQuery) -> Iterator[dict[str, Any]]:
    return (_render(run, tokens) for run in services.store.stream(runs))


def _summaries(services: Services, runs: RunQuery) -> Iterator[dict[str, Any]]:
    """Yield the facts that the index holds, without reading events of described runs."""
    for row in with_heads(services.store, services.store.facts(runs)):
        yield {"id": row.run_id, **{k: v for k, v in row._asdict().items() if k != "run_id"}}


def _render(run: Run, tokens: bool) -> dict[str, Any]:
    fields = run.model_dump(mode="json")
    if not tokens:
        for turn in fields["trajectory"]["turns"]:
            if turn["call"] is not None:
                turn["call"].update(TOKEN_LISTS)
    return {**fields, "reward": run.reward, "usage": run.usage.model_dump()}
