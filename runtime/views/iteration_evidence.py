"""Iteration evidence: a loop's iteration, the decision on its candidate, and the pairs behind.

The decision comes from the history of the candidate's name, the pairs from the loop's journal,
which loops of older versions did not write. Called by gateway/routes/loops.py.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import NotFound
from cray_agents.iteration import Iteration
from cray_agents.paths import ITERATIONS, Home
from cray_agents.promotion.sequential_test import Decision, PairedEvidence, entry_of
from cray_agents.runtime.disk import checksums, paging
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store.loop_records import LoopRecords
from cray_agents.runtime.views.view_records import (
    HoldoutPoint,
    IterationDetail,
    LoopSummary,
    PairOutcome,
    ShownDecision,
    ShownPair,
    WealthCurve,
)

MOST_POINTS = 600  # of a curve
CACHED = 8  # notes of pairs


def iteration_detail(home: Home, registry: Registry, loop: str, number: int) -> dict[str, Any]:
    """Return a IterationDetail as JSON. Raises NotFound, Corrupt."""
    records = LoopRecords(home, loop)
    content, ended = records.content(number), records.ended(number)
    try:
        record = Iteration.model_validate(content)
    except ValidationError as error:
        raise NotFound(
            f"iteration {number} of loop {loop!r} has other fields than a loop's: "
            f"/v1/loops/{loop}/iterations has them",
            param="number",
        ) from error
    noted = read_pairs(home, loop, number)
    return IterationDetail(
        loop=loop,
        record=record,
        ended=ended,
        decision=_decision(registry, loop, record),
        incumbent=None if noted is None else noted.incumbent,
        pairs=None if noted is None else len(noted.pairs),
        curve=None if noted is None else _curve(noted),
    ).model_dump(mode="json")


def pairs_page(
    home: Home, loop: str, number: int, outcome: PairOutcome | None, at: int, limit: int
) -> dict[str, Any]:
    """Return a PairPage as JSON. Raises NotFound where no pairs are noted, Corrupt."""
    noted = read_pairs(home, loop, number)
    if noted is None:
        raise NotFound(
            f"loop {loop!r} noted no pairs of iteration {number}: it compared no candidate then, "
            "or was run by a version before pairs were noted",
            param="number",
        )
    wealth = noted.wealth()
    rows = [
        ShownPair(
            **dict(pair), n=n, outcome=_outcome(pair.candidate - pair.incumbent), wealth=after
        )
        for n, (pair, after) in enumerate(zip(noted.pairs, wealth, strict=True), 1)
    ]
    chosen = [row for row in rows if outcome in (None, row.outcome)]
    return {
        "total": len(chosen),
        "data": [row.model_dump(mode="json") for row in chosen[at : at + limit]],
        "next": at + limit if at + limit < len(chosen) else None,
    }


def read_pairs(home: Home, loop: str, number: int) -> PairedEvidence | None:
    """Return the pairs noted for an iteration's decision; None if there are none."""
    path = home.loop(loop) / "journal" / f"{entry_of(number)}.json"
    try:
        return _read(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None


@lru_cache(CACHED)
def _read(path: Path, changed: int) -> PairedEvidence | None:
    try:
        return PairedEvidence.model_validate(checksums.read_json(path))
    except ValidationError:
        return None  # the entry of a client of its own


def _decision(registry: Registry, loop: str, record: Iteration) -> ShownDecision | None:
    """Return the last event of the candidate that this loop made; None if there is none."""
    name, _, version = record.version.rpartition("@")
    try:
        events = registry.history(name)
    except NotFound:
        return None
    mine = [
        event
        for event in events
        if event.kind in ("promoted", "rejected")
        and str(event.version) == version
        and event.who == f"loop {loop}"
    ]
    if not mine or record.evidence is None:
        return None
    event = mine[-1]
    try:
        numbers = Decision.model_validate(event.numbers)
    except ValidationError:
        numbers = None
    return ShownDecision(
        kind="promoted" if event.kind == "promoted" else "rejected",
        who=event.who,
        time=event.time,
        reason=event.reason,
        numbers=numbers,
    )


def _curve(noted: PairedEvidence) -> WealthCurve:
    """Return the wealth after each pair; of many, those at equal steps, the greatest and the last.

    A wealth that reached the limit must be seen, so the greatest is among them.
    """
    wealth = [1.0, *noted.wealth()]
    step = -(-len(wealth) // MOST_POINTS)
    places = {*range(0, len(wealth), step), len(wealth) - 1, wealth.index(max(wealth))}
    return WealthCurve(
        limit=1 / noted.test.alpha,
        alpha=noted.test.alpha,
        planned=noted.planned,
        points=[(n, wealth[n]) for n in sorted(places)],
    )


def _outcome(difference: float) -> PairOutcome:
    return "won" if difference > 0 else "lost" if difference < 0 else "even"


POINTS = 200  # of a curve


def loops_page(home: Home, after: str | None, limit: int) -> checksums.Listing[dict[str, Any]]:
    """Return LoopSummaries as JSON, newest change first; `damaged` names iterations.

    Raises BadInput for an unknown `after`.
    """
    folders = [path for path in home.loops.glob("*") if path.is_dir()]
    newest = sorted(((_changed(path), path.name) for path in folders), reverse=True)
    chosen, has_more = paging.after(newest, lambda each: each[1], after, limit, "loop")
    damaged: list[dict[str, str]] = []
    rows = [_summary(home, name, when, damaged) for when, name in chosen]
    return checksums.Listing(rows, damaged, has_more)


def _changed(folder: Path) -> float:
    """Return when a loop last wrote an iteration, or else an entry of its journal."""
    for name in (ITERATIONS, "journal", "."):
        try:
            return (folder / name).stat().st_mtime
        except FileNotFoundError:
            continue
    return 0.0


def _summary(
    home: Home, loop: str, updated: float, damaged: list[dict[str, str]]
) -> dict[str, Any]:
    records = LoopRecords(home, loop).known(damaged)
    known = [record for record in records if record is not None]
    step = -(-len(known) // POINTS) or 1
    points = [*known[::-step][::-1]] if known else []  # the last one is always among them
    return LoopSummary(
        id=loop,
        iterations=len(records),
        updated=updated,
        last=records[-1] if records else None,
        holdout=[
            HoldoutPoint(
                iteration=each.iteration,
                success=each.holdout_success,
                test=each.test_success,
                tasks=each.holdout_tasks,
                version=each.version,
                promoted=each.promoted,
            )
            for each in points
        ],
    ).model_dump(mode="json")
