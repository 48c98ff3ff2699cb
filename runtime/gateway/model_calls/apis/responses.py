"""OpenAI's responses API (POST /v1/responses): a conversation is a list of items."""

from typing import Any

from cray_agents.errors import BadInput
from cray_agents.records import Message
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi, assistant, tool_call


def _parse_request(request: Body) -> list[Message]:
    if request.get("previous_response_id") is not None:
        raise BadInput(
            "no earlier response is kept here: send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if request.get("background"):
        raise BadInput("nothing is answered in the background: leave it out", param="background")
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items or not all(isinstance(i, dict) for i in items):
        raise BadInput("input must be a text or a list of items", param="input")
    for number, item in enumerate(items):
        content = item["content"] if isinstance(item.get("content"), list) else []
        if any(isinstance(part, dict) and part.get("type") == "refusal" for part in content):
            message = "a refusal cannot be read: send its text as output_text, or leave it out"
            raise BadInput(f"input[{number}]: {message}", param="input")
    system = request.get("instructions")
    if not isinstance(system, str | None):
        raise BadInput("instructions must be a text", param="instructions")
    first = [{"role": "system", "content": system}] if isinstance(system, str) else []
    return first + _messages(items)


def _messages(items: list[Any]) -> list[Message]:
    """Convert items to messages; neighbouring items of the model become one message."""
    messages: list[Message] = []
    pending: list[Any] = []
    for item in items:
        if item.get("type") in ("function_call", "reasoning") or item.get("role") == "assistant":
            pending.append(item)
            continue
        if pending:
            messages.append(_assistant_message(pending))
            pending = []
        if item.get("type") == "function_call_output":
            call_id, output = item.get("call_id"), item.get("output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            text = _join_text(item.get("content"))
            messages.append({"role": item.get("role", "user"), "content": text})
    return [*messages, _assistant_message(pending)] if pending else messages


def _assistant_message(items: list[Any]) -> Message:
    texts, calls, thoughts = [], [], []
    for item in items:
        if item.get("type") == "function_call":
            call_id = str(item.get("call_id") or item.get("id") or "")
            name, arguments = str(item.get("name") or ""), str(item.get("arguments") or "")
            calls.append(tool_call(call_id, name, arguments))
        elif item.get("type") == "reasoning":
            thoughts.append(str(_join_text(item.get("content")) or ""))
        else:
            texts.append(str(_join_text(item.get("content")) or ""))
    return assistant("".join(texts) if texts else None, calls, reasoning="".join(thoughts))


def _join_text(content: Any) -> Any:
    """Join a list of text parts to one text; return anything else unchanged."""
    if isinstance(content, list) and all(isinstance(p, dict) and "text" in p for p in content):
        return "".join(str(part["text"]) for part in content)
    return content


def _parse_answer(answer: Body) -> list[Message]:
    return [_assistant_message(answer.get("output") or [])]


def _parse_stream(events: list[Body], samples: int) -> list[Message]:
    """Read the last event, which holds the whole answer; if cut off, what came of its items."""
    for event in reversed(events):
        if "response" in event and event["response"].get("output"):
            return _parse_answer(event["response"])
    items, text = [], ""
    for event in events:
        if event.get("type") == "response.output_item.done":
            items.append(event["item"])
            text = ""
        elif event.get("type") == "response.output_text.delta":
            text += event["delta"]
    return [_assistant_message([*items, {"content": text}] if text else items)]


RESPONSES = SamplingApi(
    path="/v1/responses",
    id_prefix="resp_",
    last_event=b"event: response.completed\n",
    parse_request=_parse_request,
    parse_answer=_parse_answer,
    parse_stream=_parse_stream,
    conversation_fields=frozenset({"input", "instructions", "tools"}),
)
