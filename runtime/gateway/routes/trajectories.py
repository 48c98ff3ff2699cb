"""Runs and rewards in, whole trajectories out."""

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import BadInput
from cray_agents.records import Event, Reward, Run, digest
from cray_agents.runtime.gateway.bodies import (
    answer,
    field,
    number,
    parse,
    path_id,
    query,
    read_json,
)
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.run_index import RunQuery

FILTERS = ("loop", "generation", "agent", "task", "split", "stop_reason", "model")
MOST = 1000  # runs in one answer
TOKEN_LISTS: dict[str, Any] = {"prompt_token_ids": [], "token_ids": [], "logprobs": []}


def routes(services: Services) -> list[Route]:
    """Everything under /v1/trajectories."""

    async def append(request: Request) -> Response:
        run_id = path_id(request, "run_id", "run")
        body = await read_json(request, services.max_body)
        given = field(body, "events", list)
        events = [_event(run_id, value, f"events.{n}") for n, value in enumerate(given)]
        appended = await services.store.append(events)
        return answer(appended._asdict())

    async def listing(request: Request) -> Response:
        given = query(request, *FILTERS, "limit", "after", "tokens")
        limit = number(given, "limit", 100, MOST)
        wanted = _query(given, limit + 1)
        tokens = _flag(given, "tokens")
        return answer(await asyncio.to_thread(_page, services, wanted, limit, tokens))

    async def one(request: Request) -> Response:
        run_id = path_id(request, "run_id", "run")
        run = await asyncio.to_thread(services.store.run, run_id)
        return answer(_shown(run, tokens=True))

    return [
        Route("/v1/trajectories", listing),
        Route("/v1/trajectories/{run_id}", one),
        Route("/v1/trajectories/{run_id}/events", append, methods=["POST"]),
    ]


def _event(run_id: str, value: Any, at: str) -> Event:
    """An event from JSON; without an id it is named by its content. Raises BadInput."""
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise BadInput(f"{at} must be an object with kind and body", param=at)
    kind, body = value.get("kind"), value["body"]
    event_id = value.get("id") or f"{run_id}.{kind}.{digest(body)}"
    when = value.get("time") or time.time()
    if not isinstance(event_id, str) or not isinstance(when, float | int):
        raise BadInput(f"{at}: id must be a string, and time unix seconds", param=at)
    record: Run | Reward
    if kind == "run":
        record = _bare(parse(Run, {"id": run_id, **body}, f"{at}.body"))
        if record.id != run_id:
            raise BadInput(f"{at}.body.id is {record.id!r}, not {run_id!r}", param=f"{at}.body.id")
    elif kind == "reward":
        record = parse(Reward, body, f"{at}.body")
    else:
        raise BadInput(f"{at}.kind must be 'run' or 'reward', not {kind!r}", param=f"{at}.kind")
    return Event(
        id=event_id,
        run_id=run_id,
        kind=kind,
        body=record.model_dump(mode="json"),
        time=float(when),
    )


def _bare(run: Run) -> Run:
    """The run without its calls: tokens come from the engine alone, never from a client."""
    turns = [turn.model_copy(update={"call": None}) for turn in run.trajectory.turns]
    return run.model_copy(update={"trajectory": run.trajectory.model_copy(update={"turns": turns})})


def _query(given: dict[str, str], limit: int) -> RunQuery:
    values: dict[str, Any] = {name: given[name] for name in FILTERS if name in given}
    if "generation" in given:
        values["generation"] = number(given, "generation", 0)
    return RunQuery(**values, after=given.get("after"), limit=limit)


def _flag(given: dict[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise BadInput(f"{name} must be true or false, not {text!r}", param=name)
    return text in ("true", "1")


def _page(services: Services, wanted: RunQuery, limit: int, tokens: bool) -> dict[str, Any]:
    runs = services.store.runs(wanted)
    data = [_shown(run, tokens) for run in runs[:limit]]
    return {
        "object": "list",
        "data": data,
        "has_more": len(runs) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _shown(run: Run, tokens: bool) -> dict[str, Any]:
    shown = run.model_dump(mode="json")
    if not tokens:
        for turn in shown["trajectory"]["turns"]:
            if turn["call"] is not None:
                turn["call"].update(TOKEN_LISTS)
    return {**shown, "reward": run.reward, "usage": run.usage.model_dump()}
