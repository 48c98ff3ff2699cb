"""Views of runs: outline, windows of turns, tokens with their text, scores, differences, counts.

A run is read in parts, so that one of thousands of turns opens at once. Statistics come from the
index alone. Read next: runtime/views/run_pages.py, token_text.py, run_pages.py.
"""

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import Query
from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, EngineError
from cray_agents.ports import EngineCall
from cray_agents.records import new_id
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import answer_read
from cray_agents.runtime.gateway.http.fields import (
    Bucket,
    Count,
    Fields,
    RunId,
    TurnNumber,
    named,
    names_in,
)
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.model_calls.answer import ask_engine
from cray_agents.runtime.gateway.routes.trajectories import WhichRuns
from cray_agents.runtime.gateway.services import Current, vocabulary_of
from cray_agents.runtime.pool.vllm_http import well_formed
from cray_agents.runtime.views.run_pages import differences, turn_pairs
from cray_agents.runtime.views.token_text import parse_score, score_request
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
First = Annotated[Count, Query(alias="from", description="The first turn, from 0.")]

router = Router("Training")


class CountedRuns(WhichRuns):
    """The parameters of a query for statistics of runs."""

    text: None = Query(None, include_in_schema=False)
    by: str = Field(
        "",
        description="With commas: agent, model, loop, iteration, split, stop_reason, error, task, "
        "day.",
    )
    bucket: Bucket = None
    limit: int = Field(100, ge=0, le=GROUPS)
    facets: str = Field(
        "",
        description="With commas: agent, model, loop, iteration, split, stop_reason, error, tag.",
    )
    histograms: str = Field("", description="With commas: reward, seconds, turns, tokens.")
    bins: int = Field(24, ge=1, le=BINS)
    sample: int | None = Field(
        None,
        ge=1,
        description="Of more runs than these, histograms count every n-th one (`every`).",
    )
    percentiles: bool = Field(
        True, description="Without them a million runs take a fraction of the time."
    )


class ScoreRequest(Fields):
    """The version that scores a turn, and how many likely tokens are wanted at each place."""

    model: str
    top: int = Field(5, ge=1, le=TOP)


@router.get("/v1/trajectories/stats", Role.train, answer=RunStats, long=True)
def run_statistics(services: Current, query: Annotated[CountedRuns, Query()]) -> dict[str, Any]:
    """Count the matching runs, their rewards, tokens and seconds, by group.

    `facets` count the values of fields, as a filter offers them. `histograms` have equal bins. All
    of it comes from the index. The largest groups come first.
    """
    which, by = query.filter, names_in(query.by)
    whole = not by and query.bucket is None  # its one row counts all
    if "key" in by:
        raise BadInput("usage by key is GET /v1/usage", param="by")
    rows = services.store.stats(
        which,
        by,
        bucket=query.bucket,
        percentiles=query.percentiles,
        limit=query.limit + 1,
        inputs="task" in by,
    )
    return {
        "total": rows[0]["runs"] if whole and rows else services.store.count(which),
        "data": rows[: query.limit],
        "has_more": len(rows) > query.limit,
        "facets": services.store.facets(which, names_in(query.facets)),
        "histograms": services.store.histograms(
            which, names_in(query.histograms), query.bins, query.sample
        ),
    }


@router.get("/v1/trajectories/diff", Role.use, answer=RunDifferences, fails="404 not_found")
def diff_runs(
    services: Current,
    a: Annotated[str, named("run", "a"), Query(description="A run.")],
    b: Annotated[str, named("run", "b"), Query(description="Another one.")],
) -> bytes:
    """Tell where two runs differ: fields, rewards, tokens, and their turns side by side.

    Turns count from 0 in `turns`, and from 1 in `tokens.first`.
    """
    one, other = (services.store.run(run_id) for run_id in (a, b))
    turns = turn_pairs(one, other)
    first = next((at for at, pair in enumerate(turns) if not pair["same"]), None)
    named = {"one": one.id, "other": other.id}
    about = {**named, **differences(one, other), "turns": turns, "first": first}
    return to_json(about, inf_nan_mode="null", fallback=str)


@router.get("/v1/trajectories/{run_id}/outline", Role.use, answer=RunOutline)
def outline_run(
    services: Current,
    run_id: RunId,
    first: First = 0,
    limit: Annotated[int, Query(ge=0, le=MARKS)] = MARKS,
) -> Any:
    """Return a run without its messages: its facts, its rewards, and a mark for each turn."""
    return services.run_pages.outline(run_id, first, limit)


@router.get("/v1/trajectories/{run_id}/turns", Role.use, answer=TurnWindow)
def list_turns(
    services: Current,
    run_id: RunId,
    first: First = 0,
    limit: Annotated[int, Query(ge=0, le=WINDOW)] = 20,
    full: Annotated[
        bool, Query(description="All messages of each call, not only those new in its turn.")
    ] = False,
) -> Any:
    """Return some turns of a run with their messages."""
    return services.run_pages.window(run_id, first, limit, full=full)


@router.get(
    "/v1/trajectories/{run_id}/turns/{number}/tokens",
    Role.use,
    answer=TurnTokens,
    fails="404 no_tokenizer",
)
def list_turn_tokens(
    services: Current,
    run_id: RunId,
    number: TurnNumber,
    first: Annotated[Count, Query(alias="from", description="The first token, from 0.")] = 0,
    limit: Count = 10**9,
    prompt: Annotated[bool, Query(description="false: only the tokens that were sampled.")] = True,
) -> dict[str, Any]:
    """Return the tokens of a turn with their exact text, decoded here: no engine is asked.

    The text comes from the tokenizer of the version that sampled them.
    """
    call = services.run_pages.call(run_id, number)
    read_ids, sampled = call["prompt_token_ids"], call["token_ids"]
    begin = max(first, 0 if prompt else len(read_ids))
    ids = [*read_ids, *sampled][begin : begin + limit]
    vocabulary = vocabulary_of(services, call["model"])
    decoded = vocabulary.texts_of(ids)
    logprobs = [*[None] * len(read_ids), *call["logprobs"]]
    trained = [*[False] * len(read_ids), *[True] * len(sampled)]
    return {
        "id": run_id,
        "n": number,
        "model": call["model"],
        "tokenizer": call["model"],
        "first": begin,
        "prompt": len(read_ids),
        "total": len(read_ids) + len(sampled),
        "ids": ids,
        "texts": decoded.texts,
        "bytes": decoded.bytes,
        "logprobs": logprobs[begin : begin + len(ids)],
        "trained": trained[begin : begin + len(ids)],
        "seams": [
            {"at": len(read_ids) + seam["at"], "model": seam["model"]}
            for seam in call.get("seams") or ()
        ],
        "exact": vocabulary.exact,
    }


@router.post(
    "/v1/trajectories/{run_id}/turns/{number}/score",
    Role.use,
    answer=TurnScore,
    fails="404 model_not_found, 400 no_tokens, 400 unsupported_engine",
)
async def score_turn(
    services: Current, request: Request, run_id: RunId, number: TurnNumber, body: ScoreRequest
) -> Response:
    """Compute the logprobs of a turn's sampled tokens under a version, by an engine that has it.

    It waits in the class of batches, so it yields to all other requests. The entropy is of the
    `top` likeliest tokens and the rest taken as one: a lower bound of the whole distribution's.
    """
    version = services.registry.resolve(body.model).id
    call = await asyncio.to_thread(services.run_pages.call, run_id, number)
    if not call["token_ids"]:
        raise BadInput(f"turn {number} has no tokens to score", param="number", code="no_tokens")
    exchange = EngineCall(
        "/v1/completions", score_request(call, version, body.top), new_id("x")[2:], capture=False
    )
    exchange.version = version
    ticket = services.admission.enter(caller_of(request).key_id, True, version)
    try:
        content = await ask_engine(services, request, ticket, exchange, version)
    except EngineError as error:
        if error.status in (400, 404, 405, 501):
            raise BadInput(
                f"the engine cannot score tokens: {error}", param="model", code="unsupported_engine"
            ) from error
        raise

    def read() -> dict[str, Any]:
        vocabulary = vocabulary_of(services, version)
        with well_formed(f"the replica of {version}"):
            scored = parse_score(call, orjson.loads(content), vocabulary)
        named = {"id": run_id, "n": number, "model": version, "sampled_by": call["model"]}
        return {**named, **scored}

    return await answer_read(request, read)
