"""Tool: a typed Python function that a model can call, made by @tool.

The schema comes from the signature and the docstring (signatures.py). Any failure of a call
(invalid arguments, a refusal, an exception, a timeout, an unknown name) becomes a short text for
the model and stands in ToolCall.error. It never ends a run, but for the errors in PASSING. Called
by conversation.py.
"""

import asyncio
import difflib
import functools
import inspect
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import orjson
import tenacity
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from cray_agents.agent import user_code
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.signatures import read_docstring, read_signature, unbound, untitled
from cray_agents.errors import BadInput, RealModelCall, ReplayMismatch, SubagentError, ToolError
from cray_agents.records import ToolCall

F = TypeVar("F", bound=Callable[..., Any])
#: Approval of a call: True, or the reason for a refusal (False: without a reason).
Approve = Callable[[ToolCall, RunContext], bool | str | Awaitable[bool | str]]
#: A check of validated arguments: the problem in words for a model, or None.
Check = Callable[[Mapping[str, Any]], Awaitable[str | None]]

TIMEOUT = 60.0  # seconds; the default of a tool
MAX_CHARS = 20_000  # of a result for the model: about 5,000 tokens
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: Errors that end the run: the infrastructure failed a sub-agent, or a test forbids the call.
PASSING = (SubagentError, RealModelCall, ReplayMismatch)


@dataclass(frozen=True, eq=False)
class Tool:
    """A function a model may call. `schema` is the tool as OpenAI's `tools` lists it.

    Made by `@tool`, or by Agent from a plain function; see `tool` for the options.
    `context_parameter` names the parameter that gets the RunContext. `check` looks at valid
    arguments once more, where a schema takes longer than an event loop may wait.
    """

    name: str
    description: str
    schema: dict[str, Any]
    arguments: type[BaseModel]
    function: Callable[..., Any]
    timeout: float | None = TIMEOUT
    retries: int = 0
    approve: Approve | None = None
    max_chars: int | None = MAX_CHARS
    context_parameter: str | None = None
    check: Check | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    async def call(
        self, arguments: str, context: RunContext | None = None, *, call_id: str = ""
    ) -> Any:
        """Validate a JSON object of arguments, have the call approved, make it.

        Raises ToolError, and the errors in PASSING.
        """
        values = self._validated(arguments)
        if self.check is not None and (problem := await self._checked(self.check, values)):
            raise ToolError(self._refusal(problem))
        if name := self.context_parameter:
            default = inspect.signature(self.function).parameters[name].default
            if context is not None or default is inspect.Parameter.empty:
                values[name] = self._require(context)
        if self.approve is not None:
            requested = ToolCall(id=call_id, name=self.name, arguments=arguments)
            await _check_approval(self.approve, requested, self._require(context))
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=tenacity.wait_exponential(multiplier=0.1, max=2),
            retry=tenacity.retry_if_exception(_may_pass),
            reraise=True,
        )
        bound = functools.partial(self.function, **values)
        plain, _ = unbound(self.function)
        if inspect.isasyncgenfunction(plain):
            bound = functools.partial(_list_async, bound)
        elif inspect.isgeneratorfunction(plain):
            bound = functools.partial(_list_sync, bound)
        try:
            if not self.retries:
                return await user_code.call(bound, self.timeout)
            return await attempts(user_code.call, bound, self.timeout)
        except user_code.UserCodeTimeout:
            raise ToolError(f"{self.name} did not answer within {self.timeout:g} s") from None
        except (ToolError, *PASSING):
            raise
        except Exception as error:
            raise ToolError(f"{self.name} failed: {type(error).__name__}: {error}") from error

    def _require(self, context: RunContext | None) -> RunContext:
        if context is None:
            raise ToolError(f"{self.name} works only within an agent's run")
        return context

    def _validated(self, arguments: str) -> dict[str, Any]:
        try:
            given = self.arguments.model_validate_json(arguments.strip() or "{}")
        except ValidationError as error:
            problems = "; ".join(
                ": ".join([*map(str, problem["loc"]), problem["msg"]])
                for problem in error.errors(include_url=False, include_input=False)
            )
            raise ToolError(self._refusal(problems)) from error
        fields = self.arguments.model_fields
        named = {info.alias or name: getattr(given, name) for name, info in fields.items()}
        return {**named, **(given.model_extra or {})}

    async def _checked(self, check: Check, values: Mapping[str, Any]) -> str | None:
        try:
            async with asyncio.timeout(self.timeout):
                return await check(values)
        except TimeoutError:
            raise ToolError(f"{self.name} did not answer within {self.timeout:g} s") from None

    def _refusal(self, problems: str) -> str:
        return f"bad arguments for {self.name}: {problems}. Expected {self.signature}"

    def described(self, text: str) -> "Tool":
        """The tool with this description."""
        if text == self.description:
            return self
        function = {**self.schema["function"], "description": text}
        return replace(self, description=text, schema={**self.schema, "function": function})

    @property
    def signature(self) -> str:
        """The signature for a model, such as `search(query: string, limit?: integer)`."""
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
    *,
    timeout: float | None = TIMEOUT,
    retries: int = 0,
    name: str | None = None,
    approve: Approve | None = None,
    max_chars: int | None = MAX_CHARS,
) -> Callable[[F], F]: ...


def tool(
    function: F | None = None,
    *,
    timeout: float | None = TIMEOUT,
    retries: int = 0,
    name: str | None = None,
    approve: Approve | None = None,
    max_chars: int | None = MAX_CHARS,
) -> F | Callable[[F], F]:
    """Let models call this function or method: `@tool` or `@tool(timeout=20)`.

    The function stays what it was. Its parameters need annotations; a Google-style `Args:`
    section in its docstring describes them. A parameter annotated `RunContext` gets the run's
    context, and the model does not see it. The function may be sync (it then runs in a thread) or
    async. The result of a generator is the list of its items. Of a functools.partial the model
    gives the open parameters.

    Args:
        function: the decorated function.
        timeout: seconds a call may take; None: no limit.
        retries: tries after an exception that is no ToolError.
        name: the tool's name for models; default: the function's name.
        approve: asked before each call whose arguments are valid, with the ToolCall and the
            RunContext, sync or async, for as long as it takes. The call is carried out if the
            answer is True. A text is the reason for a refusal, for the model to read.
        max_chars: of a longer result the model sees head and tail, with a note; the record has all
            of it. None: no limit.

    Raises BadInput for options that make no sense.
    """
    if timeout is not None and not timeout > 0:
        raise BadInput(f"timeout={timeout!r}: must be above 0 seconds, or None", param="timeout")
    if retries < 0:
        raise BadInput(f"retries={retries!r}: must not be negative", param="retries")
    if max_chars is not None and max_chars < 1:
        raise BadInput(f"max_chars={max_chars!r}: must be above 0, or None", param="max_chars")
    if approve is not None and not callable(approve):
        raise BadInput(f"approve={approve!r}: give a function, or None", param="approve")
    options = {
        "timeout": timeout, "retries": retries, "name": name, "approve": approve,
        "max_chars": max_chars,
    }  # fmt: skip

    def mark(function: F) -> F:
        if inspect.ismethod(function):
            raise BadInput(f"{function!r}: mark the method in its class", param="function")
        marked = function.__func__ if isinstance(function, _WRAPPED) else function
        marked.__tool_options__ = options  # type: ignore[attr-defined]
        return function

    return mark(function) if function is not None else mark


_WRAPPED = (staticmethod, classmethod)


def as_tool(function: Tool | Callable[..., Any]) -> Tool:
    """Make a Tool of a function, marked or not. Raises BadInput if that cannot be."""
    if isinstance(function, Tool):
        return function
    if not callable(function):
        raise BadInput(f"{function!r} is not a tool: give a function", param="tools")
    plain, _ = unbound(function)
    options: dict[str, Any] = dict(getattr(plain, "__tool_options__", {}))
    name = options.pop("name", None) or getattr(plain, "__name__", type(plain).__name__)
    if not NAME.fullmatch(name):
        raise BadInput(
            f"a tool cannot be called {name!r}: use 1 to 64 letters, digits, _ and -; "
            "@tool(name=...) sets the name",
            param="tools",
        )
    description, described = read_docstring(inspect.getdoc(plain) or "")
    arguments, context = read_signature(function, name, described)
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"properties": {}, **untitled(arguments.model_json_schema())},
        },
    }
    return Tool(
        name, description, schema, arguments, function, context_parameter=context, **options
    )


async def perform(
    tools: Mapping[str, Tool], requested: Mapping[str, Any], context: RunContext | None = None
) -> ToolCall:
    """Carry out one tool call of a (tidied) message; failures are in the ToolCall's `error`."""
    name, arguments = requested["function"]["name"], requested["function"]["arguments"]
    known = tools.get(name)
    started = time.monotonic()
    result, problem = None, None
    try:
        if known is None:
            raise ToolError(_unknown(name, tools))
        result = _as_json(await known.call(arguments, context, call_id=requested["id"]), name)
    except ToolError as error:
        problem = _encodable(str(error))
    call = ToolCall(
        id=requested["id"],
        name=name,
        arguments=arguments,
        result=result,
        error=problem,
        seconds=time.monotonic() - started,
    )
    return _shortened(call, known.max_chars if known else MAX_CHARS)


def model_text(call: ToolCall) -> str:
    """The text of a tool call for the model: a str result as it is, any other as JSON."""
    if call.shown is not None:
        return call.shown
    if call.error is not None:
        return f"Error: {call.error}"
    return call.result if isinstance(call.result, str) else to_json(call.result).decode()


async def _list_async(function: Callable[[], AsyncIterator[Any]]) -> list[Any]:
    """All items of an async generator, as its result."""
    return [item async for item in function()]


def _list_sync(function: Callable[[], Iterable[Any]]) -> list[Any]:
    """All items of a generator, as its result."""
    return [*function()]


async def _check_approval(approve: Approve, requested: ToolCall, context: RunContext) -> None:
    """Ask for approval. Raises ToolError unless the answer is True: a failure refuses too."""
    try:
        answer = await user_code.call(functools.partial(approve, requested, context), None)
    except Exception as error:
        raise ToolError(
            f"{requested.name} was not carried out: asking for approval failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    if answer is not True:
        reason = f": {answer}" if isinstance(answer, str) and answer else ""
        raise ToolError(f"{requested.name} was refused{reason}")


def _may_pass(error: BaseException) -> bool:
    """Tell whether to call a tool again after this error. A CancelledError ends the run."""
    final = (ToolError, user_code.UserCodeTimeout, *PASSING)
    return isinstance(error, Exception) and not isinstance(error, final)


def _shortened(call: ToolCall, max_chars: int | None) -> ToolCall:
    """The call, with a shortened text for the model if its own is too long."""
    text = model_text(call)
    if max_chars is None or len(text) <= max_chars:
        return call
    head, tail = text[: -(-max_chars // 2)], text[len(text) - max_chars // 2 :]
    note = f"\n[... {len(text) - max_chars:,} characters left out ...]\n"
    return call.model_copy(update={"shown": head + note + tail})


def _as_json(value: Any, name: str) -> Any:
    """A tool's result as JSON data, pydantic models included. Raises ToolError."""
    if isinstance(value, str):
        return _encodable(value)
    try:
        text = to_json(value, inf_nan_mode="strings")
        data = from_json(text)
    except ValueError as error:  # not serializable, or nested too deeply
        raise ToolError(f"{name} returned no JSON data but {type(value).__name__!r}") from error
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
