"""Sandbox backends: build the command that confines a program, by bubblewrap or Landlock.

bubblewrap gives the program its own namespaces: a file system of the visible files alone, its own
processes, no network. Landlock is for machines that forbid namespaces (most containers). It keeps
the program in the host's file system, and restricts the files that it may open. In both, `setpriv`
and `prlimit` of util-linux set the user and the limits. The word STARTED on the output announces
the program's start. Called by sandbox.py and process.py.
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
from cray_agents.tools.sandbox.seccomp import filter_program, machine_supported

Layer = Literal["bubblewrap", "landlock", "none"]
CONFINING: tuple[Layer, ...] = ("bubblewrap", "landlock")

PATH = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"  # this Python first
STARTED = b"started\n"
LANDLOCK_ABI = 6  # scopes signals and abstract sockets: Linux 6.12
MEGABYTE = 1 << 20
SHARED_MEMORY = 64 * MEGABYTE  # size of /dev/shm, in bytes
OPEN_FILES = 256  # limit of a process
ADDRESSES = 128  # address space, in multiples of the memory; its page tables take a quarter of it
FIRST_USER, USERS = 61184, 4335  # systemd's range of dynamic users
KEEPER = Path(__file__).with_name("keeper.py")

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_SETTINGS = (  # files in /etc that programs read, none of them secret
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
    """Folders and limits of one program. `work` and `temp` are its own."""

    work: Path
    temp: Path
    readable: tuple[Path, ...]
    writable: tuple[Path, ...]
    network: bool
    memory: int  # bytes, of each process
    file_size: int  # bytes
    processes: int
    shared: bool  # it may also write to folders that are not its own

    @property
    def user(self) -> int:
        """The program's user id if this process is root, chosen by its work folder."""
        return FIRST_USER + zlib.crc32(bytes(self.work)) % USERS


@functools.cache
def best_layer() -> Layer:
    """Return the layer that works on this machine, tried once. Raises SetupError if none does."""
    problems: dict[Layer, str] = {}
    for layer in CONFINING:
        if (why := layer_problem(layer)) is None:
            return layer
        problems[layer] = why
    raise SetupError(
        "this machine cannot run programs in a sandbox, so they are not run at all. "
        + " ".join(f"{layer}: {why}." for layer, why in problems.items())
        + " Mend one of the two (apt-get install bubblewrap), or accept the risk, on a machine "
        "with nothing to lose: Sandbox(unsandboxed=True)"
    )


@functools.cache
def layer_problem(layer: Layer) -> str | None:
    """Return the reason why a layer does not work on this machine, or None. It runs a program."""
    if sys.platform != "linux" or not machine_supported():
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
        spec = SandboxSpec(work, Path(folder), (), (), False, 1 << 29, 1 << 20, 4, False)
        program = seccomp_file(layer, spec)
        try:
            done = subprocess.run(
                command(layer, spec, ["true"], program),
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
    """Return the kernel's version of Landlock; 0: it has none."""
    version: int = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)
    return max(version, 0)


def seccomp_program(layer: Layer, spec: SandboxSpec) -> bytes:
    """Return the filter program of a layer: see seccomp.py."""
    owner = os.getuid() != 0 or spec.shared
    return filter_program(namespaces=layer == "bubblewrap", network=spec.network, owner=owner)


def seccomp_file(layer: Layer, spec: SandboxSpec) -> int:
    """Return the filter program as an open pipe, which is large enough. The caller closes it."""
    reading, writing = os.pipe()
    os.write(writing, seccomp_program(layer, spec))
    os.close(writing)
    return reading


def command(layer: Layer, spec: SandboxSpec, argv: Sequence[str], program: int) -> list[str]:
    """Return the command that runs `argv` confined; `program` is an open file with the filter."""
    if layer == "bubblewrap":
        return [*_bubblewrap(spec, program), *_begin(spec, layer), *argv]
    rules = {
        "parent": os.getpid(),
        "network": spec.network,
        "readable": [*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS), *_FACTS,
                     *map(str, (*_python_folders(), *spec.readable))],
        "writable": [*_DEVICES, *map(str, (spec.work, spec.temp, *spec.writable))],
        "filter": base64.b64encode(seccomp_program(layer, spec)).decode()
                  if layer == "landlock" else None,
    }  # fmt: skip
    keeper = [sys.executable, "-I", "-S", str(KEEPER), json.dumps(rules)]
    return [*keeper, *_begin(spec, layer), *argv]


def _bubblewrap(spec: SandboxSpec, program: int) -> list[str]:
    flags = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    flags += ["--unshare-cgroup-try"]
    if not spec.network:
        flags += ["--unshare-net"]
    if os.getuid() == 0:  # a user namespace would exempt root from the limit on processes
        flags += ["--cap-drop", "ALL"]
        for capability in ("SETUID", "SETGID", "SETPCAP", "DAC_OVERRIDE", "DAC_READ_SEARCH"):
            flags += ["--cap-add", f"CAP_{capability}"]
    else:
        flags += ["--unshare-user"]
    flags += ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    flags += ["--proc", "/proc", "--perms", "0755", "--tmpfs", "/dev"]
    for device in _DEVICES:  # no terminals, of which the host has a fixed number
        flags += ["--dev-bind", device, device]
    for name, link in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        flags += ["--symlink", f"/proc/self/{link}", f"/dev/{name}"]
    flags += ["--perms", "1777", "--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm"]
    flags += ["--remount-ro", "/dev"]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            flags += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            flags += ["--ro-bind", str(path), str(path)]
    for name in _SETTINGS:
        flags += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    flags += ["--bind", str(spec.temp), "/tmp"]
    visible = (*_python_folders(), *spec.readable, *spec.writable, spec.work)
    for above in sorted({folder for path in visible for folder in path.parents} - {Path("/")}):
        flags += ["--perms", "0755", "--dir", str(above)]  # else 0700, and root's
    for path in (*_python_folders(), *spec.readable):
        flags += ["--ro-bind", str(path), str(path)]
    for path in (*spec.writable, spec.work):
        flags += ["--bind", str(path), str(path)]
    flags += ["--chdir", str(spec.work), "--remount-ro", "/"]
    return [*flags, "--seccomp", str(program), "--"]


def _begin(spec: SandboxSpec, layer: Layer) -> list[str]:
    """Return the command prefix that sets the user and the limits, and prints STARTED."""
    flags: list[str] = []
    processes = spec.processes
    if os.getuid() == 0:
        keep = "-all" if (capability := _capability(spec, layer)) is None else f"-all,+{capability}"
        flags += ["setpriv", f"--reuid={spec.user}", f"--regid={spec.user}", "--clear-groups"]
        flags += [f"--inh-caps={keep}", f"--ambient-caps={keep}", f"--bounding-set={keep}"]
    elif layer == "bubblewrap":
        processes += 1  # bubblewrap's own, in the same user namespace
    else:
        processes += _threads_of(os.getuid())
    flags += ["prlimit", "--core=0"]
    for name, value in (
        ("nproc", processes),
        ("data", spec.memory),
        ("as", ADDRESSES * spec.memory),
        ("fsize", spec.file_size),
        ("nofile", OPEN_FILES),
    ):
        _, most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        flags += [f"--{name}={value if most < 0 else min(value, most)}"]
    return [*flags, "sh", "-c", 'cd "$0" && echo started && exec "$@"', str(spec.work)]


def _capability(spec: SandboxSpec, layer: Layer) -> str | None:
    """Return the capability that the program's user needs if this process is root, or None.

    The given folders may belong to root and be closed to other users. The capability opens them,
    and the layer alone restricts the program's files.
    """
    if spec.shared:
        return "dac_override"
    python_paths, above = list(_python_folders()), set[Path]()
    if layer != "bubblewrap":  # bubblewrap makes new folders above
        above = {folder for path in (*python_paths, spec.work) for folder in path.parents}
    hidden = any(path.stat().st_mode & 0o005 != 0o005 for path in python_paths)
    hidden = hidden or any(not folder.stat().st_mode & 0o001 for folder in above)
    return "dac_read_search" if hidden or spec.readable else None


def _python_folders() -> list[Path]:
    """Return the folders of this Python and its packages, except those among the system's."""
    places = {Path(sys.prefix).resolve(), Path(sys.prefix), Path(sys.base_prefix).resolve()}
    return sorted(place for place in places if not place.is_relative_to("/usr"))


def _threads_of(user: int) -> int:
    """Count a user's threads. Without a namespace, the limit on processes includes them all."""
    count = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and process.stat().st_uid == user:
                count += len(list((process / "task").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return count
