"""Goodput: add up the ledger, by holder, kind or node.

Hours are of GPUs, or of nodes where a holder has none. Of the hours that were held,

    useful  a replica answered at least one request, or a job trained steps that were kept
    lost    a job trained steps that a later attempt trained again
    idle    a replica served, and nobody asked
    asleep  a replica slept in its job
    other   starts, loads, saves, swaps, waits of a session for its next job

Goodput is useful / held. A holder that was killed wrote no end. Its time counts to the last sign of
it: the last line of its file, or the last event of its job.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cray_agents.paths import Home
from cray_agents.runtime.scaling.ledger import LedgerLine, read_ledger

HOUR = 3600.0
GroupedBy = Literal["kind", "holder", "node"]


@dataclass(frozen=True)
class Holding:
    """A node in the hands of a holder, from `begin` to `end`, in unix seconds."""

    line: LedgerLine
    begin: float
    end: float

    @property
    def weight(self) -> int:
        """GPUs of the holding; 1 for a node without."""
        return max(1, len(self.line.gpus))


@dataclass
class Attempt:
    """The steps of one attempt of a job: it began at step `first`, and came to `last`."""

    time: float
    first: int
    last: int
    seconds: float
    tokens: int
    place: tuple[str, int]  # whose nodes trained it: a job's attempt, or a session's


@dataclass
class Account:
    """The hours of one row, and what came of them."""

    total: float = 0.0
    useful: float = 0.0
    lost: float = 0.0
    idle: float = 0.0
    asleep: float = 0.0
    tokens_served: int = 0
    tokens_trained: int = 0
    steps: int = 0
    steps_lost: int = 0

    def row(self, name: str) -> dict[str, Any]:
        """Return the row of a table; hours, and shares of them."""
        known = self.useful + self.lost + max(0.0, self.idle) + self.asleep
        other = max(0.0, self.total - known)
        return {
            "name": name,
            "held_hours": self.total / HOUR,
            "goodput": self.useful / self.total if self.total else None,
            "useful_hours": self.useful / HOUR,
            "idle_hours": max(0.0, self.idle) / HOUR,
            "asleep_hours": self.asleep / HOUR,
            "lost_hours": self.lost / HOUR,
            "other_hours": other / HOUR,
            "tokens_served": self.tokens_served,
            "tokens_trained": self.tokens_trained,
            "steps": self.steps,
            "steps_lost": self.steps_lost,
        }


@dataclass
class _Facts:
    holdings: list[Holding] = field(default_factory=list)
    busy: list[LedgerLine] = field(default_factory=list)
    served: list[LedgerLine] = field(default_factory=list)
    attempts: dict[str, dict[int, Attempt]] = field(default_factory=lambda: defaultdict(dict))


def goodput(
    home: Home, since: float = 0.0, until: float | None = None, by: GroupedBy = "kind"
) -> list[dict[str, Any]]:
    """Return a row for each kind, holder or node, and one of the total; times in unix seconds."""
    until = time.time() if until is None else until
    facts = _read(home)
    accounts: dict[str, Account] = defaultdict(Account)
    total = Account()
    weights: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)

    def rows(key: str) -> tuple[Account, Account]:
        return accounts[key], total

    for holding in facts.holdings:
        line = holding.line
        weights[line.holder, line.attempt].append((_key(line, by), holding.weight))
        seconds = min(until, holding.end) - max(since, holding.begin)
        if seconds > 0:
            for account in rows(_key(line, by)):
                account.total += seconds * holding.weight
                account.idle += (line.state == "serving") * seconds * holding.weight
                account.asleep += (line.state == "asleep") * seconds * holding.weight
    for line in facts.busy:
        if since <= line.time < until:
            for account in rows(_key(line, by)):
                account.useful += line.seconds * max(1, len(line.gpus))
                account.idle -= line.seconds * max(1, len(line.gpus))
    for line in facts.served:
        if since <= line.time < until:
            for account in rows("replica" if by == "kind" else "platform"):
                account.tokens_served += line.tokens
    for attempts in facts.attempts.values():
        for attempt, kept in _kept(attempts):
            if since <= attempt.time < until:
                _add_steps(rows, attempt, kept, weights[attempt.place], by)
    table = [accounts[key].row(key) for key in sorted(accounts)]
    return [*table, total.row("total")]


def _add_steps(
    rows: Callable[[str], tuple[Account, Account]],
    attempt: Attempt,
    kept: int,
    places: Sequence[tuple[str, int]],
    by: GroupedBy,
) -> None:
    """Add an attempt's steps to the rows of its places; to the first one what is counted once."""
    steps = attempt.last - attempt.first
    useful = attempt.seconds * kept / steps if steps else 0.0
    default = {"kind": "job", "holder": attempt.place[0], "node": "unknown"}[by]
    for number, (key, weight) in enumerate(places or [(default, 1)]):
        for account in rows(key):
            account.useful += useful * weight
            account.lost += (attempt.seconds - useful) * weight
            if not number:
                account.steps += kept
                account.steps_lost += steps - kept
                account.tokens_trained += attempt.tokens


def _kept(attempts: dict[int, Attempt]) -> Iterable[tuple[Attempt, int]]:
    """Yield each attempt with the number of its steps that no later attempt trained again."""
    later: int | None = None
    for number in sorted(attempts, reverse=True):
        attempt = attempts[number]
        end = attempt.last if later is None else min(attempt.last, later)
        yield attempt, max(0, end - attempt.first)
        later = attempt.first if later is None else min(later, attempt.first)


def _key(line: LedgerLine, by: GroupedBy) -> str:
    return {"kind": line.kind, "holder": line.holder, "node": line.node}[by]


def _read(home: Home) -> _Facts:
    facts = _Facts()
    open_ends: list[tuple[LedgerLine, float]] = []
    begins: dict[str, list[float]] = defaultdict(list)  # of each holder
    for lines in read_ledger(home.ledger):
        places: dict[tuple[str, str], LedgerLine] = {}
        for line in lines:
            place = (line.holder, line.node)
            match line.event:
                case "hold" | "leave":
                    if (before := places.pop(place, None)) is not None:
                        facts.holdings.append(Holding(before, before.time, line.time))
                    if line.event == "hold":
                        places[place] = line
                        begins[line.holder].append(line.time)
                case "busy":
                    facts.busy.append(line)
                case "served":
                    facts.served.append(line)
                case "steps":
                    facts.attempts[line.holder][line.attempt] = _merge(
                        facts.attempts[line.holder].get(line.attempt), line
                    )
        open_ends += [(line, lines[-1].time) for line in places.values()]
    for line, last in open_ends:
        end = max(last, _last_sign(home, line))
        later = [begin for begin in begins[line.holder] if begin > line.time]
        if line.kind != "replica":  # a job's next attempt begins when this one is over
            end = min([end, *later])
        facts.holdings.append(Holding(line, line.time, end))
    return facts


def _merge(before: Attempt | None, line: LedgerLine) -> Attempt:
    """Return the newest of two accounts of an attempt: it only grows."""
    if before is not None and before.last > line.last:
        return before
    place = (line.within, line.within_attempt) if line.within else (line.holder, line.attempt)
    return Attempt(line.time, line.first, line.last, line.seconds, line.tokens, place)


def _last_sign(home: Home, line: LedgerLine) -> float:
    """Return when a job or a session that wrote no end was last known to live."""
    files = {"job": home.job(line.holder) / "events.jsonl",
             "session": home.sessions / line.holder / "log.txt"}  # fmt: skip
    try:
        return files[line.kind].stat().st_mtime
    except (KeyError, OSError):
        return 0.0
