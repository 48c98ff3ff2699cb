"""Filter options: the choice of runs that `export` and `runs` share, as a RunFilter.

A command takes the Annotated types it wants as parameters and hands them to `filter_of`.
"""

import math
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, get_args

import typer

from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter
from cray_agents.records import Split, StopReason

AGE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
PANEL = "Which runs"  # the options' heading in --help

LoopOption = Annotated[
    str | None, typer.Option("--loop", help="Of this loop.", rich_help_panel=PANEL)
]
GenerationOption = Annotated[
    list[int] | None,
    typer.Option("--generation", min=0, help="Of this generation; again: or of that.",
                 rich_help_panel=PANEL),
]  # fmt: skip
AgentOption = Annotated[
    str | None, typer.Option("--agent", help="Of this agent.", rich_help_panel=PANEL)
]
TaskOption = Annotated[
    str | None, typer.Option("--task", help="On the task of this id.", rich_help_panel=PANEL)
]
SplitOption = Annotated[
    str | None,
    typer.Option("--split", help="On tasks of this split: train, holdout or test.",
                 rich_help_panel=PANEL),
]  # fmt: skip
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Of a version `name@N`, or of all of `name`.",
                 rich_help_panel=PANEL),
]  # fmt: skip
StopReasonOption = Annotated[
    str | None,
    typer.Option("--stop-reason", help=f"{', '.join(StopReason)}.", rich_help_panel=PANEL),
]
MinRewardOption = Annotated[
    float | None,
    typer.Option("--min-reward", help="With at least this reward.", rich_help_panel=PANEL),
]
MaxRewardOption = Annotated[
    float | None,
    typer.Option("--max-reward", help="With at most this reward.", rich_help_panel=PANEL),
]
ErrorOption = Annotated[
    str | None,
    typer.Option("--error", help="With an error of this type; '*': with any.",
                 rich_help_panel=PANEL),
]  # fmt: skip
SinceOption = Annotated[
    str | None,
    typer.Option("--since", help="Started then or later: a date, or an age (7d, 12h, 30m).",
                 rich_help_panel=PANEL),
]  # fmt: skip
UntilOption = Annotated[
    str | None,
    typer.Option("--until", help="Started then or earlier; a day is its beginning.",
                 rich_help_panel=PANEL),
]  # fmt: skip
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", help="With this tag; again: and that one.", rich_help_panel=PANEL),
]
TextOption = Annotated[
    str | None,
    typer.Option("--text", help="With this text in input, output or messages.",
                 rich_help_panel=PANEL),
]  # fmt: skip


def filter_of(
    *,
    loop: str | None = None,
    generation: Sequence[int] | None = None,
    agent: str | None = None,
    task: str | None = None,
    split: str | None = None,
    model: str | None = None,
    stop_reason: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    error: str | None = None,
    since: str | None = None,
    until: str | None = None,
    tag: Sequence[str] | None = None,
    text: str | None = None,
) -> RunFilter:
    """Return the options as a filter. Raises BadInput if nothing can match."""
    _check_choice("split", split, get_args(Split))
    _check_choice("stop-reason", stop_reason, tuple(StopReason))
    for name, reward in (("min-reward", min_reward), ("max-reward", max_reward)):
        if reward is not None and math.isnan(reward):
            raise BadInput(f"--{name} must be a number, not {reward}", param=name)
    if min_reward is not None and max_reward is not None and min_reward > max_reward:
        raise BadInput(
            f"--min-reward {min_reward:g} is above --max-reward {max_reward:g}: nothing can match",
            param="min-reward",
        )
    now = time.time()
    generations = list(generation or ())
    return RunFilter(
        loop=loop,
        generation=generations[0] if len(generations) == 1 else None,
        generations=generations if len(generations) > 1 else None,
        agent=agent,
        task=task,
        split=split,
        stop_reason=stop_reason,
        model=model,
        min_reward=min_reward,
        max_reward=max_reward,
        error=error,
        since=None if since is None else moment(since, "since", now),
        until=None if until is None else moment(until, "until", now),
        tags=list(tag or ()),
        text=text,
    )


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
