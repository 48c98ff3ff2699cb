"""`models prune`: gives back the disk of versions that nobody needs. Registered by models.py.

It works on the shared root, platform or not; one that runs is asked what its replicas hold.
Read next: runtime/pruning.py.
"""

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer

from cray_agents.cli.platform.platform_process import client, owner, running
from cray_agents.cli.screen import HomeOption, JsonOption, console, errors, show
from cray_agents.config import load_config
from cray_agents.errors import SetupError
from cray_agents.paths import Home


def prune(
    name: Annotated[str | None, typer.Argument(help="Of this name alone.")] = None,
    keep: Annotated[
        int, typer.Option(min=1, help="How many versions that were promoted before stay, too.")
    ] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete the weights of versions that nobody needs, and resume points of jobs that ended.

    What stays: what is promoted, was promoted lately or is newest, canaries, what replicas hold,
    what jobs and loops go on from; and every record: a deleted version stays in the history.
    """
    from cray_agents.cli.screen import size
    from cray_agents.runtime.retention import prune

    where = load_config({"home": home}).root
    with errors.status("looking for what nobody needs"):
        found = prune.prune(where, name, keep=keep, held=lambda: held_on(where), dry_run=dry_run)
    if as_json:
        print(json.dumps(asdict(found) | {"bytes": found.bytes, "dry_run": dry_run}, indent=2))
        return
    parts = {"weights": found.weights, "resume points": found.points, "left over": found.drafts}
    rows = [
        {"what": what, "of": of, "size": size(count)}
        for what, part in parts.items()
        for of, count in part.items()
    ]
    if rows:
        show(rows, ["what", "of", "size"], as_json=False)
    for version, why in found.kept.items():
        console.print(f"{version} stays: {why}", highlight=False, markup=False)
    console.print(f"{size(found.bytes)} {'would be ' if dry_run else ''}given back")


def held_on(home: Home) -> set[str]:
    """The versions that the replicas of a root's platform hold. Raises SetupError."""
    info = running(home)
    if info is None:
        if (other := owner(home)) is None:
            return set()
        raise SetupError(
            f"the platform on {home.root} (pid {other['pid']}) does not say what its replicas hold:"
            " it is starting or ending; try again in a moment"
        )

    async def ask() -> list[dict[str, object]]:
        platform = client(info)
        try:
            return await platform.pool(spares=True)
        finally:
            await platform.close()

    found: set[str] = set()
    for replica in asyncio.run(ask()):
        versions = replica.get("versions")
        named = [replica.get("version"), *(versions if isinstance(versions, list) else [])]
        found.update(one for one in named if isinstance(one, str))
    return found
