"""Holdings: read the ledger as who had which node when, and cut each time by what came of it.

Of the time in which a holder has a node, its pieces are

    serving   a replica answered at least one request
    idle      a replica could have, and nobody asked
    asleep    a replica slept in its job
    training  a job trained steps that were kept
    lost      a job trained steps that a later attempt trained again
    other     starts, loads, saves, changes of versions, a session that waits for its next job

They add up to that time, as far as floating-point numbers do: idle and other are what the others
leave. Busy seconds are spread evenly over the time since the platform's beat before, steps over the
time since the place's last job. What is more than that time is left out: it was never held.

A holder that was killed wrote no end. Its time counts to the last sign of it: the last line of its
file, the last event of its job, or the last steps or queued job of its session. Called by
cost_account.py.

`goodput` adds them up, by holder, kind or node: useful / held, where useful is what served, and
training that was kept. Hours are of GPUs, or of nodes where a holder has none.
"""

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from cray_agents.paths import Home
from cray_agents.runtime.accounting.ledger import LedgerLine, read_ledger

HOUR = 3600.0
GroupedBy = Literal["kind", "holder", "node"]
Use = Literal["serving", "idle", "asleep", "training", "lost", "other"]
Place = tuple[str, int]  # a holder and its attempt


class Piece(NamedTuple):
    """`seconds` out of the time from `begin` to `end` of a holding, and what came of them.

    `line`: the holder, and what it had. `job`: whose steps they are. `joules`: that were measured
    in them, `measured`: for how many of them.
    """

    line: LedgerLine
    begin: float
    end: float
    seconds: float
    use: Use
    job: str = ""
    joules: float = 0.0
    measured: float = 0.0

    def share(self, since: float, until: float) -> float:
        """Return the share of its time between two times."""
        inside = min(until, self.end) - max(since, self.begin)
        return max(0.0, inside) / (self.end - self.begin)


@dataclass
class Attempt:
    """The steps of one attempt of a job: it began at step `first`, and came to `last`."""

    time: float
    first: int
    last: int
    seconds: float
    tokens: int
    place: Place  # whose nodes trained it: a job's attempt, or a session's


class KeptSteps(NamedTuple):
    """An attempt of a job, and how many of its steps no later attempt trained again."""

    job: str
    attempt: Attempt
    kept: int


@dataclass
class LedgerAccount:
    """Pieces of all holdings, steps, and tokens served: the ledger as a whole."""

    pieces: list[Piece] = field(default_factory=list)
    steps: list[KeptSteps] = field(default_factory=list)
    served: list[LedgerLine] = field(default_factory=list)


@dataclass
class _Holding:
    """A node in the hands of a holder, from `begin` to `end`, in unix seconds."""

    line: LedgerLine
    begin: float
    end: float
    energy: "_Energy"


class _Energy:
    """Measured joules of a holder on a node: each is of the time since the one before."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._spans: list[tuple[float, float]] = []  # begin and joules, in the order of `_ends`
        self._since: float | None = None

    def note(self, line: LedgerLine) -> None:
        """Take a line of this holder and node, in the order of the file."""
        if line.joules is not None and self._since is not None and line.time > self._since:
            self._ends.append(line.time)
            self._spans.append((self._since, line.joules))
        if line.joules is not None or self._since is None:
            self._since = line.time

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """Return joules between two times, and for how many seconds of them they are known."""
        joules = seconds = 0.0
        for at in range(bisect_right(self._ends, begin), len(self._ends)):
            since, amount = self._spans[at]
            if since >= end:
                break
            inside = min(end, self._ends[at]) - max(begin, since)
            joules += amount * inside / (self._ends[at] - since)
            seconds += inside
        return joules, seconds


@dataclass
class _Facts:
    holdings: list[list[_Holding]] = field(default_factory=list)  # of each file and holder
    busy: list[list[tuple[float, LedgerLine]]] = field(default_factory=list)  # beside them: since
    served: list[LedgerLine] = field(default_factory=list)
    attempts: dict[str, dict[int, Attempt]] = field(default_factory=lambda: defaultdict(dict))


def read_holdings(home: Home) -> LedgerAccount:
    """Return the pieces of all holdings, and the steps that were trained in them."""
    facts = _read(home)
    steps = [
        KeptSteps(job, attempt, kept)
        for job, attempts in facts.attempts.items()
        for attempt, kept in _kept(attempts)
    ]
    at: dict[Place, list[KeptSteps]] = defaultdict(list)
    for each in steps:
        at[each.attempt.place].append(each)
    account = LedgerAccount(steps=steps, served=facts.served)
    for holdings, busy in zip(facts.holdings, facts.busy, strict=True):
        if holdings[0].line.kind == "replica":
            account.pieces += _replica_pieces(holdings, busy)
        else:
            for holding in holdings:
                place = (holding.line.holder, holding.line.attempt)
                account.pieces += _training_pieces(holding, at[place])
    return account


def _replica_pieces(
    holdings: Sequence[_Holding], busy: Sequence[tuple[float, LedgerLine]]
) -> Iterator[Piece]:
    """Yield the pieces of a replica.

    Busy seconds fill the time in which it served first. The rest is of requests that ended while it
    already changed.
    """
    cursor = float("-inf")
    for since, line in busy:
        begin = max(since, cursor)
        yield from _unasked(holdings, cursor, begin)
        spans = _within(holdings, begin, line.time)
        left = line.seconds
        shares: list[float] = [0.0] * len(spans)
        for served in (True, False):
            chosen = [n for n, (holding, _, _) in enumerate(spans)
                      if (_left_over(holding) == "idle") is served]  # fmt: skip
            length = sum(spans[n][2] - spans[n][1] for n in chosen)
            filled = min(left, length)
            left -= filled
            for n in chosen:
                shares[n] = filled / length
        for share, (holding, start, end) in zip(shares, spans, strict=True):
            seconds = (end - start) * share
            yield from _cut(holding, start, end, [(seconds, "serving", "")])
        cursor = max(cursor, line.time)
    yield from _unasked(holdings, cursor, float("inf"))


def _unasked(holdings: Sequence[_Holding], since: float, until: float) -> Iterator[Piece]:
    """Yield the pieces of a time in which a replica answered nothing."""
    for holding, begin, end in _within(holdings, since, until):
        yield from _cut(holding, begin, end, [])


def _within(
    holdings: Sequence[_Holding], since: float, until: float
) -> list[tuple[_Holding, float, float]]:
    """Return each holding's part of a time, in order; holdings of a replica do not overlap."""
    first = bisect_right(holdings, since, key=lambda holding: holding.end)
    spans = []
    for holding in holdings[first:]:
        if holding.begin >= until:
            break
        begin, end = max(since, holding.begin), min(until, holding.end)
        if end > begin:
            spans.append((holding, begin, end))
    return spans


def _training_pieces(holding: _Holding, steps: Iterable[KeptSteps]) -> Iterator[Piece]:
    """Yield the pieces of a job's or session's node: its steps, job after job, and what is left."""

    def end_of(each: KeptSteps) -> float:
        return min(holding.end, each.attempt.time)

    cursor = holding.begin
    for end, together in groupby(sorted(steps, key=end_of), end_of):
        if end <= cursor:
            continue
        group = list(together)
        total = sum(each.attempt.seconds for each in group)
        fits = min(1.0, (end - cursor) / total) if total else 0.0
        uses: list[tuple[float, Use, str]] = []
        for job, attempt, kept in group:
            count = attempt.last - attempt.first
            share = kept / count if count else 0.0
            seconds = attempt.seconds * fits
            uses.append((seconds * share, "training", job))
            uses.append((seconds * (1.0 - share), "lost", job))
        yield from _cut(holding, cursor, end, uses)
        cursor = end
    if holding.end > cursor:
        yield from _cut(holding, cursor, holding.end, [])


def _cut(
    holding: _Holding, begin: float, end: float, uses: Iterable[tuple[float, Use, str]]
) -> Iterator[Piece]:
    """Yield a piece for each use of a time of a holding, and one for what they leave."""
    joules, known = holding.energy.between(begin, end)
    spent = 0.0
    for seconds, use, job in (*uses, (None, _left_over(holding), "")):
        seconds = max(0.0, end - begin - spent) if seconds is None else seconds
        spent += seconds
        if seconds:
            share = seconds / (end - begin)
            yield Piece(holding.line, begin, end, seconds, use, job, joules * share, known * share)


def _left_over(holding: _Holding) -> Use:
    """Return what the time of a holding is for which nothing is written."""
    if holding.line.kind != "replica":
        return "other"
    states: dict[str, Use] = {"serving": "idle", "asleep": "asleep"}
    return states.get(holding.line.state, "other")


def _kept(attempts: dict[int, Attempt]) -> Iterable[tuple[Attempt, int]]:
    """Yield each attempt with the number of its steps that no later attempt trained again."""
    later: int | None = None
    for number in sorted(attempts, reverse=True):
        attempt = attempts[number]
        end = attempt.last if later is None else min(attempt.last, later)
        yield attempt, max(0, end - attempt.first)
        later = attempt.first if later is None else min(later, attempt.first)


class _FileReader:
    def __init__(self, facts: _Facts) -> None:
        self._facts = facts
        self.places: dict[tuple[str, str], LedgerLine] = {}  # that nobody has left
        self._energy: dict[tuple[str, str], _Energy] = defaultdict(_Energy)
        self._holdings: dict[str, list[_Holding]] = defaultdict(list)
        self._busy: dict[str, list[tuple[float, LedgerLine]]] = defaultdict(list)
        self._beat = self._newest = float("-inf")  # the last two times of the platform's beat

    def read(self, lines: Sequence[LedgerLine]) -> None:
        """Take the lines of the file."""
        facts = self._facts
        for line in lines:
            place = (line.holder, line.node)
            if line.event in ("hold", "leave", "busy"):
                self._energy[place].note(line)
            match line.event:
                case "hold" | "leave":
                    if (before := self.places.pop(place, None)) is not None:
                        self.end(before, line.time)
                    if line.event == "hold":
                        self.places[place] = line
                case "busy":
                    self._note_beat(line.time)
                    self._busy[line.holder].append((self._beat, line))
                case "served":
                    self._note_beat(line.time)
                    facts.served.append(line)
                case "steps":
                    facts.attempts[line.holder][line.attempt] = _merge(
                        facts.attempts[line.holder].get(line.attempt), line
                    )

    def _note_beat(self, time: float) -> None:
        if time > self._newest:
            self._beat, self._newest = self._newest, time

    def end(self, line: LedgerLine, end: float) -> None:
        """Note when a holding ended."""
        if end > line.time:
            energy = self._energy[line.holder, line.node]
            self._holdings[line.holder].append(_Holding(line, line.time, end, energy))

    def close(self) -> None:
        """Give the holdings to the facts."""
        for holder, holdings in self._holdings.items():
            holdings.sort(key=lambda holding: holding.begin)
            self._facts.holdings.append(holdings)
            self._facts.busy.append(self._busy[holder])


def _read(home: Home) -> _Facts:
    facts = _Facts()
    files: list[tuple[_FileReader, float]] = []
    begins: dict[str, list[float]] = defaultdict(list)  # of each holder
    for lines in read_ledger(home.ledger):
        reader = _FileReader(facts)
        reader.read(lines)
        files.append((reader, lines[-1].time))
        for line in lines:
            if line.event == "hold":
                begins[line.holder].append(line.time)
    for reader, last in files:
        for line in reader.places.values():
            end = max(last, _last_sign(home, line, facts))
            later = [begin for begin in begins[line.holder] if begin > line.time]
            if line.kind != "replica":  # a job's next attempt begins when this one is over
                end = min([end, *later])
            reader.end(line, end)
        reader.close()
    return facts


def _merge(before: Attempt | None, line: LedgerLine) -> Attempt:
    """Return the newest of two accounts of an attempt: it only grows."""
    if before is not None and before.last > line.last:
        return before
    place = (line.within, line.within_attempt) if line.within else (line.holder, line.attempt)
    return Attempt(line.time, line.first, line.last, line.seconds, line.tokens, place)


def _last_sign(home: Home, line: LedgerLine, facts: _Facts) -> float:
    """Return when a job or a session that wrote no end was last known to live."""
    session = home.sessions / line.holder
    files = {
        "job": [home.job(line.holder) / "events.jsonl"],
        "session": [session / "log.txt", session / "queue"],
    }
    signs = [
        attempt.time
        for attempts in facts.attempts.values()
        for attempt in attempts.values()
        if line.kind == "session" and attempt.place == (line.holder, line.attempt)
    ]
    for path in files.get(line.kind, []):
        with suppress(OSError):
            signs.append(path.stat().st_mtime)
    return max(signs, default=0.0)


def _row(name: str, seconds: Counter[Use], work: Counter[str]) -> dict[str, Any]:
    """Return a row of the table of goodput: hours, and shares of them, and the work."""
    total, useful = seconds.total(), seconds["serving"] + seconds["training"]
    useless: tuple[Use, ...] = ("idle", "asleep", "lost", "other")
    return {
        "name": name,
        "held_hours": total / HOUR,
        "goodput": useful / total if total else None,
        "useful_hours": useful / HOUR,
        **{f"{use}_hours": seconds[use] / HOUR for use in useless},
        **{name: work[name] for name in ("tokens_served", "tokens_trained", "steps", "steps_lost")},
    }


def goodput(
    home: Home, since: float = 0.0, until: float | None = None, by: GroupedBy = "kind"
) -> list[dict[str, Any]]:
    """Return a row for each kind, holder or node, and one of the total; times in unix seconds."""
    until = time.time() if until is None else until
    ledger = read_holdings(home)
    held: dict[str, Counter[Use]] = defaultdict(Counter)  # seconds of each row
    done: dict[str, Counter[str]] = defaultdict(Counter)  # its work
    keys: dict[Place, str] = {}  # an attempt counts once, in the row of its first node
    for piece in ledger.pieces:
        key = _key(piece.line, by)
        keys.setdefault((piece.line.holder, piece.line.attempt), key)
        if seconds := piece.seconds * piece.share(since, until) * max(1, len(piece.line.gpus)):
            held[key][piece.use] += seconds  # type: ignore[assignment]
    for line in ledger.served:
        if since <= line.time < until:
            done["replica" if by == "kind" else "platform"]["tokens_served"] += line.tokens
    for _, attempt, kept in ledger.steps:
        if since <= attempt.time < until:
            default = {"kind": "job", "holder": attempt.place[0], "node": "unknown"}[by]
            lost = attempt.last - attempt.first - kept
            work = {"steps": kept, "steps_lost": lost, "tokens_trained": attempt.tokens}
            done[keys.get(attempt.place, default)].update(work)
    rows = [_row(key, held[key], done[key]) for key in sorted({*held, *done})]
    return [*rows, _row("total", sum(held.values(), Counter()), sum(done.values(), Counter()))]


def _key(line: LedgerLine, by: GroupedBy) -> str:
    return {"kind": line.kind, "holder": line.holder, "node": line.node}[by]
