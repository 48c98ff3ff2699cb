"""What Agent.stream yields, in the order in which it happens."""

from dataclasses import dataclass

from cray_agents.records import ModelCall, Run, StopReason, ToolCall


@dataclass(frozen=True)
class ModelStarted:
    """A model is asked; `turn` counts from 0."""

    turn: int
    agent: str
    model: str


@dataclass(frozen=True)
class TextDelta:
    """A piece of the model's text, as it came."""

    text: str


@dataclass(frozen=True)
class ModelFinished:
    """The model's answer is whole."""

    call: ModelCall


@dataclass(frozen=True)
class ToolStarted:
    """The model asked for a tool call, which begins."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFinished:
    """A tool call ended, with a result or an error."""

    call: ToolCall


@dataclass(frozen=True)
class Handoff:
    """From here on another agent speaks, in the same run."""

    agent: str


@dataclass(frozen=True)
class LimitReached:
    """A limit of the run was reached: `max_turns`, `max_tokens` or `timeout`."""

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
