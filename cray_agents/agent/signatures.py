"""Signatures: a function's parameters and docstring as the schema that a model is given.

A parameter annotated `RunContext` is left out of the schema. Called by tool.py.
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo

from cray_agents.agent.run_context import RunContext
from cray_agents.errors import BadInput

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*(.*)"
)
_PARAMETER = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def read_signature(
    function: Callable[..., Any], name: str, described: Mapping[str, str]
) -> tuple[type[BaseModel], str | None]:
    """A pydantic model of a function's parameters, and the name of the RunContext parameter.

    The model's fields are p0, p1, ... with the parameters' names as aliases, because pydantic keeps
    some names for itself, such as `json`. Raises BadInput.
    """
    plain, fixed = unbound(function)
    hints = _hints(plain, name)
    context: str | None = None
    fields: dict[str, Any] = {}
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.name in fixed:
            continue
        _check_parameter(parameter, plain, name)
        hint = hints.get(parameter.name, Any)
        if _takes_context(hint):
            if context is not None:
                raise BadInput(f"tool {name!r} has two RunContext parameters", param="tools")
            context = parameter.name
            continue
        about: dict[str, Any] = {"alias": parameter.name}
        if parameter.name in described:
            about["description"] = described[parameter.name]
        default = ... if parameter.default is parameter.empty else parameter.default
        if isinstance(default, FieldInfo):  # as FastMCP, FastAPI and pydantic-ai take it
            if default.default_factory is not None:
                about["default_factory"] = default.default_factory
            hint, default = Annotated[hint, default], default.default
        fields[f"p{position}"] = (hint, Field(default, **about))
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        model: type[BaseModel] = create_model(name, __config__=config, **fields)
        model.model_json_schema()  # there is none of a Callable
    except PydanticSchemaGenerationError as error:
        problem = str(error).split(".")[0]
        raise BadInput(f"tool {name!r}: no model can fill in {problem}", param="tools") from error
    except PydanticUserError as error:  # such as typing's TypedDict before Python 3.12
        problem = str(error).splitlines()[0]
        raise BadInput(f"tool {name!r}: {problem}", param="tools") from error
    return model, context


def unbound(function: Callable[..., Any]) -> tuple[Callable[..., Any], set[str]]:
    """The function within functools.partial, and the parameters given by name there."""
    fixed: set[str] = set()
    while isinstance(function, functools.partial):
        fixed |= function.keywords.keys()
        function = function.func
    return function, fixed


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise BadInput(
            f"tool {name!r}: an annotation cannot be read: {error}; import it at the top of the "
            "module, outside of `if TYPE_CHECKING`",
            param="tools",
        ) from error


def _check_parameter(parameter: inspect.Parameter, function: Callable[..., Any], name: str) -> None:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise BadInput(
            f"tool {name!r}: parameter {parameter} cannot be given by name; "
            "use ordinary parameters",
            param="tools",
        )
    if parameter.name == "self" and inspect.isfunction(function):
        raise BadInput(
            f"tool {name!r} is a class's method: give that of an object, as in tools=[shop.{name}]",
            param="tools",
        )


def _takes_context(hint: Any) -> bool:
    """Tell whether a hint is RunContext or RunContext[...], also within Annotated or Optional."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _takes_context(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return any(_takes_context(part) for part in get_args(hint))
    hint = origin or hint
    return isinstance(hint, type) and issubclass(hint, RunContext)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Read a Google-style docstring as (description, {parameter: description})."""
    description: list[str] = []
    parameters: dict[str, str] = {}
    section, indent, current = "", 0, ""
    for line in text.splitlines():
        stripped, depth = line.strip(), len(line) - len(line.lstrip())
        if heading := _SECTION.fullmatch(stripped) if depth == 0 else None:
            section, indent, current = heading[1], 0, ""
        elif not section or (depth == 0 and stripped):
            section = ""
            description.append(stripped)
        elif section in ("Args", "Arguments", "Parameters") and stripped:
            indent = indent or depth
            entry = _PARAMETER.fullmatch(stripped) if depth <= indent else None
            if entry:
                current = entry[1]
                parameters[current] = entry[2]
            elif current:
                parameters[current] = f"{parameters[current]} {stripped}".strip()
    return "\n".join(description).strip(), parameters


def untitled(node: Any) -> Any:
    """A JSON schema without the titles that pydantic makes up."""
    if isinstance(node, dict):
        items = node.items()
        return {
            key: untitled(value)
            for key, value in items
            if not (key == "title" and isinstance(value, str))
        }
    return [untitled(item) for item in node] if isinstance(node, list) else node
