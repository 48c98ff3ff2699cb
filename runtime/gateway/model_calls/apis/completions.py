"""Completions API (POST /v1/completions): continue one text or several."""

from cray_agents.errors import BadInput
from cray_agents.records import Message
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi, assistant


def _parse_request(request: Body) -> list[Message]:
    """Return the prompts as they came: texts, or lists of token ids."""
    prompt = request.get("prompt")
    if not isinstance(prompt, str | list) or prompt == []:
        raise BadInput("prompt must be a text, token ids, or a list of these", param="prompt")
    return [{"role": "user", "content": prompt}]


def _parse_answer(answer: Body) -> list[Message]:
    return [assistant(choice["text"], []) for choice in answer["choices"]]


def _parse_stream(chunks: list[Body], samples: int) -> list[Message]:
    """Join the text of each choice; a choice without text gets an empty message."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            position = choice.get("index", 0)
            texts[position] = texts.get(position, "") + (choice.get("text") or "")
    return [assistant(texts.get(position), []) for position in range(samples)]


COMPLETIONS = SamplingApi(
    path="/v1/completions",
    id_prefix="cmpl-",
    last_event=b"data: [DONE]\n\n",
    parse_request=_parse_request,
    parse_answer=_parse_answer,
    parse_stream=_parse_stream,
    conversation_fields=frozenset({"prompt"}),
)
