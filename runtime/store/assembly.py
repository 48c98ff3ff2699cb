"""Assembly: join the events of a run, in any order, to one Run record.

The agent writes the description (`run`), the gateway each model call (`call`), and judges write
rewards. A run without a description, such as a plain OpenAI client's, is built from its calls;
branch_choice.py picks its turns. Called by store.py.
"""

from collections.abc import Iterable
from typing import Any

from cray_agents.records import (
    ModelCall,
    Reward,
    Run,
    RunError,
    Trajectory,
    Turn,
    is_finding,
    scanned_tags,
)
from cray_agents.runtime.store.branch_choice import choose_turns
from cray_agents.runtime.store.segments.facts import ending_of, text_of


def assemble(
    run_id: str,
    described: dict[str, Any] | None,
    calls: list[dict[str, Any]],
    rewards: list[dict[str, Any]],
) -> Run:
    """Join the bodies of a run's events. Raises pydantic's ValidationError on a broken body.

    `calls` may lack some that turns name; such a turn keeps `call=None`.
    """
    known = {call.id: call for call in map(ModelCall.model_validate, calls)}
    run = Run.model_validate(described) if described is not None else _run_from_calls(run_id, known)
    turns = run.trajectory.turns or [
        Turn(call_id=call.id) for call in choose_turns(_sort_calls(known.values()))
    ]
    given = newest_rewards([*run.rewards, *map(Reward.model_validate, rewards)])
    tags = {*run.tags, *(tag for call in known.values() for tag in call.tags)}
    findings = [(r.source, r.value) for r in given if is_finding(r.source)]
    joined = [turn.model_copy(update={"call": known.get(turn.call_id)}) for turn in turns]
    return run.model_copy(
        update={
            "rewards": given,
            "tags": scanned_tags(tags, findings),
            "trajectory": run.trajectory.model_copy(update={"turns": joined}),
        }
    )


def newest_rewards(rewards: Iterable[Reward]) -> list[Reward]:
    """Return the last reward given for each name, source and turn, sorted by these."""
    kept: dict[tuple[str, str, int], Reward] = {}
    for reward in sorted(rewards, key=lambda r: (r.time, r.value)):
        kept[reward.name, reward.source, -1 if reward.turn is None else reward.turn] = reward
    return [kept[key] for key in sorted(kept)]


def _sort_calls(calls: Iterable[ModelCall]) -> list[ModelCall]:
    return sorted(calls, key=lambda call: (call.started, call.id))


def _run_from_calls(run_id: str, known: dict[str, ModelCall]) -> Run:
    calls = _sort_calls(known.values())
    first, last = calls[0], calls[-1]
    request = next((text_of(m) for m in first.messages if m.get("role") == "user"), "")
    return Run(
        id=run_id,
        agent="",
        model=last.model,
        input=request,
        output=last.message.get("content"),
        stop_reason=ending_of(last.finish_reason, last.message),
        error=RunError(type="EngineError", message=last.error) if last.error else None,
        trajectory=Trajectory(messages=[*last.messages, last.message]),
        started=first.started,
        seconds=last.started + last.seconds - first.started,
        owner=first.owner,
    )
