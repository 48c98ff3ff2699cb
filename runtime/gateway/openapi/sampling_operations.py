"""Operations that ask a model, in the shapes of OpenAI and Anthropic."""

from cray_agents.runtime.gateway.openapi.operation import (
    EVENTS,
    JSON,
    Operation,
    Schema,
    header,
    ref,
)

TEXT: Schema = {"type": "string"}
SAMPLING = (
    header(
        "X-Run-Id",
        ref("Id"),
        "The run that this call belongs to; without it one is found by the conversation, or begun.",
    ),
    header(
        "Idempotency-Key",
        {"type": "string", "minLength": 1, "maxLength": 255},
        "The same request again, under the same key, gets the recorded answer.",
    ),
)
PRIORITY = header(
    "X-Priority", TEXT, "`batch`: it is served when no other request waits, and never refused."
)
RECORDED = (
    "Other fields go to the engine as they are. The call is recorded, with the tokens that were "
    "sampled, before the answer ends; `x-run-id` names its run, and `model` in the answer the "
    "version that served it."
)
FAILS = (
    "404 model_not_found",
    "400 invalid_value",
    "400 context_length_exceeded",
    "400 idempotency_key_reused",
    "429 rate_limit_exceeded",
    "503 engine_unavailable",
    "503 model_not_loaded",
    "502 engine_died",
    "504 engine_timeout",
    "502 engine_error",
)


def _sampling(path: str, name: str, summary: str, request: str, answer: str) -> Operation:
    return Operation(
        "post",
        path,
        name,
        "Models",
        summary,
        {JSON: ref(answer), EVENTS: TEXT},
        takes=ref(request),
        headers=(*SAMPLING, PRIORITY),
        more=RECORDED,
        fails=FAILS,
        runs=True,
    )


def _passed(path: str, name: str, summary: str, request: str, answer: str) -> Operation:
    return Operation(
        "post",
        path,
        name,
        "Models",
        summary,
        ref(answer),
        takes=ref(request),
        headers=(PRIORITY,),
        more="Passed on to the engine; it samples nothing, and nothing is recorded.",
        fails=("404 model_not_found", "400 invalid_value", "400 unsupported_model"),
        runs=True,
    )


OPERATIONS = (
    _sampling(
        "/v1/chat/completions",
        "createChatCompletion",
        "Continue a conversation",
        "ChatRequest",
        "ChatCompletion",
    ),
    _sampling(
        "/v1/completions", "createCompletion", "Continue a text", "CompletionRequest", "Completion"
    ),
    _sampling(
        "/v1/responses",
        "createResponse",
        "Continue a conversation of items (OpenAI's newer API)",
        "ResponseRequest",
        "Response",
    ),
    _sampling(
        "/v1/messages",
        "createMessage",
        "Continue a conversation (Anthropic's API)",
        "MessageRequest",
        "AnthropicMessage",
    ),
    _passed(
        "/v1/embeddings", "createEmbedding", "Embed texts", "EmbeddingRequest", "EmbeddingList"
    ),
    _passed(
        "/v1/messages/count_tokens",
        "countMessageTokens",
        "Count the tokens of a conversation (Anthropic's API)",
        "MessageRequest",
        "TokenCount",
    ),
    _passed("/v1/tokenize", "tokenize", "A text or a conversation as tokens", "Asked", "Tokens"),
    _passed("/v1/detokenize", "detokenize", "Tokens as a text", "Asked", "Prompt"),
    Operation(
        "get",
        "/v1/models",
        "listModels",
        "Models",
        "Every model that can be asked for",
        ref("ModelList"),
        more="Each promoted `name`, and each `name@N`.",
        runs=True,
    ),
    Operation(
        "get",
        "/v1/models/{model}",
        "retrieveModel",
        "Models",
        "One model",
        ref("Model"),
        fails=("404 model_not_found",),
    ),
)
