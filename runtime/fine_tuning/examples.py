"""Training examples: read and check the lines of a training file in OpenAI's formats.

A line of the method `supervised` is `{"messages", "tools"?, "parallel_tool_calls"?}`. A line of
`dpo` is `{"input": {"messages", "tools"?, "parallel_tool_calls"?}, "preferred_output",
"non_preferred_output"}`, each output a list of one message. Content that cannot be trained on
(images, audio, refusals, functions in their old form) is an error and is never dropped silently.
Called by job_inputs.py and by runtime/imports.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cray_agents.errors import BadInput
from cray_agents.exact_json import DEEPEST_FOREIGN, parse_json, read_arguments
from cray_agents.records import Message
from cray_agents.tasks.record_source import TooLong, lines_of

Kind = Literal["supervised", "dpo"]

SIDES = ("preferred_output", "non_preferred_output")
NAMED_LINES = 10  # bad lines that an error names; it counts the rest
FIELDS = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "weight"},
    "tool": {"role", "content", "name", "tool_call_id"},
}


class BadExamples(BadInput):
    """Lines of a file cannot be trained on. The message names them; `param` is the file's."""

    code = "invalid_training_file"


@dataclass(frozen=True)
class Example:
    """A conversation to imitate, and its tools. `line` counts from 1.

    In a preference pair, `rejected` is the worse alternative to the last message.
    """

    line: int
    messages: list[Message]
    tools: list[dict[str, Any]]
    rejected: Message | None = None


def read_examples(
    path: Path, kind: Kind = "supervised", param: str = "training_file"
) -> list[Example]:
    """Return all examples of a JSONL file, without empty lines. Raises BadExamples."""
    parse = parse_example if kind == "supervised" else parse_pair
    examples: list[Example] = []
    problems: list[str] = []
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in lines_of(file):
                if line.isspace():
                    continue
                try:
                    examples.append(parse(number, _parse_json(line)))
                except BadInput as problem:
                    problems.append(f"line {number}: {problem}")
    except TooLong as problem:  # what follows is not read
        problems.append(f"line {number + 1}: {problem}")
    if problems:
        raise bad_lines(problems, len(examples) + len(problems), param)
    if not examples:
        raise BadExamples("the file holds no examples", param=param)
    return examples


def bad_lines(problems: list[str], lines: int, param: str) -> BadExamples:
    """Return the error for a file with bad lines."""
    named = "\n".join(problems[:NAMED_LINES])
    rest = len(problems) - NAMED_LINES
    more = f"\n... and {rest} more" if rest > 0 else ""
    return BadExamples(
        f"{len(problems)} of {lines} lines cannot be used:\n{named}{more}", param=param
    )


def _parse_json(line: bytes) -> Any:
    try:
        return parse_json(line, DEEPEST_FOREIGN, _refuse_half)
    except ValueError as error:
        raise BadInput(f"not valid JSON: {error}") from error


def _refuse_half() -> None:
    raise BadInput("holds half a character (a lone surrogate), which no model can read")


def parse_example(number: int, value: Any) -> Example:
    """Return a line's JSON as an example. Raises BadInput, which names the bad field."""
    if not isinstance(value, dict):
        raise BadInput("not a JSON object")
    _check_fields(value, {"messages", "tools", "parallel_tool_calls"}, "the line")
    if not isinstance(value.get("parallel_tool_calls"), bool | None):
        raise BadInput("parallel_tool_calls must be true or false")
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadInput("messages must be a list that is not empty")
    tools = value.get("tools") or []
    if not isinstance(tools, list):
        raise BadInput("tools must be a list")
    for index, tool in enumerate(tools):
        _check_tool(f"tools[{index}]", tool)
    return Example(number, list(_check_messages(messages)), tools)


def parse_pair(number: int, value: Any) -> Example:
    """Return a line's JSON as a preference pair. Raises BadInput, which names the bad field."""
    if not isinstance(value, dict):
        raise BadInput("not a JSON object")
    _check_fields(value, {"input", *SIDES}, "the line")
    given = value.get("input")
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        raise BadInput("input must be an object with a list of messages")
    better, worse = (
        parse_example(
            number, {**given, "messages": [*given["messages"], _parse_output(value, side)]}
        )
        for side in SIDES
    )
    if better.messages[-1] == worse.messages[-1]:
        raise BadInput("preferred_output and non_preferred_output are the same")
    return replace(better, rejected=worse.messages[-1])


def _parse_output(value: dict[str, Any], side: str) -> Message:
    """Return the message of one side, which is trained on as a whole."""
    answer = value.get(side)
    if not isinstance(answer, list) or len(answer) != 1 or not isinstance(answer[0], dict):
        raise BadInput(f"{side} must be a list of one message")
    message = _as_sent(answer[0])
    if message.get("role") != "assistant":
        raise BadInput(f"{side}[0].role must be assistant, not {message.get('role')!r}")
    _check_fields(message, FIELDS["assistant"] - {"weight"}, f"{side}[0]")
    _check_message(f"{side}[0]", message)
    return message


def _check_messages(messages: list[Any]) -> Iterator[Message]:
    """Yield the messages without nulls, checked alone and in their order."""
    call_ids: set[str] = set()  # so far
    trained = False
    for index, given in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(given, dict):
            raise BadInput(f"{field} is not an object")
        message = _as_sent(given)
        _check_message(field, message)
        if message["role"] == "tool" and message["tool_call_id"] not in call_ids:
            raise BadInput(f"{field} answers {message['tool_call_id']!r}, which nothing called")
        call_ids |= {call["id"] for call in message.get("tool_calls", ())}
        trained = trained or (message["role"] == "assistant" and message.get("weight") != 0)
        yield message
    if message["role"] != "assistant":
        raise BadInput(f"the last message must be the assistant's, not the {message['role']}'s")
    if not trained:
        raise BadInput("every assistant message has the weight 0: nothing is left to train on")


def _as_sent(given: dict[str, Any]) -> Message:
    """Return a message as a model gets it.

    Empty fields that client libraries write are left out. Arguments that are objects, as TRL
    writes them, become texts.
    """
    message = {name: value for name, value in given.items() if value is not None}
    for name in ("annotations", "tool_calls"):
        if message.get(name) == []:
            del message[name]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call_as_sent(call) for call in calls]
    return message


def _call_as_sent(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    sent = {name: value for name, value in call.items() if value is not None}
    function = sent.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        sent["function"] = {**function, "arguments": arguments}
    return sent


def _check_message(field: str, message: Message) -> None:
    role = message.get("role")
    if not isinstance(role, str) or role not in FIELDS:
        raise BadInput(f"{field}.role must be one of {', '.join(FIELDS)}, not {role!r}")
    _check_fields(message, FIELDS[role], f"{field} ({role})")
    if message.get("weight", 1) not in (0, 1):
        raise BadInput(f"{field}.weight must be 0 or 1, not {message['weight']!r}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise BadInput(f"{field} (tool) needs a tool_call_id")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise BadInput(f"{field}.tool_calls must be a list")
    for index, call in enumerate(calls):
        _check_call(f"{field}.tool_calls[{index}]", call)
    if "content" in message:
        _check_content(f"{field}.content", message["content"])
    elif not calls:
        raise BadInput(f"{field} ({role}) has no content")


def _check_content(field: str, content: Any) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise BadInput(f"{field} must be a text or a list of text parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadInput(f"{field} has a part of type {kind!r}: only text can be trained on")


def _check_call(field: str, call: Any) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise BadInput(f"{field} must be {{'id', 'type': 'function', 'function'}}")
    if not isinstance(call.get("id"), str) or not isinstance(function.get("name"), str):
        raise BadInput(f"{field} needs an id and function.name")
    if read_arguments(function.get("arguments")) is None:
        raise BadInput(f"{field}.function.arguments must be a JSON object, written as a string")


def _check_tool(field: str, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise BadInput(f"{field} must be {{'type': 'function', 'function': {{'name', ...}}}}")
    if not isinstance(function.get("name"), str):
        raise BadInput(f"{field}.function has no name")
    if not isinstance(function.get("parameters"), dict | None):
        raise BadInput(f"{field}.function.parameters must be a JSON schema object")


def _check_fields(value: dict[str, Any], known: set[str], what: str) -> None:
    """Raise BadInput for an unknown field, which would have no effect."""
    for name in value:
        if name not in known:
            raise BadInput(f"{what} has a field {name!r} that is not supported")
