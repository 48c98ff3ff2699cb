"""What Agent.stream yields, in the order in which it happens."""

from dataclasses import dataclass

from cray_agents.records import Run, ToolCall


@dataclass(frozen=True)
class TextDelta:
    """A piece of the model's text, as it came."""

    text: str


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
class RunEnded:
    """The last event of a stream."""

    run: Run


AgentEvent = TextDelta | ToolStarted | ToolFinished | RunEnded
