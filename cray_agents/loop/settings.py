"""What a loop is asked: checked, and recorded once, so that it never goes on as another unnoticed.

A loop that is run again under its name goes on where it stopped. With other hyperparameters it
would train the rest of its generations differently, and nobody could tell from its records. So the
settings are entries of the loop's journal, `settings-1` first; a later one is only ever added by
`changed="accept"`. Called by loop.py.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from cray_agents.agent.agent import Agent
from cray_agents.agent.handoffs import handoff_tool
from cray_agents.agent.tool import Tool
from cray_agents.errors import BadInput
from cray_agents.loop.warmup import check as check_warm_up
from cray_agents.platform.client import Platform
from cray_agents.records import Task, canonical, digest
from cray_agents.rewards.reward import RewardOptions
from cray_agents.tasks.task_set import TaskSet
from cray_agents.training_jobs import Policy, as_hyperparameters

if TYPE_CHECKING:
    from cray_agents.loop.loop import Loop

#: What of an agent is recorded as it is. The loop says how warm its own runs are.
LIMITS = ("max_turns", "max_total_tokens", "on_limit", "max_tokens", "tool_calls", "retries",
          "parallel_tool_calls", "json_schema", "output_retries")  # fmt: skip
#: What may differ from one invocation to the next: where and how far it runs, not what it learns.
FREE = {"agent", "tasks", "rewards", "method", "name", "hyperparameters", "demonstrations",
        "warm_up", "curriculum", "promotion", "attempts", "tasks_per_generation", "evaluate_every",
        "target", "patience", "budget", "concurrency", "seeded", "watch", "changed", "platform",
        "on_progress"}  # fmt: skip


ROLES = ("system", "developer", "user", "assistant", "tool")


def prepare(loop: "Loop") -> None:
    """Give a loop's arguments the form they are used in. Raises BadInput for what has none."""
    if not isinstance(loop.agent, Agent):
        raise BadInput(f"agent={loop.agent!r}: give an Agent", param="agent")
    if "@" in loop.agent.model:
        name = loop.agent.model.partition("@")[0]
        raise BadInput(
            f"the agent's model is {loop.agent.model!r}, one version: a loop makes versions of a "
            f"name. Give the agent model={name!r}; to begin with that version, promote it",
            param="model",
        )
    if not isinstance(loop.tasks, TaskSet):
        raise BadInput(
            f"tasks is a {type(loop.tasks).__name__}: give a TaskSet, as in "
            "TaskSet.from_list(tasks, holdout=0.2)",
            param="tasks",
        )
    loop.rewards = (loop.rewards,) if callable(loop.rewards) else tuple(loop.rewards)
    for place, function in enumerate(loop.rewards):
        if not callable(function):
            raise BadInput(f"rewards[{place}] is {function!r}: give a function", param="rewards")
    loop.hyperparameters = as_hyperparameters(loop.hyperparameters)
    _check_demonstrations(loop.demonstrations)
    loop.name = loop.name or f"{loop.agent.name}-{loop.agent.model}"


def _check_demonstrations(given: Any) -> None:
    for place, one in enumerate(given):
        where = f"demonstrations[{place}]"
        if not (isinstance(one, tuple | list) and len(one) == 2):
            raise BadInput(
                f"{where}: give a pair of its messages and its metadata, as in "
                '([{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}], {})',
                param="demonstrations",
            )
        messages, metadata = one
        if not isinstance(metadata, Mapping):
            message = f"{where}: its metadata is {metadata!r}: give a dict, {{}} for none"
            raise BadInput(message, param="demonstrations")
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            message = f"{where}: its messages are {messages!r}: give a list of dicts"
            raise BadInput(message, param="demonstrations")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or message.get("role") not in ROLES:
                raise BadInput(
                    f"{where}: message {number} is {message!r}: give a dict with a `role`, one of "
                    f"{', '.join(ROLES)}",
                    param="demonstrations",
                )
        if not any(message["role"] == "assistant" for message in messages):
            raise BadInput(
                f"{where} has no assistant message to learn from", param="demonstrations"
            )


def _check_keys(loop: "Loop") -> None:
    """Keys of the tasks' metadata that no task has: they would group nothing."""
    metadata = [task.metadata for task in loop.tasks]
    shown = [metadata for _, metadata in loop.demonstrations]
    for name, key, where in (
        ("balance_by", loop.balance_by, [*metadata, *shown]),
        ("curriculum.key", loop.curriculum.key, metadata),
        ("promotion.guard", loop.promotion.guard, metadata),
    ):
        known = {key for one in where for key in one}
        if key is not None and where and key not in known:
            have = ", ".join(sorted(map(repr, known))) or "none at all"
            raise BadInput(
                f"{name}={key!r}: no task has that in its metadata; there is {have}",
                param=name.partition(".")[0],
            )


def check(loop: "Loop") -> None:
    """Raises BadInput for settings that cannot be, or that would have no effect."""
    methods = {stage.method for stage in loop.stages}
    if not loop.rewards and (loop.watch is None or loop.tasks):
        raise BadInput("a loop needs at least one reward function", param="rewards")
    for split in ("train", "holdout"):
        if loop.watch is None and not loop.tasks.split(split):
            raise BadInput(f"the task set has no {split} tasks", param="tasks")
    if loop.watch is not None:
        _check_watch(loop, methods)
    _check_keys(loop)
    least, most = loop.promotion.low, loop.promotion.high
    if loop.target is not None and not least <= loop.target <= most:
        raise BadInput(
            f"target={loop.target!r}: no mean reward reaches it, for rewards are from {least:g} to "
            f"{most:g}; PromotionTest(high=...) says if they go further",
            param="target",
        )
    if not loop.temperature >= 0:
        message = f"temperature={loop.temperature!r}: must not be negative"
        raise BadInput(message, param="temperature")
    for name, low, high in (("close_at", 0.0, 1.0), ("resample", 0.0, 10.0)):
        value = getattr(loop, name)
        if not low <= value <= high or (name == "close_at" and value == 0):
            raise BadInput(f"{name}={value!r}: must be from {low:g} to {high:g}", param=name)
    if loop.staleness < 0 or loop.concurrency < 1:
        name = "staleness" if loop.staleness < 0 else "concurrency"
        raise BadInput(f"{name}={getattr(loop, name)!r} is too small", param=name)
    if loop.resample and not methods & {"grpo", "dpo"}:
        raise BadInput("resample has no effect without a grpo or dpo stage", param="resample")
    if loop.history is not None and not methods & {"rft", "dpo", "kto"}:
        raise BadInput(f"history has no effect with {', '.join(methods)}", param="history")
    if loop.control is not None and (loop.close_at < 1):
        raise BadInput("a control needs all runs of a generation: close_at=1", param="close_at")
    if loop.control not in (None, "shuffled-rewards"):
        raise BadInput(f"control {loop.control!r} is not known", param="control")
    if "sft" in methods and not loop.demonstrations:
        raise BadInput("method 'sft' trains on demonstrations: give some", param="demonstrations")
    if "grpo" in methods:
        _check_grpo(loop)
    if loop.warm_up is not None:
        check_warm_up(loop)


def _check_watch(loop: "Loop", methods: Set[str]) -> None:
    """What is said of a loop's own runs has no effect where it has none."""
    for name in ("staleness", "close_at", "resample", "control"):
        if getattr(loop, name) != getattr(type(loop), name):
            raise BadInput(f"{name} has no effect on live traffic: watch", param=name)
    if "sft" in methods:
        raise BadInput(
            "method 'sft' learns from demonstrations alone: watch with rft, and give them to it",
            param="method",
        )


def _check_grpo(loop: "Loop") -> None:
    if loop.temperature <= 0:
        raise BadInput(
            f"temperature={loop.temperature!r}: greedy runs at a task are all the same, and grpo "
            "compares them: give 1.0",
            param="temperature",
        )
    for stage in loop.stages:
        policy = stage.hyperparameters.policy
        if stage.method != "grpo":
            continue
        if loop.staleness and policy.importance_cap is None:
            raise BadInput(
                f"staleness={loop.staleness} trains on what older versions sampled: "
                "policy.importance_cap, which corrects that, must not be None",
                param="staleness",
            )
        if policy.temperature not in (Policy().temperature, loop.temperature):
            raise BadInput(
                f"policy.temperature={policy.temperature:g}, and the runs are sampled at "
                f"{loop.temperature:g}: leave it out, the loop fills it in",
                param="hyperparameters",
            )


def settings_of(loop: "Loop") -> dict[str, Any]:
    """The settings, as they are recorded; what is long by its hash."""
    plain = {f.name: getattr(loop, f.name) for f in fields(loop) if f.name not in FREE}
    return {
        **plain,
        "agent": _agent(loop.agent),
        "tasks": _fingerprint([_task(task) for task in loop.tasks]),
        "rewards": [getattr(function, "__name__", repr(function)) for function in loop.rewards],
        "reward_weights": [
            getattr(function, "__reward_options__", RewardOptions()).weight
            for function in loop.rewards
        ],
        "stages": {
            str(stage.first): {**asdict(stage), "hyperparameters": _hyper(stage.hyperparameters)}
            | ({"last": None} if stage is loop.stages[-1] else {})  # how far it runs
            for stage in loop.stages
        },
        "warm_up": loop.warm_up and loop.warm_up.settings(),
        "demonstrations": _fingerprint([list(pair) for pair in loop.demonstrations]),
        "curriculum": {
            f.name: getattr(loop.curriculum, f.name) for f in fields(loop.curriculum) if f.init
        },
        "promotion": loop.promotion.model_dump(mode="json"),
    }


async def settle(platform: Platform, loop: str, asked: dict[str, Any], accept: bool) -> None:
    """Record the settings, or find that they are the recorded ones. Raises BadInput."""
    number, known = 0, dict[str, Any]()
    while (found := await platform.recall(loop, f"settings-{number + 1}")) is not None:
        number, known = number + 1, found
    changes = differences(known, asked)
    if number and not changes:
        return
    if number and not accept:
        told = "; ".join(f"{name} was {_told(old)}, now {_told(new)}" for name, old, new in changes)
        raise BadInput(
            f"loop {loop} was begun with other settings: {told}. Give the loop another name, or go "
            'on with these from here on: changed="accept", `cray-agents loop --accept-changes`',
            param=changes[0][0],
            code="loop_changed",
        )
    await platform.remember(loop, f"settings-{number + 1}", asked)


def differences(known: dict[str, Any], asked: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The fields that differ, with both values: those of objects one by one, as `a.b`.

    A field that an older record does not have was not there to be set: it is no difference.
    """
    found: list[tuple[str, Any, Any]] = []
    for name in asked:
        old, new = known.get(name), asked[name]
        if name not in known or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += [(f"{name}.{n}", was, now) for n, was, now in differences(old, new)]
        else:
            found.append((name, old, new))
    return found


def _agent(agent: Agent) -> dict[str, Any]:
    """What an agent is made of, and those that it calls or hands over to, by their tools' names.

    Which of these there are is in `tools`. What has keys of the user's own is a text: of an object
    only the fields that an older record has are compared.
    """
    others = {
        tool.name: getattr(tool.function, "agent", None)
        for tool in agent.tools
        if isinstance(tool, Tool)
    }
    others |= {handoff_tool(other.name).name: other for other in agent.handoffs}
    instructions = agent.instructions if isinstance(agent.instructions, str) else "a function"
    return {
        "name": agent.name,
        "model": agent.model,
        "instructions": instructions,
        "tools": _fingerprint(agent.tool_schemas),
        **{name: getattr(agent, name) for name in LIMITS},
        "timeout": None if agent.timeout == math.inf else agent.timeout,
        "sampling": canonical(dict(agent.sampling)).decode(),
        "output_type": _fingerprint(_output_schema(agent)),
        "agents": {
            name: {**_agent(other), "temperature": other.temperature}
            for name, other in others.items()
            if other is not None
        },
    }


def _task(task: Task) -> dict[str, Any]:
    """A task as loops recorded it before there was an identity, where it has none."""
    return task.model_dump(mode="json", exclude=None if task.identity else {"identity"})


def _output_schema(agent: Agent) -> dict[str, Any]:
    """The JSON schema of an agent's answers."""
    output_type: Any = agent.output_type
    return TypeAdapter(output_type).json_schema()


def _hyper(hyperparameters: Any) -> dict[str, Any]:
    return dict(hyperparameters.model_dump(mode="json"))


def _fingerprint(value: Any) -> str:
    return f"sha256:{digest(value)}"


def _told(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
