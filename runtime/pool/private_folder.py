"""Private folder: where an engine's sockets and temporary files are, closed to all other users.

It lies on this host, for sockets, and has a short path, for the kernel takes no more than 107 bytes
of a socket's. Its maker holds a lock on it. The kernel frees that when the maker ends, however that
was: then the next one that is made removes it.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import EngineUnavailable

_PREFIX = "cray-agents-engine-"
_LONGEST = 42  # bytes of its parent's path; what remains is for names such as vLLM's of 36


class PrivateFolder:
    """A folder at `path`. Close it when done. Raises EngineUnavailable if it cannot be made.

    `place`: where to make it, for what needs no short path; OSError is raised if that fails.
    """

    def __init__(self, place: Path | None = None) -> None:
        parent = str(place or tempfile.gettempdir())
        if place is None and len(os.fsencode(parent)) > _LONGEST:
            parent = "/tmp"
        _remove_abandoned(Path(parent))
        try:
            self.path, self._lock = _make(parent)
        except OSError as error:
            if place is not None:
                raise
            raise EngineUnavailable(
                f"no folder for an engine's sockets can be made in {parent} ({error.strerror}): "
                f"name another with TMPDIR, of at most {_LONGEST} bytes"
            ) from error

    @property
    def variables(self) -> dict[str, str]:
        """Environment of vLLM's processes: their sockets and temporary files are in the folder."""
        return {"TMPDIR": str(self.path), "VLLM_RPC_BASE_PATH": str(self.path)}

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _make(parent: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(FileNotFoundError):  # another process took it for an abandoned one
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or one in use
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if os.fstat(handle).st_uid == os.geteuid():  # root can open those of all
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
