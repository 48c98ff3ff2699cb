"""Schedule of live training: enough new runs or a period, outside quiet hours, within a budget.

Pure functions of records and the time. Hours and days are those of the local clock. Called by
traffic.py.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from pydantic import Field, field_validator, model_validator

from cray_agents.queries import RunFilter
from cray_agents.records import StrictRecord


class Daily(StrictRecord):
    """A day's budget: once it is used, no further update begins. None: any amount.

    Args:
        updates: how many, promoted or not.
        trainer_seconds: of their training jobs, by the jobs' own clocks.
    """

    updates: int | None = Field(default=None, ge=1)
    trainer_seconds: float | None = Field(default=None, gt=0)


class Live(StrictRecord):
    """Live training: the runs to train on, and its times. `Loop(..., live=Live(...))`.

    A run counts once it has a reward of one of the `givers`, whenever that came. Runs of loops,
    verdicts of judges, runs on held-out tasks, imported runs and runs without tokens do not count.
    See traffic.py.

    Args:
        runs: the number of new runs that make an update; None: only `every` does.
        every: seconds from one update to the next; then a single new run is enough.
        quiet: hours in which no update begins, such as `22:00-06:00`; a begun one goes on.
        per_day: the budget of a day.
        givers: names of the API keys whose rewards count, beside the loop's own key and rewards
            given on the platform's host (`cray-agents runs reward`). The holder of any other key
            may say anything of his runs. Without keys, all rewards count.
        where: a filter of runs; default: runs of any version of the loop's model.
        within: seconds after its start for which a run may still get its reward.
        most: runs in one update, the oldest first; the rest waits for the next update.
        poll: seconds between two looks, or ten times as long as a look takes.
        canary_share, canary_sessions: where the loop has no held-out tasks, a candidate answers
            this share of the live sessions, and is promoted if it is no worse after so many.
    """

    runs: int | None = Field(default=64, ge=1)
    every: float | None = Field(default=None, gt=0)
    quiet: str | None = None
    per_day: Daily = Field(default_factory=Daily)
    givers: list[str] = Field(default_factory=list)
    where: RunFilter = Field(default_factory=RunFilter)
    within: float = Field(default=30 * 86_400.0, gt=0)
    most: int = Field(default=4096, ge=1)
    poll: float = Field(default=5.0, gt=0)
    canary_share: float = Field(default=0.1, gt=0, lt=1)
    canary_sessions: int = Field(default=200, ge=1)

    @field_validator("quiet")
    @classmethod
    def _hours(cls, quiet: str | None) -> str | None:
        if quiet is not None:
            _parsed(quiet)
        return quiet

    @model_validator(mode="after")
    def _ever(self) -> "Live":
        if self.runs is None and self.every is None:
            raise ValueError("say when to train: `runs`, or `every` so many seconds")
        if self.runs is not None and self.runs > self.most:
            raise ValueError(f"runs={self.runs} would never fit into an update: most={self.most}")
        if self.where.loop is not None or self.where.split not in (None, "train"):
            raise ValueError("where: live runs are no loop's, and on no held-out task")
        return self


class Update(NamedTuple):
    """An update that has begun: its time (unix seconds), and its job's seconds if it has ended."""

    time: float
    trainer_seconds: float


def is_due(watch: Live, runs: int, last: float, now: float) -> bool:
    """Tell whether so many new runs make an update. `last`: the begin of the previous one."""
    enough = watch.runs is not None and runs >= watch.runs
    return enough or (watch.every is not None and runs > 0 and now >= last + watch.every)


def held_back(watch: Live, begun: Sequence[Update], now: float) -> str | None:
    """The reason why no update may begin now, in words, if any."""
    until = quiet_until(watch.quiet, datetime.fromtimestamp(now)) if watch.quiet else None
    if until is not None:
        return f"quiet until {until:%H:%M}"
    today = datetime.fromtimestamp(now).date()
    of_today = [u for u in begun if datetime.fromtimestamp(u.time).date() == today]
    most, seconds = watch.per_day.updates, watch.per_day.trainer_seconds
    if most is not None and len(of_today) >= most:
        return f"{len(of_today)} of {most} updates a day"
    used = sum(update.trainer_seconds for update in of_today)
    if seconds is not None and used >= seconds:
        return f"{used:.0f} of {seconds:.0f} trainer seconds a day"
    return None


def quiet_until(quiet: str, now: datetime) -> datetime | None:
    """The end of the present quiet hours, which may span midnight; None outside of them."""
    first, last = _parsed(quiet)
    minute = now.hour * 60 + now.minute
    inside = first <= minute < last if first < last else minute >= first or minute < last
    if not inside:
        return None
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight + timedelta(days=int(minute >= last), minutes=last)


def _parsed(quiet: str) -> tuple[int, int]:
    """Both ends in minutes after midnight. Raises ValueError."""
    try:
        first, last = (datetime.strptime(end.strip(), "%H:%M") for end in quiet.split("-"))
    except ValueError:
        raise ValueError(f"{quiet!r}: two times of day are wanted, such as 22:00-06:00") from None
    if first == last:
        raise ValueError(f"{quiet!r} is all day or never: its ends are the same")
    return first.hour * 60 + first.minute, last.hour * 60 + last.minute
