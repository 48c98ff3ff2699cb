"""`events` command: what changes on a platform, a line each, until it ends or Ctrl-C."""

import asyncio
import json
from typing import Annotated

import typer

from cray_agents.cli.screen import HomeOption, JsonOption, UrlOption, one_line
from cray_agents.platform.client import Platform
from cray_agents.server.platform_process import platform_at


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(events)


def events(
    kind: Annotated[
        list[str] | None, typer.Option(help="Only of this kind, as run or job; repeatable.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="Go on behind this `cursor`, which --json shows.")
    ] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell which runs, jobs, loops, datasets, models, batches and keys change.

    `reset` tells that changes were missed: look at everything anew.
    """
    platform = platform_at(home, url)
    asyncio.run(_follow(platform, after, frozenset([*kind, "reset"] if kind else []), as_json))


async def _follow(
    platform: Platform, after: str | None, kinds: frozenset[str], as_json: bool
) -> None:
    try:
        async for change in platform.views.changes(after):
            if kinds and change["kind"] not in kinds:
                continue
            words = (change["kind"], change["id"] or "(any)", change["change"])
            print(json.dumps(change) if as_json else one_line(" ".join(words)), flush=True)
    finally:
        await platform.close()
