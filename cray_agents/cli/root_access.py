"""Root access: make the shared root private before a command writes to it."""

from cray_agents.cli.screen import check_stored, errors
from cray_agents.config import Config
from cray_agents.paths import Home
from cray_agents.server.permissions import keep_private


def open_root(config: Config, *, new: bool = False) -> Home:
    """Make the root private and return it; later files of this process are private, too.

    Raises NotFound if nothing is stored there, unless it may be a `new` root. Read next:
    cray_agents/permissions.py.
    """
    if not new:
        check_stored(config.root)
    if note := keep_private(config):
        errors.print(note, highlight=False, markup=False, soft_wrap=True)
    return config.root
