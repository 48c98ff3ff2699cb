"""Chat route: answer chat requests that do not stream, without the layers around vLLM's own route.

Those layers (the router, FastAPI's dependencies and validation, a counter of requests, two tasks
that watch the client, a JSON encoder in Python) take longer than a small model. The answer is made
by vLLM's own code. What that refuses or fails at is left to the route: it asks again, and has
vLLM's own words for the client. Called by capture.py.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)

PATH = "/v1/chat/completions"


async def answer_chat(scope: Scope, receive: Receive, send: Send) -> Receive | None:
    """Answer a request; or return what vLLM's route is to receive, where that has to answer.

    Where the client leaves, the request is aborted, and nothing is sent.
    """
    read = [await receive()]
    while read[-1].get("more_body"):
        read.append(await receive())

    async def receive_again() -> Message:
        return read.pop(0) if read else await receive()

    chat = scope["app"].state.openai_serving_chat
    try:
        body = orjson.loads(b"".join(message.get("body", b"") for message in read))
        if chat is None or not isinstance(body, dict) or body.get("stream"):
            return receive_again
        request = ChatCompletionRequest.model_validate(body)
        answer = await _unless_left(receive, chat.create_chat_completion(request, Request(scope)))
        if not isinstance(answer, ChatCompletionResponse | None):
            return receive_again
        content = answer and answer.model_dump_json().encode()
    except Exception:  # noqa: BLE001 - the route meets it again, and tells the client
        return receive_again
    if content is None:
        return None
    length = (b"content-length", b"%d" % len(content))
    headers = [(b"content-type", b"application/json"), length]
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
    await send({"type": "http.response.body", "body": content})
    return None


async def _unless_left(receive: Receive, work: Any) -> Any:
    """Await the work and return its result; None if the client left first, and it was cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working,))
