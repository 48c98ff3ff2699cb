"""Description of an agent: its arguments, checked, and what follows from them for a run.

Read by run_state.py and conversation.py; agent.py adds the runs.
"""

import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from types import UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    Self,
    _SpecialForm,  # as which mypy sees Literal[...] and Annotated[...]
    cast,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    PydanticUserError,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import is_instance_schema

from cray_agents.agent.environment import EnvironmentMaker, WorkerEnvironment, declared_tools
from cray_agents.agent.hooks import Hooks
from cray_agents.agent.run_context import Deps, RunContext
from cray_agents.agent.tool import NAME, Tool, as_tool, tool
from cray_agents.engines.tool_calls import (
    ParserCounts,
    ServerCapabilities,
    ToolCalls,
    with_tool_calls,
)
from cray_agents.errors import BadInput, CrayError, StoreError, SubagentError, ToolError
from cray_agents.messages import read_messages
from cray_agents.ports import ChatEngine
from cray_agents.records import Message, ModelVersion, Output, Prompt, Run

# ---- Output types: instructions and schema for the model, and the reading of its answer
_SCALARS = (int, float, bool)
_FENCE = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)


class OutputError(CrayError, ValueError):
    """The model's answer is not of the agent's output type. The message is for the model."""

    code = "output_error"


class OutputReader:
    """Reader of answers as `type_`.

    A str is taken as it is; int, float and bool are read from the bare text; other types (pydantic
    models, lists, ...) from JSON.

    `constrain`: ask the server to hold answers to the type's JSON schema. Raises BadInput for a
    type that pydantic cannot read from JSON.
    """

    def __init__(self, type_: Any, constrain: bool = True) -> None:
        self.constrain = constrain
        self._type = type_
        self._bare = type_ is str or type_ in _SCALARS
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(FiniteFloat if type_ is float else type_)
            self._json_schema = {} if self._bare else self._adapter.json_schema()
        except PydanticUserError as error:
            raise BadInput(
                f"output_type={type_!r}: {error.message.splitlines()[0]}", param="output_type"
            ) from error

    @property
    def instructions(self) -> str:
        """Instructions with the JSON schema of the answer, whose fields no model can guess."""
        if self._bare:
            return ""
        return f"Answer with JSON alone, of this schema: {json.dumps(self._json_schema)}"

    @property
    def schema(self) -> dict[str, Any] | None:
        """A request's `response_format`; None for types that are read from the bare text."""
        if self._bare:
            return None
        name = re.sub(r"\W", "_", getattr(self._type, "__name__", "answer"), flags=re.ASCII)[:64]
        schema = {"name": name, "schema": self._json_schema}
        return {"type": "json_schema", "json_schema": schema}

    def read(self, text: str) -> Any:
        """Read an answer. Raises OutputError."""
        if self._type is str:
            return text
        text = text.strip()
        try:
            if self._bare:
                return self._adapter.validate_python(text)
            fenced = _FENCE.fullmatch(text)
            return self._adapter.validate_json(fenced[1] if fenced else text)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = "".join(f"{part}: " for part in problem["loc"])
            wanted = getattr(self._type, "__name__", str(self._type))
            raise OutputError(
                f"The answer is not of type {wanted}: {place}{problem['msg']}."
            ) from error


#: Sync or async.
Recorder = Callable[[Run], Awaitable[None] | None]
#: A text, or a function of nothing or of the run's context, sync or async, that returns one.
InstructionsOrFunction = (
    str | Callable[[], str | Awaitable[str]] | Callable[[RunContext[Deps]], str | Awaitable[str]]
)
_TEXT: Any = str  # so that checkers take an agent without an output type for an Agent[..., Any]
PROMPT_TAG = "prompt:"  # and the id of a learned prompt: a tag of the runs that had it
_OWN_FIELDS = ("model", "messages", "tools", "stream", "n", "extra_headers")  # of a request


def _check_sampling(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if taken := [name for name in _OWN_FIELDS if name in given]:
        raise ValueError(f"sampling cannot hold {taken[0]!r}: the agent sets it")
    return given


def _check_engine(given: Any) -> Any:
    if not (given is None or hasattr(given, "chat") or hasattr(given, "stream")):
        raise ValueError("give an engine, as OpenAIEngine(url) is one")
    return given


Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


@dataclass(frozen=True, eq=False)
class AgentDescription(Generic[Deps, Output]):
    """The arguments of an agent, see Agent, and what follows from them."""

    name: Name
    instructions: InstructionsOrFunction[Deps] = ""
    tools: Sequence[Tool | Callable[..., Any]] = ()
    model: Name = "default"
    output_type: type[Output] | UnionType | _SpecialForm = _TEXT
    description: str = ""
    handoffs: Sequence["AgentDescription[Deps, Any]"] = ()
    environment: EnvironmentMaker | None = None
    engine: Annotated[ChatEngine | None, PlainValidator(_check_engine)] = None
    base_url: str | None = None
    max_turns: PositiveInt = 8
    timeout: PositiveFloat | None = None
    max_total_tokens: PositiveInt | None = None
    on_limit: Literal["stop", "answer"] = "stop"
    temperature: NonNegativeFloat | None = None
    max_tokens: PositiveInt | None = None
    sampling: Annotated[Mapping[str, Any], AfterValidator(_check_sampling)] = field(
        default_factory=dict
    )
    tool_calls: ToolCalls = "auto"
    parallel_tool_calls: bool = True
    json_schema: bool = True
    output_retries: NonNegativeInt = 1
    retries: NonNegativeInt = 0
    hooks: Sequence[Hooks[Deps]] = ()
    recorder: Recorder | Literal["auto"] | None = "auto"
    examples: Sequence[Mapping[str, Any]] = ()
    tags: Sequence[str] = ()
    reader: OutputReader = field(init=False, repr=False)
    server: ServerCapabilities = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_arguments(self, AgentDescription, "output_type", "environment")
        object.__setattr__(self, "tools", tuple(as_tool(thing) for thing in self.tools))
        names = [schema["function"]["name"] for schema in self.tool_schemas]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadInput(
                f"agent {self.name!r} has two tools of one name: {twice[0]}; rename one, by "
                "@tool(name=...), or by McpTools(prefix=...) of an MCP server",
                param="tools",
            )
        for other in self.handoffs:
            if other.environment is not None:
                raise BadInput(
                    f"{other.name} may take over in a run of {self.name}, whose environment "
                    f"stays: give {self.name} the environment of {other.name}",
                    param="handoffs",
                )
        if isinstance(self.instructions, str):
            check_text(self.instructions, "instructions")
        object.__setattr__(self, "examples", _read_examples(self.examples))
        if self.examples and isinstance(self.environment, WorkerEnvironment):
            problem = f"examples: the workers of {self.environment.name!r} make the messages"
            raise BadInput(f"{problem}: give them there", param="examples")
        object.__setattr__(self, "reader", OutputReader(self.output_type, self.json_schema))
        object.__setattr__(self, "server", ServerCapabilities())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """For fields of pydantic, an agent is an object that checked itself."""
        return is_instance_schema(cls, cls_repr="Agent")

    def override(self, **changes: Any) -> Self:
        """A copy with other arguments: `agent.override(model="calc@3", temperature=0.0)`.

        The copy shares what was found out about the model's server (`parser`, the fields it takes),
        unless it has another engine, base_url or name of model.
        """
        copy = replace(self, **changes)
        if copy._address == self._address:
            object.__setattr__(copy, "server", self.server)
        return copy

    @property
    def prompt(self) -> Prompt:
        """What stands before its inputs now, and its tools' descriptions."""
        own = self.instructions if isinstance(self.instructions, str) else None
        tools = {tool.name: tool.description for tool in cast("tuple[Tool, ...]", self.tools)}
        return Prompt(instructions=own, examples=self.shown_examples, tools=tools)

    def at(self, version: ModelVersion, prompt: Prompt | None = None) -> Self:
        """A copy that asks a version, with the prompt that a loop learned for this agent in it.

        `agent.at(await platform.promoted("calc"))` is the agent as the loop left it. Without such a
        prompt its own stays. `prompt`: in place of the version's. Its runs have the tag
        `prompt:<id>`. Tools that the prompt does not name keep their descriptions.
        """
        prompt = prompt or version.prompts.get(self.name)
        if prompt is None:
            return self.override(model=version.id)
        return self.override(
            model=version.id,
            instructions=self.instructions if prompt.instructions is None else prompt.instructions,
            examples=prompt.examples,
            tools=[
                tool.described(prompt.tools.get(tool.name, tool.description))
                for tool in cast("tuple[Tool, ...]", self.tools)
            ],
            tags=[*self.tags, f"{PROMPT_TAG}{prompt.id}"],
        )

    def through(self, engine: ChatEngine) -> Self:
        """A copy that asks through this engine, and keeps what is known of the server behind it.

        A loop makes one for each run, so what was checked is not checked again.
        """
        copy = object.__new__(type(self))
        changed = {"engine": engine, "server": self.server.for_engine(engine)}
        vars(copy).update({each.name: getattr(self, each.name) for each in fields(self)} | changed)
        return copy

    def without_examples(self, history: Sequence[Message]) -> list[Message]:
        """The messages of earlier runs, without the examples that a run's messages begin with."""
        known = (agent.examples for agent in (self, *self.handoffs))
        begins = (len(one) for one in known if one and [*history[: len(one)]] == [*one])
        return [*history[next(begins, 0) :]]

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as requests list them, an environment's last."""
        return [tool.schema for tool in (*self._tools, *declared_tools(self.environment))]

    @property
    def parser(self) -> ParserCounts | None:
        """Counts of tool calls that the server understood or missed; with `auto` alone."""
        return self.server.parser if self.tool_calls == "auto" else None

    @property
    def _address(self) -> tuple[int, str | None, str]:
        return id(self.engine), self.base_url, self.model.partition("@")[0]

    @cached_property
    def _tools(self) -> tuple[Tool, ...]:
        handoffs = (handoff_tool(agent.name, agent.description) for agent in self.handoffs)
        return (*cast("tuple[Tool, ...]", self.tools), *handoffs)

    # ---- for run_state.py and conversation.py
    @cached_property
    def own_engine(self) -> ChatEngine:
        """The engine that was given, or the one at `base_url`."""
        if self.engine is not None:
            return self.engine
        from cray_agents.engines.openai_engine import engine_at  # late: the openai client is slow

        url = self.base_url or os.environ.get("CRAY_AGENTS_URL")
        return engine_at(url, os.environ.get("CRAY_AGENTS_API_KEY"))

    @cached_property
    def asked_engine(self) -> ChatEngine:
        """The engine with the handling of tool calls that the agent wants."""
        object.__setattr__(self, "server", self.server.for_engine(self.own_engine))
        return with_tool_calls(self.own_engine, self.tool_calls, self.server)

    @property
    def shown_examples(self) -> list[Message]:
        """The examples, as messages that a run may change."""
        return [{**message} for message in self.examples]

    @property
    def run_recorder(self) -> Recorder | None:
        """What is called with each finished run."""
        if self.recorder == "auto":
            return getattr(self.own_engine, "record", None)
        return self.recorder

    @cached_property
    def request(self) -> Mapping[str, Any]:
        """The fields that all its requests share, without tools and messages."""
        limits = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        given = {key: value for key, value in limits.items() if value is not None}
        one = {} if self.parallel_tool_calls else {"parallel_tool_calls": False}
        return {"model": self.model, **self.sampling, **given, **one}

    @cached_property
    def all_tools(self) -> Mapping[str, Tool]:
        """Its own tools and those that hand over, by name."""
        return {tool.name: tool for tool in self._tools}

    @cached_property
    def successors(self) -> Mapping[str, "AgentDescription[Deps, Any]"]:
        """The agents that may take over, by the name of the tool that hands over."""
        return {
            handoff_tool(agent.name, agent.description).name: agent.beside(self.own_engine)
            for agent in self.handoffs
        }

    def beside(self, engine: ChatEngine | None) -> Self:
        """The agent, asking this engine unless it has one of its own."""
        own = self.engine is not None or self.base_url is not None
        return self if own or engine is None else self.through(engine)


def _read_examples(given: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    if not given:
        return ()
    try:
        messages = read_messages(given)
    except ValueError as error:
        raise BadInput(f"examples: {error}", param="examples") from error
    if messages[0]["role"] == "system":
        problem = "message 0 is of the system: give that text as the agent's instructions"
        raise BadInput(f"examples: {problem}", param="examples")
    if (last := messages[-1]["role"]) != "assistant":
        problem = f"they end with a message of role {last!r}: they must end with an answer"
        raise BadInput(f"examples: {problem}, of role 'assistant'", param="examples")
    return messages


def check_text(text: str, what: str) -> None:
    """Raise BadInput for text with lone surrogates, which JSON cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{what} is not valid Unicode text: {error}", param=what) from error


@cache
def _described(kind: type, read: tuple[str, ...]) -> type[BaseModel]:
    """The arguments of a dataclass as pydantic checks them, but those that code of ours reads."""
    hints = get_type_hints(kind, include_extras=True)
    checked: dict[str, Any] = {
        each.name: (hints[each.name], ...)
        for each in fields(kind)
        if each.init and each.name not in read
    }
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return create_model(kind.__name__, __config__=config, **checked)


def check_arguments(made: Any, kind: type, *read: str) -> None:
    """Raise BadInput for an argument of another type or beyond its bounds; `read`: not for these.

    `kind`: the dataclass whose fields are checked.
    """
    try:
        _described(kind, read)(**vars(made))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        name = str(problems[0]["loc"][0])
        messages = [problem["msg"] for problem in problems if problem["loc"][0] == name]
        why = " or ".join(dict.fromkeys(messages)).removeprefix("Value error, ")
        raise BadInput(f"{name}={getattr(made, name)!r}: {why}", param=name) from error


# ---- Tools made of agents: to ask another agent, and to hand a run over to one. Called by agent.py
RunAgent = Callable[[str, RunContext], Awaitable[Run]]


def agent_tool(run: RunAgent, name: str, description: str, agent: str) -> Tool:
    """A tool that runs an agent on an input, and answers with its output. See Agent.as_tool.

    `agent` names the agent in errors.
    """

    async def ask(input: str, context: RunContext) -> Any:  # noqa: A002
        try:
            ended = await run(input, context)
        except StoreError as error:
            raise SubagentError(f"a run of {agent} could not be recorded: {error}") from error
        if ended.error is not None and ended.error.infrastructure:
            why = f"{ended.error.type}: {ended.error.message}"
            raise SubagentError(f"{agent} was failed by the infrastructure: {why}")
        if ended.output is None and ended.error is not None:
            raise ToolError(f"{agent} came to no answer: {ended.error.message}")
        if ended.output is None:
            raise ToolError(f"{agent} came to no answer: {ended.stop_reason}")
        return ended.output

    if not NAME.fullmatch(name):
        raise BadInput(f"a tool cannot be called {name!r}: give as_tool a name", param="name")
    ask.__doc__ = purpose(agent, description)
    return as_tool(tool(name=name, timeout=None)(ask))


def handoff_tool(agent: str, description: str = "") -> Tool:
    """A tool `transfer_to_<agent>`. Its call alone hands over: see conversation.py."""

    def transfer() -> str:
        return f"{agent} has taken over."

    transfer.__doc__ = f"Hand this conversation over to {agent}. {description}".strip()
    return as_tool(tool(name=f"transfer_to_{tool_name(agent)}"[:64], timeout=None)(transfer))


def tool_name(agent: str) -> str:
    """An agent's name as a tool may be called. Raises BadInput where no letter of it may stay."""
    fit = re.sub(r"[^a-zA-Z0-9_-]+", "_", agent).strip("_")[:64]
    if not NAME.fullmatch(fit):
        raise BadInput(f"a tool cannot be called {fit!r}: give as_tool a name", param="name")
    return fit


def purpose(agent: str, description: str) -> str:
    """The description of an agent that models are given."""
    return description or f"Ask {agent}."
