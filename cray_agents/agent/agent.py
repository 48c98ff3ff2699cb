"""Agent: a model with instructions and tools, in a loop of model calls and tool calls.

`Agent.run` begins a RunState and hands it to `conversation.execute`. Read next: conversation.py,
run_state.py.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from types import UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    Unpack,
    _SpecialForm,  # as which mypy sees Literal[...] and Annotated[...]
    cast,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationError,
    create_model,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import is_instance_schema

from cray_agents.agent import user_code
from cray_agents.agent.conversation import execute
from cray_agents.agent.environment import EnvironmentMaker, declared_tools
from cray_agents.agent.handoffs import agent_tool, handoff_tool, tool_name
from cray_agents.agent.hooks import Hooks
from cray_agents.agent.output_types import OutputReader
from cray_agents.agent.run_context import Deps, RunContext
from cray_agents.agent.run_state import (
    Instructions,
    Recorder,
    RunOptions,
    check_text,
    pinned,
    start_run,
)
from cray_agents.agent.stream_events import AgentEvent, RunEnded
from cray_agents.agent.tool import Tool, as_tool
from cray_agents.engines.tool_calls import (
    ParserCounts,
    ServerCapabilities,
    ToolCalls,
    with_tool_calls,
)
from cray_agents.errors import BadInput
from cray_agents.ports import ChatEngine
from cray_agents.records import Output, Run, Task

_TEXT: Any = str  # so that checkers take an agent without an output type for an Agent[..., Any]
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
class Agent(Generic[Deps, Output]):
    """Instructions and tools for a model.

    For type checkers it is an `Agent[Deps, Output]`: `Deps` is the type of `run(deps=...)`, which
    tools, hooks and instructions find in their `RunContext[Deps]`; `Output` is that of `run.output`
    and follows from `output_type`. `Agent[Shop, int]("clerk", output_type=int)` states both.

    Args:
        name: names the agent in records.
        instructions: the system message (none is sent if it is empty), or a function of nothing or
            of the RunContext, sync or async, that returns it for each run.
        tools: functions marked with @tool, or plain ones; afterwards a tuple of Tool.
        model: `name`, `name@N`, or what the server calls it.
        output_type: what `run.output` is: str, int, float, bool, or whatever pydantic reads
            from JSON.
        description: what it is for: told to agents that may call it or hand over to it.
        handoffs: agents that may take over: a tool `transfer_to_<name>` for each switches to its
            instructions, tools, model, output type and, beside this one's, hooks, within the same
            run: its limits and environment stay.
        environment: makes the Environment of each run; its tools are the run's. Or a
            WorkerEnvironment, for loops alone: another framework's, in processes of its own.
        engine: answers the requests; default: OpenAIEngine at `base_url`.
        base_url: of the server, default $CRAY_AGENTS_URL, else http://127.0.0.1:8000/v1.
        max_turns: model calls in a run, at most.
        timeout: seconds a run may take; None: no limit.
        max_total_tokens: no model call is begun once a run's calls have read and sampled so many.
        on_limit: at max_turns or max_total_tokens, `stop`; or `answer`: ask the model once more,
            without tools, for its final answer.
        temperature, max_tokens: of each model call; None: the server's default.
        sampling: more of the request's fields, such as top_p, seed, stop.
        tool_calls: `native`: the server understands its model's tool calls. `constrained`: the
            model writes them as JSON that the server holds to a schema. `auto`: native, with a
            warning when calls are missed, and constrained if the server takes no tools.
        parallel_tool_calls: whether a message's tool calls are carried out at the same time; if
            not, the server is asked for one at a time too. An environment's never are.
        json_schema: ask the server to hold answers to output_type's schema, if it can. They are
            read, and asked for again, either way.
        output_retries: how often the model is told that its answer is not of the output type.
        retries: how often a model call is done again that the server failed, beyond what the engine
            tries itself.
        hooks: called before and after model calls, tool calls and the run.
        recorder: called with each finished run, sync or async; "auto": the engine's, which posts to
            the platform when it is one; None: nobody.
    """

    name: Name
    instructions: Instructions[Deps] = ""
    tools: Sequence[Tool | Callable[..., Any]] = ()
    model: Name = "default"
    output_type: type[Output] | UnionType | _SpecialForm = _TEXT
    description: str = ""
    handoffs: Sequence["Agent[Deps, Any]"] = ()
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
    reader: OutputReader = field(init=False, repr=False)
    server: ServerCapabilities = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_arguments(self)
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
        object.__setattr__(self, "reader", OutputReader(self.output_type, self.json_schema))
        object.__setattr__(self, "server", ServerCapabilities())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """For fields of pydantic, an agent is an object that checked itself."""
        return is_instance_schema(cls)

    def override(self, **changes: Any) -> "Agent[Deps, Output]":
        """A copy with other arguments: `agent.override(model="calc@3", temperature=0.0)`.

        The copy shares what was found out about the model's server (`parser`, the fields it takes),
        unless it has another engine, base_url or name of model.
        """
        copy = replace(self, **changes)
        if copy._address == self._address:
            object.__setattr__(copy, "server", self.server)
        return copy

    def through(self, engine: ChatEngine) -> "Agent[Deps, Output]":
        """A copy that asks through this engine, and keeps what is known of the server behind it."""
        copy = replace(self, engine=engine)
        object.__setattr__(copy, "server", self.server.for_engine(engine))
        return copy

    def as_tool(self, name: str | None = None, description: str | None = None) -> Tool:
        """This agent as another's tool: each call is a run of its own, tagged `parent:<run id>`.

        It asks the engine of the run that calls it unless it has its own, and the version which
        that run is pinned to if both ask the same model. Where the infrastructure fails it, the
        calling run ends too, with a SubagentError.
        """

        async def ask(input: str, context: RunContext) -> Run:  # noqa: A002
            return await self.beside(context.engine).run(
                input,
                model=pinned(self.model, context.model),
                deps=context.deps,
                tags=[f"parent:{context.run_id}"],
                **context.child(),
            )

        made = agent_tool(
            ask, name or tool_name(self.name), description or self.description, self.name
        )
        made.function.__dict__["__agent__"] = self  # read by loop/settings_record.py
        return made

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

    async def run(
        self,
        input: str | Task,  # noqa: A002 - the word for it
        **options: Unpack[RunOptions[Deps]],
    ) -> Run[Output]:
        """Work on an input to the end; failures and limits are in the Run, not raised.

        Raises StoreError when the finished run could not be recorded, or taken into its session,
        and CancelledError, after recording, when it was cancelled.
        """
        return await execute(start_run(self, input, options))

    def run_sync(
        self,
        input: str | Task,  # noqa: A002
        **options: Unpack[RunOptions[Deps]],
    ) -> Run[Output]:
        """`run` for code that is not async; it also works where an event loop is running."""
        return user_code.wait_for(self.run(input, **options))

    async def stream(
        self,
        input: str | Task,  # noqa: A002
        **options: Unpack[RunOptions[Deps]],
    ) -> AsyncGenerator[AgentEvent, None]:
        """Run, and yield what happens as it happens; the last event is RunEnded.

        Raises as `run` does. Closing the iterator early cancels the run.
        """
        events: asyncio.Queue[AgentEvent | None] = asyncio.Queue()
        state = start_run(self, input, options)
        state.emit = events.put_nowait
        task = asyncio.create_task(execute(state))
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield RunEnded(task.result())
        finally:
            task.cancel()
            await asyncio.wait([task])

    def stream_sync(
        self,
        input: str | Task,  # noqa: A002
        **options: Unpack[RunOptions[Deps]],
    ) -> Generator[AgentEvent, None, None]:
        """`stream` for code that is not async; it also works where an event loop is running."""
        return user_code.iterate_sync(self.stream(input, **options))

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
    def successors(self) -> Mapping[str, "Agent[Deps, Any]"]:
        """The agents that may take over, by the name of the tool that hands over."""
        return {
            handoff_tool(agent.name, agent.description).name: agent.beside(self.own_engine)
            for agent in self.handoffs
        }

    def beside(self, engine: ChatEngine | None) -> "Agent[Deps, Output]":
        """The agent, asking this engine unless it has one of its own."""
        own = self.engine is not None or self.base_url is not None
        return self if own or engine is None else self.through(engine)


@cache
def _described() -> type[BaseModel]:
    """The arguments of Agent as pydantic checks them, but those that are read by code of ours."""
    hints = get_type_hints(Agent, include_extras=True)
    read = ("output_type", "environment")
    checked: dict[str, Any] = {
        each.name: (hints[each.name], ...)
        for each in fields(Agent)
        if each.init and each.name not in read
    }
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return create_model("Agent", __config__=config, **checked)


def check_arguments(agent: Agent) -> None:
    """Raise BadInput for an argument of another type or beyond its bounds."""
    try:
        _described()(**vars(agent))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        name = str(problems[0]["loc"][0])
        messages = [problem["msg"] for problem in problems if problem["loc"][0] == name]
        why = " or ".join(dict.fromkeys(messages)).removeprefix("Value error, ")
        raise BadInput(f"{name}={getattr(agent, name)!r}: {why}", param=name) from error
