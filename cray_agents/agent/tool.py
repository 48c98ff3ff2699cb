"""@tool: a typed Python function as something a model can call.

The schema comes from the signature and the docstring (signatures.py). Whatever goes wrong in a call
(arguments that do not validate, a refusal, an exception, a timeout, an unknown name) becomes a
short text for the model and stands in ToolCall.error; it never ends a run, but for what PASSING
lists. Called by turns.py.
"""

import asyncio
import difflib
import functools
import inspect
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import orjson
import tenacity
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from cray_agents.agent import user_code
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.signatures import read_docstring, read_signature, unbound, untitled
from cray_agents.errors import (
    BadInput,
    RealModelCall,
    ReplayMismatch,
    SubagentError,
    ToolError,
)
from cray_agents.records import ToolCall

F = TypeVar("F", bound=Callable[..., Any])
#: Whether a call may be carried out: True, or the reason why not (False: none is given).
Approve = Callable[[ToolCall, RunContext], bool | str | Awaitable[bool | str]]
#: What is wrong with validated arguments, in words for a model; None: nothing.
Check = Callable[[Mapping[str, Any]], Awaitable[str | None]]

TIMEOUT = 60.0  # seconds, of a tool that names none
MAX_CHARS = 20_000  # of a result, that a model is shown: about 5,000 tokens
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: What ends the run: a sub-agent's was failed by the infrastructure, or a test forbids the call.
PASSING = (SubagentError, RealModelCall, ReplayMismatch)


@dataclass(frozen=True, eq=False)
class Tool:
    """A function a model may call. `schema` is the tool as OpenAI's `tools` lists it.

    Made by `@tool`, or by Agent from a plain function; see `tool` for the options.
    `context_parameter` names the one that is given the RunContext. `check` is asked about the
    arguments that `arguments` let through, where a schema takes longer than an event loop may wait.
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
        """The function itself."""
        return self.function(*args, **kwargs)

    async def call(
        self, arguments: str, context: RunContext | None = None, *, call_id: str = ""
    ) -> Any:
        """Validate a JSON object of arguments, have the call approved, call.

        Raises ToolError, and what PASSING lists.
        """
        values = self._validated(arguments)
        if self.check is not None and (problem := await self._checked(self.check, values)):
            raise ToolError(self._refusal(problem))
        if name := self.context_parameter:
            default = inspect.signature(self.function).parameters[name].default
            if context is not None or default is inspect.Parameter.empty:
                values[name] = self._needed(context)
        if self.approve is not None:
            asked = ToolCall(id=call_id, name=self.name, arguments=arguments)
            await _approved(self.approve, asked, self._needed(context))
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=tenacity.wait_exponential(multiplier=0.1, max=2),
            retry=tenacity.retry_if_exception(_may_pass),
            reraise=True,
        )
        bound = functools.partial(self.function, **values)
        plain, _ = unbound(self.function)
        if inspect.isasyncgenfunction(plain):
            bound = functools.partial(_collected, bound)
        elif inspect.isgeneratorfunction(plain):
            bound = functools.partial(_listed, bound)
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

    def _needed(self, context: RunContext | None) -> RunContext:
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
    section in its docstring describes them. One annotated `RunContext` is given the run's, and
    the model does not see it. The function may be sync (it then runs in a thread) or async; the
    result of a generator is the list of what it yields. Of a functools.partial the model gives
    what is not given yet.

    Args:
        function: what is decorated.
        timeout: seconds a call may take; None: no limit.
        retries: how often to try again after an exception that is no ToolError.
        name: what models call it; default: the function's name.
        approve: asked before each call whose arguments are valid, with the ToolCall and the
            RunContext, sync or async, for as long as it takes; the call is carried out if the
            answer is True. A text is the reason why not, which the model is told.
        max_chars: of a longer result the model is shown head and tail, with a note; the record
            has all of it. None: no limit.

    Raises BadInput for options that cannot be meant.
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


def as_tool(thing: Tool | Callable[..., Any]) -> Tool:
    """The Tool a function was marked to be, or may well be. Raises BadInput if it cannot."""
    if isinstance(thing, Tool):
        return thing
    if not callable(thing):
        raise BadInput(f"{thing!r} is not a tool: give a function", param="tools")
    plain, _ = unbound(thing)
    options: dict[str, Any] = dict(getattr(plain, "__tool_options__", {}))
    name = options.pop("name", None) or getattr(plain, "__name__", type(plain).__name__)
    if not NAME.fullmatch(name):
        raise BadInput(
            f"a tool cannot be called {name!r}: use 1 to 64 letters, digits, _ and -; "
            "@tool(name=...) sets the name",
            param="tools",
        )
    description, described = read_docstring(inspect.getdoc(plain) or "")
    arguments, context = read_signature(thing, name, described)
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"properties": {}, **untitled(arguments.model_json_schema())},
        },
    }
    return Tool(name, description, schema, arguments, thing, context_parameter=context, **options)


async def perform(
    tools: Mapping[str, Tool], asked: Mapping[str, Any], context: RunContext | None = None
) -> ToolCall:
    """Carry out one tool call of a (tidied) message; failures are in the ToolCall's `error`."""
    name, arguments = asked["function"]["name"], asked["function"]["arguments"]
    known = tools.get(name)
    started = time.monotonic()
    result, problem = None, None
    try:
        if known is None:
            raise ToolError(_unknown(name, tools))
        result = _as_json(await known.call(arguments, context, call_id=asked["id"]), name)
    except ToolError as error:
        problem = _encodable(str(error))
    call = ToolCall(
        id=asked["id"],
        name=name,
        arguments=arguments,
        result=result,
        error=problem,
        seconds=time.monotonic() - started,
    )
    return _shortened(call, known.max_chars if known else MAX_CHARS)


def model_text(call: ToolCall) -> str:
    """What the model reads of a tool call: a str result as it is, any other as JSON."""
    if call.shown is not None:
        return call.shown
    if call.error is not None:
        return f"Error: {call.error}"
    return call.result if isinstance(call.result, str) else to_json(call.result).decode()


async def _collected(function: Callable[[], AsyncIterator[Any]]) -> list[Any]:
    """All that an async generator yields: that is its result."""
    return [item async for item in function()]


def _listed(function: Callable[[], Iterable[Any]]) -> list[Any]:
    """The same of a generator that is not async."""
    return [*function()]


async def _approved(approve: Approve, asked: ToolCall, context: RunContext) -> None:
    """Raises ToolError unless the answer is True: what fails, or forgets to answer, refuses."""
    try:
        answer = await user_code.call(functools.partial(approve, asked, context), None)
    except Exception as error:
        raise ToolError(
            f"{asked.name} was not carried out: asking for approval failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    if answer is not True:
        reason = f": {answer}" if isinstance(answer, str) and answer else ""
        raise ToolError(f"{asked.name} was refused{reason}")


def _may_pass(error: BaseException) -> bool:
    """Whether to call a tool again after this; a run's own end, a CancelledError, is no failure."""
    final = (ToolError, user_code.UserCodeTimeout, *PASSING)
    return isinstance(error, Exception) and not isinstance(error, final)


def _shortened(call: ToolCall, max_chars: int | None) -> ToolCall:
    """The call with, if its text is too long, what the model is shown instead."""
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
