"""Views of a shared root: bindfs mounts that cache names, attributes and absences, one for a host.

A stand-in for NFS clients. Processes started by `RootView.enter` see the folder by the root's usual
path, in a mount namespace of their own, and may have a host name of their own.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHED = 30  # seconds for which a host believes what it saw
_MOUNTED = 30.0  # seconds that a mount may take


def missing() -> str:
    """Say what these mounts need and is not here; "" if nothing."""
    if shutil.which("bindfs") is None or not Path("/dev/fuse").exists():
        return "bindfs is not installed, or there is no /dev/fuse"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "mount namespaces are not allowed here"


class RootView:
    """The shared root at `disk` as one host sees it, which calls it `root`.

    `host`: the name that its processes take the host to have; "": this machine's.
    """

    def __init__(self, folder: Path, disk: Path, root: Path, host: str = "") -> None:
        self._host = host
        self.mount, self._read_only = folder / "mount", folder / "read-only"
        self._root = root
        for path in (self.mount, self._read_only, root):
            path.mkdir(parents=True, exist_ok=True)
        options = ",".join(f"{kind}_timeout={CACHED}" for kind in ("attr", "entry", "negative"))
        died = ["setpriv", "--pdeathsig", "KILL"]
        argv = [*died, "bindfs", "-f", "-o", options, str(disk), str(self.mount)]
        self._process = subprocess.Popen(argv)
        deadline = time.monotonic() + _MOUNTED
        while not os.path.ismount(self.mount):
            assert self._process.poll() is None and time.monotonic() < deadline, "no bindfs"
            time.sleep(0.02)
        _run("mount", "--make-shared", self.mount)
        _run("mount", "--bind", self.mount, self._read_only)
        _run("mount", "-o", "remount,bind,ro", self._read_only)

    @property
    def enter(self) -> list[str]:
        """Words before a command that shall run on this host."""
        inside = 'mount --bind "$0" "$1" && shift && exec "$@"'
        name = ["--uts"] if self._host else []
        if self._host:
            inside = f"hostname {self._host} && {inside}"
        return ["unshare", *name, "--mount", "--propagation", "slave", "sh", "-c", inside,
                str(self.mount), str(self._root)]  # fmt: skip

    def stall(self, seconds: float) -> None:
        """Let every access wait for so many seconds."""
        self.hold()
        time.sleep(seconds)
        self.let_go()

    def hold(self) -> None:
        """Let every access wait until `let_go`."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def let_go(self) -> None:
        """Answer again."""
        os.kill(self._process.pid, signal.SIGCONT)

    def slow(self, seconds: float) -> None:
        """Let accesses wait most of the time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.stall(0.15)
            time.sleep(0.05)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Refuse to open files for writing, to make, rename and remove them.

        Files that are open for writing stay so, as the kernel refuses to remount them.
        """
        _run("mount", "--bind", self._read_only, self.mount)
        try:
            yield
        finally:
            _run("umount", "--lazy", self.mount)

    def close(self) -> None:
        """End the mount, whoever uses it."""
        for path in (self._read_only, self.mount):
            with suppress(subprocess.CalledProcessError):
                _run("umount", "--lazy", path)
        self._process.kill()
        self._process.wait()


def _run(*argv: object) -> None:
    subprocess.run(list(map(str, argv)), check=True, capture_output=True)
