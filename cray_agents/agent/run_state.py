"""RunState: one run of an agent from its input to its Run, and the agent that speaks in it.

`conversation.py` changes the state step by step; `agent.py` makes it. Read next: conversation.py.
"""

import asyncio
import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypedDict

from cray_agents.agent import hooks
from cray_agents.agent.description import AgentDescription, OutputError, check_text
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.agent.hooks import Hooks
from cray_agents.agent.run_context import Deps, RunContext
from cray_agents.agent.sessions import FileSession, Session, without_system
from cray_agents.agent.stream_events import AgentEvent, LimitReached
from cray_agents.agent.tool import Tool
from cray_agents.errors import BadInput, EngineError, HookError
from cray_agents.messages import read_input, text_of, text_of_input
from cray_agents.records import (
    Input,
    Message,
    ModelCall,
    Reward,
    Run,
    RunError,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    digest,
    new_id,
)

_RUN_ID = re.compile(r"[\w.:@-]{1,200}", re.ASCII)


class RunOptions(TypedDict, Generic[Deps], total=False):
    """Options of Agent.run, run_sync and stream beside the input, all by name.

    deps: for tools, hooks and instructions, which find it as `RunContext.deps`.
    session: a conversation to go on from, and to add this run to, or the path of a FileSession; or
    history: the messages of earlier runs to go on from.
    model: of all model calls, in place of the agent's.
    seed: of the sampling: the n-th model call, from 0, has seed + n.
    run_id: names the run; default: a fresh name.
    tags: the run is found again by them.
    loop, iteration, attempt: what the run is for, in a loop.
    """

    deps: Deps
    session: Session | str | Path | None
    history: Sequence[Message]
    model: str | None
    seed: int | None
    run_id: str | None
    tags: Sequence[str]
    loop: str | None
    iteration: int | None
    attempt: int | None


@dataclass
class RunState:
    """A run that goes on. Raises BadInput for an unfit run id.

    agent: was asked; its limits, hooks and environment hold for the whole run, across handoffs.
    context: the public half of the state; its `messages` are the conversation.
    model: asked in place of the active agent's model, if the caller named one.
    earlier: messages from before this run.
    system: the text of a system message in the input.
    labels: further fields of the Run.
    active: the agent that speaks; a handoff changes it by `enter`.
    request: the fields that all requests of the active agent share.
    tools: the active agent's tools and the environment's, by name.
    hooks: the run's hooks and the active agent's.
    turns: each model call, with its finished tool calls.
    tokens: read and sampled so far.
    half_streamed: a part of the present answer was streamed already.
    """

    agent: AgentDescription
    context: RunContext
    model: str | None
    earlier: list[Message]
    labels: dict[str, Any]
    system: str = ""
    session: Session | None = None
    active: AgentDescription = field(init=False)
    emit: Callable[[AgentEvent], None] | None = None
    half_streamed: bool = False
    environment_tools: dict[str, Tool] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, Tool] = field(default_factory=dict)
    hooks: list[Hooks] = field(default_factory=list)
    turns: list[tuple[ModelCall, list[ToolCall]]] = field(default_factory=list)
    tokens: int = 0
    reason: StopReason = StopReason.completed
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.context.run_id):
            raise BadInput(
                f"run_id={self.context.run_id!r}: use at most 200 letters, digits and _.:@-",
                param="run_id",
            )

    @property
    def messages(self) -> list[Message]:
        """The conversation, system message first."""
        return self.context.messages

    @property
    def added_messages(self) -> list[Message]:
        """The messages that this run added to the conversation, its input first."""
        return without_system(self.messages)[len(self.active.examples) + len(self.earlier) :]

    @property
    def one_by_one(self) -> bool:
        """Tool calls are carried out one by one: an environment's always are."""
        return self.context.environment is not None or not self.active.parallel_tool_calls

    async def enter(self, agent: AgentDescription) -> None:
        """Let this agent speak from here on. Raises HookError from its instructions."""
        present = self.request.get("model")
        conversation = without_system(self.messages)
        if present is not None:  # a handoff
            conversation = conversation[len(self.active.examples) :]
        self.active = agent
        added = (hook for hook in agent.hooks if hook not in self.agent.hooks)
        self.hooks = [*self.agent.hooks, *added]
        self.context.agent = agent.name
        self.tools = {**agent.all_tools, **self.environment_tools}
        self.request = {**agent.request}
        if self.model is not None:
            self.request["model"] = self.model
        if present is not None:
            self.request["model"] = pinned(agent.request["model"], present)
        if self.tools:
            self.request["tools"] = [tool.schema for tool in self.tools.values()]
        else:
            self.request.pop("parallel_tool_calls", None)  # servers refuse it where there are none
        self.context.model = self.request["model"]
        system = await _system_message(agent, self.context, self.system)
        self.messages[:] = [*system, *agent.shown_examples, *conversation]

    def next_request(self, *, final: bool) -> dict[str, Any]:
        """The next model call's request. `final`: the model is to answer, not to call tools.

        An answer is held to its schema only where no tool may be called: servers would hold the
        tool calls to it too.
        """
        request = {**self.request, "messages": [*self.messages]}
        if self.context.seed is not None:  # the same for every call would draw alike in each
            request["seed"] = self.context.seed + len(self.turns)
        if final and self.tools:
            request["tool_choice"] = "none"
        output = self.active.reader
        constrain = output.constrain and self.active.server.schemas
        if constrain and output.schema is not None and (final or not self.tools):
            request["response_format"] = output.schema
        return request

    def addressed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request with the headers of its run: run id, idempotency key, a judge's X-Block.

        The key is the same when a run that was cut off is done again: a gateway then answers as
        it did before, instead of sampling anew.
        """
        body = {name: value for name, value in request.items() if name != "extra_headers"}
        key = digest([self.context.run_id, len(self.turns), body], 32)
        own = {"X-Run-Id": self.context.run_id, "Idempotency-Key": key}
        if "judge" in self.labels["tags"]:  # what it reads may be what is blocked
            own["X-Block"] = "off"
        return {**body, "extra_headers": {**request.get("extra_headers", {}), **own}}

    def publish(self, event: AgentEvent) -> None:
        """Give an event to the caller of `Agent.stream`, if the run is streamed."""
        if self.emit is not None:
            self.emit(event)

    def reached_limit(self) -> StopReason | None:
        """The limit that is reached, if any. Raises EngineError if tokens cannot be counted."""
        if self.agent.max_total_tokens is not None and self.turns:
            if not self.tokens:
                raise EngineError(
                    "the server does not say how many tokens it used, so max_total_tokens cannot "
                    "be held: leave it out, or use a server that reports `usage`"
                )
            if self.tokens >= self.agent.max_total_tokens:
                return StopReason.max_tokens
        return StopReason.max_turns if len(self.turns) >= self.agent.max_turns else None

    def stop(self, reason: StopReason) -> None:
        """Note a limit, once it is known that it ends the run."""
        self.reason = reason
        self.publish(LimitReached(reason))

    def fail(self, failure: BaseException) -> RunError:
        """Note the failure that ends the run, unless a limit did before; return its record."""
        if self.reason is StopReason.completed:
            cancelled = isinstance(failure, asyncio.CancelledError)
            self.reason = StopReason.cancelled if cancelled else StopReason.error
        return run_error(failure)

    def late_start(self) -> RunError | None:
        """The error of a run whose time was over before its model could be asked."""
        if self.request:
            return None
        late = "history, environment and instructions took all of the run's time"
        return self.fail(HookError(f"{late}: give it a longer timeout"))

    def rewards(self, error: RunError | None) -> list[Reward]:
        """The rewards so far. A run that the infrastructure failed has none."""
        failed = error is not None and error.infrastructure
        return [] if failed else [*self.context.rewards]

    def to_run(self, output: Any, error: RunError | None) -> Run:
        """The run as it stands now."""
        turns = [
            Turn(call_id=call.id, call=call, tool_calls=_with_unfinished(call, done))
            for call, done in self.turns
        ]
        return Run(
            id=self.context.run_id,
            model=self.turns[-1][0].model if self.turns else self.context.model,
            input=self.context.input,
            output=output,
            stop_reason=self.reason,
            error=error,
            trajectory=Trajectory(messages=self.messages, turns=turns),
            rewards=self.rewards(error),
            task=self.context.task,
            started=self.started,
            seconds=time.perf_counter() - self.clock,
            **self.labels,
        )


async def _system_message(
    agent: AgentDescription, context: RunContext, of_input: str
) -> list[Message]:
    """The system message as a list; empty if there is nothing to say. Raises HookError."""
    instructions = agent.instructions
    if not isinstance(instructions, str):
        what = f"the instructions function of {agent.name}"
        wanted = (context,)[: len(inspect.signature(instructions).parameters)]
        instructions = await hooks.call(what, instructions, *wanted)
        if not isinstance(instructions, str):
            raise HookError(f"{what} returned {instructions!r}: give a str")
        check_text(instructions, "instructions")
    text = "\n\n".join(filter(None, [instructions, of_input, agent.reader.instructions]))
    return [{"role": "system", "content": text}] if text else []


def start_run(agent: AgentDescription, given: Input | Task, options: RunOptions[Any]) -> RunState:
    """Begin a run of the agent on an input. Raises BadInput, and TypeError for unknown options."""
    if isinstance(agent.environment, WorkerEnvironment):
        raise BadInput(
            f"agent {agent.name!r} lives in workers of {agent.environment.name!r}: only a Loop "
            "runs it, through `cray-agents env-worker`",
            param="environment",
        )
    if unknown := options.keys() - RunOptions.__annotations__.keys():
        raise TypeError(f"run() got an unexpected keyword argument {min(unknown)!r}")
    try:
        asked = read_input(given.input if isinstance(given, Task) else given)
    except ValueError as error:
        raise BadInput(f"input: {error}, or a Task", param="input") from error
    text, task = text_of_input(asked), given if isinstance(given, Task) else None
    check_text(text, "input")
    messages = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    if task is None and isinstance(asked, list):
        task = Task(input=asked)  # so that the messages are on record as its input
    session, history = _session(options.get("session")), options.get("history", ())
    if session is not None and history:
        raise BadInput("give a session or a history, not both", param="history")
    of_session = [f"session:{session.id}"] if session else []
    tags = [*agent.tags, *_tags(options.get("tags", ())), *of_session]
    purpose = {name: options.get(name) for name in ("loop", "iteration", "attempt")}
    context = RunContext(
        run_id=options.get("run_id") or new_id("run"),
        agent=agent.name,
        input=text,
        task=task,
        deps=options.get("deps"),
        seed=options.get("seed"),
        messages=without_system(messages),
        engine=agent.own_engine,
    )
    return RunState(
        agent=agent,
        context=context,
        model=options.get("model"),
        earlier=without_system(history),
        labels={"agent": agent.name, "tags": tags, **purpose},
        system="\n\n".join(text_of(m) for m in messages if m["role"] == "system"),
        session=session,
    )


def _session(given: Session | str | Path | None) -> Session | None:
    """The session that was given, or the one in the file of this path. Raises BadInput."""
    if isinstance(given, str | Path):
        return FileSession(given)
    if given is None or (hasattr(given, "history") and hasattr(given, "extend")):
        return given
    raise BadInput(
        f"session={given!r}: give a session, such as MemorySession(), or the path of a file",
        param="session",
    )


def _tags(given: Sequence[str]) -> Sequence[str]:
    """Raises BadInput for a text, whose letters would each be a tag, and for other things."""
    if isinstance(given, str) or not all(isinstance(tag, str) for tag in given):
        raise BadInput(f"tags={given!r}: give a list of texts, as in ['night']", param="tags")
    return given


def _with_unfinished(call: ModelCall, done: list[ToolCall]) -> list[ToolCall]:
    """Every tool call that the model asked for, in its order, also those that did not end."""
    requested = call.message.get("tool_calls") or ()
    if len(done) == len(requested):
        return done
    known = {tool_call.id: tool_call for tool_call in done}
    late = "the run ended before this call did"
    return [
        known.get(part["id"]) or ToolCall(id=part["id"], **part["function"], error=late)
        for part in requested
    ]


def run_error(failure: BaseException) -> RunError:
    """Only a request that the model's own words made too long or unfit is not infrastructure."""
    theirs = isinstance(failure, OutputError) or (
        isinstance(failure, EngineError) and failure.status in (400, 413, 422)
    )
    name, message = type(failure).__name__, str(failure) or repr(failure)
    return RunError(type=name, message=message, infrastructure=not theirs)


def pinned(model: str, to: str) -> str:
    """The model to ask beside a run on `to`: the same version, if `to` is a version of this name.

    An agent and the agents that it hands over to or calls are so measured, and trained, at one
    version.
    """
    name, at, _ = to.rpartition("@")
    return to if at and name == model else model
