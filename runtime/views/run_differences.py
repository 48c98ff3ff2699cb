"""Differences of two runs: their headers, messages, turns, rewards and tokens.

Messages are aligned as a whole first, so that equal messages match at any position. Messages that
take each other's place are compared line by line. Called by gateway/routes/run_views.py and
cli/run_text.py.
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

from cray_agents.messages import reasoning_of, text_of
from cray_agents.records import Message, ModelCall, Run, Turn, canonical
from cray_agents.runtime.store.run_conversation import conversation_of

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


def turn_pairs(one: Run, other: Run) -> list[Json]:
    """Return the turns of two runs side by side, as TurnPair in view_records.py.

    Turns with the same answer and tool calls stand beside each other.
    """
    sides = [[_turn_fields(run, number) for number in _numbers(run)] for run in (one, other)]
    keys = [[canonical(compared["answer"]) + canonical(compared["tool_calls"]) for compared in side]
            for side in sides]  # fmt: skip
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    pairs: list[Json] = []
    for _, start, end, begin, stop in matcher.get_opcodes():
        for place, at in zip_longest(range(start, end), range(begin, stop)):
            if place is None or at is None:
                differs = ["answer"]
            else:
                before, after = sides[0][place], sides[1][at]
                differs = [name for name in before if before[name] != after[name]]
            pairs.append({"one": place, "other": at, "same": not differs, "differs": differs})
    return pairs


def _numbers(run: Run) -> range:
    return range(len(run.trajectory.turns))


def _turn_fields(run: Run, number: int) -> Json:
    """Return what a turn is compared by; ids of tool calls differ in any two runs."""
    turn: Turn = run.trajectory.turns[number]
    message = turn.call.message if turn.call is not None else {}
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return {
        "answer": text_of(message),
        "reasoning": reasoning_of(message) or "",
        "tool_calls": [[f.get("name"), f.get("arguments")] for f in functions]
        or [[call.name, call.arguments] for call in turn.tool_calls],
        "results": [[call.result, call.error] for call in turn.tool_calls],
        "rewards": [[r.name, r.source, r.value] for r in run.rewards if r.turn == number],
        "model": turn.call.model if turn.call is not None else "",
    }


def header(run: Run) -> list[tuple[str, str]]:
    """Return the known facts of a run, without its messages, as (name, value)."""
    known: list[tuple[str, Any]] = [
        ("agent", run.agent),
        ("model", run.model),
        ("imported", run.imported),
        ("loop", run.loop),
        ("iteration", run.iteration),
        ("attempt", run.attempt),
        ("tags", ", ".join(run.tags)),
        ("started", _local_time(run.started) if run.started else None),
        ("seconds", f"{run.seconds:.2f}" if run.seconds else None),
        ("ended", run.stop_reason.value),
    ]
    if run.task is not None:
        known.append(("task", f"{run.task.id} ({run.task.split})"))
        known.append(("target", None if run.task.target is None else value_text(run.task.target)))
        known += [(f"  {name}", value_text(value)) for name, value in run.task.metadata.items()]
    known.append(("input", run.input))
    known.append(("output", None if run.output is None else value_text(run.output)))
    return [(name, str(value)) for name, value in known if value not in (None, "")]


def value_text(value: Any) -> str:
    """Return a text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _local_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


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
    if thought := reasoning_of(message):
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
