"""Who may read the shared root: its owner alone, or a group that is named.

It holds prompts, answers, logs and the hashes of API keys. `up`, and every command that writes in
the root, makes its folder private first: nobody else gets past it, whatever the modes of what lies
in it. What these processes and their children make from then on is private by itself as well.
`doctor` tells what it finds by `openness`. Read next: paths.py, what lies where.
"""

import grp
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from cray_agents.config import Config
from cray_agents.errors import ConfigError, StoreError


@dataclass(frozen=True)
class RootAccess:
    """What holds for a root. `umask`: of who writes there; `note`: what a person should know."""

    umask: int
    note: str = ""


def keep_private(config: Config) -> str:
    """Make the shared root private, and all that this process writes from now on.

    Returns what a person should know, mostly nothing. Raises as `make_private`. Not for a process
    that runs a user's code or writes files that a user named: their modes are the user's choice.
    """
    access = make_private(config.root.root, config.group)
    os.umask(access.umask)
    return access.note


def make_private(root: Path, group: str | None) -> RootAccess:
    """Make the root's folder, or take away from it what others may do there.

    group: whose members may read and write. None: the owner alone, or as the folder says that was
    shared with a group on purpose: with its setgid bit, or with nothing for all others. Raises
    StoreError if the folder cannot be made, ConfigError for a group that it cannot be given to.
    """
    number = _number(group) if group is not None else None
    try:
        if not root.is_dir():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.stat()
    except OSError as error:
        raise _unwritable(root, error) from error
    mode = stat.S_IMODE(found.st_mode)
    wanted = _private(mode) if group is None else mode & 0o700 | 0o2070
    if found.st_uid != os.geteuid():
        return _of_another(root, found, group, number)
    note = ""
    if mode != wanted or (number is not None and found.st_gid != number):
        try:
            if number is not None:
                os.chown(root, -1, number)
            root.chmod(wanted)
        except OSError as error:
            raise ConfigError(
                f"{root} cannot be given to group {group!r}: {error.strerror}. Only a member of "
                "the group can do that",
                param="group",
            ) from error
        note = _told(root, mode, wanted, group)
    return RootAccess(_umask(wanted), note)


def openness(root: Path) -> tuple[bool, str]:
    """Whether nobody but an owner and one group may enter a root, and who may, in words."""
    found = root.stat()
    mode = stat.S_IMODE(found.st_mode)
    told = f"{root} ({mode:04o})"
    if mode & 0o007:
        return False, f"{told}: every user of this host, and of all that mount it, may look into it"
    if mode & 0o070:
        return True, f"{told}: its owner and group {_name(found.st_gid)}"
    return True, f"{told}: its owner alone"


def _private(mode: int) -> int:
    """A folder's mode without what was only left open, and not shared with a group on purpose."""
    if not mode & 0o007:
        return mode
    return mode & (0o7770 if mode & stat.S_ISGID else 0o7700)


def _umask(mode: int) -> int:
    """What new files lack beside a folder of this mode."""
    return 0o007 | (0o070 & ~mode)


def _of_another(
    root: Path, found: os.stat_result, group: str | None, number: int | None
) -> RootAccess:
    """A root whose folder is not ours to change."""
    mode = stat.S_IMODE(found.st_mode)
    if number is not None and (found.st_gid != number or mode & 0o070 != 0o070):
        raise ConfigError(
            f"{root} is another user's, and not open to group {group!r}: its owner has to run "
            f"chgrp {group} {root} && chmod 2770 {root}",
            param="group",
        )
    note = ""
    if mode & 0o007:
        note = (
            f"all users may look into {root}, which is another user's; its owner ends that by "
            f"chmod o= {root}"
        )
    return RootAccess(_umask(mode), note)


def _told(root: Path, mode: int, wanted: int, group: str | None) -> str:
    if group is not None:
        empty = not any(root.iterdir())
        rest = (
            ""
            if empty
            else f"; what was in it keeps its own: chgrp -R {group} {root} && chmod -R g+rwX,o= "
            f"{root} && find {root} -type d -exec chmod g+s {{}} +"
        )
        return f"{root} is open to group {group} now ({wanted:04o}){rest}"
    who = "its owner and its group" if wanted & 0o070 else "its owner alone"
    return (
        f"{root} was open to all users ({mode:04o}), and is now to {who} ({wanted:04o}); to share "
        'it, name a group: group = "NAME" in cray-agents.toml'
    )


def _number(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(
            f"group = {group!r}: this host has no such group", param="group"
        ) from error


def _name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _unwritable(root: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the shared root {root} cannot be written ({error.strerror}): choose another with --home "
        "or CRAY_AGENTS_HOME"
    )
