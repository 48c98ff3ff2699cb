"""Rolling swap: change the version of many replicas, a share of them at a time.

The first replica proves the version alone. After that a share of the replicas change side by side,
and as each one ends the next one begins. Replicas of one host then read a checkpoint while it is
in the page cache. In drain mode one replica always serves on, unless there is only one. A replica
that waits for a place in Slurm starts with the new version later. A candidate is staged on one.
Called by pool.py. Read next: replica.py, the change of one replica.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import TypeVar

from cray_agents.errors import Overtaken, PoolBusy, SwapError
from cray_agents.records import ProbeReport
from cray_agents.runtime.pool.golden_probe import LoadedVersion
from cray_agents.runtime.pool.replica import Replica

R = TypeVar("R", bound=Replica)
_POLL_INTERVAL = 0.2  # seconds between two looks if a rollback waits for a copy's end


async def copy_weights(slots: Sequence[Replica], new: LoadedVersion) -> None:
    """Have the hosts of slots copy a version's weights while these serve on: weight_copies.py.

    Raises Overtaken where a rollback waits.
    """
    stale = [s for s in slots if s.placed and new.version not in s.versions]
    if new.over is None and stale:
        copying = asyncio.gather(*(slot.engine_host.stage(new.checkpoint) for slot in stale))
        try:
            while not copying.done():
                stale[0].notifier.abort_if_rollback_waits(new.version)
                await asyncio.wait({copying}, timeout=_POLL_INTERVAL)
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)


async def rolling_swap(
    slots: Sequence[Replica],
    new: LoadedVersion,
    *,
    keep: bool,
    share: float,
    protected: Collection[str] = (),
) -> ProbeReport:
    """Load a version on all slots; slots that serve it are left alone.

    `keep` and `protected`: see `Replica.change`. `share`: see `most_away`. Returns the worst
    report; all passed. A replica that fails to prove a version that another has proven is left out.

    Raises SwapError if none proved it; each then serves its former version. Raises Overtaken where
    a rollback waits; slots that had not begun then keep their former version. Raises PoolBusy if no
    slot has a place.
    """
    if not any(slot.placed for slot in slots):
        raise PoolBusy(
            f"{new.version} was not loaded: "
            + ("all replicas wait for a place" if slots else "this platform has no replica")
            + ", and a version is checked on a replica before it serves (GET /v1/pool)"
        )
    proofs = [(slot, slot.select_version(new.version)) for slot in slots]
    reports = [report for _, report in proofs if report is not None]
    late = [slot for slot in slots if not slot.placed]
    # those that serve nothing change first
    changeable = (slot for slot, report in proofs if report is None and slot.placed)
    waiting = deque(sorted(changeable, key=_serves))
    failed: list[tuple[Replica, SwapError]] = []
    changing: set[Replica] = set()
    overtaken: list[Overtaken] = []

    async def change_next() -> None:
        slot = waiting.popleft()
        changing.add(slot)
        try:
            change = slot.change(new, keep=keep, go_back=not reports, protected=protected)
            reports.append(await change)
        except Overtaken as error:
            overtaken.append(error)
        except SwapError as error:
            failed.append((slot, error))
        finally:
            changing.remove(slot)

    def may_change(slot: Replica) -> bool:
        """Tell whether another one serves meanwhile: some may be down."""
        stay = (one for one in slots if one is not slot and one not in changing)
        return keep or not _serves(slot) or any(map(_serves, stay))

    async def change_beside() -> None:
        while waiting and not overtaken and may_change(waiting[0]):
            await change_next()

    while waiting and not reports and not overtaken:
        await change_next()
    async with asyncio.TaskGroup() as group:
        for _ in range(most_away(len(slots), share, keep=keep)):
            group.create_task(change_beside())
    while waiting and not overtaken:  # the only one that serves, as others are down
        await change_next()
    for slot in late if reports and not overtaken else ():
        if slot.placed:  # it got its place meanwhile, and may have started with the former version
            waiting.append(slot)
            await change_next()
        else:
            slot.expect(await slot.adapters.whole(new, slot.loaded))
    if overtaken:
        raise overtaken[0]
    if not reports:
        errors = [error for _, error in failed]
        raise next((error for error in errors if not isinstance(error, PoolBusy)), errors[0])
    for slot, why in failed:
        if slot.state != "out":  # it failed first, and went back to its former version
            await slot.leave_out(new, str(why))
    return max(reports, key=lambda report: report.max_logprob_diff)


def most_away(replicas: int, share: float, *, keep: bool) -> int:
    """Return how many replicas may change at once: a share of them, at least one.

    Without `keep` one stays, since a replica that drains answers no new request.
    """
    most = max(1, int(replicas * share + 1e-9))
    return most if keep else min(most, max(1, replicas - 1))


def _serves(slot: Replica) -> bool:
    return bool(slot.versions)


async def stage_on_one_slot(
    slots: Sequence[Replica],
    new: LoadedVersion,
    protected: Collection[str],
    *,
    former: str,
    keep: bool,
) -> ProbeReport:
    """Load a candidate on one slot: the least busy that no protected version depends on.

    An adapter over the weights of any slot is loaded there; that keeps the adapter of `former` too.
    If a slot that served nothing fails to prove the candidate, the next one is tried.
    Raises SwapError; PoolBusy when no slot is free.
    """
    adaptable = sorted(
        (slot for slot in slots if slot.can_load_as_adapter(new)),
        key=lambda slot: (slot.version in protected, slot.in_flight),
    )
    if adaptable:
        return await adaptable[0].change(new, protected={former, *protected})
    untried = [slot for slot in slots if slot.placed]
    if not untried:
        raise PoolBusy(f"{new.version} was not loaded: all replicas wait for a place in Slurm")
    free = find_free_slots(untried, protected)
    if not free:
        raise PoolBusy(
            f"no replica can be spared: each is the only one that serves one of "
            f"{', '.join(sorted(protected))}. Start the platform with more --replicas, or end the "
            "canary first"
        )
    while True:
        slot, served = free[0], free[0].versions
        await copy_weights([slot], new)
        try:
            return await slot.change(new, keep=keep)
        except Overtaken:
            raise
        except SwapError:
            untried.remove(slot)
            free = find_free_slots(untried, protected)
            if served or not free:
                raise


def find_free_slots(slots: Sequence[R], protected: Collection[str]) -> list[R]:
    """Return the slots that can change while every protected version stays served, best first.

    Those that hold received weights come first: their job's version is to be staged there.
    """
    count = Counter(version for slot in slots for version in slot.versions)
    used = {slot: [v for v in slot.versions if v in protected] for slot in slots}
    free = [slot for slot in slots if all(count[v] > 1 for v in used[slot])]
    return sorted(free, key=lambda s: (bool(used[s]), s.state != "unproven", s.in_flight))
