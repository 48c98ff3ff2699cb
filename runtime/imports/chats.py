"""OpenAI's fine-tuning files: chats, and preferences. Checked as fine-tuning checks them.

A chat is {"messages", "tools"?, "parallel_tool_calls"?}; other fields of a line become its task's
metadata. A preference is {"input": {"messages", "tools"?}, "preferred_output",
"non_preferred_output"}: two runs on one task, with the rewards 1 and 0, of which only the outputs
are trained on. Listed in importing.py.
"""

from collections.abc import Iterator
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.records import Event, Message, Reward, Task, digest
from cray_agents.runtime.fine_tuning.examples import example_of
from cray_agents.runtime.imports.imported_run import SOURCE, Importing, an_object, first_asked, said

_CHAT = ("messages", "tools", "parallel_tool_calls")
_SIDES = {"preferred_output": 1.0, "non_preferred_output": 0.0}  # and their rewards


def read(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """The run of a chat, or the two of a preference. Raises BadInput."""
    record = an_object(value)
    if any(side in record for side in _SIDES):
        yield from _preference(record, importing)
        return
    chat = example_of(0, {name: record[name] for name in _CHAT if name in record})
    more = {name: item for name, item in record.items() if name not in _CHAT}
    yield said("openai", chat.messages, importing, tools=chat.tools, metadata=more)


def _preference(record: dict[str, Any], importing: Importing) -> Iterator[list[Event]]:
    given = an_object(record.get("input"), "input")
    asked = given.get("messages")
    if not isinstance(asked, list) or not asked:
        raise BadInput("input.messages must be a list that is not empty")
    if record.get("preferred_output") == record.get("non_preferred_output"):
        raise BadInput("preferred_output and non_preferred_output are the same")
    more = {name: item for name, item in record.items() if name not in ("input", *_SIDES)}
    sides = []
    for side, value in _SIDES.items():
        answer = record.get(side)
        if not isinstance(answer, list) or not answer:
            raise BadInput(f"{side} must be a list that is not empty")
        chat = example_of(0, {**given, "messages": [*asked, *answer]})
        # what was asked is the whole conversation: pairs are made of runs on one task
        context = chat.messages[: len(asked)]
        name = digest([context, chat.tools])
        task = Task(input=first_asked(chat.messages), metadata=more, id=name)
        reward = Reward(name="preferred", value=value, source=SOURCE)
        messages = [*map(_untrained, context), *chat.messages[len(asked) :]]
        sides.append(
            said("openai", messages, importing, tools=chat.tools, rewards=[reward], task=task)
        )
    yield from sides


def _untrained(message: Message) -> Message:
    return {**message, "weight": 0} if message["role"] == "assistant" else message
