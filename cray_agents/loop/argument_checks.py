"""Checks of a loop's arguments: nonsense is an error before anything runs. Called by loop.py."""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from cray_agents.agent.agent import Agent
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.errors import BadInput
from cray_agents.loop.curriculum import Curriculum
from cray_agents.loop.live.schedule import Watch
from cray_agents.loop.settings import LoopSettings
from cray_agents.loop.stages import Planned
from cray_agents.loop.stop_rules import Budget
from cray_agents.loop.warmup import WarmUp
from cray_agents.loop.warmup import check as check_warm_up
from cray_agents.platform.client import Platform
from cray_agents.promotion.sequential_test import PromotionTest
from cray_agents.rewards.reward import check_names
from cray_agents.tasks.task_set import TaskSet
from cray_agents.training_jobs import ON_POLICY, Policy

#: Whole numbers of a Loop with their least values, and numbers with their least and largest ones.
COUNTS = {
    "attempts": 1,
    "tasks_per_generation": 1,
    "evaluate_every": 1,
    "history": 1,
    "max_uses": 1,
    "patience": 1,
    "staleness": 0,
    "concurrency": 1,
    "seed": 0,
}
NUMBERS = {
    "min_reward": (-math.inf, math.inf),
    "balance_power": (0.0, math.inf),
    "discount": (0.0, 1.0),
    "resample": (0.0, 10.0),
    "close_at": (0.0, 1.0),
    "target": (-math.inf, math.inf),
    "temperature": (0.0, math.inf),
    "logprob_limit": (1e-9, math.inf),
}
KINDS: dict[str, type] = {
    "name": str,
    "balance_by": str,
    "curriculum": Curriculum,
    "promotion": PromotionTest,
    "budget": Budget,
    "watch": Watch,
    "platform": Platform,
    "warm_up": WarmUp,
    "seeded": bool,
    "teacher": str,
}
OPTIONAL = {"history", "max_uses", "patience", "min_reward", "target", "balance_by", "watch"}
OPTIONAL |= {"platform", "warm_up", "teacher", "logprob_limit"}
ROLES = ("system", "developer", "user", "assistant", "tool")


def check_types(agent: Any, tasks: Any, rewards: Any, demonstrations: Any) -> None:
    """Check the kinds of a loop's first arguments. Raises BadInput."""
    if not isinstance(agent, Agent):
        raise BadInput(f"agent={agent!r}: give an Agent", param="agent")
    if "@" in agent.model:
        name = agent.model.partition("@")[0]
        raise BadInput(
            f"the agent's model is {agent.model!r}, one version: a loop makes versions of a "
            f"name. Give the agent model={name!r}; to begin with that version, promote it",
            param="model",
        )
    if not isinstance(tasks, TaskSet):
        raise BadInput(
            f"tasks is a {type(tasks).__name__}: give a TaskSet, as in "
            "TaskSet.from_list(tasks, holdout=0.2)",
            param="tasks",
        )
    if not isinstance(rewards, Sequence) or isinstance(rewards, str):
        raise BadInput(f"rewards={rewards!r}: give a function or a list", param="rewards")
    for place, function in enumerate(rewards):
        if not callable(function):
            raise BadInput(f"rewards[{place}] is {function!r}: give a function", param="rewards")
    check_names(rewards)
    _check_demonstrations(demonstrations)


def check_kinds(loop: Any) -> None:
    """Check the kinds of all other fields of a Loop, and the bounds of its numbers.

    Raises BadInput.
    """
    for name, least in COUNTS.items():
        value = getattr(loop, name)
        if value is None and name in OPTIONAL:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadInput(
                f"{name}={value!r}: give a whole number of at least {least}"
                f"{' or None' if name in OPTIONAL else ''}",
                param=name,
            )
    for name, (low, high) in NUMBERS.items():
        value = getattr(loop, name)
        if value is None and name in OPTIONAL:
            continue
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number or not low <= value <= high:
            start = "" if low == -math.inf else f" from {low:g}"
            end = "" if high == math.inf else f" to {high:g}"
            raise BadInput(f"{name}={value!r}: give a number{start}{end}", param=name)
    if loop.changed not in ("refuse", "accept"):
        raise BadInput(f"changed={loop.changed!r}: give 'refuse' or 'accept'", param="changed")
    if not callable(loop.on_progress):
        message = f"on_progress={loop.on_progress!r}: give a function"
        raise BadInput(message, param="on_progress")
    for name, kind in KINDS.items():
        value = getattr(loop, name)
        if not isinstance(value, kind) and not (value is None and name in OPTIONAL):
            raise BadInput(f"{name}={value!r}: give a {kind.__name__}", param=name)


def _check_demonstrations(given: Any) -> None:
    if not isinstance(given, Sequence):
        raise BadInput(f"demonstrations={given!r}: give a list", param="demonstrations")
    for place, one in enumerate(given):
        name = f"demonstrations[{place}]"
        if not (isinstance(one, tuple | list) and len(one) == 2):
            raise BadInput(
                f"{name}: give a pair of its messages and its metadata, as in "
                '([{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}], {})',
                param="demonstrations",
            )
        messages, metadata = one
        if not isinstance(metadata, Mapping):
            message = f"{name}: its metadata is {metadata!r}: give a dict, {{}} for none"
            raise BadInput(message, param="demonstrations")
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            message = f"{name}: its messages are {messages!r}: give a list of dicts"
            raise BadInput(message, param="demonstrations")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or message.get("role") not in ROLES:
                raise BadInput(
                    f"{name}: message {number} is {message!r}: give a dict with a `role`, one of "
                    f"{', '.join(ROLES)}",
                    param="demonstrations",
                )
        if not any(message["role"] == "assistant" for message in messages):
            raise BadInput(f"{name} has no assistant message to learn from", param="demonstrations")


def _check_keys(loop: LoopSettings) -> None:
    """Refuse keys of metadata that no task has: they would group nothing."""
    of_tasks = [task.metadata for task in loop.tasks]
    of_demonstrations = [metadata for _, metadata in loop.data.demonstrations]
    for name, key, metadata in (
        ("balance_by", loop.data.balance_by, [*of_tasks, *of_demonstrations]),
        ("curriculum.key", loop.sampling.curriculum.key, of_tasks),
        ("promotion.guard", loop.promotion.guard, of_tasks),
    ):
        known = {key for one in metadata for key in one}
        if key is not None and metadata and key not in known:
            have = ", ".join(sorted(map(repr, known))) or "none at all"
            raise BadInput(
                f"{name}={key!r}: no task has that in its metadata; there is {have}",
                param=name.partition(".")[0],
            )


def check(loop: LoopSettings) -> None:
    """Check a loop's settings. Raises BadInput for nonsense, and for what would have no effect."""
    methods = {stage.method for stage in loop.stages}
    own = isinstance(loop.agent.environment, WorkerEnvironment)  # which gives rewards itself
    if not loop.rewards and not own and (loop.watch is None or loop.tasks):
        raise BadInput("a loop needs at least one reward function", param="rewards")
    for split in ("train", "holdout"):
        if loop.watch is None and not loop.tasks.split(split):
            raise BadInput(f"the task set has no {split} tasks", param="tasks")
    if loop.watch is not None:
        _check_watch(loop, methods)
    _check_keys(loop)
    least, most = loop.promotion.low, loop.promotion.high
    target = loop.stopping.target
    if target is not None and not least <= target <= most:
        raise BadInput(
            f"target={target!r}: no mean reward reaches it, for rewards are from {least:g} to "
            f"{most:g}; PromotionTest(high=...) says if they go further",
            param="target",
        )
    if loop.asynchrony.close_at == 0:
        message = "close_at=0: a generation of no runs has nothing to learn from"
        raise BadInput(message, param="close_at")
    if loop.sampling.resample and not methods & {"grpo", "dpo"}:
        raise BadInput("resample has no effect without a grpo or dpo stage", param="resample")
    if loop.data.history is not None and not methods & {"rft", "dpo", "kto"}:
        raise BadInput(f"history has no effect with {', '.join(methods)}", param="history")
    if loop.sampling.control is not None and (loop.asynchrony.close_at < 1):
        raise BadInput("a control needs all runs of a generation: close_at=1", param="close_at")
    if loop.sampling.control not in (None, "shuffled-rewards"):
        raise BadInput(f"control {loop.sampling.control!r} is not known", param="control")
    if "sft" in methods and not loop.data.demonstrations:
        raise BadInput("method 'sft' trains on demonstrations: give some", param="demonstrations")
    if loop.sampling.control is not None and ("sft" in methods or methods == {"distill"}):
        unused = min(methods & {"distill", "sft"})
        message = f"a control has no effect with {unused}, which uses no rewards"
        raise BadInput(message, param="control")
    for stage in loop.stages:
        if stage.method in ON_POLICY:
            _check_on_policy(loop, stage)
    if loop.warm_up is not None:
        check_warm_up(loop)


async def check_engine(
    platform: Platform, stages: Sequence[Planned], logprob_limit: float | None
) -> None:
    """Refuse replicas whose rounding no limit is known for, before the first run: BadInput."""
    flag = (await platform.info()).get("engine", {}).get("quantized")
    if flag and logprob_limit is None and {stage.method for stage in stages} != {"sft"}:
        raise BadInput(
            f"the replicas quantise (engine_args: {flag}): their log-probabilities differ from the"
            " trainer's by more than rounding, and no limit is known. Start the platform without"
            " that, or say how much is allowed, as in Loop(logprob_limit=0.5)",
            param="logprob_limit",
        )


def _check_watch(loop: LoopSettings, methods: Set[str]) -> None:
    """Refuse settings of a loop's own runs: a loop on live traffic has none."""
    for name, given in (
        ("staleness", loop.asynchrony.staleness != 0),
        ("close_at", loop.asynchrony.close_at != 1.0),
        ("resample", loop.sampling.resample != 0.0),
        ("control", loop.sampling.control is not None),
    ):
        if given:
            raise BadInput(f"{name} has no effect on live traffic: watch", param=name)
    if "sft" in methods:
        raise BadInput(
            "method 'sft' learns from demonstrations alone: watch with rft, and give them to it",
            param="method",
        )
    if "distill" in methods:
        raise BadInput(
            "method 'distill' learns from the loop's own runs: leave watch out", param="method"
        )


def _check_on_policy(loop: LoopSettings, stage: Planned) -> None:
    if loop.sampling.temperature <= 0:
        uses = "grpo compares them" if stage.method == "grpo" else "distill learns from draws"
        raise BadInput(
            f"temperature={loop.sampling.temperature!r}: greedy runs at a task are all the same, "
            f"and {uses}: give 1.0",
            param="temperature",
        )
    policy = stage.hyperparameters.policy
    if loop.asynchrony.staleness and policy.importance_cap is None:
        raise BadInput(
            f"staleness={loop.asynchrony.staleness} trains on what older versions sampled: "
            "policy.importance_cap, which corrects that, must not be None",
            param="staleness",
        )
    if policy.temperature not in (Policy().temperature, loop.sampling.temperature):
        raise BadInput(
            f"policy.temperature={policy.temperature:g}, and the runs are sampled at "
            f"{loop.sampling.temperature:g}: leave it out, the loop fills it in",
            param="hyperparameters",
        )
