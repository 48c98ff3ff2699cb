"""Filter options: the choice of runs that `export` and `runs` share, as a RunFilter.

A command takes one of the classes as a parameter and is decorated with `expand_groups`.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, get_args

from cray_agents.cli.option_groups import options_under
from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter
from cray_agents.records import Split, StopReason

AGE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])")
BOUNDED = ("reward", "seconds", "turns", "tokens")  # with a least and a most
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_option = options_under("Which runs")
LoopOption = Annotated[str | None, _option("Of this loop.")]
GenerationOption = Annotated[
    list[int] | None, _option("Of this generation; again: or of that.", min=0)
]
AgentOption = Annotated[str | None, _option("Of this agent.")]
ModelOption = Annotated[str | None, _option("Of a version `name@N`, or of all of `name`.")]
TagOption = Annotated[list[str] | None, _option("With this tag; again: and that one.")]


@dataclass(frozen=True)
class FactOptions:
    """Options that choose runs by facts that the index has; None: not given."""

    loop: LoopOption = None
    generation: GenerationOption = None
    agent: AgentOption = None
    task: Annotated[str | None, _option("On the task of this id.")] = None
    split: Annotated[str | None, _option("On tasks of this split: train, holdout or test.")] = None
    model: ModelOption = None
    stop_reason: Annotated[str | None, _option(f"{', '.join(StopReason)}.")] = None
    min_reward: Annotated[float | None, _option("With at least this reward.")] = None
    max_reward: Annotated[float | None, _option("With at most this reward.")] = None
    min_seconds: Annotated[float | None, _option("That took at least so long.", min=0)] = None
    max_seconds: Annotated[float | None, _option("That took at most so long.", min=0)] = None
    min_turns: Annotated[int | None, _option("With at least so many turns.", min=0)] = None
    max_turns: Annotated[int | None, _option("With at most so many turns.", min=0)] = None
    min_tokens: Annotated[
        int | None, _option("Whose calls read and sampled at least so many tokens.", min=0)
    ] = None
    max_tokens: Annotated[int | None, _option("... at most so many.", min=0)] = None
    error: Annotated[str | None, _option("With an error of this type; '*': with any.")] = None
    since: Annotated[
        str | None, _option("Started then or later: a date, or an age (7d, 12h, 30m).")
    ] = None
    until: Annotated[str | None, _option("Started then or earlier; a day is its beginning.")] = None
    tag: TagOption = None

    def run_filter(self) -> RunFilter:
        """Return the options as a filter. Raises BadInput if nothing can match."""
        _check_choice("split", self.split, get_args(Split))
        _check_choice("stop-reason", self.stop_reason, tuple(StopReason))
        for name in BOUNDED:
            self._check_range(name)
        fields, now = asdict(self), time.time()
        generations = self.generation or []
        fields |= {
            "generation": generations[0] if len(generations) == 1 else None,
            "generations": generations if len(generations) > 1 else None,
            "since": None if self.since is None else moment(self.since, "since", now),
            "until": None if self.until is None else moment(self.until, "until", now),
            "tags": fields.pop("tag") or [],
        }
        return RunFilter(**fields)

    def _check_range(self, name: str) -> None:
        low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
        for option, bound in ((f"min-{name}", low), (f"max-{name}", high)):
            if bound is not None and math.isnan(bound):
                raise BadInput(f"--{option} must be a number, not {bound}", param=option)
        if low is not None and high is not None and low > high:
            raise BadInput(
                f"--min-{name} {low:g} is above --max-{name} {high:g}: nothing can match",
                param=f"min-{name}",
            )


@dataclass(frozen=True)
class FilterOptions(FactOptions):
    """All options that choose runs, also by the text of their messages."""

    text: Annotated[str | None, _option("With this text in input, output or messages.")] = None


def moment(given: str, option: str, now: float) -> float:
    """Parse a time to unix seconds: `7d` counts back from `now`, a date without a zone is local.

    Raises BadInput.
    """
    if match := AGE.fullmatch(given.strip().lower()):
        return now - float(match[1]) * SECONDS[match[2]]
    try:
        return datetime.fromisoformat(given.strip()).timestamp()
    except (ValueError, OverflowError, OSError) as error:  # the last two: years out of range
        raise BadInput(
            f"--{option} must be a date such as 2026-07-01 or 2026-07-01T12:30, or an age such as "
            f"7d, 12h or 30m; not {given!r}",
            param=option,
        ) from error


def _check_choice(option: str, given: str | None, known: Sequence[str]) -> None:
    if given is not None and given not in known:
        raise BadInput(f"--{option} must be one of {', '.join(known)}; not {given!r}", param=option)
