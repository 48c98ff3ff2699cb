"""A run while it goes on, and the Run it becomes, whatever ended it. Called by agent.py."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cray_agents.errors import BadInput, EngineError
from cray_agents.output import OutputError
from cray_agents.records import (
    Message,
    ModelCall,
    Run,
    RunError,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
    digest,
)

_RUN_ID = re.compile(r"[\w.:@-]{1,200}", re.ASCII)


@dataclass
class Progress:
    """A run that goes on: what was said and done so far. Raises BadInput for an unfit id.

    `request` is what all its model calls have in common, `labels` more fields of the Run.
    """

    id: str
    agent: str
    input: str
    request: dict[str, Any]
    messages: list[Message]
    labels: dict[str, Any]
    turns: list[tuple[ModelCall, list[ToolCall]]] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.id):
            raise BadInput(
                f"run_id={self.id!r}: use at most 200 letters, digits and _.:@-", param="run_id"
            )

    def next_request(self) -> dict[str, Any]:
        """The next model call's request.

        Its key is the same when a run that was cut off is done again: a gateway then answers what
        it answered before, instead of sampling anew.
        """
        request = {**self.request, "messages": [*self.messages]}
        key = digest([self.id, len(self.turns), request], 32)
        return request | {"extra_headers": {"X-Run-Id": self.id, "Idempotency-Key": key}}

    def ended(self, output: Any, reason: StopReason, error: RunError | None) -> Run:
        """The run as it stands now."""
        turns = [
            Turn(call_id=call.id, call=call, tool_calls=[*done, *_unfinished(call, done)])
            for call, done in self.turns
        ]
        return Run(
            id=self.id,
            agent=self.agent,
            model=self.turns[-1][0].model if self.turns else self.request["model"],
            input=self.input,
            output=output,
            stop_reason=reason,
            error=error,
            trajectory=Trajectory(messages=self.messages, turns=turns),
            started=self.started,
            seconds=time.perf_counter() - self.clock,
            **self.labels,
        )


def _unfinished(call: ModelCall, done: Sequence[ToolCall]) -> list[ToolCall]:
    known = {tool_call.id for tool_call in done}
    return [
        ToolCall(
            id=part["id"],
            name=part["function"]["name"],
            arguments=part["function"]["arguments"],
            error="the run ended before this call did",
        )
        for part in call.message.get("tool_calls") or ()
        if part["id"] not in known
    ]


def run_error(failure: BaseException) -> RunError:
    """Only a request that the model's own words made too long or unfit is not infrastructure."""
    theirs = isinstance(failure, OutputError) or (
        isinstance(failure, EngineError) and failure.status in (400, 413, 422)
    )
    name, message = type(failure).__name__, str(failure) or repr(failure)
    return RunError(type=name, message=message, infrastructure=not theirs)


def check_text(text: str, what: str) -> None:
    """Raise BadInput for text with lone surrogates, which JSON cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{what} is not valid Unicode text: {error}", param=what) from error
