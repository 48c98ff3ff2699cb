"""Run merge: merge the facts of a run's events, in any order, to the facts of the run.

Every rule is a maximum, a sum or a union over the run's live events, so order does not matter. Each
event must be merged once only; intake.py ensures this. assembly.py joins the bodies by the same
rules.
"""

import math
from typing import Any, NamedTuple

import orjson

from cray_agents.records import UNSCORED, GivenReward, is_finding, scanned_tags
from cray_agents.runtime.store.segments.line_format import Fact


class RunFacts(NamedTuple):
    """A run without its bodies: the fields that lists show and queries compare.

    `rewards` are (name, source, value, turn), the newest of each name, source and turn, without the
    findings of scanners, which are among the `tags`. `reward` is their sum; None if there are none,
    or if computing one failed. `given` are the newest rewards of each giver, (..., giver, time), if
    any came with an API key. `rewards_of_givers` of records.py selects some of them. A run without
    a description (`described` false) gets its facts from its calls. Times are in unix seconds.
    """

    run_id: str
    described: bool
    imported: str | None
    agent: str
    model: str
    models: tuple[str, ...]  # all models of the run, as `name@N`
    loop: str | None
    iteration: int | None
    attempt: int | None
    task: str | None
    split: str | None
    stop_reason: str
    error: str | None
    infrastructure: bool
    reward: float | None
    rewards: tuple[tuple[str, str, float, int | None], ...]
    tags: tuple[str, ...]
    started: float
    seconds: float
    turns: int
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int  # of the prompts
    input: str
    output: str
    redacted: bool
    owner: str
    given: tuple[GivenReward, ...] = ()
    found: str = ""  # of a run in an answer to a search: the words, and those round them

    @property
    def version(self) -> str:
        """A version that answered, or the model that was asked if none is known."""
        return next((model for model in reversed(self.models) if "@" in model), self.model)


_REWARD = ("name", "source", "value", "time", "turn", "giver")
_ABOUT = (  # the facts of a description, in this order
    *("model", "agent", "loop", "generation", "attempt", "task", "split", "stop_reason"),
    *("started", "seconds", "error", "infrastructure", "tags", "rewards", "turns"),
    *("input", "output", "imported", "redacted", "owner"),
)
_OF_CALLS = (  # the attributes that merge the calls, in this order
    *("calls", "prompt", "sampled", "cached", "redacted", "first", "last"),
    *("models", "tags", "owner"),
)


class MergedRun:
    """The merged facts of a run's live events; `dumps()` and `MergedRun(data)` convert to JSON."""

    __slots__ = (*_OF_CALLS, "described", "forgotten", "rewards")

    def __init__(self, data: bytes | None = None) -> None:
        self.described: list[Any] | None = None  # [time, event id, *_ABOUT] of the newest
        self.calls = self.prompt = self.sampled = self.cached = 0
        self.redacted = False
        self.first = math.inf
        self.last: list[Any] | None = None  # [started, event id, seconds, model, ending]
        self.models: list[str] = []
        self.tags: list[str] = []
        self.owner: list[Any] | None = None  # [started, event id, owner] of the first call
        self.rewards: list[list[Any]] = []  # [name, source, value, time, turn, giver], of events
        self.forgotten: float | None = None  # events up to this time do not count
        if data is not None:
            (self.described, self.forgotten, self.rewards, calls) = orjson.loads(data)
            if calls is not None:
                for name, value in zip(_OF_CALLS, calls, strict=True):
                    setattr(self, name, value)

    def dumps(self) -> bytes:
        """Return this as JSON, to pass to `MergedRun`."""
        calls = None
        if self.last is not None:
            calls = [getattr(self, name) for name in _OF_CALLS]
        return orjson.dumps((self.described, self.forgotten, self.rewards, calls))

    def take(self, fact: Fact) -> bool:
        """Merge a live event. Return whether it is now the run's newest description."""
        if fact.kind == "call":
            self._take_call(fact)
        elif fact.kind == "reward":
            about = fact.about
            reward = [about[name] for name in _REWARD]
            self.rewards = _newest([*self.rewards, reward], by_giver=True)
        elif fact.kind == "run" and (
            self.described is None or [fact.time, fact.id] > self.described[:2]
        ):
            about = fact.about
            self.described = [fact.time, fact.id, *[about[name] for name in _ABOUT]]
            return True
        return False

    def facts(self, run_id: str) -> RunFacts | None:
        """Return the facts of the run; None while it has neither a description nor a call."""
        if self.described is None and self.last is None:
            return None
        _, _, model, agent, loop, iteration, attempt, task, split, stop_reason, *more = (
            self.described or self._description_from_calls()
        )
        started, seconds, error, infrastructure, tags, given, turns, *heads = more
        run_input, output, imported, redacted, owner = heads
        by_giver = _newest([*given, *self.rewards], by_giver=True) if given else self.rewards
        rewards = _newest(by_giver)
        findings = [tuple(reward[1:4]) for reward in rewards if is_finding(reward[1])]
        if findings:
            rewards = [reward for reward in rewards if not is_finding(reward[1])]
            by_giver = [reward for reward in by_giver if not is_finding(reward[1])]
        tags = _union(self.tags, tags)
        has_givers = any(reward[5] for reward in by_giver)
        return RunFacts(
            run_id,
            self.described is not None,
            imported,
            agent,
            model,
            tuple(self.models if model in self.models else sorted([model, *self.models])),
            loop,
            iteration,
            attempt,
            task,
            split,
            stop_reason,
            error,
            infrastructure,
            sum([reward[2] for reward in rewards]) if rewards and error != UNSCORED else None,
            tuple([(reward[0], reward[1], reward[2], reward[4]) for reward in rewards]),
            tuple(scanned_tags(tags, findings, self._ended) if findings or tags else tags),
            started,
            seconds,
            turns or self.calls,
            self.calls,
            self.prompt,
            self.sampled,
            self.cached,
            run_input,
            output,
            redacted or self.redacted,
            owner,
            tuple(
                (name, source, value, turn, giver, when)
                for name, source, value, when, turn, giver in by_giver
                if has_givers
            ),
        )

    @property
    def _ended(self) -> float:
        """The time at which the last call ended."""
        return -math.inf if self.last is None else float(self.last[0] + self.last[2])

    def _description_from_calls(self) -> tuple[Any, ...]:
        """Return values like `described` for a run without a description."""
        assert self.last is not None
        started, _, seconds, model, ending = self.last
        return (
            *(0.0, "", model, "", None, None, None, None, None),
            ending,
            *(self.first, started + seconds - self.first),
            *(None, False, [], [], 0, "", "", None, False, self.owner[2] if self.owner else ""),
        )

    def _take_call(self, fact: Fact) -> None:
        about = fact.about
        model, started = about["model"], about["started"]
        self.calls += 1
        self.prompt += about["prompt"]
        self.sampled += about["sampled"]
        self.cached += about["cached"]
        self.redacted = self.redacted or about["redacted"]
        self.first = min(self.first, started)
        if self.last is None or [started, fact.id] > self.last[:2]:
            self.last = [started, fact.id, about["seconds"], model, about["ending"]]
        if self.owner is None or [started, fact.id] < self.owner[:2]:
            self.owner = [started, fact.id, about["owner"]]
        self.models = _union(self.models, [model])
        self.tags = _union(self.tags, about["tags"])


def _union(known: list[str], more: list[str]) -> list[str]:
    """Return the members of both lists, sorted, each once."""
    if not more or (len(more) == 1 and more[0] in known):
        return known
    return sorted({*known, *more})


def _newest(rewards: list[list[Any]], *, by_giver: bool = False) -> list[list[Any]]:
    """Return the newest reward, by (time, value), of each name, source and turn, sorted by these.

    `by_giver`: and of each giver.
    """
    if len(rewards) < 2:
        return rewards
    kept: dict[tuple[str, str, int, str], list[Any]] = {}
    for reward in rewards:
        name, source, value, when, turn, giver = reward
        key = (name, source, -1 if turn is None else turn, giver if by_giver else "")
        if key not in kept or (when, value) >= (kept[key][3], kept[key][2]):
            kept[key] = reward
    return [kept[key] for key in sorted(kept)]
