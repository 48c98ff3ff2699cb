"""From schema: make a Tool of a JSON schema instead of a Python signature.

A foreign schema can be made to take for ever, by a regular expression or by references that double.
Therefore a check runs in a thread and ends after SECONDS of processor time, and patterns are
matched by pydantic's engine, which takes linear time. Called by mcp_client.py. Use it also for your
own bridges to services with tools in JSON.
"""

import asyncio
import functools
import importlib.util
import inspect
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

from pydantic import ConfigDict, create_model, model_validator
from pydantic_core import SchemaError, SchemaValidator, core_schema

from cray_agents.agent.tool import NAME, TIMEOUT, Tool
from cray_agents.errors import BadInput, SetupError, ToolError

SECONDS = 1.0  # processor time of a check
MAX_CHARS = 100_000  # length of a schema as JSON
MAX_MESSAGE = 300  # characters of a problem

log = logging.getLogger(__name__)
T = TypeVar("T")


def tool_from_schema(
    name: str,
    description: str,
    parameters: Mapping[str, Any],
    call: Callable[..., Any],
    *,
    timeout: float | None = TIMEOUT,
    **options: Any,
) -> Tool:
    """Make a tool whose arguments are checked against `parameters`, the JSON schema of an object.

    `call`, sync or async, gets the model's arguments as one dict, `call(arguments={...})`, without
    defaults filled in. `options` are further ones of Tool. See SchemaCheck for what is checked.
    Raises BadInput for an unusable name or schema, and SetupError without jsonschema.
    """
    if not NAME.fullmatch(name):
        raise BadInput(f"a tool cannot be called {name!r}: use 1 to 64 letters, digits, _ and -")
    schema_check = SchemaCheck(name, parameters)

    async def check(values: Mapping[str, Any]) -> str | None:
        return await schema_check.problem(values["arguments"])

    def wrap(given: Any) -> Any:
        return {"arguments": given}

    validators: dict[str, Any] = {"wrap": model_validator(mode="before")(wrap)}
    arguments = create_model(
        name,
        __config__=ConfigDict(extra="forbid"),
        __validators__=validators,
        arguments=(dict[str, Any], ...),
    )
    properties = {  # `true` and `{}` mean the same
        key: about if isinstance(about, dict) else {}
        for key, about in parameters.get("properties", {}).items()
    }
    parameters = {"type": "object", **parameters, "properties": properties}
    function = {"name": name, "description": description, "parameters": parameters}
    schema = {"type": "function", "function": function}
    return Tool(name, description, schema, arguments, call, timeout=timeout, check=check, **options)


class SchemaCheck:
    """The check of values by the JSON schema of the tool `name`.

    References out of the schema are not followed. The keywords `unevaluatedItems` and
    `unevaluatedProperties`, and patterns that cannot be matched in linear time (look-around,
    references back), are left to whoever takes the values; a warning tells of such patterns. Raises
    BadInput for a broken or too large schema, and SetupError without jsonschema.
    """

    def __init__(self, name: str, schema: Any) -> None:
        if importlib.util.find_spec("jsonschema") is None:
            raise SetupError(
                "tools with a JSON schema need jsonschema: pip install 'cray-agents[tools]'"
            )
        from jsonschema import Draft202012Validator
        from jsonschema.validators import validator_for
        from referencing import Registry

        try:
            text = json.dumps(schema)
            if len(text) > MAX_CHARS:
                raise BadInput(
                    f"tool {name!r} has a JSON schema of {len(text):,} characters: "
                    f"at most {MAX_CHARS:,} are taken"
                )
            kind = validator_for(schema, default=Draft202012Validator)
            check = functools.partial(_problem, kind(kind.META_SCHEMA), schema)
            if (problem := _within_time(check)) is not None:
                raise BadInput(f"tool {name!r} has a broken JSON schema: {problem}")
            prepare = functools.partial(_prepare, name)
            plain = _within_time(lambda: json.loads(text, object_hook=prepare))
        except (ValueError, TypeError, RecursionError, ToolError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"tool {name!r} has a broken JSON schema: {error}") from error
        self._validator = _bounded(kind)(plain, registry=Registry())

    async def problem(self, value: Any) -> str | None:
        """Return the problem of a value in words for a model, or None. Raises ToolError."""
        check = functools.partial(_problem, self._validator, value)
        return await asyncio.to_thread(_within_time, check)


def _within_time(work: Callable[[], T]) -> T:
    """Return what some work with a schema returns. Raises ToolError if it takes too long."""
    end = time.thread_time() + SECONDS

    def look(frame: FrameType, event: str, argument: Any) -> None:
        """Look at the time whenever this thread calls a function of a check.

        An error elsewhere may be lost, and this with it: Python also calls the generators that it
        closes, and functions of objects that it collects, and drops what they raise.
        """
        if event == "call" and time.thread_time() > end and _checks(frame):
            raise ToolError(
                f"its JSON schema takes more than {SECONDS:g} s to check: it may be made so, "
                "by references that double"
            )

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        return work()
    except RecursionError as error:
        raise ToolError("its JSON schema cannot be checked: nested too deeply") from error
    finally:
        sys.setprofile(before)


def _checks(frame: FrameType) -> bool:
    """Tell whether a function takes part in a check, and is no generator."""
    module = str(frame.f_globals.get("__name__"))
    ours = module == __name__ or module.partition(".")[0] in ("jsonschema", "referencing", "re")
    return ours and not frame.f_code.co_flags & inspect.CO_GENERATOR


def _problem(validator: Any, value: Any) -> str | None:
    """Return the problem of a value in words for a model, or None."""
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(validator.iter_errors(value))
    except Unresolvable as unresolved:
        return f"its schema refers to {unresolved.ref!r}, which is not in it"
    if error is None:
        return None
    place = "".join(f"{part}: " for part in error.absolute_path)
    return f"{place}{error.message[:MAX_MESSAGE]}"


def _prepare(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a schema without a dialect of its own, and warn of patterns not matched."""
    if isinstance(part.get("$schema"), str):  # it would exchange the validator
        del part["$schema"]
    named = part.get("patternProperties")
    for pattern in [part.get("pattern"), *(named if isinstance(named, dict) else ())]:
        if isinstance(pattern, str) and _matcher(pattern) is None:
            log.warning("tool %r: the pattern %.200r of its schema is not checked", name, pattern)
    return part


@functools.cache
def _bounded(kind: Any) -> Any:
    """Return a kind of validator that matches patterns in linear time."""
    from jsonschema.validators import extend

    own = {
        "pattern": _check_pattern,
        "patternProperties": _check_named,
        "additionalProperties": _check_others,
        "unevaluatedItems": _check_nothing,
        "unevaluatedProperties": _check_nothing,
    }
    return extend(kind, {word: step for word, step in own.items() if word in kind.VALIDATORS})


def _check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if isinstance(value, str) and not _matches(pattern, value, True):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _check_named(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for pattern, below in patterns.items():
            for key, each in value.items():
                if _matches(pattern, key, False):
                    yield from validator.descend(each, below, path=key, schema_path=pattern)


def _check_others(validator: Any, below: Any, value: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if not isinstance(value, dict):
        return
    patterns = schema.get("patternProperties", {})
    for key, each in value.items():
        named = any(_matches(pattern, key, True) for pattern in patterns)
        if named or key in schema.get("properties", {}):
            continue
        if below is False:
            yield ValidationError(f"additional properties are not allowed: {key!r} was unexpected")
        else:
            yield from validator.descend(each, below, path=key)


def _check_nothing(validator: Any, below: Any, value: Any, schema: Any) -> Iterator[Any]:
    yield from ()


def _matches(pattern: str, text: str, unknown: bool) -> bool:
    """Return True if a pattern is found in a text; `unknown` if it has no match in linear time."""
    matcher = _matcher(pattern)
    return unknown if matcher is None else matcher.isinstance_python(text)


@functools.lru_cache(maxsize=1024)
def _matcher(pattern: str) -> SchemaValidator | None:
    """Return pydantic's matcher of a pattern, or None if its engine does not take the pattern."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:
        return None
