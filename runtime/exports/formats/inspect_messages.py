"""Inspect messages: a run's messages in the shape that Inspect AI's logs have.

Called by inspect_eval.py for the conversation, and by inspect_events.py for what each call saw.
"""

from dataclasses import dataclass, field
from typing import Any

from cray_agents.exact_json import sent_arguments
from cray_agents.records import Message, Run
from cray_agents.runtime.exports.conversations.conversation import Conversation
from cray_agents.runtime.exports.export_format import Json, unsupported

_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = ("text", "input_text", "output_text")
_STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls",
          "content_filter": "content_filter"}  # fmt: skip


@dataclass
class MessageWriter:
    """Writes a run's messages one after the other; `losses` gets the codes of what is left out."""

    run: Run
    losses: set[str]
    _functions: dict[str, str] = field(default_factory=dict)  # by the tool call's id

    def __post_init__(self) -> None:
        """Note which tool calls failed."""
        calls = [call for turn in self.run.trajectory.turns for call in turn.tool_calls]
        self._errors = {call.id: call.error for call in calls}

    def write(self, path: str, message: Message, model: str) -> Json:
        """Return a message; `model` made it if it is an answer. Raises BadInput, with `path`."""
        role = message.get("role")
        if role not in _ROLES:
            problem = f"is {role!r}, which this format does not have"
            raise unsupported(self.run, f"{path}.role", problem)
        if role == "developer":
            self.losses.add("developer_role")
        if any(name not in _KNOWN and message[name] not in (None, "", [], {}) for name in message):
            self.losses.add("message_fields")
        content = self._content(path, message)
        written: Json = {"role": "system" if role == "developer" else role, "content": content}
        if role == "assistant":
            written |= self._answer(path, message, model)
        elif role == "tool":
            call_id = str(message.get("tool_call_id") or "")
            written |= {"tool_call_id": call_id, "function": self._functions.get(call_id)}
            if self._errors.get(call_id):
                written["error"] = {"type": "unknown", "message": self._errors[call_id]}
        return written

    def _content(self, path: str, message: Message) -> Any:
        """Return the content as text, or as a list of parts in Inspect's shape."""
        content = message.get("content")
        pieces: list[Json] = []
        thought = message.get("reasoning") or message.get("reasoning_content")
        if thought and message.get("role") == "assistant":
            pieces.append({"type": "reasoning", "reasoning": str(thought)})
        if content is None or isinstance(content, str):
            if not pieces:
                return content or ""
            return [*pieces, {"type": "text", "text": content or ""}]
        if not isinstance(content, list):
            problem = "is neither a text nor a list of parts"
            raise unsupported(self.run, f"{path}.content", problem)
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            image = part.get("image_url") if isinstance(part, dict) else None
            url = image.get("url") if isinstance(image, dict) else None
            if kind in _TEXTS and isinstance(part.get("text"), str):
                pieces.append({"type": "text", "text": part["text"]})
            elif kind == "image_url" and isinstance(url, str):
                pieces.append({"type": "image", "image": url})
            else:
                problem = f"has a part of type {kind!r}, which this format does not have"
                raise unsupported(self.run, f"{path}.content", problem)
            if len(part) > 2:
                self.losses.add("message_fields")
        return pieces or ""

    def _answer(self, path: str, message: Message, model: str) -> Json:
        """Return the fields that an answer has beside its content."""
        answer: Json = {"model": model, "source": "generate"}
        calls = []
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                place = f"{path}.tool_calls[{index}]"
                raise unsupported(self.run, place, "is no call of a function")
            arguments = sent_arguments(function.get("arguments"))
            if "unparsed" in arguments:
                self.losses.add("tool_arguments")
            call_id = str(call.get("id") or "")
            self._functions[call_id] = function["name"]
            calls.append(
                {
                    "id": call_id,
                    "function": function["name"],
                    "arguments": arguments,
                    "type": "function",
                }
            )
        return {**answer, "tool_calls": calls} if calls else answer


def write_conversation(run: Run, conversation: Conversation, losses: set[str]) -> list[Json]:
    """Return the messages of a conversation. Raises BadInput for what this format cannot carry."""
    writer, messages = MessageWriter(run, losses), []
    for index, message in enumerate(conversation.messages):
        turn = conversation.turns_by_message.get(index)
        model = turn.call.model if turn is not None and turn.call is not None else run.model
        messages.append(writer.write(f"messages[{index}]", message, model))
    return messages


def write_output(model: str, answer: Json | None, finish_reason: str | None, usage: Json) -> Json:
    """Return the output of a model: its answer as one choice, None if it gave none."""
    output: Json = {"model": model, "choices": [], "completion": ""}
    if answer is not None:
        content = answer["content"]
        text = (
            content if isinstance(content, str) else "\n".join(p.get("text", "") for p in content)
        )
        stop = _STOPS.get(finish_reason or "", "unknown")
        output["choices"] = [{"message": answer, "stop_reason": stop}]
        output["completion"] = text.strip("\n")
        output["usage"] = usage
    return output


def count_tokens(read: int, sampled: int) -> Json:
    """Return a usage in Inspect's shape."""
    return {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}
