"""Trajectories: append, list, show, reward and forget runs."""

import asyncio
import math
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from fastapi import Query
from pydantic import FailFast, Field
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.records import Event, Reward, Run, Usage, digest, is_finding
from cray_agents.runtime.disk.turns import INLINE
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import Caller, caller_of
from cray_agents.runtime.gateway.http.bodies import (
    json_response,
    page,
    parse,
    size_of,
)
from cray_agents.runtime.gateway.http.bounds import (
    ANSWER,
    MAX_DESCRIPTIONS,
    MAX_EVENTS,
    check_count,
)
from cray_agents.runtime.gateway.http.client_work import aside
from cray_agents.runtime.gateway.http.fields import (
    ID_PATTERN,
    LARGEST,
    Deleted,
    Fields,
    ListPage,
    RecordSchema,
    RunId,
)
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.ownership import check_claims
from cray_agents.runtime.gateway.services import Current, Services
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.feedback import (
    CLOCK_SKEW,
    Feedback,
    check_feedback,
    check_rewards,
    give_feedback,
)
from cray_agents.runtime.views.run_pages import with_heads

FEW = 20  # events that are checked and written on the event loop
TOKEN_LISTS: dict[str, Any] = {"prompt_token_ids": [], "token_ids": [], "logprobs": []}

router = Router("Training")


class WhichRuns(RunFilter):
    """The parameters of a query that select runs."""

    iteration: int | None = Field(None, ge=0, le=LARGEST)
    iterations: None = Query(None, include_in_schema=False)
    tags: list[str] = Field(
        default_factory=list, alias="tag", description="The run has each of these tags."
    )

    @property
    def filter(self) -> RunFilter:
        """The filter, without what else the query asks."""
        return RunFilter(**self.model_dump(include=set(RunFilter.model_fields)))


class RunsWanted(WhichRuns):
    """The parameters of a query for a page of runs."""

    order: Literal["id", "newest", "oldest", "task"] = "id"
    limit: int = Field(100, ge=1, le=1000)
    after: str | None = Field(None, description="The last id of the page before.")
    tokens: bool = Field(False, description="Calls with their tokens.")
    view: Literal["whole", "summary"] = Field(
        "whole", description="A summary has no messages and no calls."
    )


class SentEvent(Fields):
    """An event of a run: a description or a reward."""

    kind: Literal["run", "reward"]
    body: dict[str, Any]
    id: str | None = None
    time: float | None = None


class EventOfRun(SentEvent):
    """An event with its run."""

    run_id: str = Field(pattern=ID_PATTERN)


class SentEvents(Fields):
    """Events of the run in the path."""

    events: Annotated[list[SentEvent], FailFast()]


class EventsOfRuns(Fields):
    """Events of several runs."""

    events: Annotated[list[EventOfRun], FailFast()]


#: A run's row of the index: its facts, without messages and calls.
Summary: TypeAlias = dict[str, Any]
#: A run with the sum of its rewards and its tokens.
ShownRun = Annotated[
    dict[str, Any],
    RecordSchema(
        Run,
        also={"reward": {"type": ["number", "null"]}, "usage": Usage.model_json_schema()},
    ),
]


@router.get(
    "/v1/trajectories", Role.train, answer=ListPage[ShownRun | Summary], local=True, long=True
)
def list_runs(services: Current, wanted: Annotated[RunsWanted, Query()]) -> bytes:
    """List the matching runs.

    Without `tokens` the three token lists of each call are empty; `usage` still counts them.
    `error` is a type of error, or `*` for any. `text` is searched in the runs that match the other
    filters. In another order than `id`, an unknown `after` is refused with 404 not_found.
    """
    limit, brief = wanted.limit, wanted.view == "summary"
    if brief and wanted.tokens:
        raise BadInput("a summary has no tokens: leave out view, or tokens", param="tokens")
    which = wanted.filter.model_dump()
    runs = RunQuery(**which, order=wanted.order, after=wanted.after, limit=limit + 1)
    if brief:
        return _page(_summaries(services.store, runs), limit)
    return _page((_render(run, wanted.tokens) for run in services.store.stream(runs)), limit)


@router.get("/v1/trajectories/{run_id}", Role.use, answer=ShownRun, local=True)
def retrieve_run(services: Current, run_id: RunId) -> dict[str, Any]:
    """Return a run, with its tokens."""
    return _render(services.store.run(run_id), tokens=True)


@router.delete("/v1/trajectories/{run_id}", Role.admin, answer=Deleted)
async def delete_run(services: Current, run_id: RunId) -> Response:
    """Forget a run.

    It is gone from every answer at once, from the disk when segments are compacted.
    """
    await asyncio.to_thread(services.store.run, run_id)  # NotFound
    await services.store.forget([run_id], "deleted over HTTP")
    return json_response({"id": run_id, "object": "trajectory", "deleted": True})


@router.post(
    "/v1/trajectories/events",
    Role.use,
    answer=dict[str, int],
    max_body="runs",
    local=True,
)
async def append_events_of_runs(
    services: Current, request: Request, body: EventsOfRuns
) -> Response:
    """Append events to several runs; all of them, or none.

    Events are those of one run, with a `run_id` each. The answer counts what was `appended`, and
    the `duplicates`.
    """
    return await _append(services, request, [(sent.run_id, sent) for sent in body.events])


@router.post(
    "/v1/trajectories/{run_id}/events",
    Role.use,
    answer=dict[str, int],
    max_body="runs",
    local=True,
)
async def append_events(
    services: Current, request: Request, run_id: RunId, body: SentEvents
) -> Response:
    """Append events to a run: a description or rewards.

    An event's body is a Run or a Reward. An event without an id is named by its content, so the
    same event again changes nothing. The newest `run` event of a run counts, and the newest reward
    of each name, source and turn. Calls inside turns are dropped: tokens come from the engines. The
    run is new or the caller's. Keys of role `use` cannot describe a loop's run, an imported run, or
    one on a held-out task. The `giver` of a reward is the caller's key.
    """
    return await _append(services, request, [(run_id, sent) for sent in body.events])


@router.post(
    "/v1/trajectories/{run_id}/rewards",
    Role.use,
    answer=Reward,
    fails="400 invalid_value",
    max_body="runs",
    local=True,
)
async def give_reward(
    services: Current, request: Request, run_id: RunId, body: Feedback
) -> Response:
    """Reward a run, or one of its turns.

    A reward replaces the earlier one of the same source, name and turn. Datasets built afterwards
    see it.
    """
    check_rewards([Reward(**body.model_dump())], services.reward_limit)
    caller = caller_of(request)
    await services.run_owners.owners(caller, (), [run_id])
    run = await asyncio.to_thread(check_feedback, services.store, run_id, body)
    reward = await give_feedback(services.store, run_id, body, caller.key_name)
    if is_finding(reward.source):
        services.metrics.model_calls.scanned(reward.source, run.version, reward.value)
    await services.versions.live.note_reward(run_id)
    return json_response(reward)


async def _append(
    services: Services, request: Request, sent: list[tuple[str, SentEvent]]
) -> Response:
    check_count(sent, MAX_EVENTS, "events", "events")
    runs = [event for _, event in sent if event.kind == "run"]
    check_count(runs, MAX_DESCRIPTIONS, "descriptions of runs", "events")
    caller = caller_of(request)

    def read() -> list[Event]:
        limit = services.reward_limit
        return [_event(*one, f"events.{n}", caller, limit) for n, one in enumerate(sent)]

    many = len(sent) > FEW or size_of(request) > INLINE
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


def _event(run_id: str, sent: SentEvent, at: str, caller: Caller, reward_limit: float) -> Event:
    """Return an event as it was sent, `at` that place. Raises BadInput, AccessDenied.

    An event without an id is named by its content. Ids of callers other than admins get the key's
    id as a prefix: no caller can occupy the event id of another.
    """
    kind, body, when = sent.kind, sent.body, sent.time or time.time()
    event_id = sent.id or f"{run_id}.{kind}.{digest(body)}"
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
    else:
        record = _with_giver(caller, parse(Reward, body, f"{at}.body"))
        check_rewards([record], reward_limit, f"{at}.body")
    body = record.model_dump(mode="json")
    return Event(id=event_id, run_id=run_id, kind=kind, body=body, time=when)


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


def _summaries(store: Store, runs: RunQuery) -> Iterator[dict[str, Any]]:
    """Yield the facts that the index holds, without reading events of described runs."""
    for row in with_heads(store, store.facts(runs)):
        yield {"id": row.run_id, **{k: v for k, v in row._asdict().items() if k != "run_id"}}


def _render(run: Run, tokens: bool) -> dict[str, Any]:
    fields = run.model_dump(mode="json")
    if not tokens:
        for turn in fields["trajectory"]["turns"]:
            if turn["call"] is not None:
                turn["call"].update(TOKEN_LISTS)
    return {**fields, "reward": run.reward, "usage": run.usage.model_dump()}
