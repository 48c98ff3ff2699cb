"""OpenAI's fine-tuning files: read chats and preferences, checked as fine-tuning checks them.

A chat is {"messages", "tools"?, "parallel_tool_calls"?}; other fields of a line become its task's
metadata. A preference is {"input": {"messages", "tools"?}, "preferred_output",
"non_preferred_output"}: two runs on one task, with the rewards 1 and 0. Only their outputs are
trained on. Listed in import_file.py.
"""

from collections.abc import Iterator
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.messages import first_question
from cray_agents.records import Event, Message, Reward, Task, digest
from cray_agents.runtime.fine_tuning.examples import parse_example
from cray_agents.runtime.imports.imported_run import (
    SOURCE,
    Importing,
    conversation_events,
    require_object,
)

_CHAT = ("messages", "tools", "parallel_tool_calls")
_SIDES = {"preferred_output": 1.0, "non_preferred_output": 0.0}  # side: reward


def read(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """Yield the run of a chat, or the two runs of a preference. Raises BadInput."""
    record = require_object(value)
    if any(side in record for side in _SIDES):
        yield from _preference(record, importing)
        return
    chat = parse_example(0, {name: record[name] for name in _CHAT if name in record})
    more = {name: item for name, item in record.items() if name not in _CHAT}
    yield conversation_events("openai", chat.messages, importing, tools=chat.tools, metadata=more)


def _preference(record: dict[str, Any], importing: Importing) -> Iterator[list[Event]]:
    question = require_object(record.get("input"), "input")
    prompt = question.get("messages")
    if not isinstance(prompt, list) or not prompt:
        raise BadInput("input.messages must be a list that is not empty")
    if record.get("preferred_output") == record.get("non_preferred_output"):
        raise BadInput("preferred_output and non_preferred_output are the same")
    more = {name: item for name, item in record.items() if name not in ("input", *_SIDES)}
    sides = []
    for side, value in _SIDES.items():
        answer = record.get(side)
        if not isinstance(answer, list) or not answer:
            raise BadInput(f"{side} must be a list that is not empty")
        chat = parse_example(0, {**question, "messages": [*prompt, *answer]})
        # the task is the whole prompt, since pairs are made of runs on one task
        context = chat.messages[: len(prompt)]
        name = digest([context, chat.tools])
        task = Task(input=first_question(chat.messages), metadata=more, id=name)
        reward = Reward(name="preferred", value=value, source=SOURCE)
        messages = [*map(_untrained, context), *chat.messages[len(prompt) :]]
        sides.append(
            conversation_events(
                "openai", messages, importing, tools=chat.tools, rewards=[reward], task=task
            )
        )
    yield from sides


def _untrained(message: Message) -> Message:
    return {**message, "weight": 0} if message["role"] == "assistant" else message
