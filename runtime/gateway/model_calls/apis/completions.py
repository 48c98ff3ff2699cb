"""POST /v1/completions: a text, or several, continued."""

from cray_agents.errors import BadInput
from cray_agents.records import Message
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi, assistant


def _asked(request: Body) -> list[Message]:
    """The prompts as they came: texts, or lists of token ids."""
    prompt = request.get("prompt")
    if not isinstance(prompt, str | list) or prompt == []:
        raise BadInput("prompt must be a text, token ids, or a list of these", param="prompt")
    return [{"role": "user", "content": prompt}]


def _said(answer: Body) -> list[Message]:
    return [assistant(choice["text"], []) for choice in answer["choices"]]


def _streamed(chunks: list[Body], samples: int) -> list[Message]:
    """A choice may have said nothing yet."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            place = choice.get("index", 0)
            texts[place] = texts.get(place, "") + (choice.get("text") or "")
    return [assistant(texts.get(place), []) for place in range(samples)]


COMPLETIONS = SamplingApi(
    path="/v1/completions",
    prefix="cmpl-",
    last=b"data: [DONE]\n\n",
    asked=_asked,
    said=_said,
    streamed=_streamed,
    content=frozenset({"prompt"}),
)
