"""Events of Agent.stream, in the order in which they happen."""

from dataclasses import dataclass

from cray_agents.records import ModelCall, Run, StopReason, ToolCall


@dataclass(frozen=True)
class ModelStarted:
    """A model call begins; `turn` counts from 0."""

    turn: int
    agent: str
    model: str


@dataclass(frozen=True)
class TextDelta:
    """A piece of the model's text."""

    text: str


@dataclass(frozen=True)
class ModelFinished:
    """A model call ended."""

    call: ModelCall


@dataclass(frozen=True)
class ToolStarted:
    """A tool call begins."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFinished:
    """A tool call ended, with a result or an error."""

    call: ToolCall


@dataclass(frozen=True)
class Handoff:
    """Another agent speaks from here on, in the same run."""

    agent: str


@dataclass(frozen=True)
class LimitReached:
    """A limit was reached: `max_turns`, `timeout`, or `max_tokens` of the run or of its answer."""

    limit: StopReason


@dataclass(frozen=True)
class RunEnded:
    """The last event of a stream."""

    run: Run


AgentEvent = (
    ModelStarted
    | TextDelta
    | ModelFinished
    | ToolStarted
    | ToolFinished
    | Handoff
    | LimitReached
    | RunEnded
)
