"""Record of a loop's settings: a loop never goes on with other settings unnoticed.

A loop that is run again under its name goes on where it stopped. With other hyperparameters it
would train the rest of its iterations differently, and nobody could tell from its records. So the
settings are entries of the loop's journal, `settings-1` first. Only `changed="accept"` adds
another. Called by loop.py.
"""

import ast
import contextlib
import functools
import inspect
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import FunctionType
from typing import Any

from pydantic import TypeAdapter

from cray_agents.agent.agent import Agent
from cray_agents.agent.description import handoff_tool
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.agent.tool import Tool
from cray_agents.errors import BadInput
from cray_agents.iteration import SETTINGS_VERSION
from cray_agents.loop.hazards import Hazards
from cray_agents.loop.methods import Method
from cray_agents.loop.settings import LoopSettings
from cray_agents.platform.client import Platform
from cray_agents.records import Task, canonical, digest
from cray_agents.rewards.llm_judge import GroupJudge, LLMJudge
from cray_agents.rewards.reward import RewardFunction, name_of, options_of
from cray_agents.training_jobs import with_backend_of_older

#: Agent fields recorded verbatim. Temperature is missing because the loop sets it.
VERBATIM = ("max_turns", "max_total_tokens", "on_limit", "max_tokens", "tool_calls", "retries",
            "parallel_tool_calls", "json_schema", "output_retries")  # fmt: skip
KEPT = ("parent", "evaluate_every", "teacher")  # names of a method that version 1 had, too
#: Where the fields of version 1 are: their group, and their name in it.
MOVED = {
    **{name: ("data", name) for name in ("history", "max_uses", "min_reward", "balance_by",
                                         "balance_power", "discount", "demonstrations",
                                         "curriculum")},
    "resample": ("sampling", "dynamic_sampling"),
    "staleness": ("sampling", "max_staleness"),
    "close_at": ("sampling", "straggler_quantile"),
    "temperature": ("sampling", "temperature"),
    "seed": ("sampling", "seed"),
}  # fmt: skip


def settings_record(loop: LoopSettings) -> dict[str, Any]:
    """The settings as they are recorded: long ones by their hash.

    Left out are settings that may differ from one invocation to the next: where and how far the
    loop runs, not how it learns.
    """
    data, curriculum = loop.data, loop.data.curriculum
    return {
        "version": SETTINGS_VERSION,
        "tasks": _fingerprint([_task(task) for task in loop.tasks]),
        **record_of(loop.agent, loop.rewards),
        "method": {
            str(one.first): {"name": one.method.name, **_method(one.method)}
            | ({"iterations": None} if one is loop.schedule[-1] else {})  # how far it runs
            for one in loop.schedule
        },
        "sampling": loop.sampling.model_dump(mode="json", exclude={"concurrency", "seeded"}),
        "data": data.model_dump(mode="json", exclude={"demonstrations", "curriculum"})
        | {
            "demonstrations": _fingerprint([list(pair) for pair in data.demonstrations]),
            "curriculum": {
                f.name: getattr(curriculum, f.name) for f in fields(curriculum) if f.init
            },
        },
        "promotion": loop.promotion.model_dump(mode="json"),
        "hazards": loop.hazards and _hazards(loop.hazards),
        "control": loop.control,
        "warm_up": loop.warm_up,
    }


def record_of(agent: Agent, rewards: Sequence[RewardFunction]) -> dict[str, Any]:
    """An agent and the rewards of its runs as they are recorded."""
    return {
        "agent": _agent(agent),
        "rewards": [_reward(function) for function in rewards],
        "reward_weights": [options_of(function).weight for function in rewards],
        "reward_code": {name_of(function): fingerprint(function) for function in rewards},
    }


def _hazards(hazards: Hazards) -> dict[str, Any]:
    prompts = [_task(task) for task in hazards.tasks]
    return {"prompts": _fingerprint(prompts), "judge": _reward(hazards.reward)}


def _method(method: Method) -> dict[str, Any]:
    return method.model_dump(mode="json", exclude={"training": {"logprob_limit"}})


def translated(record: dict[str, Any]) -> dict[str, Any]:
    """A record in today's names, also if it is older. Raises BadInput for a newer one."""
    version = record.get("version", 1)
    if version > SETTINGS_VERSION:
        raise BadInput(
            f"the loop's settings are a record of version {version}, and this code reads up to "
            f"{SETTINGS_VERSION}: use the version of cray-agents that wrote it, or a newer one"
        )
    if version == SETTINGS_VERSION:
        methods = {
            first: {**method, "training": with_backend_of_older(method["training"])}
            for first, method in record["method"].items()
        }
        return {**record, "method": methods}
    moved: dict[str, Any] = {"sampling": {}, "data": {}, "method": {}}
    for old, value in record.items():
        group, name = MOVED.get(old, (None, old))
        (moved if group is None else moved[group])[name] = value
    for first, stage in moved.pop("stages", {}).items():
        hyper = dict(stage["hyperparameters"])
        preference, policy = hyper.pop("preference", {}), hyper.pop("policy", {})
        last = stage["last"]
        moved["method"][first] = {
            **(policy if stage["method"] in ("grpo", "distill") else preference),
            "name": stage["method"],
            "iterations": None if last is None else last - int(first) + 1,
            "group_size": stage["attempts"],
            "tasks_per_iteration": stage["tasks_per_generation"],
            "training": with_backend_of_older(hyper),
            **{
                name: stage[name]
                for name in ("parent", "evaluate_every", "teacher")
                if name in stage
            },
        }
    return moved


async def record_settings(
    platform: Platform, loop: str, settings: dict[str, Any], accept: bool
) -> None:
    """Record the settings of a loop that begins, and compare those of one that goes on.

    Raises BadInput where they differ, unless the change is accepted: then it is recorded too.
    """
    number, newest = 0, None
    while (entry := await platform.recall(loop, f"settings-{number + 1}")) is not None:
        number, newest = number + 1, entry
    changes = [] if newest is None else differences(translated(newest), settings)
    if newest is not None and not changes:
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
        if old == new or (name not in known and name != "examples"):  # older agents have none
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
        "examples": _fingerprint([*agent.examples]) if agent.examples else None,
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
    if isinstance(function, LLMJudge | GroupJudge):
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


def _fingerprint(value: Any) -> str:
    return f"sha256:{digest(value)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- Record of a loop's code: hashes of what its rewards, tools and hooks do
# What counts is a function's syntax tree, not its comments; the functions of its module that it
# calls, and those that it closes over; its defaults, and the arguments in a functools.partial or a
# frozen dataclass. No other values count, as a run may change them, nor this package's own code.
def code_of(agent: Agent) -> dict[str, str]:
    """Return hashes of an agent's functions, by what they are."""
    named: dict[str, Any] = {"instructions": agent.instructions, "environment": agent.environment}
    named |= {f"tool {t.name}": [t.function, t.approve] for t in agent.tools if isinstance(t, Tool)}
    named |= {f"hooks {place}": hooks for place, hooks in enumerate(agent.hooks)}
    recorded = (str, WorkerEnvironment)  # as they are
    given = {name: thing for name, thing in named.items() if not isinstance(thing, recorded)}
    return {name: fingerprint(thing) for name, thing in given.items() if thing is not None}


def fingerprint(thing: Any) -> str:
    """Return a hash of what a function, or an object with functions, does."""
    return f"sha256:{digest(_plain(thing, ()))}"


def _plain(thing: Any, above: tuple[Any, ...]) -> Any:
    """Return what counts of a thing as plain data. `above`: the things that it was found in."""
    if thing is None or isinstance(thing, str | int | float):
        return thing
    if any(thing is one for one in above):
        return "again"
    inner = functools.partial(_plain, above=(*above, thing))
    if isinstance(thing, list | tuple):
        return [inner(item) for item in thing]
    if isinstance(thing, Mapping):
        return {str(name): inner(value) for name, value in thing.items()}
    if isinstance(thing, functools.partial):
        return [inner(thing.func), inner(thing.args), inner(thing.keywords)]
    if inspect.ismethod(thing):
        return [inner(thing.__func__), inner(thing.__self__)]
    kind: Any = thing if isinstance(thing, type | FunctionType) else type(thing)
    name, own = f"{kind.__module__}.{kind.__qualname__}", kind.__module__.startswith("cray_agents.")
    if isinstance(thing, FunctionType):
        return name if own else [_source(thing), inner(thing.__defaults__), inner(_called(thing))]
    frozen = getattr(getattr(type(thing), "__dataclass_params__", None), "frozen", False)
    values = [getattr(thing, field.name) for field in fields(thing)] if frozen else []
    near = [base for base in kind.__mro__ if base.__module__ == kind.__module__ and not own]
    methods = [getattr(value, "__func__", value) for one in near for value in vars(one).values()]
    return [name, inner(values), inner([one for one in methods if isinstance(one, FunctionType)])]


def _called(function: FunctionType) -> dict[str, Any]:
    """Return the functions that a function closes over, and those of its module that it names."""
    code, module = function.__code__, function.__module__
    known = {name: function.__globals__.get(name) for name in code.co_names}
    near = {name: one for name, one in known.items() if getattr(one, "__module__", "") == module}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            near[name] = cell.cell_contents
    return {name: one for name, one in near.items() if isinstance(one, FunctionType)}


def _source(function: FunctionType) -> Any:
    """Return a function's source in one layout; its byte code where the source cannot be had."""
    with contextlib.suppress(OSError, TypeError, SyntaxError):  # such as one typed at a prompt
        if function.__name__ != "<lambda>":  # whose source is the whole statement that it is in
            return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    code = function.__code__
    plain = [one for one in code.co_consts if isinstance(one, str | int | float)]
    return [code.co_code.hex(), list(code.co_names), plain]
