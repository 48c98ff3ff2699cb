"""A new version for several replicas: one after the other, so that at least one serves at any time.

Called by pool.py, which lets one change at a time begin. Read next: seat.py, how one replica does.
"""

from collections.abc import Collection, Sequence

from cray_agents.errors import SwapError
from cray_agents.records import ProbeReport
from cray_agents.runtime.held import Held
from cray_agents.runtime.seat import Seat


async def roll(seats: Sequence[Seat], new: Held, *, keep: bool) -> ProbeReport:
    """Let all seats hold a version; those that serve it already are left alone. `keep`: see `Seat`.

    Returns the worst report; all passed. A replica that cannot prove what others could is left
    out. Raises SwapError if none could: then each serves what it served before.
    """
    reports: list[ProbeReport] = []
    failed: list[tuple[Seat, SwapError]] = []
    for seat in sorted(seats, key=lambda seat: (seat.serving != new.version, bool(seat.serving))):
        if seat.serving == new.version and seat.report is not None:
            reports.append(seat.report)
            continue
        try:
            reports.append(await seat.change(new, keep=keep, go_back=not reports))
        except SwapError as error:
            failed.append((seat, error))
    if not reports:
        raise failed[0][1]
    for seat, why in failed:
        if seat.state != "out":  # it went back when nobody had proven the new version yet
            await seat.leave_out(new, str(why))
    return max(reports, key=lambda report: report.max_logprob_diff)


async def stage(
    seats: Sequence[Seat], new: Held, needed: Collection[str], *, keep: bool
) -> ProbeReport:
    """Let one seat hold a candidate: the least busy that the needed versions can do without.

    Where one that served nothing cannot prove it, that seat is to blame, and the next is asked.
    Raises SwapError, also when there is none to spare.
    """
    left = list(seats)
    free = spare(left, needed)
    if not free:
        raise SwapError(
            f"no replica can be spared: each is the only one that serves one of "
            f"{', '.join(sorted(needed))}. Start the platform with more --replicas, or end the "
            "canary first"
        )
    while True:
        seat, served = free[0], free[0].serving
        try:
            return await seat.change(new, keep=keep)
        except SwapError:
            left.remove(seat)
            free = spare(left, needed)
            if served or not free:
                raise


def spare(seats: Sequence[Seat], needed: Collection[str]) -> list[Seat]:
    """The seats of which any can be taken while each needed version is served on; best first."""
    served = [seat.serving for seat in seats]
    free = [seat for seat in seats if seat.serving not in needed or served.count(seat.serving) > 1]
    return sorted(free, key=lambda seat: (seat.serving in needed, seat.in_flight))
