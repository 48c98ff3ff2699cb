"""Record of a loop's code: hashes of what its rewards, tools and hooks do.

What counts is a function's syntax tree, not its comments; the functions of its module that it
calls, and those that it closes over; its defaults, and the arguments in a functools.partial or a
frozen dataclass. No other values count, as a run may change them, nor this package's own code.
Called by settings_record.py.
"""

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from types import FunctionType
from typing import Any

from cray_agents.agent.agent import Agent
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.agent.tool import Tool
from cray_agents.records import digest


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
