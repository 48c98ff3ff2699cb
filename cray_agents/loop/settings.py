"""Settings of a loop, in groups: each step takes the group that it needs. Made by loop.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cray_agents.agent.agent import Agent
from cray_agents.loop.curriculum import Curriculum
from cray_agents.loop.live.schedule import Watch
from cray_agents.loop.stages import Planned
from cray_agents.loop.stop_rules import Budget
from cray_agents.promotion.sequential_test import PromotionTest
from cray_agents.records import Message
from cray_agents.rewards.reward import RewardFunction
from cray_agents.tasks.task_set import TaskSet

Control = Literal["shuffled-rewards"]
Demonstration = tuple[list[Message], dict[str, Any]]


@dataclass(frozen=True)
class Sampling:
    """Settings of drawing and sampling training runs. See Loop for the fields."""

    curriculum: Curriculum
    resample: float
    concurrency: int
    temperature: float
    seed: int
    seeded: bool
    control: Control | None

    @property
    def shuffle(self) -> str | None:
        """Seed of the permutation of rewards; None: rewards stay with their runs."""
        return str(self.seed) if self.control == "shuffled-rewards" else None


@dataclass(frozen=True)
class Asynchrony:
    """Bounds on sampling ahead of training. See Loop for the fields."""

    staleness: int
    close_at: float


@dataclass(frozen=True)
class TrainingData:
    """Settings of a training set: its runs and demonstrations. See Loop for the fields."""

    demonstrations: Sequence[Demonstration]
    history: int | None
    max_uses: int | None
    min_reward: float | None
    balance_by: str | None
    balance_power: float
    discount: float


@dataclass(frozen=True)
class Stopping:
    """Conditions on which the loop ends by itself. See Loop for the fields."""

    target: float | None
    patience: int | None
    budget: Budget


@dataclass(frozen=True)
class LoopSettings:
    """Settings of one loop, checked.

    stages: the methods by generation, with attempts, tasks and hyperparameters.
    accept_changes: go on although the settings differ from the recorded ones.
    """

    name: str
    agent: Agent
    tasks: TaskSet
    rewards: Sequence[RewardFunction]
    stages: tuple[Planned, ...]
    sampling: Sampling
    asynchrony: Asynchrony
    data: TrainingData
    stopping: Stopping
    promotion: PromotionTest
    watch: Watch | None
    warm_up: Mapping[str, Any] | None
    accept_changes: bool

    @property
    def live(self) -> bool:
        """The loop trains on live traffic, not on runs of its own."""
        return self.watch is not None
