"""A canary: some live sessions are answered by a candidate, and the others are what it must equal.

A session is drawn by a hash of its name and the canary's, so it stays where it is, and each canary
draws anew. Both sides are watched. Whenever both have something new, x is the difference of their
means since the last time, against the candidate: of failed sessions, and of rewards. Two gamblers
without a deadline (betting.Stream) bet on E[x] > margin; the first of them who has reached
2 / alpha ends the canary. So one that is no worse than the margins is rolled back with probability
at most alpha, however long it runs and however often it is looked at.

Of a session its first answer counts, and its first failure: one that sends again and again what
cannot be answered is one failure. Of a run its first reward. What was seen is kept beside the
registry's files, a second late at most, so that a restarted gateway goes on with it.
Called by gateway/live.py.
"""

import hashlib
from typing import Any, Literal

import orjson
from pydantic import Field, model_validator

from cray_agents.paths import Home
from cray_agents.promotion.e_process import Stream
from cray_agents.records import StrictRecord
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry.registry import ModelEvent

Side = Literal["canary", "control"]
Verdict = Literal["continue", "roll back", "promote"]

REMEMBERED = 200_000  # sessions and runs that are told apart; later ones do not count


class CanaryTest(StrictRecord):
    """How a canary is drawn and judged.

    Args:
        share: of the live sessions.
        alpha: greatest probability of rolling back a candidate that is no worse.
        error_margin: by how much its share of failed sessions may be greater.
        reward_margin: by how much its mean reward may be smaller, as a share of the range.
        promote_after: promote it after so many of its sessions, if it then stands within the
            margins; without, it runs until it is ended.
        low, high: the range of rewards; what lies outside counts as its nearer end.
        givers: names of the API keys whose rewards count, beside what is given on the platform's
            host; None: everybody's. Over HTTP none is none but the caller's own.
    """

    share: float = Field(0.1, gt=0, lt=1)
    alpha: float = Field(0.05, gt=0, lt=1)
    error_margin: float = Field(0.02, ge=0, lt=1)
    reward_margin: float = Field(0.05, ge=0, lt=1)
    promote_after: int | None = Field(None, ge=1)
    low: float = 0.0
    high: float = 1.0
    givers: list[str] | None = None

    @model_validator(mode="after")
    def _in_order(self) -> "CanaryTest":
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g})")
        return self


class Comparison:
    """Outcomes in [0, 1] of both sides, and the evidence that the candidate's are greater."""

    def __init__(self, margin: float) -> None:
        self.stream = Stream(margin)
        self.count: dict[Side, int] = {"canary": 0, "control": 0}
        self.total: dict[Side, float] = {"canary": 0.0, "control": 0.0}
        self._new: dict[Side, tuple[int, float]] = {"canary": (0, 0.0), "control": (0, 0.0)}

    def add(self, side: Side, outcome: float) -> None:
        """See an outcome; once both sides have new ones, bet on their difference."""
        self.count[side] += 1
        self.total[side] += outcome
        count, total = self._new[side]
        self._new[side] = (count + 1, total + outcome)
        (n, candidate), (m, control) = self._new["canary"], self._new["control"]
        if n and m:
            self.stream.add(candidate / n - control / m)
            self._new = {"canary": (0, 0.0), "control": (0, 0.0)}

    def mean(self, side: Side) -> float | None:
        """The mean outcome of a side."""
        return self.total[side] / self.count[side] if self.count[side] else None

    @property
    def within(self) -> bool:
        """Whether the candidate stands no worse than the margin; also while nothing is known."""
        canary, control = self.mean("canary"), self.mean("control")
        return canary is None or control is None or canary - control <= self.stream.margin

    def kept(self) -> dict[str, Any]:
        """All of it, for `restore`."""
        return {
            "count": self.count,
            "total": self.total,
            "new": self._new,
            "stream": self.stream.kept(),
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from what `kept` gave."""
        self.count, self.total = kept["count"], kept["total"]
        self._new = {side: (int(n), float(total)) for side, (n, total) in kept["new"].items()}
        self.stream.restore(kept["stream"])


class Canary:
    """One canary from its start to its verdict. `start`: the event that began it."""

    def __init__(self, start: ModelEvent) -> None:
        self.start = start
        self.test = CanaryTest.model_validate(start.numbers)
        self.id = f"{start.name}/{start.number}"
        self.version = f"{start.name}@{start.version}"
        self.failures = Comparison(self.test.error_margin)
        self.losses = Comparison(self.test.reward_margin)  # 1 - reward
        self.staged = False  # whether a replica was given its version, by this process
        self.decided: Verdict | None = None
        self.changed = False  # since it was saved
        self._answered: set[int] = set()
        self._failed: set[int] = set()
        self._rewarded: set[int] = set()

    def draws(self, session: str) -> bool:
        """Whether a session is answered by the candidate; always the same for the same session."""
        return self._hash(session) < self.test.share * 2**64

    def answered(self, session: str, side: Side, *, failed: bool) -> None:
        """A request of a session was answered, or failed by no fault of its client."""
        known, key = self._failed if failed else self._answered, self._hash(session)
        if key in known or len(known) >= REMEMBERED:
            return
        known.add(key)
        self._answered.add(key)  # an answer after a failure tells nothing new
        self.failures.add(side, float(failed))
        self.changed = True

    def rewarded(self, run_id: str, side: Side, reward: float) -> None:
        """A run has a reward."""
        key = self._hash(run_id)
        if key in self._rewarded or len(self._rewarded) >= REMEMBERED:
            return
        self._rewarded.add(key)
        share = (reward - self.test.low) / (self.test.high - self.test.low)
        self.losses.add(side, 1 - min(1.0, max(0.0, share)))
        self.changed = True

    def verdict(self) -> tuple[Verdict, str]:
        """What is to be done now, and why."""
        limit = 2 / self.test.alpha
        for what, of in (("errors", self.failures), ("rewards", self.losses)):
            if of.stream.evidence >= limit:
                return "roll back", f"worse {what}: {self._told(what)}"
        after = self.test.promote_after
        seen = self.failures.count["canary"]
        within = self.failures.within and self.losses.within
        if after is not None and seen >= after and within:
            return "promote", f"no worse after {seen} sessions"
        return "continue", ""

    def numbers(self) -> dict[str, Any]:
        """How it stands: what both sides got, and the evidence so far."""
        told: dict[str, Any] = {"limit": 2 / self.test.alpha}
        for side in ("canary", "control"):
            loss = self.losses.mean(side)
            reward = None if loss is None else self.test.high - loss * self._range
            told[side] = {
                "answered": self.failures.count[side],
                "failed": round(self.failures.total[side]),
                "rewarded": self.losses.count[side],
                "reward": reward,
            }
        told["error_evidence"] = self.failures.stream.evidence
        told["reward_evidence"] = self.losses.stream.evidence
        return told

    def _hash(self, text: str) -> int:
        hashed = hashlib.blake2b(f"{self.id} {text}".encode(), digest_size=8).digest()
        return int.from_bytes(hashed)

    @property
    def _range(self) -> float:
        return self.test.high - self.test.low

    def _told(self, what: str) -> str:
        numbers = self.numbers()
        canary, control = numbers["canary"], numbers["control"]
        if what == "errors":
            return (
                f"{canary['failed']} of {canary['answered']} against "
                f"{control['failed']} of {control['answered']}"
            )
        return (
            f"mean {canary['reward']:.3g} of {canary['rewarded']} runs against "
            f"{control['reward']:.3g} of {control['rewarded']}"
        )

    # ---- what outlives a restart

    def kept(self) -> bytes:
        """What was seen. Which sessions were is left out: after a restart they may count again."""
        self.changed = False
        kept = {"failures": self.failures.kept(), "losses": self.losses.kept()}
        return checksums.with_crc(orjson.dumps(kept)) + b"\n"

    @classmethod
    def opened(cls, home: Home, start: ModelEvent) -> "Canary":
        """The canary that an event began, with what was kept of it."""
        canary = cls(start)
        path = home.canary(start.name, start.number)
        if path.exists():
            kept = checksums.read_json(path)
            canary.failures.restore(kept["failures"])
            canary.losses.restore(kept["losses"])
        return canary
