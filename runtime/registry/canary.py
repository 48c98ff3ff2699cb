"""Canary: compare a candidate with the promoted version on a share of the live sessions.

A hash of the session's name and the canary's decides the side of a session. So a session stays on
its side, and each canary selects anew. Whenever both sides have new outcomes, x is the difference
of their means since the last time, positive if the candidate is worse. One x is of failed sessions,
one of rewards, and with `scanners` one of their findings. A betting test of each (`Stream` in
cray_agents/promotion/e_process.py) collects evidence for E[x] > margin. The canary is rolled back
when one of these 2 or 3 tests reaches 2 or 3 / alpha. A candidate within the margins is rolled back
with probability at most alpha, however long and often it is tested.

Only the first answer and the first failure of a session count, only the first reward of a run, and
only the first finding of a scanner in it.
So a request that is repeated and fails each time is one failure. The counts are saved beside the
registry's files, a second late at most, so that a restarted gateway goes on from them.
Called by runtime/gateway/model_calls/canary_traffic.py.
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

REMEMBERED = 200_000  # most sessions and runs per canary; later ones do not count


class CanaryTest(StrictRecord):
    """Settings of a canary's traffic and of its verdict.

    Args:
        share: share of the live sessions that the candidate answers.
        alpha: greatest probability of rolling back a candidate that is no worse.
        error_margin: largest accepted increase of the share of failed sessions.
        reward_margin: largest accepted decrease of the mean reward, as a share of the range.
        promote_after: promote the candidate after so many of its sessions, if it is within the
            margins. None: the canary runs until it is ended.
        scanners: names of scanners (`cray-agents scan`) that must not find more in the candidate's
            runs.
        scan_margin: largest accepted increase of the share of runs with a finding.
        low, high: the range of rewards; a reward outside counts as the nearer end.
        givers: names of the API keys whose rewards count, beside rewards given on the platform's
            host; None: all keys. Over HTTP the caller's own key is always among them.
    """

    share: float = Field(0.1, gt=0, lt=1)
    alpha: float = Field(0.05, gt=0, lt=1)
    error_margin: float = Field(0.02, ge=0, lt=1)
    reward_margin: float = Field(0.05, ge=0, lt=1)
    promote_after: int | None = Field(None, ge=1)
    scanners: list[str] = Field(default_factory=list, max_length=32)
    scan_margin: float = Field(0.02, ge=0, lt=1)
    low: float = 0.0
    high: float = 1.0
    givers: list[str] | None = None

    @model_validator(mode="after")
    def _in_order(self) -> "CanaryTest":
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g})")
        return self


class Comparison:
    """Outcomes in [0, 1] of both sides, and the evidence for greater ones of the candidate."""

    def __init__(self, margin: float) -> None:
        self.stream = Stream(margin)
        self.count: dict[Side, int] = {"canary": 0, "control": 0}
        self.total: dict[Side, float] = {"canary": 0.0, "control": 0.0}
        self._new: dict[Side, tuple[int, float]] = {"canary": (0, 0.0), "control": (0, 0.0)}

    def add(self, side: Side, outcome: float) -> None:
        """Add an outcome; once both sides have new ones, test the difference of their means."""
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
    def within_margin(self) -> bool:
        """True if the candidate is no worse than the margin, or a side has no outcomes."""
        canary, control = self.mean("canary"), self.mean("control")
        return canary is None or control is None or canary - control <= self.stream.margin

    def to_dict(self) -> dict[str, Any]:
        """Return the whole state, for `restore`."""
        return {
            "count": self.count,
            "total": self.total,
            "new": self._new,
            "stream": self.stream.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state that `to_dict` returned."""
        self.count, self.total = state["count"], state["total"]
        self._new = {side: (int(n), float(total)) for side, (n, total) in state["new"].items()}
        self.stream.restore(state["stream"])


class Canary:
    """One canary from its start to its verdict. `start`: the event that began it."""

    def __init__(self, start: ModelEvent) -> None:
        self.start = start
        self.test = CanaryTest.model_validate(start.numbers)
        self.id = f"{start.name}/{start.number}"
        self.version = f"{start.name}@{start.version}"
        self.failures = Comparison(self.test.error_margin)
        self.losses = Comparison(self.test.reward_margin)  # 1 - reward
        self.findings = Comparison(self.test.scan_margin)  # 1: a scanner found something
        self.staged = False  # True once this process has loaded the version on a replica
        self.decided: Verdict | None = None
        self.changed = False  # True if there are outcomes that are not saved yet
        self._answered: set[int] = set()
        self._failed: set[int] = set()
        self._rewarded: set[int] = set()
        self._scanned: set[int] = set()

    def draws(self, session: str) -> bool:
        """Tell whether the candidate answers a session; always the same for the same session."""
        return self._hash(session) < self.test.share * 2**64

    def add_answer(self, session: str, side: Side, *, failed: bool) -> None:
        """Count an answer to a session, or a failure that its client did not cause."""
        known, key = self._failed if failed else self._answered, self._hash(session)
        if key in known or len(known) >= REMEMBERED:
            return
        known.add(key)
        self._answered.add(key)  # an answer after a failure does not count
        self.failures.add(side, float(failed))
        self.changed = True

    def add_reward(self, run_id: str, side: Side, reward: float) -> None:
        """Count a run's first reward."""
        key = self._hash(run_id)
        if key in self._rewarded or len(self._rewarded) >= REMEMBERED:
            return
        self._rewarded.add(key)
        share = (reward - self.test.low) / (self.test.high - self.test.low)
        self.losses.add(side, 1 - min(1.0, max(0.0, share)))
        self.changed = True

    def add_finding(self, run_id: str, scanner: str, side: Side, *, has_finding: bool) -> None:
        """Count the first finding of a scanner in a run, also that there is nothing."""
        key = self._hash(f"{scanner} {run_id}")
        if key in self._scanned or len(self._scanned) >= REMEMBERED:
            return
        self._scanned.add(key)
        self.findings.add(side, float(has_finding))
        self.changed = True

    @property
    def _limit(self) -> float:
        """The evidence that rolls the canary back: the tests share alpha."""
        return (3 if self.test.scanners else 2) / self.test.alpha

    def verdict(self) -> tuple[Verdict, str]:
        """Return the action to take now, and the reason."""
        tests = {"errors": self.failures, "rewards": self.losses, "findings": self.findings}
        for kind, comparison in tests.items():
            if comparison.stream.evidence >= self._limit:
                return "roll back", f"worse {kind}: {self._describe(kind)}"
        after = self.test.promote_after
        sessions = self.failures.count["canary"]
        within = all(comparison.within_margin for comparison in tests.values())
        if after is not None and sessions >= after and within:
            return "promote", f"no worse after {sessions} sessions"
        return "continue", ""

    def numbers(self) -> dict[str, Any]:
        """Return the counts and means of both sides, and the evidence so far."""
        numbers: dict[str, Any] = {"limit": self._limit}
        for side in ("canary", "control"):
            loss = self.losses.mean(side)
            reward = None if loss is None else self.test.high - loss * self._range
            numbers[side] = {
                "answered": self.failures.count[side],
                "failed": round(self.failures.total[side]),
                "rewarded": self.losses.count[side],
                "reward": reward,
                "scanned": self.findings.count[side],
                "found": round(self.findings.total[side]),
            }
        numbers["error_evidence"] = self.failures.stream.evidence
        numbers["reward_evidence"] = self.losses.stream.evidence
        numbers["finding_evidence"] = self.findings.stream.evidence
        return numbers

    def _hash(self, text: str) -> int:
        hashed = hashlib.blake2b(f"{self.id} {text}".encode(), digest_size=8).digest()
        return int.from_bytes(hashed)

    @property
    def _range(self) -> float:
        return self.test.high - self.test.low

    def _describe(self, kind: str) -> str:
        numbers = self.numbers()
        canary, control = numbers["canary"], numbers["control"]
        if kind == "errors":
            return (
                f"{canary['failed']} of {canary['answered']} against "
                f"{control['failed']} of {control['answered']}"
            )
        if kind == "findings":
            return (
                f"{', '.join(self.test.scanners)}: {canary['found']} in {canary['scanned']} runs "
                f"against {control['found']} in {control['scanned']}"
            )
        return (
            f"mean {canary['reward']:.3g} of {canary['rewarded']} runs against "
            f"{control['reward']:.3g} of {control['rewarded']}"
        )

    # ---- state on disk

    def to_bytes(self) -> bytes:
        """Return the state as the file's content, and mark it as saved.

        The sets of counted sessions and runs are left out: after a restart they may count again.
        """
        self.changed = False
        state = {
            "failures": self.failures.to_dict(),
            "losses": self.losses.to_dict(),
            "findings": self.findings.to_dict(),
        }
        return checksums.with_crc(orjson.dumps(state)) + b"\n"

    @classmethod
    def load(cls, home: Home, start: ModelEvent) -> "Canary":
        """Load the canary that an event started, with its saved state if there is one."""
        canary = cls(start)
        path = home.canary(start.name, start.number)
        if path.exists():
            state = checksums.read_json(path)
            canary.failures.restore(state["failures"])
            canary.losses.restore(state["losses"])
            if "findings" in state:
                canary.findings.restore(state["findings"])
        return canary
