"""The model APIs of OpenAI and Anthropic: their routes; model_calls/ answers them.

Handlers take and return plain JSON: a chat request is not worth two validations. Each route is also
served under /runs/{run_id}, the base URL of a run.
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.http.shapes import ID_SHAPE, TEXT, Described
from cray_agents.runtime.gateway.model_calls.answer import answer_call, check_fields
from cray_agents.runtime.gateway.model_calls.apis.chat import CHAT
from cray_agents.runtime.gateway.model_calls.apis.completions import COMPLETIONS
from cray_agents.runtime.gateway.model_calls.apis.messages import MESSAGES
from cray_agents.runtime.gateway.model_calls.apis.responses import RESPONSES
from cray_agents.runtime.gateway.model_calls.passthrough import check_embedded, pass_through
from cray_agents.runtime.gateway.routes.sampling_shapes import (
    CHAT_COMPLETION,
    CHAT_REQUEST,
    COMPLETION,
    COMPLETION_REQUEST,
    EMBEDDING_LIST,
    EMBEDDING_REQUEST,
    MESSAGE,
    MESSAGE_REQUEST,
    PROMPT,
    RESPONSE,
    RESPONSE_REQUEST,
    TOKEN_COUNT,
    TOKENS,
    TOKENS_REQUEST,
)
from cray_agents.runtime.gateway.services import Services

EVENTS = {"text/event-stream": {"description": "Server-sent events, of JSON objects."}}
PRIORITY = {
    "X-Priority": Described(
        TEXT, "`batch`: it is served when no other request waits, and never refused."
    )
}

router = Router("Models")
sampled = partial(
    router.post,
    role=Role.use,
    media=EVENTS,
    headers={
        "X-Run-Id": Described(
            ID_SHAPE, "The run of this call; by default the run of its conversation, or a new one."
        ),
        "X-Run-Tags": Described(TEXT, "Words to find the run by, with commas."),
        "Idempotency-Key": Described(
            {"type": "string", "minLength": 1, "maxLength": 255},
            "The same request again, under the same key, gets the recorded answer.",
        ),
        **PRIORITY,
    },
    fails=(
        "404 model_not_found, 400 invalid_value, 400 context_length_exceeded, "
        "400 idempotency_key_reused, 429 rate_limit_exceeded, 503 engine_unavailable, "
        "503 model_not_loaded, 502 engine_died, 504 engine_timeout, 502 engine_error"
    ),
    in_runs=True,
    rate_limited=True,
)
passed = partial(
    router.post,
    role=Role.use,
    headers=PRIORITY,
    fails="404 model_not_found, 400 invalid_value, 400 unsupported_model",
    in_runs=True,
)


@sampled(CHAT.path, body=CHAT_REQUEST, answer=CHAT_COMPLETION)
async def create_chat_completion(services: Services, request: Request) -> Response:
    """Continue a conversation.

    Unknown fields go to the engine. The call is recorded, with the tokens that were sampled, before
    the answer ends. In the answer `id` is the recorded call (choice k > 0 of `n`: `<id>-k`),
    `model` the version that served it, and the header `x-run-id` names its run. With
    `return_samples: true` the answer, or the last event but one, has `samples`: for each choice the
    prompt_token_ids, token_ids and logprobs.
    """
    return await answer_call(services, request, CHAT)


@sampled(COMPLETIONS.path, body=COMPLETION_REQUEST, answer=COMPLETION)
async def create_completion(services: Services, request: Request) -> Response:
    """Continue a text.

    Recorded as a chat completion is.
    """
    return await answer_call(services, request, COMPLETIONS)


@sampled(RESPONSES.path, body=RESPONSE_REQUEST, answer=RESPONSE)
async def create_response(services: Services, request: Request) -> Response:
    """Continue a conversation of items (OpenAI's newer API).

    Recorded as a chat completion is.
    """
    return await answer_call(services, request, RESPONSES)


@sampled(MESSAGES.path, body=MESSAGE_REQUEST, answer=MESSAGE)
async def create_message(services: Services, request: Request) -> Response:
    """Continue a conversation (Anthropic's API).

    Recorded as a chat completion is. Errors have Anthropic's shape.
    """
    return await answer_call(services, request, MESSAGES)


@passed("/v1/embeddings", body=EMBEDDING_REQUEST, answer=EMBEDDING_LIST, rate_limited=True)
async def create_embedding(services: Services, request: Request) -> Response:
    """Embed texts.

    Passed on to the engine; it samples nothing, and nothing is recorded.
    """
    return await pass_through(services, request, "/v1/embeddings", check_embedded)


@passed("/v1/messages/count_tokens", body=MESSAGE_REQUEST, answer=TOKEN_COUNT)
async def count_message_tokens(services: Services, request: Request) -> Response:
    """Count the tokens of a conversation (Anthropic's API).

    Passed on to the engine; it samples nothing, and nothing is recorded.
    """
    check = partial(check_fields, MESSAGES)
    return await pass_through(services, request, "/v1/messages/count_tokens", check)


@passed("/v1/tokenize", body=TOKENS_REQUEST, answer=TOKENS)
async def tokenize(services: Services, request: Request) -> Response:
    """Turn a text or a conversation into tokens.

    Passed on to the engine; it samples nothing, and nothing is recorded.
    """
    return await pass_through(services, request, "/tokenize")


@passed("/v1/detokenize", body=TOKENS_REQUEST, answer=PROMPT)
async def detokenize(services: Services, request: Request) -> Response:
    """Turn tokens into a text.

    Passed on to the engine; it samples nothing, and nothing is recorded.
    """
    return await pass_through(services, request, "/detokenize")
