"""Settings of a loop, in groups that check themselves: sampling, data, stop. Made by its user."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from cray_agents.agent.agent import Agent
from cray_agents.loop.curriculum import Curriculum
from cray_agents.loop.hazards import Hazards
from cray_agents.loop.live.schedule import Live
from cray_agents.loop.methods import Scheduled
from cray_agents.loop.stop_rules import Stop
from cray_agents.promotion.sequential_test import PromotionTest
from cray_agents.records import Message, StrictRecord
from cray_agents.rewards.reward import RewardFunction
from cray_agents.tasks.task_set import TaskSet

Control = Literal["shuffled-rewards"]
Demonstration = tuple[list[Message], dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")


class Sampling(StrictRecord):
    """Settings of the sampling of training runs.

    Args:
        temperature: of the training runs; held-out and test runs are greedy.
        seed: of the draw of tasks, and of the runs.
        seeded: each training run has a sampling seed made of its id: a killed loop ends like an
            undisturbed one, as far as a sample does not depend on the rest of its batch. The engine
            then draws for each request by itself, which costs time in large batches on a GPU.
        concurrency: runs at a time.
        max_staleness: iteration n samples from the version decided at iteration
            n - 1 - max_staleness, while earlier jobs train (arXiv 2410.18252). GRPO and Distill
            correct for it by their `importance_cap`. With one replica, versions take turns on it.
        straggler_quantile: the share of an iteration's runs with which it may close (rollouts.py
            has the rule). Late runs are stored when they end, and enter the next training set.
        dynamic_sampling: for GRPO and DPO: the share of an iteration's runs that may be added to
            replace tasks whose runs were all rewarded alike (DAPO, arXiv 2503.14476).
    """

    temperature: float = Field(default=1.0, ge=0)
    seed: int = Field(default=0, ge=0)
    seeded: bool = True
    concurrency: int = Field(default=64, ge=1)
    max_staleness: int = Field(default=0, ge=0)
    straggler_quantile: float = Field(default=1.0, gt=0, le=1)
    dynamic_sampling: float = Field(default=0.0, ge=0, le=10)


class Data(StrictRecord):
    """Settings of the training sets.

    Args:
        demonstrations: conversations with their metadata. SFT trains on them alone; RFT keeps them
            in every training set.
        history: how many iterations of runs stay in the training set; None: all. GRPO and Distill
            take their own iteration's alone.
        max_uses: in how many training sets a run may be; None: in any number.
        min_reward: the least reward of a good run. None: 1 for RFT and KTO, any for DPO.
        balance_by, balance_power, discount: see DatasetRecipe.
        curriculum: the rule by which tasks are drawn.
    """

    demonstrations: Sequence[Demonstration] = ()
    history: int | None = Field(default=None, ge=1)
    max_uses: int | None = Field(default=None, ge=1)
    min_reward: float | None = None
    balance_by: str | None = None
    balance_power: float = Field(default=0.0, ge=0)
    discount: float = Field(default=1.0, ge=0, le=1)
    curriculum: Curriculum = Field(default_factory=Curriculum)

    @field_validator("demonstrations", mode="before")
    @classmethod
    def _check_demonstrations(cls, given: Any) -> Any:
        if not isinstance(given, Sequence):
            raise ValueError("give a list of pairs: messages and metadata")
        for place, one in enumerate(given):
            if wrong := _wrong_with(one):
                raise ValueError(f"demonstrations[{place}]{wrong}")
        return given


def _wrong_with(demonstration: Any) -> str | None:
    if not (isinstance(demonstration, tuple | list) and len(demonstration) == 2):
        return (
            ": give a pair of its messages and its metadata, as in "
            '([{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}], {})'
        )
    messages, metadata = demonstration
    if not isinstance(metadata, Mapping):
        return f": its metadata is {metadata!r}: give a dict, {{}} for none"
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f": its messages are {messages!r}: give a list of dicts"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            known = ", ".join(ROLES)
            return f": message {number} is {message!r}: give a dict with a `role`, one of {known}"
    if not any(message["role"] == "assistant" for message in messages):
        return " has no assistant message to learn from"
    return None


@dataclass(frozen=True)
class LoopSettings:
    """Settings of one loop, checked.

    schedule: the methods by iteration.
    accept_changes: go on although the settings differ from the recorded ones.
    """

    name: str
    agent: Agent
    tasks: TaskSet
    rewards: Sequence[RewardFunction]
    schedule: tuple[Scheduled, ...]
    sampling: Sampling
    data: Data
    stop: Stop
    promotion: PromotionTest
    live: Live | None
    control: Control | None
    warm_up: Mapping[str, Any] | None
    accept_changes: bool
    hazards: Hazards | None = None

    @property
    def shuffle(self) -> str | None:
        """Seed of the permutation of rewards; None: rewards stay with their runs."""
        return str(self.sampling.seed) if self.control == "shuffled-rewards" else None
