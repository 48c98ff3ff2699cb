"""Agent: a model with instructions and tools, in a loop of model calls and tool calls.

`Agent.run` begins a RunState and hands it to `conversation.execute`. Read next: conversation.py,
run_state.py.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, Unpack, cast

from cray_agents.agent import user_code
from cray_agents.agent.arguments import check_arguments, check_kinds
from cray_agents.agent.conversation import execute
from cray_agents.agent.environment import (
    EnvironmentMaker,
    WorkerEnvironment,
    declared_tools,
)
from cray_agents.agent.handoffs import agent_tool, handoff_tool, tool_name
from cray_agents.agent.hooks import Hooks
from cray_agents.agent.output_types import OutputReader
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.run_state import (
    ActiveAgent,
    Instructions,
    Recorder,
    RunOptions,
    RunSettings,
    RunState,
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

if TYPE_CHECKING:
    from typing import _SpecialForm  # as which mypy sees Literal[...] and Annotated[...]

_TEXT: Any = str  # so that checkers take an agent without an output type for an Agent[Any]


class Changes(TypedDict, total=False):
    """Arguments of Agent.override: all of Agent's, each by its name."""

    name: str
    instructions: Instructions
    tools: Sequence[Tool | Callable[..., Any]]
    model: str
    output_type: Any
    description: str
    handoffs: Sequence["Agent"]
    environment: EnvironmentMaker | None
    engine: ChatEngine | None
    base_url: str | None
    max_turns: int
    timeout: float | None
    max_total_tokens: int | None
    on_limit: Literal["stop", "answer"]
    temperature: float | None
    max_tokens: int | None
    sampling: Mapping[str, Any]
    tool_calls: ToolCalls
    parallel_tool_calls: bool
    json_schema: bool
    output_retries: int
    retries: int
    hooks: Sequence[Hooks]
    recorder: Recorder | Literal["auto"] | None


@dataclass(frozen=True, eq=False)
class Agent(Generic[Output]):
    """Instructions and tools for a model; Agent[int] for type checkers if `output_type` is int.

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
        recorder: called with each finished run; "auto": the engine's, which posts to the platform
            when it is one; None: nobody.
    """

    name: str
    instructions: Instructions = ""
    tools: Sequence[Tool | Callable[..., Any]] = ()
    model: str = "default"
    output_type: "type[Output] | UnionType | _SpecialForm" = _TEXT
    description: str = ""
    handoffs: Sequence["Agent"] = ()
    environment: EnvironmentMaker | None = None
    engine: ChatEngine | None = None
    base_url: str | None = None
    max_turns: int = 8
    timeout: float | None = None
    max_total_tokens: int | None = None
    on_limit: Literal["stop", "answer"] = "stop"
    temperature: float | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tool_calls: ToolCalls = "auto"
    parallel_tool_calls: bool = True
    json_schema: bool = True
    output_retries: int = 1
    retries: int = 0
    hooks: Sequence[Hooks] = ()
    recorder: Recorder | Literal["auto"] | None = "auto"
    _output: OutputReader = field(init=False, repr=False)
    _server: ServerCapabilities = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_kinds(vars(self), Agent)
        object.__setattr__(self, "tools", tuple(as_tool(thing) for thing in self.tools))
        names = [schema["function"]["name"] for schema in self.tool_schemas]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadInput(
                f"agent {self.name!r} has two tools of one name: {twice[0]}; rename one, by "
                "@tool(name=...), or by McpTools(prefix=...) of an MCP server",
                param="tools",
            )
        check_arguments(vars(self))
        object.__setattr__(self, "_output", OutputReader(self.output_type, self.json_schema))
        object.__setattr__(self, "_server", ServerCapabilities())

    def override(self, **changes: Unpack[Changes]) -> "Agent[Output]":
        """A copy with other arguments: `agent.override(model="calc@3", temperature=0.0)`.

        The copy shares what was found out about the model's server (`parser`, the fields it takes),
        unless it has another engine, base_url or name of model.
        """
        copy = replace(self, **changes)
        if copy._address == self._address:
            object.__setattr__(copy, "_server", self._server)
        return copy

    def through(self, engine: ChatEngine) -> "Agent[Output]":
        """A copy that asks through this engine, and keeps what is known of the server behind it."""
        copy = replace(self, engine=engine)
        object.__setattr__(copy, "_server", self._server.for_engine(engine))
        return copy

    def as_tool(self, name: str | None = None, description: str | None = None) -> Tool:
        """This agent as another's tool: each call is a run of its own, tagged `parent:<run id>`.

        It asks the engine of the run that calls it unless it has its own, and the version which
        that run is pinned to if both ask the same model. Where the infrastructure fails it, the
        calling run ends too, with a SubagentError.
        """

        async def ask(input: str, context: RunContext) -> Run:  # noqa: A002
            return await self._beside(context.engine).run(
                input,
                model=pinned(self.model, context.model),
                context=context.given,
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
        return self._server.parser if self.tool_calls == "auto" else None

    @property
    def _address(self) -> tuple[int, str | None, str]:
        return id(self.engine), self.base_url, self.model.partition("@")[0]

    async def run(
        self,
        input: str | Task,  # noqa: A002 - the word for it
        **options: Unpack[RunOptions],
    ) -> Run[Output]:
        """Work on an input to the end; failures and limits are in the Run, not raised.

        Raises StoreError when the finished run could not be recorded, or taken into its session,
        and CancelledError, after recording, when it was cancelled.
        """
        return await execute(self._start(input, options), self._active)

    def run_sync(
        self,
        input: str | Task,  # noqa: A002
        **options: Unpack[RunOptions],
    ) -> Run[Output]:
        """`run` for code that is not async; it also works where an event loop is running."""
        return user_code.wait_for(self.run(input, **options))

    async def stream(
        self,
        input: str | Task,  # noqa: A002
        **options: Unpack[RunOptions],
    ) -> AsyncGenerator[AgentEvent, None]:
        """Run, and yield what happens as it happens; the last event is RunEnded.

        Raises as `run` does. Closing the iterator early cancels the run.
        """
        events: asyncio.Queue[AgentEvent | None] = asyncio.Queue()
        state = self._start(input, options)
        state.emit = events.put_nowait
        task = asyncio.create_task(execute(state, self._active))
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
        **options: Unpack[RunOptions],
    ) -> Generator[AgentEvent, None, None]:
        """`stream` for code that is not async; it also works where an event loop is running."""
        return user_code.iterate_sync(self.stream(input, **options))

    def _start(self, given: str | Task, options: RunOptions) -> RunState:
        environment = self.environment
        if isinstance(environment, WorkerEnvironment):
            raise BadInput(
                f"agent {self.name!r} lives in workers of {environment.name!r}: only a Loop runs "
                "it, through `cray-agents env-worker`",
                param="environment",
            )
        settings = RunSettings(
            engine=self._engine,
            hooks=self.hooks,
            environment=environment,
            max_turns=self.max_turns,
            max_total_tokens=self.max_total_tokens,
            timeout=self.timeout,
            on_limit=self.on_limit,
            retries=self.retries,
            output_retries=self.output_retries,
            record=self._record,
        )
        return start_run(given, options, self.name, settings)

    def _beside(self, engine: ChatEngine | None) -> "Agent[Output]":
        """The agent, asking this engine unless it has one of its own."""
        own = self.engine is not None or self.base_url is not None
        return self if own or engine is None else self.through(engine)

    @property
    def _record(self) -> Recorder | None:
        if self.recorder == "auto":
            return getattr(self._engine, "record", None)
        return self.recorder

    @cached_property
    def _engine(self) -> ChatEngine:
        if self.engine is not None:
            return self.engine
        from cray_agents.engines.openai_engine import engine_at  # late: the openai client is slow

        url = self.base_url or os.environ.get("CRAY_AGENTS_URL")
        return engine_at(url, os.environ.get("CRAY_AGENTS_API_KEY"))

    @cached_property
    def _successors(self) -> dict[str, "Agent"]:
        """The agents that may take over, by the name of the tool that hands over."""
        return {handoff_tool(agent.name, agent.description).name: agent for agent in self.handoffs}

    @cached_property
    def _tools(self) -> tuple[Tool, ...]:
        handoffs = (handoff_tool(agent.name, agent.description) for agent in self.handoffs)
        return (*cast("tuple[Tool, ...]", self.tools), *handoffs)

    @cached_property
    def _active(self) -> ActiveAgent:
        limits = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        given = {key: value for key, value in limits.items() if value is not None}
        one = {} if self.parallel_tool_calls else {"parallel_tool_calls": False}
        server = self._server.for_engine(self._engine)
        object.__setattr__(self, "_server", server)
        return ActiveAgent(
            name=self.name,
            instructions=self.instructions,
            engine=with_tool_calls(self._engine, self.tool_calls, server),
            request={"model": self.model, **self.sampling, **given, **one},
            tools={tool.name: tool for tool in self._tools},
            one_by_one=not self.parallel_tool_calls,
            hooks=self.hooks,
            output=self._output,
            server=server,
            handoffs={
                name: agent._beside(self._engine)._active
                for name, agent in self._successors.items()
            },
        )
