"""`dashboard` command: open the pages of a platform in a browser, signed in.

The URL has a one-time token behind its `#`, which browsers send to nobody. The page exchanges it
for the key that this command uses: $CRAY_AGENTS_API_KEY, else the platform's own.
"""

import webbrowser
from typing import Annotated

import typer

from cray_agents.cli.platform.platform_process import ask_once, platform_at
from cray_agents.cli.screen import HomeOption, UrlOption, root
from cray_agents.platform.client import Platform


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(dashboard)


def dashboard(
    home: HomeOption = None,
    url: UrlOption = None,
    browser: Annotated[
        bool, typer.Option(help="Open a browser; otherwise only print the URL.")
    ] = True,
) -> None:
    """Open the platform's pages in a browser. The URL that it prints works once, for a minute."""
    address = ask_once(platform_at(root(home), url), _sign_in)
    print(address)
    if browser:
        webbrowser.open(address)


async def _sign_in(platform: Platform) -> str:
    """Return the URL of the platform's pages with a token in it."""
    return f"{platform.url}/#sign_in={await platform.dashboard_token()}"
