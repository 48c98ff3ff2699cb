"""Run pages: the outline of a run, and windows of its turns, from the bodies of its events.

A run of thousands of turns is too much for one answer. Its layout (which call is which turn, and
how large it is) is computed once and cached; a window then reads the events of its own turns only.
Bodies are not validated again: the gateway wrote them, and their checksums are checked. Called by
gateway/routes/run_views.py. Read next: view_records.py, the answers.
"""

import difflib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from typing import Any, TypeVar

from cray_agents.errors import Corrupt, CrayError, NotFound
from cray_agents.exact_json import dump_json, load_json
from cray_agents.messages import reasoning_of, text_of
from cray_agents.records import Message, ModelCall, Reward, Run, Turn, canonical
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.assembly import choose_turns, comparable_message, newest_rewards
from cray_agents.runtime.store.index import Places, RunFacts
from cray_agents.runtime.store.segments.line_format import LinePlace, head_of
from cray_agents.runtime.store.segments.reader import Moved

CACHED_BYTES = 128 * 2**20  # of the tools' results in cached layouts
CACHED_RUNS = 64
TOOLS = 3  # names of tools in a mark
NAME = 24  # characters of such a name

Body = dict[str, Any]
Result = TypeVar("Result")


@dataclass
class TurnLayout:
    """A turn: the place of its call, the JSON of its tool calls, and its mark in the outline."""

    call_id: str
    place: LinePlace | None
    tool_calls: bytes
    mark: Body = field(default_factory=dict)


@dataclass
class RunLayout:
    """The turns of a run, computed from its events in this `state`."""

    facts: RunFacts
    rewards: list[Reward]
    turns: list[TurnLayout]
    closing: bytes  # JSON of the messages after the last turn
    task: Body = field(default_factory=dict)
    error: Body | None = None
    state: bytes = b""

    @property
    def cached_bytes(self) -> int:
        """The bytes that this layout keeps in memory, but for its marks."""
        return len(self.closing) + sum(len(turn.tool_calls) for turn in self.turns)


class RunPages:
    """Outlines and windows of the runs of a store, for use by any number of threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._layouts: OrderedDict[str, RunLayout] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def outline(self, run_id: str, first: int, limit: int) -> Body:
        """Return a RunOutline of at most `limit` turns from `first` on, as JSON.

        Raises NotFound, Corrupt, StoreError.
        """
        layout = self._layout(run_id)
        marks = [turn.mark for turn in layout.turns]
        facts = layout.facts._asdict()
        return {
            "id": facts.pop("run_id"),
            "run": facts,
            "rewards": [reward.model_dump(mode="json") for reward in layout.rewards],
            "target": layout.task.get("target"),
            "metadata": layout.task.get("metadata") or {},
            "error": layout.error,
            "turns": len(marks),
            "bytes": sum(mark.get("bytes", 0) for mark in marks),
            "data": marks[first : first + limit],
            "has_more": first + limit < len(marks),
        }

    def window(self, run_id: str, first: int, limit: int, *, full: bool = False) -> Body:
        """Return a TurnWindow of at most `limit` turns from `first` on, as JSON.

        `full`: with all messages of each call. Raises NotFound, Corrupt, StoreError.
        """
        return self._retry(run_id, lambda: self._window(self._layout(run_id), first, limit, full))

    def call(self, run_id: str, number: int) -> Body:
        """Return the body of the model call of a turn (from 0). Raises NotFound, Corrupt."""

        def read() -> Body:
            layout = self._layout(run_id)
            if number >= len(layout.turns):
                count = len(layout.turns)
                raise NotFound(f"run {run_id!r} has {count} turns, from 0 on", param="number")
            place = layout.turns[number].place
            if place is None:
                raise NotFound(f"the model call of turn {number} is not recorded", param="number")
            return next(self._store.bodies([place]))

        return self._retry(run_id, read)

    def _window(self, layout: RunLayout, first: int, limit: int, full: bool) -> Body:
        turns = layout.turns[first : first + limit]
        end = first + len(turns)
        bodies = self._bodies(layout.turns[max(0, first - 1) : end])
        pages = []
        for number, turn in enumerate(turns, first):
            before = bodies.get(layout.turns[number - 1].call_id) if number else None
            rewards = [r for r in layout.rewards if r.turn == number]
            page = _turn_page(bodies.get(turn.call_id), before, full)
            tool_calls = load_json(turn.tool_calls)
            given = [reward.model_dump(mode="json") for reward in rewards]
            page |= {"n": number, "call_id": turn.call_id, "tool_calls": tool_calls}
            pages.append(page | {"rewards": given})
        done = end >= len(layout.turns)
        return {
            "id": layout.facts.run_id,
            "total": len(layout.turns),
            "data": pages,
            "next": None if done else end,
            "closing": load_json(layout.closing) if done else [],
        }

    def _bodies(self, turns: Sequence[TurnLayout]) -> dict[str, Body]:
        placed = [(turn.call_id, turn.place) for turn in turns if turn.place is not None]
        bodies = self._store.bodies([place for _, place in placed])
        return {call_id: body for (call_id, _), body in zip(placed, bodies, strict=True)}

    def _layout(self, run_id: str) -> RunLayout:
        """Return the layout of a run, from the cache if its events are still the same."""
        state = self._store.run_state(run_id)
        with self._lock:
            known = self._layouts.get(run_id)
            if known is not None and known.state == state:
                self._layouts.move_to_end(run_id)
                return known
        layout = self._retry(run_id, lambda: self._compute(*self._store.places(run_id)))
        layout.state = state
        with self._lock:
            self._drop(run_id)
            self._layouts[run_id] = layout
            self._bytes += layout.cached_bytes
            while len(self._layouts) > CACHED_RUNS or (
                self._bytes > CACHED_BYTES and len(self._layouts) > 1
            ):
                self._drop(next(iter(self._layouts)))
        return layout

    def _drop(self, run_id: str) -> None:
        """Drop a cached layout, with the lock taken."""
        if (layout := self._layouts.pop(run_id, None)) is not None:
            self._bytes -= layout.cached_bytes

    def _compute(self, facts: RunFacts, places: Places) -> RunLayout:
        described = next(self._store.bodies([places.run])) if places.run is not None else None
        calls = self._store.bodies(places.calls)
        rewards = map(Reward.model_validate, self._store.bodies(places.rewards))
        if described is None:
            return _undescribed(facts, places, list(calls), newest_rewards(rewards))
        own = map(Reward.model_validate, described.get("rewards") or ())
        return _described(facts, places, described, calls, newest_rewards([*own, *rewards]))

    def _retry(self, run_id: str, read: Callable[[], Result]) -> Result:
        """Return what `read` returns; compaction may move its events meanwhile."""

        def again() -> Result:
            try:
                return read()
            except Moved:
                with self._lock:
                    self._drop(run_id)
                raise
            except (KeyError, TypeError, ValueError) as error:
                raise Corrupt(
                    f"an event of this run is no call or description: {error!r}"
                ) from error

        return self._store.retry(again)


def with_heads(store: Store, rows: Iterable[RunFacts]) -> Iterator[RunFacts]:
    """Yield rows of a list. A run that only calls tell of gets input and output of its last one."""
    for row in rows:
        listed = row
        with suppress(CrayError, KeyError, TypeError):  # moved or damaged: `maintain fsck` tells
            calls = () if row.described else store.places(row.run_id)[1].calls[-1:]
            for call in store.bodies(calls):
                questions: Iterator[Body] = (m for m in call["messages"] if m.get("role") == "user")
                heads = head_of(text_of(next(questions, {}))), head_of(text_of(call["message"]))
                listed = row._replace(input=heads[0], output=heads[1])
        yield listed


def _described(
    facts: RunFacts, places: Places, body: Body, calls: Any, rewards: list[Reward]
) -> RunLayout:
    """Lay out a run by the turns of its description. `calls` are read one after the other."""
    trajectory = body.get("trajectory") or {}
    turns = [
        TurnLayout(turn["call_id"], None, dump_json(turn.get("tool_calls") or []))
        for turn in trajectory.get("turns") or ()
    ]
    numbers = {turn.call_id: number for number, turn in enumerate(turns)}
    sizes = _Sizes(facts, rewards)
    last: Body | None = None
    waiting: dict[int, tuple[Body, LinePlace]] = {}
    at = 0
    for place, call in zip(places.calls, calls, strict=True):
        if (number := numbers.get(call["id"])) is not None:
            waiting[number] = call, place
        while at in waiting:  # in the order of turns, which is nearly that of the events
            last = sizes.mark(at, turns[at], *waiting.pop(at))
            at += 1
    while at < len(turns):
        if at in waiting:
            last = sizes.mark(at, turns[at], *waiting.pop(at))
        else:
            turns[at].mark = {"n": at, "call_id": turns[at].call_id, "missing": True}
        at += 1
    messages = trajectory.get("messages") or []
    closing = messages[_known(messages, last) :] if last is not None else messages
    task, error = body.get("task") or {}, body.get("error")
    return RunLayout(facts, rewards, turns, dump_json(closing), task, error)


def _undescribed(
    facts: RunFacts, places: Places, calls: list[Body], rewards: list[Reward]
) -> RunLayout:
    """Lay out a run that only its calls tell of: those that its client went on from."""
    by_id = {call["id"]: (call, place) for call, place in zip(calls, places.calls, strict=True)}
    ordered = sorted(calls, key=lambda call: (call["started"], call["id"]))
    chosen = choose_turns([ModelCall.model_construct(**call) for call in ordered])
    turns = [TurnLayout(call.id, None, b"[]") for call in chosen]
    sizes = _Sizes(facts, rewards)
    for number, turn in enumerate(turns):
        sizes.mark(number, turn, *by_id[turn.call_id])
    return RunLayout(facts, rewards, turns, b"[]")


class _Sizes:
    """Marks of turns, made one after the other: sizes count what the turn before had not."""

    def __init__(self, facts: RunFacts, rewards: Sequence[Reward]) -> None:
        self._facts = facts
        self._before: Body | None = None
        self._rewards: dict[int, float] = {}
        for reward in rewards:
            if reward.turn is not None:
                self._rewards[reward.turn] = self._rewards.get(reward.turn, 0.0) + reward.value

    def mark(self, number: int, turn: TurnLayout, call: Body, place: LinePlace) -> Body:
        """Set the place and the mark of a turn; return its call."""
        turn.place = place
        known = 0 if self._before is None else _known(call["messages"], self._before)
        new = call["messages"][known:]
        tools = load_json(turn.tool_calls) or call["message"].get("tool_calls") or []
        size = len(dump_json(new)) + len(dump_json(call["message"])) + len(turn.tool_calls) - 2
        mark = {
            "at": round(max(0.0, call["started"] - self._facts.started), 3),
            "seconds": round(call.get("seconds") or 0.0, 3),
            "bytes": size,
            "prompt": len(call.get("prompt_token_ids") or ()),
            "sampled": len(call.get("token_ids") or ()),
            "messages": len(new),
            "calls": len(tools),
            "tools": [_tool_name(tool)[:NAME] for tool in tools[:TOOLS]],
            "errors": sum(1 for tool in tools if tool.get("error")),
            "seams": [seam["at"] for seam in (call.get("seams") or ())[:TOOLS]],
            "finish": call.get("finish_reason"),
            "reward": self._rewards.get(number),
            "model": None if call["model"] == self._facts.model else call["model"],
        }
        kept = {name: value for name, value in mark.items() if value or name == "reward"}
        if kept["reward"] is None:
            del kept["reward"]
        turn.mark = {"n": number, "call_id": turn.call_id, **kept}
        self._before = call
        return call


def _turn_page(call: Body | None, before: Body | None, full: bool) -> Body:
    """Return the fields of a ShownTurn that come from its call."""
    if call is None:
        call = {"messages": [], "message": None, "missing": True}
    known = 0 if full or before is None else _known(call["messages"], before)
    tools = call.get("tools") or []
    same_tools = not full and before is not None and (before.get("tools") or []) == tools
    return {
        "model": call.get("model"),
        "started": call.get("started") or 0.0,
        "seconds": call.get("seconds") or 0.0,
        "api": call.get("api") or "",
        "skipped": known,
        "messages": call["messages"][known:],
        "answer": call["message"],
        "tools": None if same_tools else tools,
        "sampling": call.get("sampling") or {},
        "finish_reason": call.get("finish_reason"),
        "prompt_tokens": len(call.get("prompt_token_ids") or ()),
        "sampled_tokens": len(call.get("token_ids") or ()),
        "seams": call.get("seams") or [],
        "tags": call.get("tags") or [],
        "redacted": call.get("redacted") or [],
        "owner": call.get("owner") or "",
    }


def _known(messages: Sequence[Message], before: Body) -> int:
    """Return how many messages a request begins with that the call before had, or answered."""
    earlier = before["messages"]
    most = min(len(messages), len(earlier))
    count = 0
    while count < most and messages[count] == earlier[count]:
        count += 1
    if count == len(earlier) < len(messages) and messages[count].get("role") == "assistant":
        count += comparable_message(messages[count]) == comparable_message(before["message"])
    return count


def _tool_name(tool: Body) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return str(name or "")


# ---- Differences of two runs: their headers, turns, rewards and tokens
_IN_MESSAGES = {"input", "output"}  # header fields that the messages repeat
Json = dict[str, Any]


def differences(one: Run, other: Run) -> Json:
    """Return the differences as JSON; a list is empty if nothing differs.

    fields: [{"name", "one", "other"}]; rewards: [{"name", "source", "turn" (from 0, or None),
    "one", "other"}]; tokens: {"prompt", "sampled": [one, other], "first": {"turn", "list",
    "position", "one", "other"} or None}, or None if they are unknown.
    """
    return {
        "fields": list(_fields(one, other)),
        "rewards": list(_rewards(one, other)),
        "tokens": _tokens(one.calls, other.calls),
    }


def turn_pairs(one: Run, other: Run) -> list[Json]:
    """Return the turns of two runs side by side, as TurnPair in view_records.py.

    Turns with the same answer and tool calls stand beside each other.
    """
    sides = [
        [_turn_fields(run, number) for number in range(len(run.trajectory.turns))]
        for run in (one, other)
    ]
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
        ("started", f"{datetime.fromtimestamp(run.started):%F %T}" if run.started else None),
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
        for name, member in (("prompt", "prompt_token_ids"), ("sampled", "token_ids")):
            sides = [getattr(call, member) if call is not None else [] for call in pair]
            for position, (token, another) in enumerate(zip_longest(*sides)):
                if token != another:
                    entry = {"turn": turn, "list": name, "position": position}
                    return {**entry, "one": token, "other": another}
    return None
