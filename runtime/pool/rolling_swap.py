"""A new version for several replicas: one after the other, so that at least one serves at any time.

Called by pool.py, which lets one change at a time begin. Read next: seat.py, how one replica does.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from cray_agents.errors import Overtaken, PoolBusy, SwapError
from cray_agents.records import ProbeReport
from cray_agents.runtime.pool.loaded_version import LoadedVersion
from cray_agents.runtime.pool.replica_slot import ReplicaSlot


async def roll(
    seats: Sequence[ReplicaSlot], new: LoadedVersion, *, keep: bool, needed: Collection[str] = ()
) -> ProbeReport:
    """Let all seats hold a version; those that serve it already are left alone.

    `keep` and `needed`: see `Seat.change`.
    Returns the worst report; all passed. A replica that cannot prove what others could is left
    out. Raises SwapError if none could: then each serves what it served before. Raises Overtaken
    where a rollback waits: then those that had not begun serve what they served before.
    """
    reports: list[ProbeReport] = []
    failed: list[tuple[ReplicaSlot, SwapError]] = []
    for seat in sorted(seats, key=lambda s: (new.version not in s.versions, bool(s.versions))):
        if (report := seat.turn_to(new.version)) is not None:
            reports.append(report)
            continue
        try:
            reports.append(await seat.change(new, keep=keep, go_back=not reports, needed=needed))
        except Overtaken:
            raise
        except SwapError as error:
            failed.append((seat, error))
    if not reports:
        errors = [error for _, error in failed]
        raise next((error for error in errors if not isinstance(error, PoolBusy)), errors[0])
    for seat, why in failed:
        if seat.state != "out":  # it went back when nobody had proven the new version yet
            await seat.leave_out(new, str(why))
    return max(reports, key=lambda report: report.max_logprob_diff)


async def stage(
    seats: Sequence[ReplicaSlot],
    new: LoadedVersion,
    needed: Collection[str],
    *,
    former: str,
    keep: bool,
) -> ProbeReport:
    """Let one seat hold a candidate: the least busy that the needed versions can do without.

    Where it is an adapter over what seats hold, any of them will do, and of the adapters there
    `former` stays too.
    Where one that served nothing cannot prove it, that seat is to blame, and the next is asked.
    Raises SwapError; PoolBusy when there is none to spare.
    """
    over = sorted(
        (seat for seat in seats if seat.adapts(new)),
        key=lambda seat: (seat.version in needed, seat.in_flight),
    )
    if over:
        return await over[0].change(new, needed={former, *needed})
    left = list(seats)
    free = spare(left, needed)
    if not free:
        raise PoolBusy(
            f"no replica can be spared: each is the only one that serves one of "
            f"{', '.join(sorted(needed))}. Start the platform with more --replicas, or end the "
            "canary first"
        )
    while True:
        seat, served = free[0], free[0].versions
        try:
            return await seat.change(new, keep=keep)
        except Overtaken:
            raise
        except SwapError:
            left.remove(seat)
            free = spare(left, needed)
            if served or not free:
                raise


def spare(seats: Sequence[ReplicaSlot], needed: Collection[str]) -> list[ReplicaSlot]:
    """The seats of which any can be taken while each needed version is served on; best first."""
    count = Counter(version for seat in seats for version in seat.versions)
    used = {seat: [v for v in seat.versions if v in needed] for seat in seats}
    free = [seat for seat in seats if all(count[v] > 1 for v in used[seat])]
    return sorted(free, key=lambda seat: (bool(used[seat]), seat.in_flight))
