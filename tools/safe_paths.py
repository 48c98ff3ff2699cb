"""Files of one folder, and never of another: how workspace.py opens, replaces and walks them.

Each part of a path is opened from its parent, refusing symbolic links (openat with O_NOFOLLOW), so
that nothing leads out, nor what is exchanged while we look. Errors are ToolErrors, for a model.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cray_agents.errors import ToolError

MAX_DEPTH = 64  # parts of a path
_LINK = (errno.ELOOP, errno.ENOTDIR)  # what O_NOFOLLOW says of a symbolic link, with O_DIRECTORY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_of(path: str) -> list[str]:
    """The parts of a path within the folder; none for the folder itself. Raises ToolError."""
    if path.startswith("/"):
        raise ToolError(f"{path!r} is absolute: give a path in the workspace, such as 'notes/a.md'")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ToolError(f"{path!r}: '..' is not allowed, nothing outside of the workspace is")
    if len(parts) > MAX_DEPTH:
        raise ToolError(f"a path has at most {MAX_DEPTH} parts, not {len(parts)}")
    if "\0" in path or not path.isprintable():
        raise ToolError(f"{path!r}: a path has printable characters only")
    return parts


@contextmanager
def opened_folder(root: Path, parts: list[str], *, make: bool = False) -> Iterator[int]:
    """A folder's descriptor. With `make`, folders that are missing are made."""
    try:
        at = os.open(root, _FOLDER)
    except OSError as error:
        raise ToolError(f"the workspace cannot be opened: {error.strerror}") from error
    try:
        for depth, part in enumerate(parts):
            at = _entered(at, part, "/".join(parts[: depth + 1]), make)
        yield at
    finally:
        os.close(at)


def _entered(parent: int, name: str, shown: str, make: bool) -> int:
    """The child folder's descriptor, in place of the parent's, which is closed if there is one."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
    try:
        child = os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in _LINK:
            raise ToolError(f"{shown!r} is no folder, or a symbolic link") from error
        raise ToolError(f"{shown!r}: {error.strerror}") from error
    os.close(parent)
    return child


def read(root: Path, path: str, max_bytes: int) -> bytes:
    """The contents of an ordinary file of at most `max_bytes`."""
    parts = parts_of(path)
    if not parts:
        raise ToolError(f"{path!r} is the workspace itself, not a file")
    with opened_folder(root, parts[:-1]) as folder:
        return read_at(folder, parts[-1], path, max_bytes)


def read_at(folder: int, name: str, shown: str, max_bytes: int) -> bytes:
    """The contents of an ordinary file in an opened folder."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not block us
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ToolError(f"{shown!r} is a symbolic link, which is not followed") from error
        raise ToolError(f"{shown!r}: {error.strerror}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder: list_files shows it" if stat.S_ISDIR(mode) else "not an ordinary file"
        raise ToolError(f"{shown!r} is {kind}")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ToolError(f"{shown!r} has more than {max_bytes} bytes, which is the limit")
    return data


def replace(root: Path, path: str, data: bytes) -> None:
    """Write a file, all of it or nothing: a new one takes the old one's place, and its mode."""
    parts = parts_of(path)
    if not parts:
        raise ToolError(f"{path!r} is the workspace itself, not a file")
    name = parts[-1]
    with opened_folder(root, parts[:-1], make=True) as folder:
        draft = f".{os.urandom(8).hex()}.draft"
        try:
            mode = _mode(folder, name, path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(draft, flags, 0o666, dir_fd=folder), "wb") as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                file.write(data)
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=folder)
            raise ToolError(f"{path!r} cannot be written: {error.strerror}") from error


def _mode(folder: int, name: str, shown: str) -> int | None:
    """The permissions of the file that is replaced; None: it is new. Raises ToolError."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        raise ToolError(f"{shown!r} is a folder, a symbolic link or a device: it is left as it is")
    return stat.S_IMODE(found)


def walk(root: Path, path: str) -> Iterator[tuple[str, int, str, os.stat_result]]:
    """Every ordinary file below a folder: (path, its folder's descriptor, name, stat).

    Sorted within each folder; symbolic links are left out, and what lies too deep. The descriptor
    is open until the next one is asked for.
    """
    parts = parts_of(path)
    with opened_folder(root, parts) as top:
        for where, folders, names, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            prefix = [*parts, *(part for part in where.split("/") if part != ".")]
            folders[:] = sorted(folders) if len(prefix) < MAX_DEPTH - 1 else []
            for name in sorted(names):
                with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                    found = os.stat(name, dir_fd=at, follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield "/".join([*prefix, name]), at, name, found
