"""Shapes of the model APIs: of a request, only the fields that the gateway itself checks.

Other fields are the engine's to judge.
"""

from cray_agents.runtime.gateway.http.shapes import (
    ANY,
    TEXT,
    TEXT_OR_NONE,
    WHOLE,
    NamedShape,
    Schema,
    list_of,
    object_of,
)

_COMMON: Schema = {
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {"type": ["object", "null"]},
    "tools": {"type": ["array", "null"], "items": ANY},
}
_TOKENS_OR_TEXTS = {"anyOf": [TEXT, WHOLE, list_of(WHOLE)]}
_NAMED: Schema = {"id": TEXT, "model": TEXT}

CHAT_REQUEST = NamedShape(
    "ChatRequest", object_of({"model": TEXT, "messages": list_of(ANY, 1)}, _COMMON)
)
CHAT_COMPLETION = NamedShape(
    "ChatCompletion",
    object_of(
        {
            **_NAMED,
            "object": {"const": "chat.completion"},
            "choices": list_of(object_of({"index": WHOLE, "message": ANY, "finish_reason": TEXT})),
            "usage": ANY,
        }
    ),
)
COMPLETION_REQUEST = NamedShape(
    "CompletionRequest",
    object_of(
        {
            "model": TEXT,
            "prompt": {
                "anyOf": [TEXT, list_of(_TOKENS_OR_TEXTS, 1)],
                "description": "A text, token ids, or a list of these.",
            },
        },
        _COMMON,
    ),
)
COMPLETION = NamedShape(
    "Completion",
    object_of(
        {
            **_NAMED,
            "choices": list_of(object_of({"index": WHOLE, "finish_reason": TEXT_OR_NONE})),
            "usage": ANY,
        }
    ),
)
RESPONSE_REQUEST = NamedShape(
    "ResponseRequest",
    object_of(
        {"model": TEXT, "input": {"anyOf": [TEXT, list_of(ANY, 1)]}},
        {"instructions": TEXT_OR_NONE, **_COMMON},
    ),
)
RESPONSE = NamedShape(
    "Response", object_of({**_NAMED, "object": {"const": "response"}, "output": list_of(ANY)})
)
MESSAGE_REQUEST = NamedShape(
    "MessageRequest",
    object_of(
        {"model": TEXT, "messages": list_of(ANY, 1)},
        {
            "max_tokens": WHOLE,
            "system": {"anyOf": [TEXT, list_of(ANY), {"type": "null"}]},
            **_COMMON,
        },
    ),
)
MESSAGE = NamedShape(
    "AnthropicMessage",
    object_of({**_NAMED, "role": {"const": "assistant"}, "content": list_of(ANY)}),
)
EMBEDDING_REQUEST = NamedShape(
    "EmbeddingRequest",
    object_of({"model": TEXT, "input": {"anyOf": [TEXT, list_of(_TOKENS_OR_TEXTS)]}}),
)
EMBEDDING_LIST = NamedShape(
    "EmbeddingList", object_of({"object": {"const": "list"}, "model": TEXT, "data": list_of(ANY)})
)
TOKEN_COUNT = NamedShape("TokenCount", object_of({"input_tokens": WHOLE}))
TOKENS_REQUEST = NamedShape(
    "TokensRequest",
    object_of(
        {"model": TEXT},
        {
            "prompt": {"description": "The text to tokenize."},
            "messages": {"description": "Or the conversation."},
            "tokens": {"description": "The token ids to detokenize."},
        },
    ),
)
TOKENS = NamedShape("Tokens", object_of({"count": WHOLE, "tokens": list_of(WHOLE)}))
PROMPT = NamedShape("Prompt", object_of({"prompt": TEXT}))
