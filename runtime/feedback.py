"""Rewards that come later: what people, or programs of theirs, say of a run that has ended.

The store only adds: of one name, source and turn the newest counts (store/assembly.py), so whoever
changes his mind says it again. A dataset that is built afterwards sees it. Called by the gateway
(routes/trajectories.py) and by `cray-agents runs reward`.
"""

from pydantic import Field

from cray_agents.errors import BadInput, NotFound
from cray_agents.records import Event, Reward, StrictRecord, new_id
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import RunFacts


class Feedback(StrictRecord):
    """A reward for a run, or for one of its turns (from 0), from `source`: a person, a program."""

    value: float = Field(strict=True, allow_inf_nan=False)
    name: str = Field("feedback", min_length=1, max_length=200)
    source: str = Field("human", min_length=1, max_length=200)
    turn: int | None = Field(None, ge=0, strict=True)
    comment: str | None = Field(None, max_length=10_000)


def judged(store: Store, run_id: str, feedback: Feedback) -> RunFacts:
    """The run that feedback is for. Raises NotFound, or BadInput where it has no such turn."""
    store.refresh()
    facts = store.index.run(run_id)
    if facts is None:
        raise NotFound(f"no run {run_id!r} is recorded", param="run_id")
    if feedback.turn is not None and feedback.turn >= facts.turns:
        raise BadInput(
            f"run {run_id} has {facts.turns} turns, counted from 0: there is no turn "
            f"{feedback.turn}",
            param="turn",
        )
    return facts


async def give(store: Store, run_id: str, feedback: Feedback) -> Reward:
    """Put it on the record; durable when this returns."""
    reward = Reward(**feedback.model_dump())
    body = reward.model_dump(mode="json")
    event = Event(id=new_id("reward"), run_id=run_id, kind="reward", body=body, time=reward.time)
    await store.append([event], new=True)
    return reward
