"""Imported run: turn a conversation of a file into the store's events.

A run's id is the hash of its conversation, so the same conversation is the same run in every
import. An event's id is the hash of the whole record, so an import with another tag or reward
adds a new one. Called by the formats' modules.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.messages import first_question, text_of
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
    digest,
)
from cray_agents.runtime.store.feedback import REWARD_LIMIT, check_rewards

IMPORTED = "imported"  # agent and model, if the file names none
SOURCE = "import"  # source of rewards given with the import

# a record of a file -> the events of each run in it; raises BadInput for a bad record
Read = Callable[[Any, "Importing"], Iterator[list[Event]]]


@dataclass(frozen=True)
class Importing:
    """Labels for all runs of an import. None keeps the file's own value, if it has one.

    `tags` are added to a run's own. `split` is the task's; a run without a task gets one of its
    input. `reward_limit` is described in feedback.py.
    """

    tags: tuple[str, ...] = ()
    loop: str | None = None
    split: Split | None = None
    agent: str | None = None
    reward: float | None = None
    reward_limit: float = REWARD_LIMIT


def conversation_events(
    form: str,
    messages: Sequence[Message],
    importing: Importing,
    *,
    tools: Sequence[dict[str, Any]] = (),
    rewards: Sequence[Reward] = (),
    task: Task | None = None,
    metadata: dict[str, Any] | None = None,
) -> list[Event]:
    """Return the events of a conversation from its first question to its last answer.

    These become the run's input and output. Without a `task`, the input becomes one, with this
    `metadata`.
    """
    question = first_question(messages)
    run = Run(
        id=imported_run_id(messages, tools),
        agent=IMPORTED,
        model=IMPORTED,
        input=question,
        output=last_answer(messages),
        stop_reason=StopReason.completed,
        trajectory=Trajectory(messages=list(messages), tools=list(tools)),
        rewards=list(rewards),
        task=task or Task(input=question, metadata=metadata or {}),
        started=time.time(),
        imported=form,
    )
    return events_of(run, importing)


def imported_run_id(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], *more: Any
) -> str:
    """Return the id of an imported run, a hash of its conversation and of `more`."""
    return f"imported-{digest([list(messages), list(tools), *more], 24)}"


def last_answer(messages: Sequence[Message]) -> str | None:
    """Return the text of the assistant's last message."""
    last = next((m for m in reversed(messages) if m.get("role") == "assistant"), {})
    return text_of(last) or None


def events_of(run: Run, importing: Importing) -> list[Event]:
    """Return the events of a run: one for each call of its turns, then the run itself.

    Keys of the host that the run came from are removed: they mean nothing here. Raises BadInput
    for a reward beyond the limit.
    """
    run = _without_keys(_apply_labels(run, importing))
    check_rewards(run.rewards, importing.reward_limit, "rewards")
    calls = [turn.call for turn in run.trajectory.turns if turn.call is not None]
    turns = [turn.model_copy(update={"call": None}) for turn in run.trajectory.turns]
    trajectory = run.trajectory.model_copy(update={"turns": turns})
    body = run.model_copy(update={"trajectory": trajectory}).model_dump(mode="json")
    return [*map(_call_event, calls), _run_event(run, body)]


def _without_keys(run: Run) -> Run:
    rewards = [reward.model_copy(update={"giver": ""}) for reward in run.rewards]
    return run.model_copy(update={"owner": "", "rewards": rewards})


def _apply_labels(run: Run, importing: Importing) -> Run:
    changes: dict[str, Any] = {}
    if importing.tags:
        changes["tags"] = list(dict.fromkeys([*run.tags, *importing.tags]))
    if importing.loop is not None:
        changes["loop"] = importing.loop
    if importing.agent is not None:
        changes["agent"] = importing.agent
    if importing.reward is not None:
        reward = Reward(name=IMPORTED, value=importing.reward, source=SOURCE)
        key = (reward.name, reward.source, reward.turn)
        kept = [r for r in run.rewards if (r.name, r.source, r.turn) != key]
        changes["rewards"] = [*kept, reward]
    if importing.split is not None:
        task = run.task or Task(input=run.input)
        changes["task"] = task.model_copy(update={"split": importing.split})
    return run.model_copy(update=changes) if changes else run


def _run_event(run: Run, body: dict[str, Any]) -> Event:
    """Return the run's event; its id hashes the record without the time of the import."""
    content = dict(body)
    if run.imported is not None:
        content["started"] = None
    del content["owner"]  # always "": the hash is older than this field
    content["rewards"] = [[r.name, r.source, r.turn, r.value] for r in run.rewards]
    return Event(id=f"{run.id}.run.{digest(content)}", run_id=run.id, kind="run", body=body)


def _call_event(call: ModelCall) -> Event:
    when = call.started + call.seconds or time.time()
    body = call.model_copy(update={"owner": ""}).model_dump(mode="json")
    return Event(id=call.id, run_id=call.run_id, kind="call", body=body, time=when)


def as_bad_input(error: ValidationError) -> BadInput:
    """Return pydantic's first error as a BadInput."""
    first = error.errors(include_url=False)[0]
    path = ".".join(map(str, first["loc"]))
    return BadInput(f"{path}: {first['msg']}" if path else first["msg"])


def require_object(value: Any, name: str = "the record") -> dict[str, Any]:
    """Return the value, which must be a JSON object. Raises BadInput otherwise."""
    if not isinstance(value, dict):
        raise BadInput(f"{name} is not a JSON object")
    return value
