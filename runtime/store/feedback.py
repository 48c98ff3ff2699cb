"""Feedback: check and record rewards that people or programs give to a finished run.

The store only appends. Of one name, source and turn the newest reward counts (assembly.py), so a
correction is a second reward. Datasets built afterwards see it. Called by the gateway
(runtime/gateway/routes/trajectories.py) and by `cray-agents runs reward`.
"""

import time
from collections.abc import Sequence

from pydantic import Field

from cray_agents.errors import BadInput
from cray_agents.records import REWARD_REFUSED, Event, Reward, StrictRecord, new_id
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import RunFacts

REWARD_LIMIT = 1e6  # default of the setting `reward_limit`, for a reward and for their sum
MAX_REWARDS = 1000  # rewards that a run is described with
CLOCK_SKEW = 300.0  # seconds by which another clock may be ahead of ours


class Feedback(StrictRecord):
    """A reward for a run, or for one of its turns (from 0), from `source`: a person, a program.

    `time`: when the run was looked at, in unix seconds; of several rewards the newest counts.
    """

    value: float = Field(strict=True, allow_inf_nan=False)
    name: str = Field("feedback", min_length=1, max_length=200)
    source: str = Field("human", min_length=1, max_length=200)
    turn: int | None = Field(None, ge=0, lt=2**63, strict=True)
    comment: str | None = Field(None, max_length=10_000)
    time: float = Field(default_factory=time.time, allow_inf_nan=False)


def check_rewards(rewards: Sequence[Reward], limit: float, at: str = "value") -> None:
    """Raise BadInput for rewards that are invalid or so large that all others count for nothing.

    A time in the future is invalid too, for a later reward could not replace it. `at` is the field
    that holds the rewards.
    """
    total = 0.0
    for reward in rewards:
        total += reward.value
        if not abs(reward.value) <= limit:  # false for NaN too
            raise BadInput(
                f"{at}: a reward of {reward.value:g} ({reward.name}) is not taken: the setting "
                f"`reward_limit` allows {-limit:g} to {limit:g}",
                param=at,
                code=REWARD_REFUSED,
            )
        if reward.turn is not None and reward.turn < 0:
            raise BadInput(f"{at}: turn {reward.turn}: turns count from 0", param=at)
        if not reward.time <= time.time() + CLOCK_SKEW:
            raise BadInput(f"{at}: its time {reward.time} is no unix time up to now", param=at)
    if len(rewards) > MAX_REWARDS or not abs(total) <= limit:
        raise BadInput(
            f"{at}: {len(rewards)} rewards that are {total:g} together; a run is described with at "
            f"most {MAX_REWARDS}, of {-limit:g} to {limit:g} (the setting `reward_limit`) in all",
            param=at,
            code=REWARD_REFUSED,
        )


def check_feedback(store: Store, run_id: str, feedback: Feedback) -> RunFacts:
    """Return the run that feedback is for. Raises NotFound, or BadInput for an unknown turn."""
    facts = store.run_facts(run_id)
    if feedback.turn is not None and feedback.turn >= facts.turns:
        raise BadInput(
            f"run {run_id} has {facts.turns} turns, counted from 0: there is no turn "
            f"{feedback.turn}",
            param="turn",
        )
    return facts


async def give_feedback(store: Store, run_id: str, feedback: Feedback, giver: str = "") -> Reward:
    """Record feedback as a reward; it is durable when this returns. For `giver` see Reward."""
    reward = Reward(**feedback.model_dump(), giver=giver)
    await store.append([reward_event(run_id, reward)], new=True)
    return reward


def reward_event(run_id: str, reward: Reward) -> Event:
    """Return the event that records a new reward of a run."""
    body = reward.model_dump(mode="json")
    return Event(id=new_id("reward"), run_id=run_id, kind="reward", body=body, time=reward.time)
