"""Permissions of the shared root: open it to its owner alone, or also to a named group.

The root contains prompts, answers, logs and the hashes of API keys. `up`, and every command that
writes in the root, makes its folder private first. Other users then reach nothing inside, whatever
the modes of the files. Files that these processes and their children make later are private too.
`doctor` reports the result of `describe_access`. Read next: paths.py, the layout of the root.
"""

import grp
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from cray_agents.config import Config
from cray_agents.errors import ConfigError, StoreError
from cray_agents.runtime.vllm_plugins.wire import TIER_MARK


@dataclass(frozen=True)
class RootAccess:
    """Access to a root: the `umask` for its writers, and a `note` for a person."""

    umask: int
    note: str = ""


def keep_private(config: Config) -> str:
    """Make the shared root private, and every file that this process writes from now on.

    Returns a note for a person, mostly empty. Raises as `make_private`. Do not call this in a
    process that runs a user's code or writes files that a user named: the user chooses their modes.
    """
    access = make_private(config.root.root, config.group)
    os.umask(access.umask)
    return access.note


def prepare_kv_tier(folder: Path | None) -> str:
    """Make the folder of a KV tier, its user's alone, and mark it; return a note, mostly empty.

    Replicas write there only if the mark is there, so that they fill no disk on which the tier's
    own is not mounted. Raises ConfigError for a folder with other contents, of another user, or
    that cannot be written.
    """
    if folder is None:
        return ""
    mark = folder / TIER_MARK
    try:
        if folder.is_dir() and not mark.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"kv_tier: {folder} holds other files: name a new folder, or an empty one",
                param="kv_tier",
            )
        note = make_private(folder, None).note
        if folder.stat().st_uid != os.geteuid():
            raise ConfigError(
                f"kv_tier: {folder} is another user's, whose replicas keep their blocks to"
                " themselves: name a folder of your own",
                param="kv_tier",
            )
        mark.write_text("cray-agents keeps KV blocks of its replicas here\n")
    except OSError as error:
        raise ConfigError(
            f"kv_tier: {folder} cannot be written ({error.strerror or error}): name another folder",
            param="kv_tier",
        ) from error
    return note


def make_private(root: Path, group: str | None) -> RootAccess:
    """Make the root's folder, or remove the permissions of other users from it.

    Members of `group` may read and write. With None, only the owner may, and the group of a folder
    that was shared on purpose: one with the setgid bit, or closed to all other users. Raises
    StoreError if the folder cannot be made, ConfigError if it cannot be given to the group.
    """
    number = _group_number(group) if group is not None else None
    try:
        if not root.is_dir():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        raise _unwritable(root, error) from error
    mode = stat.S_IMODE(status.st_mode)
    wanted = _private_mode(mode) if group is None else mode & 0o700 | 0o2070
    if status.st_uid != os.geteuid():
        return _check_foreign_root(root, status, group, number)
    note = ""
    if mode != wanted or (number is not None and status.st_gid != number):
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
        note = _describe_change(root, mode, wanted, group)
    return RootAccess(_umask_beside(wanted), note)


def describe_access(root: Path) -> tuple[bool, str]:
    """Tell whether only the owner and one group may enter a root; also say who may, in words."""
    status = root.stat()
    mode = stat.S_IMODE(status.st_mode)
    text = f"{root} ({mode:04o})"
    if mode & 0o007:
        return False, f"{text}: every user of this host, and of all that mount it, may look into it"
    if mode & 0o070:
        return True, f"{text}: its owner and group {_group_name(status.st_gid)}"
    return True, f"{text}: its owner alone"


def _private_mode(mode: int) -> int:
    """Return a folder's mode without access for others, nor for a group unless given on purpose."""
    if not mode & 0o007:
        return mode
    return mode & (0o7770 if mode & stat.S_ISGID else 0o7700)


def _umask_beside(mode: int) -> int:
    """Return the umask for new files in a folder of this mode."""
    return 0o007 | (0o070 & ~mode)


def _check_foreign_root(
    root: Path, status: os.stat_result, group: str | None, number: int | None
) -> RootAccess:
    """Return the access to another user's root, whose mode must stay. Raises ConfigError."""
    mode = stat.S_IMODE(status.st_mode)
    if number is not None and (status.st_gid != number or mode & 0o070 != 0o070):
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
    return RootAccess(_umask_beside(mode), note)


def _describe_change(root: Path, mode: int, wanted: int, group: str | None) -> str:
    """Return the note for a person on a root whose mode changed from `mode` to `wanted`."""
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


def _group_number(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(
            f"group = {group!r}: this host has no such group", param="group"
        ) from error


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _unwritable(root: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the shared root {root} cannot be written ({error.strerror}): choose another with --home "
        "or CRAY_AGENTS_HOME"
    )
