"""A Tool from a JSON schema, where there is no Python signature to read one from.

Called by mcp_client.py; also for your own bridges to whatever describes its tools in JSON.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, create_model, model_validator
from pydantic_core import PydanticCustomError

from cray_agents.errors import BadInput, SetupError
from cray_agents.toolbox import NAME, TIMEOUT, Tool


def tool_from_schema(
    name: str,
    description: str,
    parameters: Mapping[str, Any],
    call: Callable[..., Any],
    *,
    timeout: float | None = TIMEOUT,
    **options: Any,
) -> Tool:
    """A tool whose arguments are checked against `parameters`, the JSON schema of an object.

    `call`, sync or async, gets them as one dict, `call(arguments={...})`, with what the model gave
    and no defaults filled in. `options` are Tool's others. References that lead out of the schema
    are not followed. Raises BadInput for a name or schema that cannot be used, and SetupError
    where jsonschema is not installed.
    """
    if not NAME.fullmatch(name):
        raise BadInput(f"a tool cannot be called {name!r}: use 1 to 64 letters, digits, _ and -")
    problem = _checker(name, parameters)

    def check(given: Any) -> Any:
        if (what := problem(given)) is not None:
            raise PydanticCustomError("json_schema", "{what}", {"what": what})
        return {"arguments": given}

    validators: dict[str, Any] = {"check": model_validator(mode="before")(check)}
    arguments = create_model(
        name,
        __config__=ConfigDict(extra="forbid"),
        __validators__=validators,
        arguments=(dict[str, Any], ...),
    )
    shown = {"type": "object", **parameters, "properties": _described(parameters)}
    function = {"name": name, "description": description, "parameters": shown}
    schema = {"type": "function", "function": function}
    return Tool(name, description, schema, arguments, call, timeout=timeout, **options)


def _checker(name: str, schema: Mapping[str, Any]) -> Callable[[Any], str | None]:
    """What is wrong with a value by this schema, in words for a model; None: nothing."""
    try:
        import jsonschema
        import referencing
        from jsonschema.validators import validator_for
    except ModuleNotFoundError as error:
        raise SetupError(
            f"tool {name!r} comes with a JSON schema: pip install 'cray-agents[tools]'"
        ) from error
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise BadInput(f"tool {name!r} has a broken JSON schema: {error.message}") from error
    validator = kind(schema, registry=referencing.Registry())

    def problem(value: Any) -> str | None:
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        except referencing.exceptions.Unresolvable as unresolved:
            return f"its schema refers to {unresolved.ref!r}, which is not in it"
        if error is None:
            return None
        place = "".join(f"{part}: " for part in error.absolute_path)
        return f"{place}{error.message[:300]}"

    return problem


def _described(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Its properties; a schema may be `true` for anything, which is the same as `{}`."""
    properties = parameters.get("properties", {})
    return {key: about if isinstance(about, dict) else {} for key, about in properties.items()}
