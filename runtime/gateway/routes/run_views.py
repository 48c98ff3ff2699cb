"""Views of runs: outline, windows of turns, tokens with their text, scores, differences, counts.

A run is read in parts, so that one of thousands of turns opens at once. Statistics come from the
index alone. Read next: runtime/views/run_pages.py, token_text.py, run_differences.py.
"""

import asyncio
from functools import partial
from typing import Any

import orjson
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, EngineError, NotFound
from cray_agents.ports import EngineCall
from cray_agents.queries import RunFilter
from cray_agents.records import new_id
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    ID,
    answer_read,
    bucket_seconds,
    field,
    names_in,
    number,
    path_id,
    path_number,
    read_json,
)
from cray_agents.runtime.gateway.http.client_work import await_or_disconnect
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    BUCKET,
    COUNT,
    FLAG,
    TEXT,
    WHOLE,
    Described,
    count_up_to,
    object_of,
)
from cray_agents.runtime.gateway.model_calls.answer import collect_answer
from cray_agents.runtime.gateway.routes.trajectories import WHICH, one_of, run_query
from cray_agents.runtime.gateway.services import Services, vocabulary_of
from cray_agents.runtime.pool.engine.vllm_http import well_formed
from cray_agents.runtime.views.run_differences import differences, turn_pairs
from cray_agents.runtime.views.turn_score import parse_score, score_request
from cray_agents.runtime.views.view_records import (
    RunDifferences,
    RunOutline,
    RunStats,
    TurnScore,
    TurnTokens,
    TurnWindow,
)

MARKS, WINDOW = 10_000, 200  # turns in an outline and in a window, at most
TOP = 20  # likely tokens at a place, at most
GROUPS, BINS = 10_000, 200
FROM = Described(COUNT, "The first turn, from 0.")

router = Router("Training")


@router.get(
    "/v1/trajectories/stats",
    Role.train,
    query={
        **{name: shape for name, shape in WHICH.items() if name != "text"},
        "by": Described(
            TEXT,
            "With commas: agent, model, loop, generation, split, stop_reason, error, task, day.",
        ),
        "bucket": BUCKET,
        "limit": count_up_to(GROUPS),
        "facets": Described(
            TEXT, "With commas: agent, model, loop, generation, split, stop_reason, error, tag."
        ),
        "histograms": Described(TEXT, "With commas: reward, seconds, turns, tokens."),
        "bins": {**COUNT, "minimum": 1, "maximum": BINS},
        "sample": Described(
            {**COUNT, "minimum": 1},
            "Of more runs than these, histograms count every n-th one (`every`).",
        ),
        "percentiles": Described(FLAG, "Without them a million runs take a fraction of the time."),
    },
    answer=RunStats,
)
async def run_statistics(services: Services, request: Request) -> Response:
    """Count the matching runs, their rewards, tokens and seconds, by group.

    `facets` count the values of fields, as a filter offers them. `histograms` have equal bins. All
    of it comes from the index. The largest groups come first.
    """
    params = query(request)
    which = RunFilter(
        **run_query(request, params, None).model_dump(include=set(RunFilter.model_fields))
    )
    limit = number(params, "limit", 100, GROUPS)
    bins = number(params, "bins", 24, BINS)
    sample = number(params, "sample", 0) if "sample" in params else None
    for name, count in (("bins", bins), ("sample", sample)):
        if count == 0:
            raise BadInput(f"{name} must be 1 or more", param=name)
    options: dict[str, Any] = {
        "bucket": bucket_seconds(params),
        "percentiles": one_of(params, "percentiles", ("true", "false")) == "true",
        "limit": limit + 1,
    }
    by = names_in(params, "by")
    options["inputs"] = "task" in by
    whole = not by and options["bucket"] is None  # its one row counts all
    if "key" in by:
        raise BadInput("usage by key is GET /v1/usage", param="by")

    def read() -> dict[str, Any]:
        rows = services.store.stats(which, by, **options)
        return {
            "total": rows[0]["runs"] if whole and rows else services.store.count(which),
            "data": rows[:limit],
            "has_more": len(rows) > limit,
            "facets": services.store.facets(which, names_in(params, "facets")),
            "histograms": services.store.histograms(
                which, names_in(params, "histograms"), bins, sample
            ),
        }

    return await answer_read(request, read, long=True)


@router.get(
    "/v1/trajectories/diff",
    Role.use,
    query={"a": Described(TEXT, "A run."), "b": Described(TEXT, "Another one.")},
    answer=RunDifferences,
    fails="404 not_found",
)
async def diff_runs(services: Services, request: Request) -> Response:
    """Tell where two runs differ: fields, messages, rewards, tokens, and their turns side by side.

    Turns count from 0 in `turns`, and from 1 in `tokens.first`.
    """
    params = query(request)
    for name in ("a", "b"):
        if name not in params:
            raise BadInput(f"{name} must name a run", param=name)
        if not ID.fullmatch(params[name]):
            raise NotFound(f"no run {params[name][:200]!r} is recorded", param=name)

    def read() -> bytes:
        one, other = (services.store.run(params[name]) for name in ("a", "b"))
        turns = turn_pairs(one, other)
        first = next((at for at, pair in enumerate(turns) if not pair["same"]), None)
        diff = differences(one, other)
        named = {"one": one.id, "other": other.id}
        about = {**named, **diff, "turns": turns, "first": first}
        return to_json(about, inf_nan_mode="null", fallback=str)

    return await answer_read(request, read)


@router.get(
    "/v1/trajectories/{run_id}/outline",
    Role.use,
    query={"from": FROM, "limit": count_up_to(MARKS)},
    answer=RunOutline,
    fails="404 not_found",
)
async def outline_run(services: Services, request: Request) -> Response:
    """Return a run without its messages: its facts, its rewards, and a mark for each turn."""
    params, run_id = query(request), path_id(request, "run_id", "run")
    first, limit = number(params, "from", 0), number(params, "limit", MARKS, MARKS)
    return await answer_read(request, partial(services.run_pages.outline, run_id, first, limit))


@router.get(
    "/v1/trajectories/{run_id}/turns",
    Role.use,
    query={
        "from": FROM,
        "limit": count_up_to(WINDOW),
        "full": Described(FLAG, "All messages of each call, not only those new in its turn."),
    },
    answer=TurnWindow,
    fails="404 not_found",
)
async def list_turns(services: Services, request: Request) -> Response:
    """Return some turns of a run with their messages."""
    params, run_id = query(request), path_id(request, "run_id", "run")
    first, limit = number(params, "from", 0), number(params, "limit", 20, WINDOW)
    full = one_of(params, "full", ("false", "true")) == "true"
    read = partial(services.run_pages.window, run_id, first, limit, full=full)
    return await answer_read(request, read)


@router.get(
    "/v1/trajectories/{run_id}/turns/{number}/tokens",
    Role.use,
    query={
        "from": Described(COUNT, "The first token, from 0; negative numbers are refused."),
        "limit": COUNT,
        "prompt": Described(FLAG, "false: only the tokens that were sampled."),
    },
    answer=TurnTokens,
    fails="404 not_found, 404 no_tokenizer",
)
async def list_turn_tokens(services: Services, request: Request) -> Response:
    """Return the tokens of a turn with their exact text, decoded here: no engine is asked.

    The text comes from the tokenizer of the version that sampled them.
    """
    params, run_id = query(request), path_id(request, "run_id", "run")
    turn = path_number(request, "number", "turn")
    first, limit = number(params, "from", 0), number(params, "limit", 10**9)
    with_prompt = one_of(params, "prompt", ("true", "false")) == "true"

    def read() -> dict[str, Any]:
        call = services.run_pages.call(run_id, turn)
        prompt, sampled = call["prompt_token_ids"], call["token_ids"]
        begin = max(first, 0 if with_prompt else len(prompt))
        ids = [*prompt, *sampled][begin : begin + limit]
        vocabulary = vocabulary_of(services, call["model"])
        decoded = vocabulary.texts_of(ids)
        logprobs = [*[None] * len(prompt), *call["logprobs"]]
        trained = [*[False] * len(prompt), *[True] * len(sampled)]
        return {
            "id": run_id,
            "n": turn,
            "model": call["model"],
            "tokenizer": call["model"],
            "first": begin,
            "prompt": len(prompt),
            "total": len(prompt) + len(sampled),
            "ids": ids,
            "texts": decoded.texts,
            "bytes": decoded.bytes,
            "logprobs": logprobs[begin : begin + len(ids)],
            "trained": trained[begin : begin + len(ids)],
            "seams": [
                {"at": len(prompt) + seam["at"], "model": seam["model"]}
                for seam in call.get("seams") or ()
            ],
            "exact": vocabulary.exact,
        }

    return await answer_read(request, read)


@router.post(
    "/v1/trajectories/{run_id}/turns/{number}/score",
    Role.use,
    body=object_of({"model": TEXT}, {"top": {**WHOLE, "minimum": 1, "maximum": TOP}}),
    answer=TurnScore,
    fails="404 not_found, 404 model_not_found, 400 no_tokens, 400 unsupported_engine",
)
async def score_turn(services: Services, request: Request) -> Response:
    """Compute the logprobs of a turn's sampled tokens under a version, by an engine that has it.

    It waits in the class of batches, so it yields to all other requests. The entropy is of the
    `top` likeliest tokens and the rest taken as one: a lower bound of the whole distribution's.
    """
    run_id, turn = path_id(request, "run_id", "run"), path_number(request, "number", "turn")
    body = await read_json(request, services.max_settings)
    model, top = field(body, "model", str), field(body, "top", int, 5)
    if not 1 <= top <= TOP:
        raise BadInput(f"top must be from 1 to {TOP}, not {top}", param="top")
    version = services.registry.resolve(model).id
    call = await asyncio.to_thread(services.run_pages.call, run_id, turn)
    if not call["token_ids"]:
        raise BadInput(f"turn {turn} has no tokens to score", param="number", code="no_tokens")
    exchange = EngineCall(
        "/v1/completions", score_request(call, version, top), new_id("x")[2:], capture=False
    )
    exchange.version = version
    ticket = services.admission.enter(caller_of(request).key_id, True, version)
    try:
        answer = services.pool.answer(version, exchange)
        work = collect_answer(services, answer, ticket, version)
        content = await await_or_disconnect(request, ticket, work)
    except EngineError as error:
        if error.status in (400, 404, 405, 501):
            raise BadInput(
                f"the engine cannot score tokens: {error}", param="model", code="unsupported_engine"
            ) from error
        raise
    finally:
        ticket.release()

    def read() -> dict[str, Any]:
        vocabulary = vocabulary_of(services, version)
        with well_formed(f"the replica of {version}"):
            scored = parse_score(call, orjson.loads(content), vocabulary)
        named = {"id": run_id, "n": turn, "model": version, "sampled_by": call["model"]}
        return {**named, **scored, "from_top": top}

    return await answer_read(request, read)
