"""From a conversation of a file to the events of an imported run. Called by the formats' modules.

A run is named by the hash of what was said, so that the same conversation is the same run whenever
and from wherever it is imported; its event by the hash of all of it, so that importing it again
with another tag or reward says it anew.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.records import (
    Event,
    Message,
    ModelCall,
    Reward,
    Run,
    Split,
    StopReason,
    Task,
    Trajectory,
    Turn,
    digest,
)
from cray_agents.runtime.store.feedback import REWARD_LIMIT, check_rewards
from cray_agents.runtime.store.segments.facts import text_of

IMPORTED = "imported"  # who and what said it, where the file does not say
SOURCE = "import"  # of rewards that are given with the import

# a record of a file -> the events of each run in it; BadInput says what is wrong with the record
Read = Callable[[Any, "Importing"], Iterator[list[Event]]]


@dataclass(frozen=True)
class Importing:
    """What is said of all runs of an import. None: what the file says, or else nothing.

    `tags` are added to a run's own. A run that the file gives no task gets one of its input.
    `reward_limit`: see feedback.py.
    """

    tags: tuple[str, ...] = ()
    loop: str | None = None
    split: Split | None = None
    agent: str | None = None
    reward: float | None = None
    reward_limit: float = REWARD_LIMIT


def said(
    form: str,
    messages: Sequence[Message],
    importing: Importing,
    *,
    tools: Sequence[dict[str, Any]] = (),
    rewards: Sequence[Reward] = (),
    task: Task | None = None,
    metadata: dict[str, Any] | None = None,
    model: str | None = None,
) -> list[Event]:
    """The events of a conversation: its input is what was asked first, its output the last answer.

    Without a `task` its input is one, with this `metadata`.
    """
    asked = first_asked(messages)
    run = Run(
        id=run_name(messages, tools),
        agent=IMPORTED,
        model=model or IMPORTED,
        input=asked,
        output=last_said(messages),
        stop_reason=StopReason.completed,
        trajectory=Trajectory(messages=list(messages), tools=list(tools)),
        rewards=list(rewards),
        task=task or Task(input=asked, metadata=metadata or {}),
        started=time.time(),
        imported=form,
    )
    return events_of(run, importing)


def run_name(messages: Sequence[Message], tools: Sequence[dict[str, Any]], *more: Any) -> str:
    """The id of an imported run: what was said in it, and whatever else tells it from others."""
    return f"imported-{digest([list(messages), list(tools), *more], 24)}"


def first_asked(messages: Sequence[Message]) -> str:
    """The text of the user's first message."""
    return next((text_of(m) for m in messages if m.get("role") == "user"), "")


def last_said(messages: Sequence[Message]) -> str | None:
    """The text of the assistant's last message."""
    last = next((m for m in reversed(messages) if m.get("role") == "assistant"), {})
    return text_of(last) or None


def events_of(run: Run, importing: Importing) -> list[Event]:
    """The events of a run: one for each call of its turns, and the run, whose turns name them.

    It is this host's own: keys of the root that it may come from are none here. Raises BadInput for
    a reward beyond the limit.
    """
    run = _unkeyed(_labelled(run, importing))
    check_rewards(run.rewards, importing.reward_limit, "rewards")
    calls = [turn.call for turn in run.trajectory.turns if turn.call is not None]
    turns = [turn.model_copy(update={"call": None}) for turn in run.trajectory.turns]
    trajectory = run.trajectory.model_copy(update={"turns": turns})
    body = run.model_copy(update={"trajectory": trajectory}).model_dump(mode="json")
    return [*map(_call_event, calls), _run_event(run, body)]


def _unkeyed(run: Run) -> Run:
    rewards = [reward.model_copy(update={"giver": ""}) for reward in run.rewards]
    return run.model_copy(update={"owner": "", "rewards": rewards})


def _labelled(run: Run, importing: Importing) -> Run:
    changes: dict[str, Any] = {}
    if importing.tags:
        changes["tags"] = list(dict.fromkeys([*run.tags, *importing.tags]))
    if importing.loop is not None:
        changes["loop"] = importing.loop
    if importing.agent is not None:
        changes["agent"] = importing.agent
    if importing.reward is not None:
        given = Reward(name=IMPORTED, value=importing.reward, source=SOURCE)
        key = (given.name, given.source, given.turn)
        others = [r for r in run.rewards if (r.name, r.source, r.turn) != key]
        changes["rewards"] = [*others, given]
    if importing.split is not None:
        task = run.task or Task(input=run.input)
        changes["task"] = task.model_copy(update={"split": importing.split})
    return run.model_copy(update=changes) if changes else run


def _run_event(run: Run, body: dict[str, Any]) -> Event:
    """Named by all that it says, but for when it was imported."""
    what = dict(body)
    if run.imported is not None:
        what["started"] = None
    del what["owner"]  # "": which was not told once
    what["rewards"] = [[r.name, r.source, r.turn, r.value] for r in run.rewards]
    return Event(id=f"{run.id}.run.{digest(what)}", run_id=run.id, kind="run", body=body)


def _call_event(call: ModelCall) -> Event:
    when = call.started + call.seconds or time.time()
    body = call.model_copy(update={"owner": ""}).model_dump(mode="json")
    return Event(id=call.id, run_id=call.run_id, kind="call", body=body, time=when)


def calls_of(run: Run, turns: Sequence[Turn]) -> None:
    """Raise BadInput where a call of these turns is not the run's."""
    for turn in turns:
        if turn.call is not None and turn.call.run_id != run.id:
            raise BadInput(
                f"call {turn.call.id!r} is of run {turn.call.run_id!r}, not of {run.id!r}"
            )


def invalid(error: ValidationError) -> BadInput:
    """What pydantic found, as a BadInput."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return BadInput(f"{place}: {first['msg']}" if place else first["msg"])


def an_object(value: Any, what: str = "the record") -> dict[str, Any]:
    """The value, which must be a JSON object. Raises BadInput."""
    if not isinstance(value, dict):
        raise BadInput(f"{what} is not a JSON object")
    return value
