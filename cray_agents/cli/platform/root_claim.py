"""A platform's claim on its shared root: one at a time, by a file that says where it is.

`up` claims the root before it starts anything and gives it back when it ends (compose.py). Commands
read the file, on this host and others: running.py.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cray_agents.cli.platform.platform_process import owner, submitter
from cray_agents.errors import SetupError
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.gateway.http.auth import is_loopback
from cray_agents.runtime.scheduler.supervised import boot_id

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and how this host reaches what listens there


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises SetupError when the port is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SetupError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another port with --port "
            "(0 picks a free one), or end what uses it"
        ) from error
    listener.listen(2048)
    return listener


def address(listener: socket.socket) -> str:
    """The gateway's URL, as this host reaches it."""
    host, port = listener.getsockname()[:2]
    return _url(ANYWHERE.get(host, host), port)


def address_elsewhere(listener: socket.socket) -> str | None:
    """The gateway's URL, as other hosts reach it; None: they do not."""
    host, port = listener.getsockname()[:2]
    if is_loopback(host):
        return None
    return _url(socket.gethostname() if host in ANYWHERE else host, port)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def claim(home: Home, listener: socket.socket, name: str) -> str:
    """Say in the root where its platform is. Raises SetupError when it has one.

    Returns the platform's own key. It stands in that file, which only its user can read, so that
    this user's commands need no other.
    """
    with _alone(home):
        return _claim(home, listener, name)


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """Raises SetupError while another process of this host claims the root.

    Of two that find a killed one's claim, each would remove the other's in its place. Hosts need
    no such lock between them: none removes another's claim. The socket is in no folder and ends
    with its process.
    """
    root = home.root.stat()
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0cray-agents-claim-{os.getuid()}-{root.st_dev}-{root.st_ino}")
        except OSError as error:
            raise _just_started(home) from error
        yield


def _just_started(home: Home) -> SetupError:
    return SetupError(f"another platform was just started on {home.root}: use it")


def _claim(home: Home, listener: socket.socket, name: str) -> str:
    other = owner(home)
    if other is not None:
        where = f"pid {other['pid']}" if other["pid"] else f"host {other['host']}"
        raise SetupError(
            f"a platform runs on {home.root} already ({where}, {other['url']}): "
            "use it, end it with `cray-agents down`, or choose another root with --home"
        )
    if (pid := submitter(home)) is not None:
        raise SetupError(
            f"`jobs submit` (pid {pid}) trains on {home.root}: wait for its end, or choose another"
            " root with --home"
        )
    token = f"sk-platform-{secrets.token_urlsafe(32)}"
    info = {
        "url": address(listener),
        "elsewhere": address_elsewhere(listener),
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        "name": name,
        "started": time.time(),
        "token": token,
    }
    home.platform.unlink(missing_ok=True)  # of one that was killed
    draft = home.platform.with_name(f".platform.{token[-12:]}")
    durable.write_file(draft, checksums.with_crc(json.dumps(info).encode()), 0o600)
    try:
        os.link(draft, home.platform)
    except FileExistsError as error:
        raise _just_started(home) from error
    finally:
        draft.unlink()
    durable.sync(home.root)
    return token


def give_back(home: Home, token: str) -> None:
    """End a claim, if it still is ours."""
    with suppress(OSError):  # Corrupt is one
        if checksums.read_json(home.platform)["token"] == token:
            home.platform.unlink()
