"""Safe paths: read, replace and walk files of one folder, without ever leaving it.

Each part of a path is opened from its parent, refusing symbolic links (openat with O_NOFOLLOW).
Therefore no path leads out of the folder, even if files are exchanged meanwhile. Errors are
ToolErrors, for a model. Called by workspace.py and documents.py.
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
_LINK = (errno.ELOOP, errno.ENOTDIR)  # errors of O_NOFOLLOW and O_DIRECTORY for a symbolic link
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def split_path(path: str) -> list[str]:
    """Split a path within the folder; the folder itself gives an empty list. Raises ToolError."""
    if path.startswith("/"):
        raise ToolError(f"{path!r} is absolute: give a path in the workspace, such as 'notes/a.md'")
    components = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in components:
        raise ToolError(f"{path!r}: '..' is not allowed, nothing outside of the workspace is")
    if len(components) > MAX_DEPTH:
        raise ToolError(f"a path has at most {MAX_DEPTH} parts, not {len(components)}")
    if "\0" in path or not path.isprintable():
        raise ToolError(f"{path!r}: a path has printable characters only")
    return components


@contextmanager
def open_folder(root: Path, components: list[str], *, make: bool = False) -> Iterator[int]:
    """Open a folder, and yield its descriptor. With `make`, make missing folders."""
    try:
        at = os.open(root, _FOLDER)
    except OSError as error:
        raise ToolError(f"the workspace cannot be opened: {error.strerror}") from error
    try:
        for depth, part in enumerate(components):
            at = _enter(at, part, "/".join(components[: depth + 1]), make)
        yield at
    finally:
        os.close(at)


def _enter(parent: int, name: str, label: str, make: bool) -> int:
    """Return the child folder's descriptor, and close the parent's. Raises ToolError."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
    try:
        child = os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in _LINK:
            raise ToolError(f"{label!r} is no folder, or a symbolic link") from error
        raise ToolError(f"{label!r}: {error.strerror}") from error
    os.close(parent)
    return child


def read(root: Path, path: str, max_bytes: int) -> bytes:
    """Return the contents of an ordinary file of at most `max_bytes`. Raises ToolError."""
    components = split_path(path)
    if not components:
        raise ToolError(f"{path!r} is the workspace itself, not a file")
    with open_folder(root, components[:-1]) as folder:
        return read_at(folder, components[-1], path, max_bytes)


def read_at(folder: int, name: str, label: str, max_bytes: int) -> bytes:
    """Return the contents of an ordinary file in an open folder. Raises ToolError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not block us
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ToolError(f"{label!r} is a symbolic link, which is not followed") from error
        raise ToolError(f"{label!r}: {error.strerror}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder: list_files shows it" if stat.S_ISDIR(mode) else "not an ordinary file"
        raise ToolError(f"{label!r} is {kind}")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ToolError(f"{label!r} has more than {max_bytes} bytes, which is the limit")
    return data


def replace(root: Path, path: str, data: bytes) -> None:
    """Write a whole file or nothing. A new file takes the place and the mode of an old one."""
    components = split_path(path)
    if not components:
        raise ToolError(f"{path!r} is the workspace itself, not a file")
    name = components[-1]
    with open_folder(root, components[:-1], make=True) as folder:
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


def _mode(folder: int, name: str, label: str) -> int | None:
    """Return the permissions of the file to replace; None: it is new. Raises ToolError."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise ToolError(f"{label!r} is a folder, a symbolic link or a device: it is left as it is")
    return stat.S_IMODE(mode)


def walk(root: Path, path: str) -> Iterator[tuple[str, int, str, os.stat_result]]:
    """Yield each ordinary file below a folder: (path, its folder's descriptor, name, stat).

    Files are sorted within each folder. Symbolic links and files below MAX_DEPTH are left out. The
    descriptor is open until the next item is requested.
    """
    components = split_path(path)
    with open_folder(root, components) as top:
        for below, folders, names, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            prefix = [*components, *(part for part in below.split("/") if part != ".")]
            folders[:] = sorted(folders) if len(prefix) < MAX_DEPTH - 1 else []
            for name in sorted(names):
                with contextlib.suppress(FileNotFoundError):  # removed after the listing
                    status = os.stat(name, dir_fd=at, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield "/".join([*prefix, name]), at, name, status
