"""The model APIs of OpenAI and Anthropic: their routes; model_calls/ answers them.

Handlers take and return plain JSON: a chat request is not worth two validations. The records below
have, for /openapi.json alone, the fields of requests that the gateway checks; others are the
engine's. Each route is also served under /runs/{run_id}, the base URL of a run.
"""

from functools import partial
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.records import Record
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.fields import ID_PATTERN
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.model_calls.answer import (
    answer_call,
    check_embedded,
    check_fields,
    pass_through,
)
from cray_agents.runtime.gateway.model_calls.apis.chat import CHAT, COMPLETIONS
from cray_agents.runtime.gateway.model_calls.apis.messages import MESSAGES
from cray_agents.runtime.gateway.model_calls.apis.responses import RESPONSES
from cray_agents.runtime.gateway.services import Services

# ---- what /openapi.json says: nothing is checked by these twice
Json = dict[str, Any]
Inputs = list[str | int | list[int]]


class CommonFields(Record):
    """The fields that requests of all APIs have."""

    model: str
    stream: bool | None = None
    stream_options: Json | None = None
    tools: list[Json] | None = None


class ChatRequest(CommonFields):
    """A conversation to continue."""

    messages: list[Json] = Field(min_length=1)


class CompletionRequest(CommonFields):
    """A text, token ids, or a list of these, to continue."""

    prompt: str | Inputs = Field(union_mode="left_to_right")


class ResponseRequest(CommonFields):
    """A conversation of items to continue."""

    input: str | list[Json]
    instructions: str | None = None


class MessageRequest(ChatRequest):
    """A conversation to continue, as Anthropic's API has it."""

    max_tokens: int = 0
    system: str | list[Json] | None = None


class EmbeddingRequest(Record):
    """A text, token ids, or a list of these, to embed."""

    model: str
    input: str | Inputs


class TokensRequest(Record):
    """A `prompt` or `messages` to tokenize, or `tokens` to detokenize."""

    model: str
    prompt: Any = None
    messages: Any = None
    tokens: Any = None


class Priority(Record):
    """Headers of a request that an engine answers."""

    priority: str = Field(
        "",
        alias="X-Priority",
        description="`batch`: it is served when no other request waits, and never refused.",
    )


class SamplingHeaders(Priority):
    """Headers of a request to a model."""

    run_id: str = Field(
        "",
        alias="X-Run-Id",
        pattern=ID_PATTERN,
        description="The run of this call; by default the run of its conversation, or a new one.",
    )
    run_tags: str = Field(
        "", alias="X-Run-Tags", description="Words to find the run by, with commas."
    )
    idempotency_key: str = Field(
        "",
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="The same request again, under the same key, gets the recorded answer.",
    )


# ---- routes
router = Router("Models")
sampled = partial(
    router.post,
    role=Role.use,
    media={"text/event-stream": {"description": "Server-sent events, of JSON objects."}},
    headers=SamplingHeaders,
    fails=(
        "404 model_not_found, 400 invalid_value, 400 context_length_exceeded, "
        "400 idempotency_key_reused, 429 rate_limit_exceeded, 503 engine_unavailable, "
        "503 model_not_loaded, 502 engine_died, 504 engine_timeout, 502 engine_error"
    ),
    in_runs=True,
    rate_limited=True,
    bare=True,
    local=True,
)
passed = partial(
    router.post,
    role=Role.use,
    headers=Priority,
    fails="404 model_not_found, 400 invalid_value, 400 unsupported_model",
    in_runs=True,
    bare=True,
    local=True,
)


@sampled(CHAT.path, body=ChatRequest, answer=Json)
async def create_chat_completion(services: Services, request: Request) -> Response:
    """Continue a conversation.

    Unknown fields go to the engine. The call is recorded, with the tokens that were sampled, before
    the answer ends. In the answer `id` is the recorded call (choice k > 0 of `n`: `<id>-k`),
    `model` the version that served it, and the header `x-run-id` names its run. With
    `return_samples: true` the answer, or the last event but one, has `samples`: for each choice the
    prompt_token_ids, token_ids and logprobs.
    """
    return await answer_call(services, request, CHAT)


@sampled(COMPLETIONS.path, body=CompletionRequest, answer=Json)
async def create_completion(services: Services, request: Request) -> Response:
    """Continue a text.

    Recorded as a chat completion is.
    """
    return await answer_call(services, request, COMPLETIONS)


@sampled(RESPONSES.path, body=ResponseRequest, answer=Json)
async def create_response(services: Services, request: Request) -> Response:
    """Continue a conversation of items (OpenAI's newer API).

    Recorded as a chat completion is.
    """
    return await answer_call(services, request, RESPONSES)


@sampled(MESSAGES.path, body=MessageRequest, answer=Json)
async def create_message(services: Services, request: Request) -> Response:
    """Continue a conversation (Anthropic's API).

    Recorded as a chat completion is. Errors have Anthropic's shape.
    """
    return await answer_call(services, request, MESSAGES)


@passed("/v1/embeddings", body=EmbeddingRequest, answer=Json, rate_limited=True)
async def create_embedding(services: Services, request: Request) -> Response:
    """Embed texts.

    Passed on to the engine; it samples nothing, and nothing is recorded.
    """
    return await pass_through(services, request, "/v1/embeddings", check_embedded)


@passed("/v1/messages/count_tokens", body=MessageRequest, answer=Json)
async def count_message_tokens(services: Services, request: Request) -> Response:
    """Count the tokens of a conversation (Anthropic's API).

    Passed on to the engine; it samples nothing, and nothing is recorded.
    """
    check = partial(check_fields, MESSAGES)
    return await pass_through(services, request, "/v1/messages/count_tokens", check)


@passed("/v1/tokenize", body=TokensRequest, answer=Json)
async def tokenize(services: Services, request: Request) -> Response:
    """Turn a text or a conversation into tokens.

    Passed on to the engine; it samples nothing, and nothing is recorded.
    """
    return await pass_through(services, request, "/tokenize")


@passed("/v1/detokenize", body=TokensRequest, answer=Json)
async def detokenize(services: Services, request: Request) -> Response:
    """Turn tokens into a text.

    Passed on to the engine; it samples nothing, and nothing is recorded.
    """
    return await pass_through(services, request, "/detokenize")
