"""Differences of two runs: their headers, messages, rewards and tokens. For runs.py.

Messages are aligned as a whole first, so that equal messages match at any position. Messages that
take each other's place are compared line by line.
"""

import difflib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from cray_agents.cli.runs.run_text import header, value_text
from cray_agents.cli.screen import console, line
from cray_agents.records import Message, ModelCall, Run, canonical
from cray_agents.runtime.exports.conversations.conversation import conversation_of
from cray_agents.runtime.store.segments.facts import text_of

COLORS = {"-": "red", "+": "green", "@": "cyan"}
_IN_MESSAGES = {"input", "output"}  # header fields that the messages repeat
Json = dict[str, Any]


def differences(one: Run, other: Run) -> Json:
    """Return the differences as JSON; a list is empty if nothing differs.

    fields: [{"name", "one", "other"}]; messages: [{"one", "other": place or None, "diff": lines}];
    rewards: [{"name", "source", "turn" (from 0, or None), "one", "other"}]; tokens: {"prompt",
    "sampled": [one, other], "first": {"turn", "list", "position", "one", "other"} or None}, or None
    if they are unknown.
    """
    return {
        "fields": list(_fields(one, other)),
        "messages": list(_messages(one, other)),
        "rewards": list(_rewards(one, other)),
        "tokens": _tokens(one.calls, other.calls),
    }


def print_differences(one: str, other: str, diff: Json) -> None:
    """Print differences for people: - is the first run, + the second."""
    line(f"- {one}", style="red")
    line(f"+ {other}", style="green")
    for each in diff["fields"]:
        line("")
        line(each["name"], style="bold")
        _print_sides(each)
    for each in diff["messages"]:
        line("")
        places = [each[side] for side in ("one", "other")]
        titles = ["-" if place is None else f"messages[{place}]" for place in places]
        line(" | ".join(titles), style="bold")
        for text in each["diff"]:
            line(text, 2, COLORS.get(text[:1], ""))
    for each in diff["rewards"]:
        line("")
        turn = "" if each["turn"] is None else f", turn {each['turn'] + 1}"
        line(f"reward {each['name']} ({each['source']}{turn})", style="bold")
        _print_sides(each)
    _print_tokens(diff["tokens"])
    if not (diff["fields"] or diff["messages"] or diff["rewards"]):
        console.print(
            "\nno other difference" if _tokens_differ(diff["tokens"]) else "\nno difference"
        )


def _print_sides(each: Json) -> None:
    for mark, side in (("-", "one"), ("+", "other")):
        if each[side] is not None:
            line(f"{mark} {value_text(each[side])}", 2, COLORS[mark], hanging=2)


def _print_tokens(tokens: Json | None) -> None:
    if tokens is None:
        return
    line("")
    line("tokens", style="bold")
    for name in ("prompt", "sampled"):
        line(f"{name}: {tokens[name][0]} | {tokens[name][1]}", 2)
    first = tokens["first"]
    if first is None:
        line("the exact tokens are the same", 2)
        return
    position = f"turn {first['turn']}, {first['list']} token {first['position']}"
    line(f"they differ first at {position}: {first['one']} | {first['other']}", 2)


def _tokens_differ(tokens: Json | None) -> bool:
    return tokens is not None and tokens["first"] is not None


def _fields(one: Run, other: Run) -> Iterator[Json]:
    sides = [_header_fields(run) for run in (one, other)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        values = [side.get(name) for side in sides]
        if values[0] != values[1]:
            yield {"name": name.strip(), "one": values[0], "other": values[1]}


def _header_fields(run: Run) -> dict[str, str]:
    """Return a run's header and error, without texts that its messages repeat."""
    known = dict(header(run))
    if run.error is not None:
        known["error"] = f"{run.error.type}: {run.error.message}"
    if run.trajectory.messages or run.calls:
        known = {name: value for name, value in known.items() if name not in _IN_MESSAGES}
    return known


def _messages(one: Run, other: Run) -> Iterator[Json]:
    sides = [_with_numbered_calls(conversation_of(run).messages) for run in (one, other)]
    keys = [[canonical(message) for message in messages] for messages in sides]
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    for kind, start, end, begin, stop in matcher.get_opcodes():
        if kind == "equal":
            continue
        for place, at in zip_longest(range(start, end), range(begin, stop)):
            before = _lines(sides[0], place)
            after = _lines(sides[1], at)
            diff = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
            # the same text, but another field of the message
            if not diff and place is not None and at is not None:
                diff = [f"-{value_text(sides[0][place])}", f"+{value_text(sides[1][at])}"]
            yield {"one": place, "other": at, "diff": diff}


def _with_numbered_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool calls numbered: their ids differ in any two runs."""
    numbers: dict[Any, str] = {}

    def number(call_id: Any) -> str:
        return numbers.setdefault(call_id, f"#{len(numbers) + 1}")

    numbered = []
    for message in messages:
        plain = dict(message)
        if plain.get("tool_calls"):
            plain["tool_calls"] = [{**c, "id": number(c.get("id"))} for c in plain["tool_calls"]]
        if "tool_call_id" in plain:
            plain["tool_call_id"] = number(plain["tool_call_id"])
        numbered.append(plain)
    return numbered


def _lines(messages: Sequence[Message], place: int | None) -> list[str]:
    """Return a message as lines: its role, its text, its tool calls."""
    if place is None:
        return []
    message = messages[place]
    lines = [f"[{message.get('role')}]"]
    if thought := message.get("reasoning") or message.get("reasoning_content"):
        lines += [f"(reasoning) {part}" for part in str(thought).split("\n")]
    if text := text_of(message):
        lines += text.split("\n")
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        lines.append(f"calls {function.get('name')}({function.get('arguments') or ''})")
    return lines


def _rewards(one: Run, other: Run) -> Iterator[Json]:
    sides = [{(r.name, r.source, r.turn): r.value for r in run.rewards} for run in (one, other)]
    for key in sorted({*sides[0], *sides[1]}, key=str):
        values = [side.get(key) for side in sides]
        if values[0] != values[1]:
            key_fields = dict(zip(("name", "source", "turn"), key, strict=True))
            yield {**key_fields, "one": values[0], "other": values[1]}


def _tokens(one: Sequence[ModelCall], other: Sequence[ModelCall]) -> Json | None:
    if not all(any(call.token_ids for call in calls) for calls in (one, other)):
        return None
    return {
        "prompt": [sum(len(c.prompt_token_ids) for c in calls) for calls in (one, other)],
        "sampled": [sum(len(c.token_ids) for c in calls) for calls in (one, other)],
        "first": _first_difference(one, other),
    }


def _first_difference(one: Sequence[ModelCall], other: Sequence[ModelCall]) -> Json | None:
    """Return the first token in which the calls differ; turns count from 1, positions from 0."""
    for turn, pair in enumerate(zip_longest(one, other), 1):
        for name, field in (("prompt", "prompt_token_ids"), ("sampled", "token_ids")):
            sides = [getattr(call, field) if call is not None else [] for call in pair]
            for position, (token, another) in enumerate(zip_longest(*sides)):
                if token != another:
                    entry = {"turn": turn, "list": name, "position": position}
                    return {**entry, "one": token, "other": another}
    return None
