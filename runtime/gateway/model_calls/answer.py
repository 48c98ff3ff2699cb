"""The APIs that ask a model: resolve the version, wait for a place, ask the pool, record, answer.

Every call is durably in the store before its answer ends, with the tokens the engine sampled and
the `name@N` that sampled them. Read next: doors/, the APIs; call.py, what is recorded; relay.py,
streams; repeats.py, what is sent again. What samples nothing is passed on: passing.py.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import BadInput, StoreError
from cray_agents.ports import EngineCall
from cray_agents.records import Event, new_id
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import ID, check_unmarked, read_json
from cray_agents.runtime.gateway.model_calls.admission import Ticket
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi
from cray_agents.runtime.gateway.model_calls.apis.chat import CHAT
from cray_agents.runtime.gateway.model_calls.apis.completions import COMPLETIONS
from cray_agents.runtime.gateway.model_calls.apis.messages import MESSAGES
from cray_agents.runtime.gateway.model_calls.apis.responses import RESPONSES
from cray_agents.runtime.gateway.model_calls.call import Call
from cray_agents.runtime.gateway.model_calls.idempotency import (
    IdempotencyKeys,
    InFlightKey,
    ReplayedAnswer,
    fingerprint,
    key_of,
)
from cray_agents.runtime.gateway.model_calls.relay import EventStream, Relay
from cray_agents.runtime.gateway.ownership import owner_of
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.pool import Wanted
from cray_agents.runtime.store.conversations import chain

DOORS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
KEY_LENGTH = 255  # characters of an Idempotency-Key
TAGS, TAG_LENGTH = 32, 100  # of a run
OBJECTS = ("stream_options", "structured_outputs")  # of the latter vLLM fails otherwise: 500
LOOK = 1.0  # seconds between looks at whether a version that is waited for is to be had
PATIENCE = 0.05  # seconds after which it is watched whether the client is still there

T = TypeVar("T")


def routes(services: Services) -> list[Route]:
    """A route for each API, and the same under a run's own base URL."""
    repeats = IdempotencyKeys(services.store)
    found = []
    for door in DOORS:
        handler = _handler(services, repeats, door)
        found.append(Route(door.path, handler, methods=["POST"]))
        found.append(Route(f"/runs/{{run_id}}{door.path}", handler, methods=["POST"]))
    return found


def _handler(
    services: Services, repeats: IdempotencyKeys, door: SamplingApi
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def handle(request: Request) -> Response:
        body = await read_json(request, services.max_body)
        call = _call(services, door, request, body)
        if _named(request) is not None:
            await services.run_owners.check_call(caller_of(request), call.run_id)
        if call.key is None:
            return await _ask(services, request, call, None)
        turn = await repeats.enter(door.prefix, call.exchange.id, call.fingerprint)
        if isinstance(turn, ReplayedAnswer):
            return _again(call, turn)
        call.exchange.id = turn.name
        response: Response | None = None
        try:
            response = await _ask(services, request, call, turn)
            return response
        finally:
            if not isinstance(response, EventStream):  # a stream leaves when it is recorded
                turn.leave()

    return handle


async def _ask(
    services: Services, request: Request, call: Call, turn: InFlightKey | None
) -> Response:
    model, live = call.exchange.request["model"], services.promoting.live
    if call.door is RESPONSES:
        call.exchange.request["request_id"] = call.id
    wanted = resolved(services, call.exchange, call.session)
    ticket = enter(services, request, model)
    last = call.door.last if call.exchange.streams else None
    answer = services.pool.answer(wanted, call.exchange)
    answer = live.watched(model, call.session, call.exchange, answer, last)
    headers = {"x-run-id": call.run_id}
    if not call.exchange.streams:
        asked = whole(services, answer, ticket, wanted)
        content = await unless_gone(request, ticket, asked)
        # from here on it is recorded, whether the client is still there or not
        content = await _recorded(services, call, content)
        return Response(content, headers=headers, media_type="application/json")

    async def record(data: list[Body], cut: str | None, whole: bytes | None) -> None:
        if cut == "error" and data:
            services.metrics.error("stream_broken")  # one that never began is counted by its status
        if cut is None or call.sampled:
            await _record(services, call, call.streamed(data, cut, whole))

    def told() -> bytes:
        if not call.tells:
            return b""
        head = orjson.dumps({"id": call.id, "model": call.exchange.version, "choices": []})
        return b"data: " + head[:-1] + call.samples() + b"}\n\n"

    def ended() -> None:
        ticket.release()
        if turn is not None:
            turn.leave()

    alive = services.keep_alive
    relay = Relay(
        its_turn(services, ticket, wanted), answer, call.door.last, told, record, ended, alive
    )
    return EventStream(relay, await relay.head(), headers)


async def whole(
    services: Services, answer: AsyncGenerator[bytes, None], ticket: Ticket, wanted: Wanted
) -> bytes:
    """The engine's answer in one piece."""
    await its_turn(services, ticket, wanted)
    async with ticket, aclosing(answer) as pieces:
        return b"".join([piece async for piece in pieces])


async def its_turn(services: Services, ticket: Ticket, wanted: Wanted) -> None:
    """Wait for a place, and for a version that no replica holds, now or while it waits.

    Raises EngineUnavailable; NotLoaded at once, or SwapError, where it cannot be loaded.
    """
    turn: asyncio.Future[None] | None = None
    try:
        while turn is None or not turn.done():
            version = wanted if isinstance(wanted, str) else wanted()
            loading = services.promoting.loaded(version)
            if loading is not None:
                await asyncio.shield(loading)  # others wait for it, too
            if ticket.inside:
                return
            turn = turn or asyncio.ensure_future(ticket.turn())
            await asyncio.wait({turn}, timeout=LOOK)
        turn.result()
    finally:
        if turn is not None:
            turn.cancel()


async def _recorded(services: Services, call: Call, content: bytes) -> bytes:
    """What the client is to see of the engine's answer, once it is in the store."""
    answer = orjson.loads(content)
    if call.tells:
        content = content[: content.rindex(b"}")] + call.samples() + b"}"
    await _record(services, call, call.whole(answer, content))
    return content


async def _record(services: Services, call: Call, events: list[Event]) -> None:
    appended = await services.store.append(events, new=call.key is None)
    if appended.duplicates:  # an id that was there: two platforms on one root, or a bug
        raise StoreError(f"the call {call.id} was recorded before; send the request again")
    samples = call.exchange.samples
    prompt = sum(len(sample.prompt_token_ids) for sample in samples)
    sampled = sum(len(sample.token_ids) for sample in samples)
    services.metrics.recorded(prompt, sampled, len(events))


def _call(services: Services, door: SamplingApi, request: Request, body: Body) -> Call:
    """The request as a call. Checks only what recording needs; the engine judges the rest."""
    if not isinstance(body.get("model"), str):
        raise BadInput("model must be given as a string", param="model")
    messages = door.asked(body)
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadInput("tools must be a list of objects", param="tools")
    if body.get("use_beam_search"):
        raise BadInput(
            "beam search samples nothing that could be recorded", param="use_beam_search"
        )
    if not isinstance(body.get("stream"), bool | None):
        raise BadInput("stream must be true or false", param="stream")
    for name in OBJECTS:
        if not isinstance(body.get(name), dict | None):
            raise BadInput(f"{name} must be an object", param=name)
    check_unmarked(body)
    caller = caller_of(request).key_id
    key, mark = _key(request, caller, door, body)
    tells = body.pop("return_samples", None) is True
    if tells and not body.get("top_logprobs"):  # other servers' words for nearly the same
        body.pop("return_token_ids", None)
        if body.get("logprobs") is True:  # a number is how many a completion is to tell
            del body["logprobs"]
    exchange = EngineCall(door.path, body, key or new_id("x")[2:])
    run_id, asked = _run(services, request, door, messages, caller)
    session = _session(request, body) or run_id
    return Call(door, exchange, messages, run_id, session, asked, key, mark, tells, _tags(request),
                owner_of(request))  # fmt: skip


def _named(request: Request) -> str | None:
    """The run that the client says its request belongs to."""
    return request.path_params.get("run_id") or request.headers.get("x-run-id")


def _run(
    services: Services, request: Request, door: SamplingApi, messages: list[Any], caller: str
) -> tuple[str, str | None]:
    """The run that a request belongs to, and the hash by which its successor will find it."""
    run_id = _named(request)
    if run_id is not None:
        if not ID.fullmatch(run_id):
            raise BadInput(
                f"{run_id[:200]!r} cannot name a run: letters, digits and '._:@-', at most 200",
                param="X-Run-Id",
            )
        return str(run_id), None
    if door is COMPLETIONS:  # no conversation
        return new_id("run"), None
    prefixes = chain(messages, caller)
    found = services.store.conversations.find(prefixes, messages, caller)
    return found or new_id("run"), prefixes[-1]


def _session(request: Request, body: Body) -> str | None:
    """What a canary keeps together: the client's session, else its user."""
    named = request.headers.get("x-session-id") or body.get("user")
    return named if isinstance(named, str) else None


def _tags(request: Request) -> list[str]:
    """What the client wants its run to be found by: `X-Run-Tags: first, second`."""
    given = request.headers.get("x-run-tags", "")
    tags = sorted({tag.strip() for tag in given.split(",")} - {""})
    if len(tags) > TAGS or any(len(tag) > TAG_LENGTH for tag in tags):
        raise BadInput(
            f"X-Run-Tags holds at most {TAGS} tags of at most {TAG_LENGTH} characters, with commas",
            param="X-Run-Tags",
        )
    return tags


def _key(request: Request, caller: str, door: SamplingApi, body: Body) -> tuple[str | None, str]:
    given = request.headers.get("idempotency-key")
    if given is None:
        return None, ""
    if not 0 < len(given) <= KEY_LENGTH:
        raise BadInput(
            f"an Idempotency-Key has 1 to {KEY_LENGTH} characters, not {len(given)}",
            param="Idempotency-Key",
        )
    return key_of(caller, door.path, given), fingerprint(body)


def resolved(services: Services, exchange: EngineCall, session: str | None = None) -> Wanted:
    """The version that a request's model means now, and how to ask again. Raises NotFound.

    In a live session that may be a canary's; what has no session gets the promoted one.
    """
    model = exchange.request["model"]

    def meant() -> str:
        if session is None:
            return services.registry.resolve(model).id
        return services.promoting.live.meant(model, session).id

    version = exchange.version = meant()
    return version if model == version else meant


def enter(services: Services, request: Request, model: str) -> Ticket:
    """A place for a request; only the platform's own worker, which bounds itself, is a batch."""
    caller = caller_of(request)
    batch = caller.role is Role.admin and request.headers.get("x-priority") == "batch"
    return services.admission.enter(caller.key_id, batch, model)


def _again(call: Call, before: ReplayedAnswer) -> Response:
    media_type = "text/event-stream" if call.exchange.streams else "application/json"
    headers = {"x-run-id": before.run_id, "x-idempotent-replayed": "true"}
    return Response(before.body, headers=headers, media_type=media_type)


async def unless_gone(request: Request, ticket: Ticket, work: Coroutine[Any, Any, T]) -> T:
    """The result of work under a ticket; it is cancelled when the client leaves.

    Raises ClientDisconnect then. The client is looked after only if it takes a while: most of what
    is quick needs no second task.
    """
    task = asyncio.current_task()
    assert task is not None
    watch = DisconnectWatcher(request, task)
    timer = asyncio.get_running_loop().call_later(PATIENCE, watch.begin)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.gone:
            raise ClientDisconnect from None
        raise
    finally:
        timer.cancel()
        watch.end()
        ticket.release()  # also where the work never came to its turn


class DisconnectWatcher:
    """Cancels a task when its client leaves."""

    def __init__(self, request: Request, task: "asyncio.Task[Any]") -> None:
        self.gone = False
        self._request = request
        self._task = task
        self._watching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look from now on."""
        self._watching = asyncio.create_task(self._watch())

    def end(self) -> None:
        """Look no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()
