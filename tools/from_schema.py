"""A Tool from a JSON schema, where there is no Python signature to read one from.

Called by mcp_client.py; also for your own bridges to whatever describes its tools in JSON.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, create_model, model_validator

from cray_agents.agent.tool import NAME, TIMEOUT, Tool
from cray_agents.errors import BadInput
from cray_agents.tools.schema_checks import SchemaChecks


def tool_from_schema(
    name: str,
    description: str,
    parameters: Mapping[str, Any],
    call: Callable[..., Any],
    *,
    timeout: float | None = TIMEOUT,
    checks: SchemaChecks | None = None,
    **options: Any,
) -> Tool:
    """A tool whose arguments are checked against `parameters`, the JSON schema of an object.

    `call`, sync or async, gets them as one dict, `call(arguments={...})`, with what the model gave
    and no defaults filled in. `options` are Tool's others. References that lead out of the schema
    are not followed. The check is made in another process (schema_checks.py); `checks`: which,
    else one that all share. Raises BadInput for a name or schema that cannot be used, and
    SetupError where jsonschema is not installed.
    """
    if not NAME.fullmatch(name):
        raise BadInput(f"a tool cannot be called {name!r}: use 1 to 64 letters, digits, _ and -")
    checks = checks or _shared(os.getpid())
    text = checks.text_of(name, parameters)

    async def check(values: Mapping[str, Any]) -> str | None:
        return await checks.problem(text, values["arguments"])

    validators: dict[str, Any] = {"wrap": model_validator(mode="before")(_wrapped)}
    arguments = create_model(
        name,
        __config__=ConfigDict(extra="forbid"),
        __validators__=validators,
        arguments=(dict[str, Any], ...),
    )
    shown = {"type": "object", **parameters, "properties": _described(parameters)}
    function = {"name": name, "description": description, "parameters": shown}
    schema = {"type": "function", "function": function}
    return Tool(name, description, schema, arguments, call, timeout=timeout, check=check, **options)


def _wrapped(given: Any) -> Any:
    return {"arguments": given}


@functools.cache
def _shared(pid: int) -> SchemaChecks:
    """The checks of a process for all tools that bring none."""
    return SchemaChecks()


def _described(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Its properties; a schema may be `true` for anything, which is the same as `{}`."""
    properties = parameters.get("properties", {})
    return {key: about if isinstance(about, dict) else {} for key, about in properties.items()}
