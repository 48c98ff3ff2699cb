"""From schema: make a Tool of a JSON schema instead of a Python signature.

Called by mcp_client.py. Use it also for your own bridges to services with tools in JSON.
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
    """Make a tool whose arguments are checked against `parameters`, the JSON schema of an object.

    `call`, sync or async, gets the model's arguments as one dict, `call(arguments={...})`, without
    defaults filled in. `options` are further ones of Tool. References out of the schema are not
    followed. Another process makes the check (schema_checks.py): that of `checks`, else a common
    one. Raises BadInput for an unusable name or schema, and SetupError without jsonschema.
    """
    if not NAME.fullmatch(name):
        raise BadInput(f"a tool cannot be called {name!r}: use 1 to 64 letters, digits, _ and -")
    checks = checks or _shared_checks(os.getpid())
    text = checks.text_of(name, parameters)

    async def check(values: Mapping[str, Any]) -> str | None:
        return await checks.problem(text, values["arguments"])

    validators: dict[str, Any] = {"wrap": model_validator(mode="before")(_wrap)}
    arguments = create_model(
        name,
        __config__=ConfigDict(extra="forbid"),
        __validators__=validators,
        arguments=(dict[str, Any], ...),
    )
    parameters_schema = {
        "type": "object",
        **parameters,
        "properties": _describe_properties(parameters),
    }
    function = {"name": name, "description": description, "parameters": parameters_schema}
    schema = {"type": "function", "function": function}
    return Tool(name, description, schema, arguments, call, timeout=timeout, check=check, **options)


def _wrap(given: Any) -> Any:
    return {"arguments": given}


@functools.cache
def _shared_checks(pid: int) -> SchemaChecks:
    """Return the checks of a process for all tools without their own."""
    return SchemaChecks()


def _describe_properties(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a schema, with `{}` for `true`, which means the same."""
    properties = parameters.get("properties", {})
    return {key: about if isinstance(about, dict) else {} for key, about in properties.items()}
