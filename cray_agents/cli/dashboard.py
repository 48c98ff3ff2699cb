"""`dashboard` command: open the pages of a platform in a browser, signed in.

The URL has a one-time token behind its `#`, which browsers send to nobody. The page exchanges it
for the key that this command uses: $CRAY_AGENTS_API_KEY, else the platform's own. Where no
platform runs, one without replicas shows what is stored, until Ctrl-C.
"""

import os
import time
import webbrowser
from contextlib import suppress
from typing import Annotated

import typer

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import note, platform_client, root, settings
from cray_agents.platform.client import Platform
from cray_agents.processes import alive
from cray_agents.server.platform_process import ask_once, client, running, serving

commands = Commands()


@commands.command("dashboard", takes="url")
def dashboard(
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser, or only print the URL.")
    ] = True,
) -> None:
    """Open the platform's pages in a browser. The URL that it prints works once, for a minute.

    If no platform runs, one without replicas is started to look at what is stored; Ctrl-C ends it.
    """
    config = settings()
    if given().url or running(config.root) or "CRAY_AGENTS_URL" in os.environ:
        _open(platform_client(), browser)
        return
    root()
    with suppress(KeyboardInterrupt), serving(config, name="", replicas=0) as info:
        _open(client(info), browser)
        note("no platform ran here: one without replicas shows the root until Ctrl-C")
        while alive(info["pid"]):
            time.sleep(1)


def _open(platform: Platform, browser: bool) -> None:
    address = ask_once(platform, _sign_in)
    print(address, flush=True)
    if browser:
        webbrowser.open(address)


async def _sign_in(platform: Platform) -> str:
    """Return the URL of the platform's pages with a token in it."""
    return f"{platform.url}/#sign_in={await platform.dashboard_token()}"
