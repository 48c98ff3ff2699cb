"""Access of commands to a platform: the one at `--url`, on the root, or at $CRAY_AGENTS_URL."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cray_agents.cli.options import given
from cray_agents.cli.screen import root, settings
from cray_agents.errors import SetupError
from cray_agents.platform.client import Platform
from cray_agents.server.platform_process import (
    ask_once,
    client,
    command,
    find_platform,
    running,
)

T = TypeVar("T")


def found_platform() -> dict[str, Any]:
    """Return the claim of the platform that this command means. Raises SetupError for none."""
    return find_platform(settings().root, given().url)


def platform_client() -> Platform:
    """Return a client of the platform that this command means. Raises SetupError for none."""
    return client(found_platform())


def ask_root(request: Callable[[Platform], Awaitable[T]]) -> T:
    """Return the answer of the platform on the root to one request. Raises SetupError for none."""
    home = root()
    if (info := running(home)) is None:
        raise SetupError(f"no platform runs on {home.root}: start it with `{command('up', home)}`")
    return ask_once(client(info), request)
