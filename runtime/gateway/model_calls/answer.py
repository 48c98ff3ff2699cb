"""Model calls: resolve the version, wait for a place, ask the pool, record, answer.

Every call is durably in the store before its answer ends. The record holds the tokens the engine
sampled and the `name@N` that sampled them. Read next: apis/, the APIs; call.py, the record;
relay.py, streams and spans; idempotency.py, repeats. Requests that sample nothing (embeddings,
tokens) pass through to the engine without a record.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, EngineError, StoreError
from cray_agents.exact_json import load_json, malformed_calls
from cray_agents.ports import EngineCall
from cray_agents.records import Event, Message, new_id
from cray_agents.runtime.background import start_task
from cray_agents.runtime.disk.turns import INLINE
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    check_run_id,
    check_unmarked,
    read_as,
    response_of,
    size_of,
)
from cray_agents.runtime.gateway.http.bounds import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_RECORDED,
    check_count,
    check_sampling,
    check_texts,
)
from cray_agents.runtime.gateway.http.client_work import aside, await_or_disconnect
from cray_agents.runtime.gateway.http.fields import ID
from cray_agents.runtime.gateway.model_calls.admission import Ticket
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi
from cray_agents.runtime.gateway.model_calls.apis.chat import COMPLETIONS
from cray_agents.runtime.gateway.model_calls.apis.responses import RESPONSES, complete_answer
from cray_agents.runtime.gateway.model_calls.call import DATA, Call, Piece, choices_of
from cray_agents.runtime.gateway.model_calls.idempotency import (
    ReplayedAnswer,
    fingerprint,
    key_of,
)
from cray_agents.runtime.gateway.model_calls.relay import (
    EventStream,
    StreamRecorder,
    begin_span,
    end_span,
    failed_span,
)
from cray_agents.runtime.gateway.ownership import owner_of
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.request_router import Wanted
from cray_agents.runtime.pool.vllm_http import well_formed
from cray_agents.runtime.store.conversations import Continuation, chain, chain_before_error

KEY_LENGTH = 255  # characters of an Idempotency-Key
MAX_TAGS, TAG_LENGTH = 32, 100  # tags of a run, characters of one
OBJECT_FIELDS = ("stream_options", "structured_outputs")  # other types in the latter: 500 from vLLM
VERSION_INTERVAL = 1.0  # seconds between checks for the version that a request waits for


class _CallRequest(NamedTuple):
    """The body of a call, and its parts. `hashes` is its `chain`, where that may lead to its run.

    `run`: as the client names it. `before_error`: see `chain_before_error`.
    """

    body: Body
    messages: list[Message]
    run: str | None
    key: str | None
    fingerprint: str
    hashes: list[str]
    before_error: list[str]
    is_continued: bool


async def answer_call(services: Services, request: Request, api: SamplingApi) -> Response:
    """Answer a request to a sampling API. Called by routes/sampling.py."""
    read = partial(_read_request, services, request, api)
    call_request = await read_as(read, request, services.max_body)
    call = await _parse_call(services, api, request, call_request)
    response: Response | None = None
    try:
        if call.key is not None:
            keys, prefix = services.idempotency_keys, api.id_prefix
            entry = await keys.enter(prefix, call.exchange.id, call.fingerprint)
            if isinstance(entry, ReplayedAnswer):
                if call.blocks is not None:
                    said = await aside(request, partial(call.messages_of, entry.body))
                    await aside(request, partial(call.blocks.check, said, answer=True))
                headers = {"x-run-id": entry.run_id, "x-idempotent-replayed": "true"}
                kind = "text/event-stream" if call.exchange.streams else "application/json"
                return Response(entry.body, headers=headers, media_type=kind)
            call.in_flight, call.exchange.id = entry, entry.name
        response = await _answer(services, request, call)
        return response
    finally:
        if not isinstance(response, EventStream):  # a stream leaves when it is recorded
            call.leave()


async def _answer(services: Services, request: Request, call: Call) -> Response:
    model, live = call.exchange.request["model"], services.versions.live
    if call.api is RESPONSES:
        call.exchange.request["request_id"] = call.id
    wanted = _admit(services, request, call, call.session)
    last_event = call.api.last_event if call.exchange.streams else None
    answer = services.pool.answer(wanted, call.exchange)
    if call.api is RESPONSES:
        answer = complete_answer(answer, call.exchange.request)
    answer = live.count_outcome(model, call.session, call.exchange, answer, last_event)
    headers = {"x-run-id": call.run_id}
    if not call.exchange.streams:
        work = collect_answer(services, answer, call.ticket, wanted)
        with failed_span(services, call):
            content = await await_or_disconnect(request, call.ticket, work)
            # recorded from here on, even if the client leaves
            content = await _record_answer(services, call, content)
        return response_of(content, headers=headers)

    async def record(events: bytes, cut: str | None, end: Piece) -> None:
        data = events.startswith(DATA) or b"\n" + DATA in events
        if cut == "error" and data:
            services.metrics.error("stream_broken")  # one that never began is counted by its status
        if cut is None:
            begun, sampled = recorder.first_at, sum(len(s.token_ids) for s in call.exchange.samples)
            times = begun - call.clock, time.perf_counter() - begun
            services.metrics.model_calls.streamed(call.ticket.batch, *times, sampled)
        if cut is not None and not call.has_tokens and not data:
            end_span(services, call, failure=cut)
            return
        first = recorder.first_at - call.clock if recorder.first_at else None

        def make() -> list[Event]:
            with well_formed(f"the replica of {call.exchange.version}"):
                return call.stream_events(events, cut, end)

        await _record(services, call, make, len(events), first)

    slot = wait_for_slot(services, call.ticket, wanted)
    hold = call.blocks is not None and call.blocks.answers
    recorder = StreamRecorder(call, slot, answer, record, services.keep_alive, hold=hold)
    return EventStream(recorder, await recorder.first_piece(), headers)


async def start_call(
    services: Services, request: Request, api: SamplingApi, body: Body
) -> "tuple[Call, asyncio.Task[bytes]]":
    """Return a call and the task that answers and records it, though the request may end before.

    Raises BadInput, NotFound, TooManyRequests; the task raises EngineError and its kinds.
    """
    read = partial(_read_request, services, request, api, body)
    call_request = await aside(request, read) if size_of(request) > INLINE else read()
    call = await _parse_call(services, api, request, call_request)
    wanted = _admit(services, request, call)

    async def work() -> bytes:
        answer = services.pool.answer(wanted, call.exchange)
        with failed_span(services, call):
            content = await collect_answer(services, answer, call.ticket, wanted)
            return await _record_answer(services, call, content)

    task = start_task("call", work(), call.id)
    task.add_done_callback(lambda _: call.ticket.release())  # also if it never began
    return call, task


def _admit(services: Services, request: Request, call: Call, session: str | None = None) -> Wanted:
    """Resolve a call's version, and give it its ticket and its span."""
    wanted = resolve_version(services, call.exchange, session)
    call.ticket = take_ticket(services, request, call.exchange.request["model"])
    begin_span(services, request, call)
    return wanted


async def collect_answer(
    services: Services, answer: AsyncGenerator[bytes, None], ticket: Ticket, wanted: Wanted
) -> bytes:
    """Wait for a place and return the engine's answer in one piece."""
    await wait_for_slot(services, ticket, wanted)
    async with ticket, aclosing(answer) as pieces:
        return b"".join([piece async for piece in pieces])


async def wait_for_slot(services: Services, ticket: Ticket, wanted: Wanted) -> None:
    """Wait for a place, and for the version to be loaded if no replica holds it.

    Raises EngineUnavailable. Raises NotLoaded at once, or SwapError, if it cannot be loaded.
    """
    slot: asyncio.Future[None] | None = None
    try:
        while slot is None or not slot.done():
            version = wanted if isinstance(wanted, str) else wanted()
            loading = services.versions.load_on_demand(version)
            if loading is not None:
                await asyncio.shield(loading)  # other requests wait for it, too
            if ticket.inside:
                return
            slot = slot or asyncio.ensure_future(ticket.wait())
            await asyncio.wait({slot}, timeout=VERSION_INTERVAL)
        slot.result()
    finally:
        if slot is not None:
            slot.cancel()


async def _record_answer(services: Services, call: Call, content: bytes) -> bytes:
    """Record the engine's answer and return the client's version of it."""

    def make() -> list[Event]:
        nonlocal content
        with well_formed(f"the replica of {call.exchange.version}"):
            answer = from_json(content, allow_inf_nan=False)
            if call.returns_samples:
                content = content[: content.rindex(b"}")] + call.samples_member() + b"}"
            return call.answer_events(answer, content)

    await _record(services, call, make, len(content))
    return content


async def _record(
    services: Services,
    call: Call,
    make: Callable[[], list[Event]],
    size: int,
    first: float | None = None,
) -> None:
    """Put a call's events in the store, which `make` returns.

    `size`: of the answer, in bytes. `first`: seconds to a stream's first event. Large events are
    made in a thread; they too are written if this is cancelled.
    """
    large = size + call.exchange.size * call.choices > INLINE
    writing = _write(services, call, make, first, large)
    await (asyncio.shield(start_task("record of a call", writing)) if large else writing)


async def _write(
    services: Services,
    call: Call,
    make: Callable[[], list[Event]],
    first: float | None,
    large: bool,
) -> None:
    control_tokens = services.control_tokens
    await control_tokens.learn(call.versions)

    def read() -> tuple[list[Event], int]:
        events = make()
        if call.api is not COMPLETIONS:  # whose prompt no template renders
            control_tokens.tag(events)
        calls = [call for event in events for call in malformed_calls(event.body["message"])]
        return events, sum(bool(call["function"].get("arguments")) for call in calls)

    if large:
        events, malformed = await services.work.run(call.ticket.key, read, ends=False)
    else:
        events, malformed = read()
    begun = time.perf_counter()
    appended = await services.store.append(events, new=call.key is None, many=large)
    services.metrics.model_calls.append_seconds.observe(time.perf_counter() - begun)
    if appended.duplicates:  # an id used before: two platforms on one root, or a bug
        raise StoreError(f"the call {call.id} was recorded before; send the request again")
    if call.continuation is not None:
        call.continuation.end(recorded=True, cut="asked" not in events[0].body)
    samples = call.exchange.samples
    prompt = sum(len(sample.prompt_token_ids) for sample in samples)
    sampled = sum(len(sample.token_ids) for sample in samples)
    services.metrics.recorded(prompt, sampled, len(events))
    finish, ticket = events[0].body["finish_reason"], call.ticket
    version, tokens = call.exchange.version, (prompt, sampled)
    services.metrics.model_calls.count(
        version, call.owner, ticket.batch, finish, tokens, ticket.waited, malformed
    )
    if call.blocks is not None:
        said = [event.body["message"] for event in events]
        with failed_span(services, call, events[0]):
            await services.work.run(ticket.key, partial(call.blocks.check, said, answer=True))
    end = partial(end_span, services, call, events[0], first=first)
    await asyncio.to_thread(end) if large else end()


def check_fields(api: SamplingApi, body: Body) -> list[Message]:
    """Return the messages of a body in an API's shape; only what the document names is checked.

    Raises BadInput.
    """
    if not isinstance(body.get("model"), str):
        raise BadInput("model must be given as a string", param="model")
    for name in ("messages", "input"):
        if isinstance(given := body.get(name), list):
            check_count(given, MAX_MESSAGES, "messages", name)
    messages = api.parse_request(body)
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadInput("tools must be a list of objects", param="tools")
    if not isinstance(body.get("stream"), bool | None):
        raise BadInput("stream must be true or false", param="stream")
    for name in OBJECT_FIELDS:
        if not isinstance(body.get(name), dict | None):
            raise BadInput(f"{name} must be an object", param=name)
    check_sampling(body)
    return messages


def _read_request(
    services: Services, request: Request, api: SamplingApi, body: Body
) -> _CallRequest:
    """Return what a request asks, all that takes long for a long one. Raises BadInput."""
    messages = check_fields(api, body)
    check_unmarked(body)
    if body.get("use_beam_search"):
        raise BadInput(
            "beam search samples nothing that could be recorded", param="use_beam_search"
        )
    choices, size = choices_of(body), size_of(request)
    if choices > MAX_CHOICES or (choices > 1 and size * choices > MAX_RECORDED):
        raise BadInput(
            f"{choices:,} choices of a request of {size:,} bytes: at most {MAX_CHOICES:,} are "
            f"taken, and {MAX_RECORDED:,} bytes in all, for each is recorded with its request",
            param="n",
        )
    caller, run = caller_of(request).key_id, _named_run(services, request)
    hashes: list[str] = []
    before: list[str] = []
    if api is not COMPLETIONS and run is None:
        hashes, before = chain(messages, caller), chain_before_error(messages, caller)
    continued = services.several_gateways and _is_continued(messages)
    key = _parse_key(request, caller, api, body)
    return _CallRequest(body, messages, run, *key, hashes, before, continued)


async def _parse_call(
    services: Services, api: SamplingApi, request: Request, call_request: _CallRequest
) -> Call:
    """Return the request as a call. Raises AccessDenied for a run of another key."""
    body = call_request.body
    returns_samples = body.pop("return_samples", None) is True
    if returns_samples and not body.get("top_logprobs"):  # other servers' names for nearly the same
        body.pop("return_token_ids", None)
        if body.get("logprobs") is True:  # a number would be a completion's count of them
            del body["logprobs"]
    exchange = EngineCall(
        api.path, body, call_request.key or new_id("x")[2:], size=size_of(request)
    )
    caller = caller_of(request)
    unblocked = caller.role is Role.admin and request.headers.get("x-block") == "off"
    blocks = None if unblocked else services.blocks
    if blocks is not None:
        await aside(request, partial(blocks.check, call_request.messages, answer=False))
    known, conversation_hash = await _find_run(services, request, call_request)
    run_id = known.run_id if isinstance(known, Continuation) else known
    if call_request.run is not None:
        await services.run_owners.check_call(caller_of(request), run_id)
    exchange.conversation = request.headers.get("x-session-id", "")[:TAG_LENGTH] or run_id
    return Call(
        api,
        exchange,
        call_request.messages,
        run_id,
        session=_session(request, body) or run_id,
        conversation_hash=conversation_hash,
        continuation=known if isinstance(known, Continuation) else None,
        named=call_request.run is not None,
        retry=request.headers.get("x-stainless-retry-count", "0") != "0",
        key=call_request.key,
        fingerprint=call_request.fingerprint,
        returns_samples=returns_samples,
        tags=_parse_tags(request),
        owner=owner_of(request),
        blocks=blocks,
    )


def _named_run(services: Services, request: Request) -> str | None:
    """Return the run that the client names: by its URL, by X-Run-Id, or by a header of its own."""
    named: str | None = request.path_params.get("run_id") or request.headers.get("x-run-id")
    if named is None and services.run_headers:
        headers = request.headers
        named = next((headers[name] for name in services.run_headers if name in headers), None)
    return named


async def _find_run(
    services: Services, request: Request, call_request: _CallRequest
) -> tuple[Continuation | str, str | None]:
    """Return what a request continues or its run, and the hash by which the next will find it."""
    if (run_id := call_request.run) is not None:
        if not ID.fullmatch(run_id):
            own = next((n for n in services.run_headers if request.headers.get(n) == run_id), None)
            raise BadInput(
                f"{run_id[:200]!r} cannot name a run: letters, digits and '._:@-', at most 200",
                param=own or "X-Run-Id",
            )
        return run_id, None
    if not call_request.hashes:  # a completion is no conversation
        return new_id("run"), None
    find = partial(
        services.store.conversations.find,
        call_request.hashes,
        call_request.messages,
        call_request.before_error,
    )
    known = find()
    if known is None and call_request.is_continued:
        await asyncio.to_thread(services.store.refresh_conversations)
        known = find()
    return known or new_id("run"), call_request.hashes[-1]


def _is_continued(messages: list[Any]) -> bool:
    """Tell whether messages repeat an answer, or the error of one that is not repeated."""
    return any(
        message.get("role") in ("assistant", "tool") or "Error:" in str(message.get("content"))
        for message in messages
        if isinstance(message, dict)
    )


def _session(request: Request, body: Body) -> str | None:
    """Return the client's session, else its user. A canary keeps a session on one side."""
    session = request.headers.get("x-session-id") or body.get("user")
    return session if isinstance(session, str) else None


def _parse_tags(request: Request) -> list[str]:
    """Return the tags for the run, as in `X-Run-Tags: first, second`."""
    given = request.headers.get("x-run-tags", "")
    tags = sorted({tag.strip() for tag in given.split(",")} - {""})
    if len(tags) > MAX_TAGS or any(len(tag) > TAG_LENGTH for tag in tags):
        raise BadInput(
            f"X-Run-Tags holds at most {MAX_TAGS} tags of at most {TAG_LENGTH} characters, "
            "with commas",
            param="X-Run-Tags",
        )
    return tags


def _parse_key(
    request: Request, caller: str, api: SamplingApi, body: Body
) -> tuple[str | None, str]:
    given = request.headers.get("idempotency-key")
    if given is None:
        return None, ""
    if not 0 < len(given) <= KEY_LENGTH:
        raise BadInput(
            f"an Idempotency-Key has 1 to {KEY_LENGTH} characters, not {len(given)}",
            param="Idempotency-Key",
        )
    return key_of(caller, api.path, given), fingerprint(body)


def resolve_version(services: Services, exchange: EngineCall, session: str | None = None) -> Wanted:
    """Return the version of a request's model, or a function that resolves it again later.

    A live session may get a canary's version; without a session it is the promoted one. Raises
    NotFound.
    """
    model = exchange.request["model"]

    def resolve() -> str:
        if session is None:
            return services.registry.resolve(model).id
        return services.versions.live.resolve(model, session).id

    version = exchange.version = resolve()
    return version if model == version else resolve


def take_ticket(services: Services, request: Request, model: str) -> Ticket:
    """Return a request's ticket. Only the platform's own batch worker, an admin, may be a batch."""
    caller = caller_of(request)
    batch = caller.role is Role.admin and request.headers.get("x-priority") == "batch"
    return services.admission.enter(caller.key_id, batch, model)


def check_embedded(body: Body) -> None:
    """Raise BadInput for an `input` that is no text, no tokens, and no list of these."""
    given = body.get("input")
    if not isinstance(given, str) and not (isinstance(given, list) and all(map(_is_text, given))):
        raise BadInput("input must be a text, token ids, or a list of these", param="input")
    check_texts("input", given)


def _is_text(given: Any) -> bool:
    """Tell whether it is a text, a token id or a list of token ids, up to the first that is not."""
    ids = given if isinstance(given, list) else [given]
    return isinstance(given, str) or all(type(each) is int for each in ids)  # and no bool


async def pass_through(
    services: Services,
    request: Request,
    path: str,
    check: Callable[[Body], object] | None = None,
) -> Response:
    """Answer a request by the engine's route at `path`. Called by routes/sampling.py.

    `check` raises BadInput for a body that is not as the document says.
    """
    check_run_id(request)

    def checked(body: Body) -> Body:
        if not isinstance(body.get("model"), str):
            raise BadInput("model must be given as a string", param="model")
        check_unmarked(body)
        if check is not None:
            check(body)
        return body

    body = await read_as(checked, request, services.max_body)
    body.pop("stream", None)
    exchange = EngineCall(path, body, new_id("x")[2:], capture=False, size=size_of(request))
    wanted = resolve_version(services, exchange)
    if path == "/v1/embeddings" and not services.pool.serves(exchange.version):
        folder = services.home.checkpoint(services.registry.resolve(exchange.version).checkpoint)
        if await asyncio.to_thread(only_generates, folder):  # before a replica is started for it
            raise _unsupported(exchange.version, path)
    ticket = take_ticket(services, request, body["model"])
    try:
        return response_of(await ask_engine(services, request, ticket, exchange, wanted))
    except EngineError as error:
        if error.status in (404, 405, 501):  # vLLM has no route that its model cannot serve
            raise _unsupported(exchange.version, path) from error
        raise


async def ask_engine(
    services: Services, request: Request, ticket: Ticket, exchange: EngineCall, wanted: Wanted
) -> bytes:
    """Return the engine's answer to what is not recorded, unless the client leaves."""
    answer = services.pool.answer(wanted, exchange)
    work = collect_answer(services, answer, ticket, wanted)
    return await await_or_disconnect(request, ticket, work)


def only_generates(checkpoint: Path) -> bool:
    """Tell by its files whether vLLM serves a model for text alone, unless told otherwise."""
    try:
        config = load_json((checkpoint / "config.json").read_bytes())
        names = [str(name) for name in config["architectures"]]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    generates = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    return generates and not (checkpoint / "modules.json").exists()


def _unsupported(version: str, path: str) -> BadInput:
    return BadInput(
        f"{version} cannot do this ({path}): its engine serves a model of another kind",
        param="model",
        code="unsupported_model",
    )
