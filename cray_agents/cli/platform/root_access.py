"""The shared root of a command that may write there: private before anything stands in it."""

from cray_agents.cli.screen import errors
from cray_agents.config import Config
from cray_agents.paths import Home
from cray_agents.permissions import keep_private


def opened(config: Config) -> Home:
    """The root, private; what this process makes from now on is so, too. See access.py."""
    if note := keep_private(config):
        errors.print(note, highlight=False, markup=False, soft_wrap=True)
    return config.root
