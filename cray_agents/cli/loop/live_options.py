"""What `loop --watch` and its options make of a file's loop: one that trains on live traffic.

Called by loops.py; what the options mean is in hours.Watch.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import ValidationError

from cray_agents.cli.runs.filter_options import AGE, SECONDS
from cray_agents.errors import BadInput
from cray_agents.loop.live.schedule import Watch
from cray_agents.loop.loop import Loop
from cray_agents.platform.client import Platform


@dataclass(frozen=True)
class Watching:
    """The options as they were given."""

    watch: bool
    runs: int | None
    every: str | None
    quiet: str | None
    updates_per_day: int | None
    giver: list[str] | None
    once: bool


def watching(loop: Loop, given: Watching) -> Loop:
    """The loop, watching if that was asked; the file's own Watch holds where nothing is said.

    It gets a name of its own, `<name>-live`, unless it watched already: what it did offline stays
    another loop's. Raises BadInput.
    """
    if not given.watch:
        said = [name for name, value in asdict(given).items() if value]
        if said:
            option = said[0].replace("_", "-")
            raise BadInput(f"--{option} has no effect without --watch", param=option)
        return loop
    known = loop.watch.model_dump() if loop.watch is not None else {}
    name = loop.name if loop.watch is not None else f"{loop.name}-live"
    try:
        watch = Watch(**{**known, **_changes(given, known)})
    except ValidationError as error:
        told = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise BadInput(f"--watch: {told}", param="watch") from error
    return replace(loop, watch=watch, name=name)


async def next_update(platform: Platform, loop: str) -> int:
    """The number of the update that comes next; 0 is but the beginning."""
    recorded = await platform.generations(loop)
    await platform.close()
    return max(1, len(recorded))


def _changes(given: Watching, known: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if given.every is not None:
        changes |= {"every": seconds(given.every, "every"), "runs": None}
    if given.runs is not None:
        changes["runs"] = given.runs
    if given.quiet is not None:
        changes["quiet"] = given.quiet
    if given.giver:
        changes["givers"] = given.giver
    if given.updates_per_day is not None:
        changes["per_day"] = {**known.get("per_day", {}), "updates": given.updates_per_day}
    return changes


def seconds(given: str, option: str) -> float:
    """A time such as 6h, 30m or 45s. Raises BadInput."""
    match = AGE.fullmatch(given.strip().lower())
    if match is None or float(match[1]) == 0:
        raise BadInput(f"--{option} must be a time such as 6h, 30m or 45s; not {given!r}",
                       param=option)  # fmt: skip
    return float(match[1]) * SECONDS[match[2]]
