"""Attacks on a sandbox, run inside it: tries each of ATTACKS and prints the results as JSON.

    python sandbox_attacks.py '{"victim": 123, "secret": "/path", "socket": "/path", ...}'

True: it worked. A text: what the system said. A test runs it without a sandbox too: those that
work there are held off by the sandbox, and by nothing else.
"""

import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

site: dict[str, Any] = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
buffer = ctypes.create_string_buffer(256)


def call(*arguments: Any) -> None:
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def connect(family: int, address: Any) -> None:
    with socket.socket(family) as client:
        client.settimeout(30)
        client.connect(address)
        assert client.recv(2) == b"hi"


def send() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"hi", ("127.0.0.1", site["udp"]))


def write(path: str) -> None:
    Path(path).write_text("was here")


def read(path: str) -> None:
    with Path(path).open("rb") as file:
        assert file.read(1)


def key() -> None:
    assert "SECRET_KEY" in os.environ


def share() -> None:
    made = libc.syscall(29 if X86 else 194, 0, 4096, 0o1600)
    call(31 if X86 else 195, made, 0, None)  # and remove it, for no other end of it does


def attach() -> None:
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(site["memory"], None, 0)
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    ctypes.c_char.from_address(at).value = b"x"


def receive() -> None:
    number = 70 if X86 else 188
    call(number, site["messages"], buffer, 1, 0, 0o4000)  # IPC_NOWAIT


def clone() -> None:
    number, new_user, sigchld = (56 if X86 else 220), 0x10000000, 17
    child = libc.syscall(number, new_user | sigchld, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    if child < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.waitpid(child, 0)


def lease() -> None:
    made = os.open("leased", os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.fcntl(made, 1024, fcntl.F_RDLCK)  # F_SETLEASE


def pin() -> None:
    _, pipe = os.pipe()
    page = ctypes.create_string_buffer(1)
    call(278 if X86 else 75, pipe, struct.pack("@PN", ctypes.addressof(page), 1), 1, 0)


def pin_in_a_socket(move: Callable[[int, int], object]) -> None:
    one, other = socket.socketpair()
    reading, writing = os.pipe()
    os.write(writing, b"x")
    with one, other, Path("/dev/zero").open("rb") as zeros:
        move(reading if move is not send_file else zeros.fileno(), one.fileno())


def send_file(file: int, to: int) -> None:
    os.sendfile(to, file, None, 1)


def reserve() -> None:
    made = os.open("reserved", os.O_RDWR | os.O_CREAT, 0o600)
    call(285 if X86 else 47, made, 0, 0, 4096)


def hold_a_capability() -> None:
    header, held = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    call(125 if X86 else 90, header, held)
    assert any(held.raw)


victim, secret = site["victim"], site["secret"]
ATTACKS: dict[str, Callable[[], object]] = {
    "read a file": lambda: read(secret),
    "read a key of root": lambda: read(site["ssh"]),
    "write a file": lambda: write(secret),
    "make a file": lambda: write(f"{Path(secret).parent}/new"),
    "make a file in /tmp": lambda: write(site["tmp"]),
    "make a file in /usr": lambda: write("/usr/was-here"),
    "truncate a file": lambda: os.truncate(secret, 0),
    "remove a file": lambda: Path(secret).unlink(),
    "rename a file": lambda: Path(secret).rename(secret + "2"),
    "link a file": lambda: os.link(secret, "link"),
    "chmod a file": lambda: Path(secret).chmod(0o777),
    "chmod an open file": lambda: os.fchmod(os.open(site["readable"], os.O_RDONLY), 0o777),
    "chown a file": lambda: os.chown(secret, os.getuid(), os.getgid()),
    "set a file's time": lambda: os.utime(secret),
    "set a file's xattr": lambda: os.setxattr(secret, "user.x", b"1"),
    "set a shared file's xattr": lambda: os.setxattr(site["open"], "user.x", b"1"),
    "lease a file": lease,
    "hold a capability": hold_a_capability,
    "read a process's environment": lambda: read(f"/proc/{victim}/environ"),
    "read a process's arguments": lambda: read(f"/proc/{victim}/cmdline"),
    "signal a process": lambda: os.kill(victim, 0),
    "trace a process": lambda: call(101 if X86 else 117, 16, victim, 0, 0),
    "limit a process": lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (7, 7)),
    "pin a process": lambda: os.sched_setaffinity(victim, {0}),
    "slow a process": lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
    "connect to a unix socket": lambda: connect(socket.AF_UNIX, site["socket"]),
    "connect to an abstract socket": lambda: connect(socket.AF_UNIX, "\0" + site["abstract"]),
    "connect over TCP": lambda: connect(socket.AF_INET, ("127.0.0.1", site["tcp"])),
    "send over UDP": send,
    "open a vsock": lambda: socket.socket(40, 1, 0).close(),
    "open a crypto socket": lambda: socket.socket(38, 5, 0).close(),
    "start an io_uring": lambda: call(425, 4, buffer),
    "take the host's asynchronous operations": lambda: call(
        206 if X86 else 0, 1, ctypes.create_string_buffer(8)
    ),
    "take a terminal": os.openpty,
    "pin pages in a pipe": pin,
    "pin pages in a socket": lambda: pin_in_a_socket(lambda file, to: os.splice(file, to, 1)),
    "pin pages of a file in a socket": lambda: pin_in_a_socket(send_file),
    "double a pipe": lambda: call(276 if X86 else 77, os.pipe()[0], os.pipe()[1], 1, 2),
    "reserve disk": reserve,
    "make a file without a name": lambda: os.open(".", os.O_RDWR | os.O_TMPFILE),
    "make hidden memory": lambda: os.close(os.memfd_create("hidden")),
    "make shared memory": share,
    "write to memory that others share": attach,
    "set a semaphore of others": lambda: call(66 if X86 else 191, site["semaphore"], 0, 16, 7),
    "take a message of others": receive,
    "remove a message queue": lambda: call(241 if X86 else 181, site["queue"].encode()),
    "enter a new user namespace": lambda: call(272 if X86 else 97, 0x10000000),
    "start a process in a new user namespace": clone,
    "read an environment variable": key,
}


def tried(attack: Callable[[], object]) -> bool | str:
    try:
        attack()
    except (OSError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return True


if __name__ == "__main__":
    print(json.dumps({name: tried(attack) for name, attack in ATTACKS.items()}))
