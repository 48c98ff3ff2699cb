"""Folders of a run: write files into them, and remove them afterwards.

The contents that a program leaves are not trusted, so no symbolic link is followed. Called by
sandbox.py.
"""

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from cray_agents.errors import BadInput, SetupError
from cray_agents.tools.sandbox.process import SandboxLost

# errors of this machine, not of a file's name
_MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)
log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that a run waits for the removal of its folders
_REMOVAL = 'rm -rf -- "$0" || { chmod -R u+rwX -- "$0"; rm -rf -- "$0"; }'
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write_files(folder: Path, files: Mapping[str, str | bytes], user: int | None) -> None:
    """Write files below a folder. If this process is root, give them to `user`, if there is one.

    Raises BadInput for a name that is invalid, or leads out of the folder or through a link.
    Raises SetupError if the disk is full.
    """
    for name, content in files.items():
        names = PurePosixPath(name).parts
        broken = "\0" in name or any(0xD800 <= ord(each) < 0xE000 for each in name)
        if not names or name.startswith("/") or ".." in names or broken:
            raise BadInput(f"file {name!r}: give a name inside the work folder", param="files")
        data = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
        try:
            _write(folder, names, data, user if os.getuid() == 0 else None)
        except OSError as error:
            problem = error.strerror
            if error.errno in _MACHINE_ERRORS:
                raise SetupError(f"the sandbox's folder cannot be written: {problem}") from error
            raise BadInput(f"file {name!r} cannot be written: {problem}", param="files") from error


def _write(folder: Path, names: tuple[str, ...], data: bytes, user: int | None) -> None:
    with contextlib.ExitStack() as opened:

        def open_at(name: str | Path, flags: int, above: int | None = None) -> int:
            handle = os.open(name, flags, 0o600, dir_fd=above)
            opened.callback(os.close, handle)
            if user is not None and above is not None:
                os.fchown(handle, user, user)
            return handle

        at = open_at(folder, _FOLDER)
        for part in names[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=at)
            at = open_at(part, _FOLDER, at)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.dup(open_at(names[-1], flags, at)), "wb")
        with file:
            file.write(data)


async def remove(folder: Path, patience: float = PATIENCE) -> None:
    """Remove a folder with deep, full or forbidden contents. Raises SandboxLost.

    A program can fill a folder so that its removal takes long. After `patience` seconds the removal
    goes on in the background, also after the end of this process.
    """
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", _REMOVAL, str(folder)),
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(patience):
            status = await process.wait()
    except TimeoutError:
        log.warning("%s holds so much that its removal takes longer than %g s", folder, patience)
        return
    if status != 0:
        raise SandboxLost(f"{folder} is left behind: it cannot be removed")
