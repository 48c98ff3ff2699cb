"""What confines a program: bubblewrap, else Landlock, else nothing. Each is a command's prefix.

bubblewrap gives the program namespaces of its own: a file system of only what it may see, its own
processes, no network. Landlock, for machines that forbid namespaces (most containers), lets it stay
where it is and open only what it may. In both, `setpriv` and `prlimit` of util-linux set the user
and the limits, and the word STARTED on the output says that the program is about to begin.
Called by sandbox.py.
"""

import base64
import ctypes
import functools
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cray_agents.errors import SetupError
from cray_agents.tools.sandbox.seccomp import filter_program, supported
from cray_agents.tools.sandbox.usage_monitor import OPEN_FILES

Layer = Literal["bubblewrap", "landlock", "none"]
CONFINING: tuple[Layer, ...] = ("bubblewrap", "landlock")

PATH = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"  # this Python first
STARTED = b"started\n"
LANDLOCK_ABI = 6  # scopes signals and abstract sockets: Linux 6.12
MEGABYTE = 1 << 20
SHARED_MEMORY = 64 * MEGABYTE  # of /dev/shm: bytes
ADDRESSES = 128  # times the memory: page tables for as many take a quarter of it
FIRST_USER, USERS = 61184, 4335  # systemd's range of users that exist for a while
KEEPER = Path(__file__).with_name("keeper.py")

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_SETTINGS = (  # in /etc: what programs look up, and nothing that is secret
    *("alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "fonts"),
    *("group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
    *("magic", "mime.types", "nsswitch.conf", "os-release", "passwd", "protocols"),
    *("pki/ca-trust", "pki/tls/cert.pem", "pki/tls/certs", "pki/tls/openssl.cnf"),
    *("resolv.conf", "services", "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf"),
    *("terminfo", "timezone"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FACTS = ("/proc/cpuinfo", "/proc/meminfo")


@dataclass(frozen=True)
class SandboxSpec:
    """What one program gets: its folders, and its limits. `work` and `temp` are its own."""

    work: Path
    temp: Path
    readable: tuple[Path, ...]
    writable: tuple[Path, ...]
    network: bool
    memory: int  # bytes, of each process
    file_size: int  # bytes
    processes: int
    shared: bool  # some of what it may write is not its own

    @property
    def user(self) -> int:
        """As root, the user id that the program gets: one of its work folder's own."""
        return FIRST_USER + zlib.crc32(bytes(self.work)) % USERS


@functools.cache
def best() -> Layer:
    """The layer that works on this machine, tried out once. Raises SetupError if none does."""
    problems: dict[Layer, str] = {}
    for layer in CONFINING:
        if (why := problem(layer)) is None:
            return layer
        problems[layer] = why
    raise SetupError(
        "this machine cannot run programs in a sandbox, so they are not run at all. "
        + " ".join(f"{layer}: {why}." for layer, why in problems.items())
        + " Mend one of the two (apt-get install bubblewrap), or accept the risk, on a machine "
        "with nothing to lose: Sandbox(unsandboxed=True)"
    )


@functools.cache
def problem(layer: Layer) -> str | None:
    """What keeps a layer from working here, or None: a program is run in it."""
    if sys.platform != "linux" or not supported():
        return "only on Linux, x86_64 or aarch64"
    for name in ("setpriv", "prlimit", *(["bwrap"] if layer == "bubblewrap" else [])):
        if shutil.which(name) is None:
            return f"the program {name} is not installed"
    try:
        Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError as error:
        return f"processes cannot be watched: {error}"
    if layer == "landlock" and (abi := landlock_abi()) < LANDLOCK_ABI:
        return f"the kernel has Landlock {abi}, and {LANDLOCK_ABI} is needed (Linux 6.12)"
    with tempfile.TemporaryDirectory(prefix="cray-sandbox-") as folder:
        work = Path(folder, "work")
        work.mkdir()
        for each in (Path(folder), work):
            each.chmod(0o755)
        cell = SandboxSpec(work, Path(folder), (), (), False, 1 << 29, 1 << 20, 4, False)
        program = seccomp_file(layer, cell)
        try:
            done = subprocess.run(
                command(layer, cell, ["true"], program),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={"PATH": PATH},
                pass_fds=[program],
                timeout=60,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        finally:
            os.close(program)
    if done.returncode == 0 and done.stdout == STARTED:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
    return f"{shlex.quote(lines[-1])} (status {done.returncode})"


def landlock_abi() -> int:
    """The version of Landlock that the kernel speaks; 0: none."""
    found: int = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)
    return max(found, 0)


def seccomp(layer: Layer, cell: SandboxSpec) -> bytes:
    """The filter of a layer: see seccomp.py."""
    owner = os.getuid() != 0 or cell.shared
    return filter_program(namespaces=layer == "bubblewrap", network=cell.network, owner=owner)


def seccomp_file(layer: Layer, cell: SandboxSpec) -> int:
    """That filter as an open file: a pipe, which has room for it. The caller closes it."""
    reading, writing = os.pipe()
    os.write(writing, seccomp(layer, cell))
    os.close(writing)
    return reading


def command(layer: Layer, cell: SandboxSpec, argv: Sequence[str], program: int) -> list[str]:
    """The command that runs `argv` in a cell; `program` is an open file with the filter."""
    if layer == "bubblewrap":
        return [*_bubblewrap(cell, program), *_begin(cell, layer), *argv]
    spec = {
        "parent": os.getpid(),
        "network": cell.network,
        "readable": [*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS), *_FACTS,
                     *map(str, (*_python(), *cell.readable))],
        "writable": [*_DEVICES, *map(str, (cell.work, cell.temp, *cell.writable))],
        "filter": base64.b64encode(seccomp(layer, cell)).decode() if layer == "landlock" else None,
    }  # fmt: skip
    keeper = [sys.executable, "-I", "-S", str(KEEPER), json.dumps(spec)]
    return [*keeper, *_begin(cell, layer), *argv]


def _bubblewrap(cell: SandboxSpec, program: int) -> list[str]:
    made = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    made += ["--unshare-cgroup-try"]
    if not cell.network:
        made += ["--unshare-net"]
    if os.getuid() == 0:  # a user namespace would exempt root from the limit on processes
        made += ["--cap-drop", "ALL"]
        for capability in ("SETUID", "SETGID", "SETPCAP", "DAC_OVERRIDE", "DAC_READ_SEARCH"):
            made += ["--cap-add", f"CAP_{capability}"]
    else:
        made += ["--unshare-user"]
    made += ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    made += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(SHARED_MEMORY)]
    made += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            made += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            made += ["--ro-bind", str(path), str(path)]
    for name in _SETTINGS:
        made += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    made += ["--bind", str(cell.temp), "/tmp"]
    shown = (*_python(), *cell.readable, *cell.writable, cell.work)
    for above in sorted({folder for path in shown for folder in path.parents} - {Path("/")}):
        made += ["--perms", "0755", "--dir", str(above)]  # else 0700, and root's
    for path in (*_python(), *cell.readable):
        made += ["--ro-bind", str(path), str(path)]
    for path in (*cell.writable, cell.work):
        made += ["--bind", str(path), str(path)]
    made += ["--chdir", str(cell.work), "--remount-ro", "/"]
    return [*made, "--seccomp", str(program), "--"]


def _begin(cell: SandboxSpec, layer: Layer) -> list[str]:
    """Become an unprivileged user, take on the limits, say that all is ready."""
    made: list[str] = []
    processes = cell.processes
    if os.getuid() == 0:
        keep = "-all" if (capability := _capability(cell, layer)) is None else f"-all,+{capability}"
        made += ["setpriv", f"--reuid={cell.user}", f"--regid={cell.user}", "--clear-groups"]
        made += [f"--inh-caps={keep}", f"--ambient-caps={keep}", f"--bounding-set={keep}"]
    elif layer == "bubblewrap":
        processes += 1  # bubblewrap's own, in the same user namespace
    else:
        processes += _threads_of(os.getuid())
    made += ["prlimit", "--core=0"]
    for name, value in (
        ("nproc", processes),
        ("data", cell.memory),
        ("as", ADDRESSES * cell.memory),
        ("fsize", cell.file_size),
        ("nofile", OPEN_FILES),
    ):
        _, most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        made += [f"--{name}={value if most < 0 else min(value, most)}"]
    return [*made, "sh", "-c", 'cd "$0" && echo started && exec "$@"', str(cell.work)]


def _capability(cell: SandboxSpec, layer: Layer) -> str | None:
    """As root, what the program's user cannot do without; None: nothing.

    What is given may be root's own, and lie where nobody else gets. What may be opened is then the
    layer's to say, whoever owns it.
    """
    if cell.shared:
        return "dac_override"
    needed, above = list(_python()), set[Path]()
    if layer != "bubblewrap":  # which makes the folders above anew
        above = {folder for path in (*needed, cell.work) for folder in path.parents}
    hidden = any(path.stat().st_mode & 0o005 != 0o005 for path in needed)
    hidden = hidden or any(not folder.stat().st_mode & 0o001 for folder in above)
    return "dac_read_search" if hidden or cell.readable else None


def _python() -> list[Path]:
    """Where this Python and its packages are, unless among the system's folders."""
    places = {Path(sys.prefix).resolve(), Path(sys.prefix), Path(sys.base_prefix).resolve()}
    return sorted(place for place in places if not place.is_relative_to("/usr"))


def _threads_of(user: int) -> int:
    """How many threads a user has: without a namespace, the limit counts them all."""
    count = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and process.stat().st_uid == user:
                count += len(list((process / "task").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return count
