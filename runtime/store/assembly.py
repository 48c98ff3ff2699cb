"""From the events of one run to its Run record, whatever order they came in.

The agent tells what was said and done (`run`), the gateway what was sampled (`call`), whoever
judges tells rewards. A run nobody described, such as a plain OpenAI client's, is told by its calls
(choices.py: which of them are turns). Called by store.py.
"""

from collections.abc import Iterable
from typing import Any

from cray_agents.records import ModelCall, Reward, Run, Trajectory, Turn
from cray_agents.runtime.store.branch_choice import turns_among
from cray_agents.runtime.store.segments.facts import ending_of, text_of


def assemble(
    run_id: str,
    described: dict[str, Any] | None,
    calls: list[dict[str, Any]],
    rewards: list[dict[str, Any]],
) -> Run:
    """Join the bodies of a run's events. Raises pydantic's ValidationError on a broken body.

    `calls` may hold fewer than the turns name: a turn whose call is not known keeps `call=None`.
    """
    known = {call.id: call for call in map(ModelCall.model_validate, calls)}
    run = Run.model_validate(described) if described is not None else _told_by(run_id, known)
    turns = run.trajectory.turns or [
        Turn(call_id=call.id) for call in turns_among(_in_order(known.values()))
    ]
    joined = [turn.model_copy(update={"call": known.get(turn.call_id)}) for turn in turns]
    return run.model_copy(
        update={
            "rewards": newest([*run.rewards, *map(Reward.model_validate, rewards)]),
            "tags": sorted({*run.tags, *(tag for call in known.values() for tag in call.tags)}),
            "trajectory": run.trajectory.model_copy(update={"turns": joined}),
        }
    )


def newest(rewards: Iterable[Reward]) -> list[Reward]:
    """One reward for each name, source and turn: the one given last. Sorted by these."""
    kept: dict[tuple[str, str, int], Reward] = {}
    for reward in sorted(rewards, key=lambda r: (r.time, r.value)):
        kept[reward.name, reward.source, -1 if reward.turn is None else reward.turn] = reward
    return [kept[key] for key in sorted(kept)]


def _in_order(calls: Iterable[ModelCall]) -> list[ModelCall]:
    return sorted(calls, key=lambda call: (call.started, call.id))


def _told_by(run_id: str, known: dict[str, ModelCall]) -> Run:
    calls = _in_order(known.values())
    first, last = calls[0], calls[-1]
    asked = next((text_of(m) for m in first.messages if m.get("role") == "user"), "")
    return Run(
        id=run_id,
        agent="",
        model=last.model,
        input=asked,
        output=last.message.get("content"),
        stop_reason=ending_of(last.finish_reason, last.message),
        trajectory=Trajectory(messages=[*last.messages, last.message]),
        started=first.started,
        seconds=last.started + last.seconds - first.started,
        owner=first.owner,
    )
