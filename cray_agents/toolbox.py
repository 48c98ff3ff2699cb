"""@tool: a typed Python function as something a model can call.

The schema comes from the signature and the docstring. Whatever goes wrong in a call (arguments that
do not validate, an exception, a timeout, an unknown name) becomes a short text for the model and
stands in ToolCall.error; it never ends a run. Called by agent.py.
"""

import difflib
import functools
import inspect
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints, overload

import orjson
import tenacity
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticSerializationError, from_json, to_json

from cray_agents import foreign
from cray_agents.errors import BadInput, ToolError
from cray_agents.records import ToolCall

F = TypeVar("F", bound=Callable[..., Any])

TIMEOUT = 60.0  # seconds, of a tool that names none
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*(.*)"
)
_PARAMETER = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


@dataclass(frozen=True, eq=False)
class Tool:
    """A function a model may call. `schema` is the tool as OpenAI's `tools` lists it.

    Made by `@tool`, or by Agent from a plain function. `timeout` is in seconds (None: no limit);
    `retries` says how often an exception other than ToolError is tried again.
    """

    name: str
    description: str
    schema: dict[str, Any]
    arguments: type[BaseModel]
    function: Callable[..., Any]
    timeout: float | None = TIMEOUT
    retries: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        return self.function(*args, **kwargs)

    async def call(self, arguments: str) -> Any:
        """Validate a JSON object of arguments and call the function. Raises ToolError."""
        values = self._validated(arguments)
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=tenacity.wait_exponential(multiplier=0.1, max=2),
            retry=tenacity.retry_if_not_exception_type((ToolError, foreign.Overdue)),
            reraise=True,
        )
        bound = functools.partial(self.function, **values)
        try:
            if not self.retries:
                return await foreign.call(bound, self.timeout)
            return await attempts(foreign.call, bound, self.timeout)
        except foreign.Overdue:
            raise ToolError(f"{self.name} did not answer within {self.timeout:g} s") from None
        except ToolError:
            raise
        except Exception as error:
            raise ToolError(f"{self.name} failed: {type(error).__name__}: {error}") from error

    def _validated(self, arguments: str) -> dict[str, Any]:
        try:
            given = self.arguments.model_validate_json(arguments.strip() or "{}")
        except ValidationError as error:
            problems = "; ".join(
                ": ".join([*map(str, problem["loc"]), problem["msg"]])
                for problem in error.errors(include_url=False, include_input=False)
            )
            raise ToolError(
                f"bad arguments for {self.name}: {problems}. Expected {self.signature}"
            ) from error
        fields = self.arguments.model_fields
        return {str(info.alias): getattr(given, name) for name, info in fields.items()}

    @property
    def signature(self) -> str:
        """Such as `search(query: string, limit?: integer)`: what a model is told."""
        parameters = self.schema["function"]["parameters"]
        required = parameters.get("required", [])
        listed = (
            f"{name}{'' if name in required else '?'}: {about.get('type', 'value')}"
            for name, about in parameters["properties"].items()
        )
        return f"{self.name}({', '.join(listed)})"


@overload
def tool(function: F) -> F: ...
@overload
def tool(
    *, timeout: float | None = TIMEOUT, retries: int = 0, name: str | None = None
) -> Callable[[F], F]: ...


def tool(
    function: F | None = None,
    *,
    timeout: float | None = TIMEOUT,
    retries: int = 0,
    name: str | None = None,
) -> F | Callable[[F], F]:
    """Let models call this function: `@tool` or `@tool(timeout=20)`.

    The function stays what it was. Its parameters need annotations; a Google-style `Args:`
    section in its docstring describes them. It may be sync (it then runs in a thread) or async.

    Args:
        function: what is decorated.
        timeout: seconds a call may take; None: no limit.
        retries: how often to try again after an exception that is no ToolError.
        name: what models call it; default: the function's name.

    Raises BadInput for a timeout or retries that cannot be meant.
    """
    if timeout is not None and not timeout > 0:
        raise BadInput(f"timeout={timeout!r}: must be above 0 seconds, or None", param="timeout")
    if retries < 0:
        raise BadInput(f"retries={retries!r}: must not be negative", param="retries")

    def mark(function: F) -> F:
        options = {"timeout": timeout, "retries": retries, "name": name}
        function.__tool_options__ = options  # type: ignore[attr-defined]
        return function

    return mark(function) if function is not None else mark


def as_tool(thing: Tool | Callable[..., Any]) -> Tool:
    """The Tool a function was marked to be, or may well be. Raises BadInput if it cannot."""
    if isinstance(thing, Tool):
        return thing
    if not callable(thing):
        raise BadInput(f"{thing!r} is not a tool: give a function", param="tools")
    options: dict[str, Any] = dict(getattr(thing, "__tool_options__", {}))
    name = options.pop("name", None) or getattr(thing, "__name__", type(thing).__name__)
    if not NAME.fullmatch(name):
        raise BadInput(
            f"a tool cannot be called {name!r}: use 1 to 64 letters, digits, _ and -; "
            "@tool(name=...) sets the name",
            param="tools",
        )
    description, described = read_docstring(inspect.getdoc(thing) or "")
    arguments = _arguments(thing, name, described)
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"properties": {}, **_untitled(arguments.model_json_schema())},
        },
    }
    return Tool(name, description, schema, arguments, thing, **options)


async def perform(tools: Mapping[str, Tool], asked: Mapping[str, Any]) -> ToolCall:
    """Carry out one tool call of a (tidied) message; failures are in the ToolCall's `error`."""
    name, arguments = asked["function"]["name"], asked["function"]["arguments"]
    started = time.monotonic()
    result, problem = None, None
    try:
        if name not in tools:
            raise ToolError(_unknown(name, tools))
        result = _as_json(await tools[name].call(arguments), name)
    except ToolError as error:
        problem = _encodable(str(error))
    return ToolCall(
        id=asked["id"],
        name=name,
        arguments=arguments,
        result=result,
        error=problem,
        seconds=time.monotonic() - started,
    )


def told(call: ToolCall) -> str:
    """What the model reads of a tool call: a str result as it is, any other as JSON."""
    if call.error is not None:
        return f"Error: {call.error}"
    return call.result if isinstance(call.result, str) else to_json(call.result).decode()


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """A Google-style docstring as (description, {parameter: description})."""
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


def _arguments(
    function: Callable[..., Any], name: str, described: Mapping[str, str]
) -> type[BaseModel]:
    """A model of a function's parameters: fields p0, p1, ... whose aliases are their names.

    The detour spares authors the names that pydantic keeps for itself, such as `json`.
    """
    target = function if inspect.isroutine(function) else type(function).__call__
    hints = get_type_hints(target, include_extras=True)
    fields: dict[str, Any] = {}
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadInput(
                f"tool {name!r}: parameter {parameter} cannot be given by name; "
                "use ordinary parameters",
                param="tools",
            )
        about: dict[str, Any] = {"alias": parameter.name}
        if parameter.name in described:
            about["description"] = described[parameter.name]
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"p{position}"] = (hints.get(parameter.name, Any), Field(default, **about))
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    model: type[BaseModel] = create_model(name, __config__=config, **fields)
    return model


def _untitled(node: Any) -> Any:
    """A JSON schema without the titles that pydantic makes up."""
    if isinstance(node, dict):
        items = node.items()
        return {
            key: _untitled(value)
            for key, value in items
            if not (key == "title" and isinstance(value, str))
        }
    return [_untitled(item) for item in node] if isinstance(node, list) else node


def _as_json(value: Any, name: str) -> Any:
    """A tool's result as JSON data, pydantic models included."""
    if isinstance(value, str):
        return _encodable(value)
    try:
        text = to_json(value, inf_nan_mode="strings")
    except PydanticSerializationError as error:
        raise ToolError(f"{name} returned no JSON data but {type(value).__name__!r}") from error
    data = from_json(text)
    try:
        orjson.dumps(data)
    except TypeError:  # an integer beyond 64 bits: kept as the text the model reads
        return text.decode()
    return data


def _encodable(text: str) -> str:
    """Text without lone surrogates (file names have them), which JSON cannot carry."""
    return text.encode("utf-8", "replace").decode()


def _unknown(name: str, tools: Mapping[str, Tool]) -> str:
    if not tools:
        return f"there is no tool {name!r}, and no other tool"
    near = difflib.get_close_matches(name, tools, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no tool {name!r}; {hint}The tools are: {', '.join(tools)}"
