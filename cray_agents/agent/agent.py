"""Agent: a model, instructions and tools, in a loop of model calls and tool calls.

The loop is `_converse`: ask the model; carry out the tool calls it asks for; stop at the first
answer without any. Whatever ends a run, it ends with its trajectory and a reason. Speaks to a model
through ports.ChatEngine. Read next: turns.py (ask and act), progress.py (a run so far), toolbox.py.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, Unpack, cast

from cray_agents.agent import user_code
from cray_agents.agent.active_agent import ActiveAgent, Instructions
from cray_agents.agent.arguments import check_arguments, check_kinds
from cray_agents.agent.environment import Environment, begin, declared_tools, reply, tear_down
from cray_agents.agent.handoffs import asking_tool, beside, handoff_tool
from cray_agents.agent.hooks import Hooks, observed
from cray_agents.agent.output_types import OutputError, OutputReader
from cray_agents.agent.run_state import RunOptions, RunState, begun
from cray_agents.agent.sessions import is_answered, spoken
from cray_agents.agent.stream_events import AgentEvent, Handoff, RunEnded
from cray_agents.agent.tool import Tool, as_tool
from cray_agents.agent.turns import act, ask
from cray_agents.engines.missed_tool_calls import (
    ParserCounts,
    ServerCapabilities,
    ToolCalls,
    with_tool_calls,
)
from cray_agents.errors import BadInput, CrayError, HookError, StoreError
from cray_agents.ports import ChatEngine
from cray_agents.records import Output, Run, RunError, StopReason, Task, ToolCall

if TYPE_CHECKING:
    from typing import _SpecialForm  # as which mypy sees Literal[...] and Annotated[...]

Recorder = Callable[[Run], Awaitable[None]]
Emit = Callable[[AgentEvent], None]
_TEXT: Any = str  # so that checkers take an agent without an output type for an Agent[Any]

log = logging.getLogger(__name__)


class Changes(TypedDict, total=False):
    """What Agent.override takes: all arguments of Agent, each by its name."""

    name: str
    instructions: Instructions
    tools: Sequence[Tool | Callable[..., Any]]
    model: str
    output_type: Any
    description: str
    handoffs: Sequence["Agent"]
    environment: Callable[[], Environment] | None
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
        environment: makes the Environment of each run; its tools are the run's.
        engine: answers the requests; default: OpenAIEngine at `base_url`.
        base_url: of the server, default $CRAY_AGENTS_URL, else http://127.0.0.1:8000/v1.
        max_turns: model calls in a run, at most.
        timeout: seconds a run may take; None: no limit.
        max_total_tokens: no model call is begun once a run's calls have read and sampled so many.
        on_limit: at max_turns or max_total_tokens, `stop`; or `answer`: ask the model once more,
            without tools, for its final answer.
        temperature, max_tokens: of each model call; None: the server's default.
        sampling: more of the request's fields, such as top_p, seed, stop.
        tool_calls: `native`: the server understands its model's tool calls; `constrained`: it need
            not, the model writes them as JSON that is held to a schema; `auto`: native, with a
            warning when calls are not understood, and constrained if the server takes no tools.
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
    environment: Callable[[], Environment] | None = None
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
    _learned: ServerCapabilities = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_kinds(self)
        object.__setattr__(self, "tools", tuple(as_tool(thing) for thing in self.tools))
        names = [schema["function"]["name"] for schema in self.tool_schemas]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadInput(
                f"agent {self.name!r} has two tools of one name: {twice[0]}", param="tools"
            )
        check_arguments(self)
        object.__setattr__(self, "_output", OutputReader(self.output_type, self.json_schema))
        object.__setattr__(self, "_learned", ServerCapabilities())

    def override(self, **changes: Unpack[Changes]) -> "Agent[Output]":
        """A copy with other arguments: `agent.override(model="calc@3", temperature=0.0)`.
        What was found out about the model's server (`parser`, what it takes) is shared with it,
        unless it has another engine, base_url or name of model.
        """
        copy = replace(self, **changes)
        if copy._asked == self._asked:
            object.__setattr__(copy, "_learned", self._learned)
        return copy

    def through(self, engine: ChatEngine) -> "Agent[Output]":
        """A copy that asks by way of this engine; `override`, where the server may be the same."""
        copy = replace(self, engine=engine)
        object.__setattr__(copy, "_learned", self._learned.at(engine))
        return copy

    def as_tool(self, name: str | None = None, description: str | None = None) -> Tool:
        """This agent as another's tool: each call is a run of its own, tagged `parent:<run id>`."""
        return asking_tool(self, name, description)

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as requests list them, an environment's last."""
        return [tool.schema for tool in (*self._tools, *declared_tools(self.environment))]

    @property
    def parser(self) -> ParserCounts | None:
        """How many tool calls the server understood, and how many not; with `auto` alone."""
        return self._learned.parser if self.tool_calls == "auto" else None

    @property
    def _asked(self) -> tuple[int, str | None, str]:
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
        return await self._execute(self._begun(input, options))

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
        progress = self._begun(input, options)
        progress.emit = events.put_nowait
        task = asyncio.create_task(self._execute(progress))
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
        return user_code.each_of(self.stream(input, **options))

    async def _execute(self, progress: RunState) -> Run:
        """The conversation within its limits; then the record of it, whatever happened."""
        try:
            output, error = await self._limited(progress)
        except BaseException as failure:
            await self._give_up(progress, failure)
            raise
        else:
            return await user_code.unbroken(self._finish(progress, output, error))
        finally:
            await user_code.unbroken(tear_down(progress.context))

    async def _limited(self, progress: RunState) -> tuple[Any, RunError | None]:
        """What the conversation came to, and what ended it; raises what no run may swallow."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await self._converse(progress), None
        except CrayError as failure:
            return None, progress.failed(failure)
        except TimeoutError:
            if not limit.expired():
                raise
            progress.stop(StopReason.timeout)
            return None, progress.never_began() or await self._excuse(begun)

    async def _converse(self, progress: RunState) -> Any:
        """Until the model answers without asking for tools; returns its answer as output_type."""
        await self._begin(progress)
        mistakes = 0
        while (limit := progress.at_limit()) is None:
            again = mistakes > 0 and progress.persona.output.schema is not None
            message = await ask(progress, retries=self.retries, final=again)
            if asked := message.get("tool_calls"):
                calls = await act(progress, asked)
                await self._hand_over(progress, calls)
                continue
            answer = message.get("content") or ""
            if (said := await reply(answer, progress.context)) is not None:
                progress.messages.append({"role": "user", "content": said})
                continue
            try:
                return progress.persona.output.read(answer)
            except OutputError as error:
                mistakes += 1
                if mistakes > self.output_retries:
                    raise
                progress.messages.append({"role": "user", "content": f"{error} Answer again."})
        progress.stop(limit)
        if self.on_limit == "stop":
            return None
        message = await ask(progress, retries=self.retries, final=True)
        if message.get("tool_calls"):
            raise OutputError("The model asked for tools when it was to answer.")
        return progress.persona.output.read(message.get("content") or "")

    def _begun(self, given: str | Task, options: RunOptions) -> RunState:
        limits = {"max_turns": self.max_turns, "max_tokens": self.max_total_tokens}
        progress = begun(given, options, self.name, run_hooks=self.hooks, **limits)
        progress.context.engine = self._engine
        return progress

    async def _begin(self, progress: RunState) -> None:
        """All that a model is to know when it is first asked."""
        if progress.session is not None:
            progress.earlier = spoken(await progress.session.history())
        progress.messages[:0] = progress.earlier
        if self.environment is not None:
            progress.environment_tools = await begin(self.environment, progress.context)
        await progress.enter(self._persona)
        await observed(self.hooks, "before_run", progress.context)

    async def _hand_over(self, progress: RunState, calls: Sequence[ToolCall]) -> None:
        """Let another agent speak if a tool call says so: the first that was carried out."""
        for call in calls:
            to = progress.persona.handoffs.get(call.name)
            if to is not None and call.error is None:
                await progress.enter(to)
                progress.tell(Handoff(to.name))
                return

    async def _finish(self, progress: RunState, output: Any, error: RunError | None) -> Run:
        """The run as it ended: shown to the hooks, recorded, remembered by its session."""
        run = progress.ended(output, error)
        try:
            await observed(self.hooks, "after_run", run, progress.context)
            run = run.model_copy(update={"rewards": progress.rewards(error)})  # hooks give some too
        except HookError as failure:
            run = progress.ended(None, progress.failed(failure))
        if self._record is not None:
            await self._record(run)
        if progress.session is not None and is_answered(run):
            await progress.session.extend(run, progress.said)
        return run

    async def _give_up(self, progress: RunState, failure: BaseException) -> None:
        """The record of a run that ends by being cancelled, or by a fault: it may not take long."""
        error = progress.failed(failure)
        try:
            async with asyncio.timeout(user_code.GRACE):
                await self._finish(progress, None, error)
        except (StoreError, TimeoutError) as unkept:
            run = progress.context.run_id
            log.error("run %s (%s) is not recorded: %s", run, progress.reason, unkept)

    async def _excuse(self, begun: float) -> RunError | None:
        """What the engine says took the time of a run that had too little; None: the run itself."""
        excuse = getattr(self._engine, "excuse", None)
        return None if excuse is None else await excuse(begun)

    @property
    def _record(self) -> Recorder | None:
        if self.recorder == "auto":
            return getattr(self._engine, "record", None)
        return self.recorder

    @cached_property
    def _engine(self) -> ChatEngine:
        if self.engine is not None:
            return self.engine
        from cray_agents.engines.openai_engine import (
            engine_at,  # late: it imports the openai client
        )

        url = self.base_url or os.environ.get("CRAY_AGENTS_URL")
        return engine_at(url, os.environ.get("CRAY_AGENTS_API_KEY"))

    @cached_property
    def _transfers(self) -> dict[str, "Agent"]:
        """Who takes over, by the name of the tool that is called for it."""
        return {handoff_tool(agent).name: agent for agent in self.handoffs}

    @cached_property
    def _tools(self) -> tuple[Tool, ...]:
        return (*cast("tuple[Tool, ...]", self.tools), *map(handoff_tool, self.handoffs))

    @cached_property
    def _persona(self) -> ActiveAgent:
        limits = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        given = {key: value for key, value in limits.items() if value is not None}
        one = {} if self.parallel_tool_calls else {"parallel_tool_calls": False}
        learned = self._learned.at(self._engine)
        object.__setattr__(self, "_learned", learned)
        return ActiveAgent(
            name=self.name,
            instructions=self.instructions,
            engine=with_tool_calls(self._engine, self.tool_calls, learned),
            request={"model": self.model, **self.sampling, **given, **one},
            tools={tool.name: tool for tool in self._tools},
            in_order=not self.parallel_tool_calls,
            hooks=self.hooks,
            output=self._output,
            learned=learned,
            handoffs={
                name: beside(self._engine, agent)._persona
                for name, agent in self._transfers.items()
            },
        )
