"""Runs and rewards in, whole trajectories out."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.records import Event, Reward, Run, digest
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import Caller, caller_of
from cray_agents.runtime.gateway.http.bodies import (
    ID,
    answer,
    field,
    number,
    parse,
    path_id,
    query,
    read_json,
)
from cray_agents.runtime.gateway.ownership import check_claims
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.store.feedback import AHEAD, Feedback, check_rewards, give, judged

FILTERS = tuple(name for name in RunFilter.model_fields if name not in ("generations", "tags"))
MOST = 1000  # runs in one answer
TOKEN_LISTS: dict[str, Any] = {"prompt_token_ids": [], "token_ids": [], "logprobs": []}


def routes(services: Services) -> list[Route]:
    """Everything under /v1/trajectories."""
    owners = services.run_owners

    async def append(request: Request) -> Response:
        of_one = "run_id" in request.path_params
        run_id = path_id(request, "run_id", "run") if of_one else None
        body = await read_json(request, services.max_body)
        given = field(body, "events", list)
        caller = caller_of(request)
        events = [
            _event(run_id, value, f"events.{n}", caller, services.reward_limit)
            for n, value in enumerate(given)
        ]
        described = [event.run_id for event in events if event.kind == "run"]
        owner = await owners.owners(caller, described, (event.run_id for event in events))
        for event in events:
            if event.kind == "run":
                event.body["owner"] = owner[event.run_id]
        appended = await services.store.append(events)
        for told_of in {event.run_id for event in events}:
            await services.promoting.live.rewarded(told_of)
        return answer(appended._asdict())

    async def reward(request: Request) -> Response:
        run_id = path_id(request, "run_id", "run")
        given = parse(Feedback, await read_json(request, services.max_body))
        check_rewards([Reward(**given.model_dump())], services.reward_limit)
        caller = caller_of(request)
        await owners.owners(caller, (), [run_id])
        await asyncio.to_thread(judged, services.store, run_id, given)  # NotFound, BadInput
        reward = await give(services.store, run_id, given, caller.key_name)
        await services.promoting.live.rewarded(run_id)
        return answer(reward.model_dump(mode="json"))

    async def listing(request: Request) -> Response:
        given = query(request, *FILTERS, "tag", "order", "limit", "after", "tokens", "view")
        limit = number(given, "limit", 100, MOST)
        wanted = run_query(request, given, limit + 1)
        brief = one_of(given, "view", ("whole", "summary")) == "summary"
        tokens = one_of(given, "tokens", ("false", "true")) == "true"
        if brief and tokens:
            raise BadInput("a summary has no tokens: leave out view, or tokens", param="tokens")
        page = partial(_summaries, services) if brief else partial(_runs, services, tokens)
        return answer(await asyncio.to_thread(_page, page, wanted, limit))

    async def one(request: Request) -> Response:
        run_id = path_id(request, "run_id", "run")
        run = await asyncio.to_thread(services.store.run, run_id)
        return answer(_shown(run, tokens=True))

    async def forget(request: Request) -> Response:
        run_id = path_id(request, "run_id", "run")
        await asyncio.to_thread(services.store.run, run_id)  # NotFound
        await services.store.forget([run_id], "deleted over HTTP")
        return answer({"id": run_id, "object": "trajectory", "deleted": True})

    return [
        Route("/v1/trajectories", listing),
        Route("/v1/trajectories/{run_id}", one),
        Route("/v1/trajectories/{run_id}", forget, methods=["DELETE"]),
        Route("/v1/trajectories/events", append, methods=["POST"]),
        Route("/v1/trajectories/{run_id}/events", append, methods=["POST"]),
        Route("/v1/trajectories/{run_id}/rewards", reward, methods=["POST"]),
    ]


def run_query(request: Request, given: dict[str, str], limit: int | None) -> RunQuery:
    """The runs that a request asks for by its query parameters. Raises BadInput."""
    values: dict[str, Any] = {name: given[name] for name in FILTERS if name in given}
    if "generation" in given:
        values["generation"] = number(given, "generation", 0)
    paging = {name: given[name] for name in ("order", "after") if name in given}
    tags = request.query_params.getlist("tag")
    return parse(RunQuery, {**values, **paging, "tags": tags, "limit": limit})


def one_of(given: dict[str, str], name: str, known: Sequence[str]) -> str:
    """A query parameter that is one of a few words, the first of which is meant by none."""
    text = given.get(name, known[0]).lower()
    if text not in known:
        raise BadInput(f"{name} must be {' or '.join(known)}, not {text!r}", param=name)
    return text


def _event(run_id: str | None, value: Any, at: str, caller: Caller, reward_limit: float) -> Event:
    """An event from JSON; without an id it is named by its content. Raises BadInput, AccessDenied.

    run_id: the run of which the path says that it tells; None: the event says it itself. The ids of
    those who are no admin are their own: under another's it would be taken for that event.
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
    if not -math.inf < when <= time.time() + AHEAD:
        raise BadInput(f"{at}.time: {when} is no unix time up to now", param=f"{at}.time")
    if caller.role is not Role.admin:
        event_id = f"{caller.key_id}.{event_id}"
    record: Run | Reward
    if kind == "run":
        record = _bare(parse(Run, {"id": run_id, **body}, f"{at}.body"))
        if record.id != run_id:
            raise BadInput(f"{at}.body.id is {record.id!r}, not {run_id!r}", param=f"{at}.body.id")
        check_claims(caller, record, f"{at}.body")
        check_rewards(record.rewards, reward_limit, f"{at}.body.rewards")
        rewards = [_given_by(caller, reward) for reward in record.rewards]
        record = record.model_copy(update={"rewards": rewards})
    elif kind == "reward":
        record = _given_by(caller, parse(Reward, body, f"{at}.body"))
        check_rewards([record], reward_limit, f"{at}.body")
    else:
        raise BadInput(f"{at}.kind must be 'run' or 'reward', not {kind!r}", param=f"{at}.kind")
    return Event(
        id=event_id,
        run_id=run_id,
        kind=kind,
        body=record.model_dump(mode="json"),
        time=float(when),
    )


def _given_by(caller: Caller, reward: Reward) -> Reward:
    """The reward with its giver; only an admin passes on what another gave."""
    if caller.role is Role.admin and reward.giver:
        return reward
    return reward.model_copy(update={"giver": caller.key_name})


def _bare(run: Run) -> Run:
    """The run without its calls: tokens come from the engine alone, never from a client."""
    turns = [turn.model_copy(update={"call": None}) for turn in run.trajectory.turns]
    return run.model_copy(update={"trajectory": run.trajectory.model_copy(update={"turns": turns})})


def _page(
    page: Callable[[RunQuery], list[dict[str, Any]]], wanted: RunQuery, limit: int
) -> dict[str, Any]:
    found = page(wanted)
    data = found[:limit]
    return {
        "object": "list",
        "data": data,
        "has_more": len(found) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _runs(services: Services, tokens: bool, wanted: RunQuery) -> list[dict[str, Any]]:
    return [_shown(run, tokens) for run in services.store.stream(wanted)]


def _summaries(services: Services, wanted: RunQuery) -> list[dict[str, Any]]:
    """What the index knows: no event is read."""
    return [
        {"id": row.run_id, **{k: v for k, v in row._asdict().items() if k != "run_id"}}
        for row in services.store.facts(wanted)
    ]


def _shown(run: Run, tokens: bool) -> dict[str, Any]:
    shown = run.model_dump(mode="json")
    if not tokens:
        for turn in shown["trajectory"]["turns"]:
            if turn["call"] is not None:
                turn["call"].update(TOKEN_LISTS)
    return {**shown, "reward": run.reward, "usage": run.usage.model_dump()}
