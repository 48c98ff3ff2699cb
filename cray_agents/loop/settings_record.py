"""Record of a loop's settings: a loop never goes on with other settings unnoticed.

A loop that is run again under its name goes on where it stopped. With other hyperparameters it
would train the rest of its generations differently, and nobody could tell from its records. So the
settings are entries of the loop's journal, `settings-1` first. Only `changed="accept"` adds
another. Called by loop.py.
"""

import math
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter

from cray_agents.agent.agent import Agent
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.agent.handoffs import handoff_tool
from cray_agents.agent.tool import Tool
from cray_agents.errors import BadInput
from cray_agents.loop.code_record import code_of, fingerprint
from cray_agents.loop.settings import LoopSettings
from cray_agents.platform.client import Platform
from cray_agents.records import Task, canonical, digest
from cray_agents.rewards.llm_judge import LLMJudge
from cray_agents.rewards.reward import RewardFunction, name_of, options_of
from cray_agents.training_jobs import Hyperparameters

#: Agent fields recorded verbatim. Temperature is missing because the loop sets it.
VERBATIM = ("max_turns", "max_total_tokens", "on_limit", "max_tokens", "tool_calls", "retries",
            "parallel_tool_calls", "json_schema", "output_retries")  # fmt: skip


def settings_record(loop: LoopSettings) -> dict[str, Any]:
    """The settings as they are recorded: long ones by their hash.

    Left out are settings that may differ from one invocation to the next: where and how far the
    loop runs, not how it learns.
    """
    data, sampling = loop.data, loop.sampling
    return {
        "history": data.history,
        "max_uses": data.max_uses,
        "min_reward": data.min_reward,
        "balance_by": data.balance_by,
        "balance_power": data.balance_power,
        "discount": data.discount,
        "resample": sampling.resample,
        "staleness": loop.asynchrony.staleness,
        "close_at": loop.asynchrony.close_at,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "control": sampling.control,
        "agent": _agent(loop.agent),
        "tasks": _fingerprint([_task(task) for task in loop.tasks]),
        "rewards": [_reward(function) for function in loop.rewards],
        "reward_weights": [options_of(function).weight for function in loop.rewards],
        "reward_code": {name_of(function): fingerprint(function) for function in loop.rewards},
        "stages": {
            str(stage.first): {**asdict(stage), "hyperparameters": _hyper(stage.hyperparameters)}
            | ({"last": None} if stage is loop.stages[-1] else {})  # how far it runs
            for stage in loop.stages
        },
        "warm_up": loop.warm_up,
        "demonstrations": _fingerprint([list(pair) for pair in data.demonstrations]),
        "curriculum": {
            f.name: getattr(sampling.curriculum, f.name)
            for f in fields(sampling.curriculum)
            if f.init
        },
        "promotion": loop.promotion.model_dump(mode="json"),
    }


async def record_settings(
    platform: Platform, loop: str, settings: dict[str, Any], accept: bool
) -> None:
    """Record the settings, or find that they are the recorded ones. Raises BadInput."""
    number, known = 0, dict[str, Any]()
    while (entry := await platform.recall(loop, f"settings-{number + 1}")) is not None:
        number, known = number + 1, entry
    changes = differences(known, settings)
    if number and not changes:
        return
    if number and not accept:
        listed = "; ".join(
            f"{name} was {_short(old)}, now {_short(new)}" for name, old, new in changes
        )
        raise BadInput(
            f"loop {loop} was begun with other settings: {listed}. Give the loop another name, or "
            'go on with these from here on: changed="accept", `cray-agents loop --accept-changes`',
            param=changes[0][0],
            code="loop_changed",
        )
    await platform.remember(loop, f"settings-{number + 1}", settings)


def differences(known: dict[str, Any], settings: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The fields that differ, with both values. Fields of objects are listed one by one, as `a.b`.

    A field that an older record lacks did not exist then: it is no difference.
    """
    changes: list[tuple[str, Any, Any]] = []
    for name in settings:
        old, new = known.get(name), settings[name]
        if name not in known or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            changes += [(f"{name}.{n}", was, now) for n, was, now in differences(old, new)]
        else:
            changes.append((name, old, new))
    return changes


def _agent(agent: Agent) -> dict[str, Any]:
    """An agent's fields, and those of the agents that it calls or hands over to, by tool name.

    `sampling` is recorded as a text, because its keys are the user's: of an object only the fields
    that an older record has are compared.
    """
    agents = {
        tool.name: getattr(tool.function, "__agent__", None)
        for tool in agent.tools
        if isinstance(tool, Tool)
    }
    agents |= {handoff_tool(other.name).name: other for other in agent.handoffs}
    instructions = agent.instructions if isinstance(agent.instructions, str) else "a function"
    return {
        "name": agent.name,
        "model": agent.model,
        "instructions": instructions,
        "tools": _fingerprint(agent.tool_schemas),
        "code": code_of(agent),
        **{name: getattr(agent, name) for name in VERBATIM},
        **_worker_environment(agent),
        "timeout": None if agent.timeout == math.inf else agent.timeout,
        "sampling": canonical(dict(agent.sampling)).decode(),
        "output_type": _fingerprint(_output_schema(agent)),
        "agents": {
            name: {**_agent(other), "temperature": other.temperature}
            for name, other in agents.items()
            if other is not None
        },
    }


def _reward(function: RewardFunction) -> str:
    """The name of a reward function, and all of a judge: never an address, which changes."""
    if isinstance(function, LLMJudge):
        return repr(function)
    return str(getattr(function, "__name__", name_of(function)))


def _worker_environment(agent: Agent) -> dict[str, str]:
    named = agent.environment
    return {"environment": named.name} if isinstance(named, WorkerEnvironment) else {}


def _task(task: Task) -> dict[str, Any]:
    """A task as it is recorded. Without an identity it is as records were before identities."""
    return task.model_dump(mode="json", exclude=None if task.identity else {"identity"})


def _output_schema(agent: Agent) -> dict[str, Any]:
    output_type: Any = agent.output_type
    return TypeAdapter(output_type).json_schema()


def _hyper(hyperparameters: Hyperparameters) -> dict[str, Any]:
    given = hyperparameters.model_dump(mode="json")
    return given if "steps" in hyperparameters.model_fields_set else given | {"steps": None}


def _fingerprint(value: Any) -> str:
    return f"sha256:{digest(value)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
