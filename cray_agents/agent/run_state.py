"""A run while it goes on, and the Run it becomes, whatever ended it.

Called by agent.py and turns.py. Read next: persona.py.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from cray_agents.agent.active_agent import ActiveAgent, check_text, pinned
from cray_agents.agent.hooks import Hooks
from cray_agents.agent.output_types import OutputError
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.sessions import FileSession, Session, spoken
from cray_agents.agent.stream_events import AgentEvent, LimitReached
from cray_agents.agent.tool import Tool
from cray_agents.errors import BadInput, EngineError, HookError
from cray_agents.records import (
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


class RunOptions(TypedDict, total=False):
    """What Agent.run, run_sync and stream take beside the input, all by name.

    context: anything, for tools and hooks: they find it as RunContext.given.
    session: a conversation to go on from, and to add this run to, or the path of a FileSession; or
    history: the messages of earlier runs to go on from.
    model: of all model calls, in place of the agent's.
    seed: of the sampling: the n-th model call, from 0, has seed + n.
    run_id: names the run; default: a fresh name.
    tags: the run is found again by them.
    loop, generation, attempt: what the run is for, in a loop.
    """

    context: Any
    session: Session | str | Path | None
    history: Sequence[Message]
    model: str | None
    seed: int | None
    run_id: str | None
    tags: Sequence[str]
    loop: str | None
    generation: int | None
    attempt: int | None


@dataclass
class RunState:
    """A run that goes on: what was said and done so far. Raises BadInput for an unfit id.

    `model` is asked in the place of the persona's, where this run says so; `earlier` is
    what was said before it; `labels` are more fields of the Run. `request` is what the present
    persona's requests have in common, `tools` what it may call: its own, and the environment's;
    `hooks` are the run's and the persona's. `half_told`: a part of the present answer was streamed
    already.
    """

    context: RunContext
    model: str | None
    earlier: list[Message]
    labels: dict[str, Any]
    session: Session | None = None
    run_hooks: Sequence[Hooks] = ()
    max_turns: int = 1
    max_tokens: int | None = None
    emit: Callable[[AgentEvent], None] | None = None
    half_told: bool = False
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
    def said(self) -> list[Message]:
        """What this run added to the conversation, its input first."""
        return spoken(self.messages)[len(self.earlier) :]

    @property
    def in_order(self) -> bool:
        """Whether tool calls are carried out one by one: an environment's always are."""
        return self.context.environment is not None or self.persona.in_order

    async def enter(self, persona: ActiveAgent) -> None:
        """Let this persona speak from here on. Raises HookError of its instructions."""
        present = self.request.get("model")
        self.persona = persona
        others = (one for one in persona.hooks if one not in self.run_hooks)
        self.hooks = [*self.run_hooks, *others]
        self.context.agent = persona.name
        self.tools = {**persona.tools, **self.environment_tools}
        self.request = {**persona.request}
        if self.model is not None:
            self.request["model"] = self.model
        if present is not None:  # a handoff
            self.request["model"] = pinned(persona.request["model"], present)
        if self.tools:
            self.request["tools"] = [tool.schema for tool in self.tools.values()]
        else:
            self.request.pop("parallel_tool_calls", None)  # servers refuse it where there are none
        self.context.model = self.request["model"]
        self.messages[:] = [*await persona.system(self.context), *spoken(self.messages)]

    def next_request(self, *, final: bool) -> dict[str, Any]:
        """The next model call's request. `final`: for an answer, not for tools.

        An answer is held to its schema only where no tool may be called: servers would hold the
        tool calls to it too.
        """
        request = {**self.request, "messages": [*self.messages]}
        if self.context.seed is not None:  # the same for every call would draw alike in each
            request["seed"] = self.context.seed + len(self.turns)
        if final and self.tools:
            request["tool_choice"] = "none"
        output = self.persona.output
        constrain = output.constrain and self.persona.learned.schemas
        if constrain and output.schema is not None and (final or not self.tools):
            request["response_format"] = output.schema
        return request

    def addressed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request with the headers that say whose it is.

        Its key is the same when a run that was cut off is done again: a gateway then answers what
        it answered before, instead of sampling anew.
        """
        body = {name: value for name, value in request.items() if name != "extra_headers"}
        key = digest([self.context.run_id, len(self.turns), body], 32)
        own = {"X-Run-Id": self.context.run_id, "Idempotency-Key": key}
        return {**body, "extra_headers": {**request.get("extra_headers", {}), **own}}

    def tell(self, event: AgentEvent) -> None:
        """Let whoever streams the run know."""
        if self.emit is not None:
            self.emit(event)

    def at_limit(self) -> StopReason | None:
        """The limit that is reached, if any. Raises EngineError if tokens cannot be counted."""
        if self.max_tokens is not None and self.turns:
            if not self.tokens:
                raise EngineError(
                    "the server does not say how many tokens it used, so max_total_tokens cannot "
                    "be held: leave it out, or use a server that reports `usage`"
                )
            if self.tokens >= self.max_tokens:
                return StopReason.max_tokens
        return StopReason.max_turns if len(self.turns) >= self.max_turns else None

    def stop(self, reason: StopReason) -> None:
        """Note a limit, once it is known that it ends the run."""
        self.reason = reason
        self.tell(LimitReached(reason))

    def failed(self, failure: BaseException) -> RunError:
        """Note what ends the run, unless a limit did before; the error as it is recorded."""
        if self.reason is StopReason.completed:
            cancelled = isinstance(failure, asyncio.CancelledError)
            self.reason = StopReason.cancelled if cancelled else StopReason.error
        return run_error(failure)

    def never_began(self) -> RunError | None:
        """The error of a run whose time was over before its model could be asked."""
        if self.request:
            return None
        late = "history, environment and instructions took all of the run's time"
        return self.failed(HookError(f"{late}: give it a longer timeout"))

    def rewards(self, error: RunError | None) -> list[Reward]:
        """What was given so far; of a run that the infrastructure failed, nothing."""
        failed = error is not None and error.infrastructure
        return [] if failed else [*self.context.rewards]

    def ended(self, output: Any, error: RunError | None) -> Run:
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


def begun(given: str | Task, options: RunOptions, agent: str, **fixed: Any) -> RunState:
    """An agent's run on an input; `fixed` are more fields of Progress.

    Raises BadInput, and TypeError for an option there is not.
    """
    if unknown := options.keys() - RunOptions.__annotations__.keys():
        raise TypeError(f"run() got an unexpected keyword argument {min(unknown)!r}")
    if not isinstance(given, str | Task):
        raise BadInput(f"input is a {type(given).__name__}: give a str or Task", param="input")
    text = given.input if isinstance(given, Task) else given
    check_text(text, "input")
    session, history = _session(options.get("session")), options.get("history", ())
    if session is not None and history:
        raise BadInput("give a session or a history, not both", param="history")
    tags = [*_tags(options.get("tags", ())), *([f"session:{session.id}"] if session else [])]
    purpose = {name: options.get(name) for name in ("loop", "generation", "attempt")}
    context = RunContext(
        run_id=options.get("run_id") or new_id("run"),
        agent=agent,
        input=text,
        task=given if isinstance(given, Task) else None,
        given=options.get("context"),
        seed=options.get("seed"),
        messages=[{"role": "user", "content": text}],
    )
    return RunState(
        context=context,
        model=options.get("model"),
        earlier=spoken(history),
        labels={"agent": agent, "tags": tags, **purpose},
        session=session,
        **fixed,
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
    """A tool call for each that the model asked for, in its order, whether it ended or not."""
    asked = call.message.get("tool_calls") or ()
    if len(done) == len(asked):
        return done
    known = {tool_call.id: tool_call for tool_call in done}
    late = "the run ended before this call did"
    return [
        known.get(part["id"]) or ToolCall(id=part["id"], **part["function"], error=late)
        for part in asked
    ]


def run_error(failure: BaseException) -> RunError:
    """Only a request that the model's own words made too long or unfit is not infrastructure."""
    theirs = isinstance(failure, OutputError) or (
        isinstance(failure, EngineError) and failure.status in (400, 413, 422)
    )
    name, message = type(failure).__name__, str(failure) or repr(failure)
    return RunError(type=name, message=message, infrastructure=not theirs)
