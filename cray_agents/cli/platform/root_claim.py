"""Root claim: one platform per shared root, by a file with its URL, host and key.

`up` claims the root before it starts anything and gives it back when it ends (compose.py). Commands
read the file, on this host and other hosts: platform_process.py.
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

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard address -> this host's own address


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket. Raises SetupError if the port is taken.

    With `shared`, other processes of this user may listen on the port too: see shared_port.py.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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
    """Return the gateway's URL for clients on this host."""
    host, port = listener.getsockname()[:2]
    return _url(ANYWHERE.get(host, host), port)


def address_elsewhere(listener: socket.socket) -> str | None:
    """Return the gateway's URL for clients on other hosts; None if it is on loopback only."""
    host, port = listener.getsockname()[:2]
    if is_loopback(host):
        return None
    return _url(socket.gethostname() if host in ANYWHERE else host, port)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def claim(home: Home, listener: socket.socket, name: str, control: str | None = None) -> str:
    """Write the platform's claim into the root. Raises SetupError if the root has a platform.

    `control`: its URL for further gateways of this host, where they share the listener's port.

    Returns the platform's own key. Only its user can read the file, so the commands of this user
    need no other key.
    """
    with _lock_claims(home):
        return _claim(home, listener, name, control)


@contextmanager
def _lock_claims(home: Home) -> Iterator[None]:
    """Lock out other claims of this host. Raises SetupError while another process claims the root.

    Without the lock, two processes that see the claim of a killed platform would each remove the
    other's new claim. Hosts need no lock, as no host removes another's claim. The socket is in no
    folder and ends with its process.
    """
    root = home.root.stat()
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0cray-agents-claim-{os.getuid()}-{root.st_dev}-{root.st_ino}")
        except OSError as error:
            raise _claimed_error(home) from error
        yield


def _claimed_error(home: Home) -> SetupError:
    return SetupError(f"another platform was just started on {home.root}: use it")


def _claim(home: Home, listener: socket.socket, name: str, control: str | None) -> str:
    other = owner(home)
    if other is not None:
        place = f"pid {other['pid']}" if other["pid"] else f"host {other['host']}"
        raise SetupError(
            f"a platform runs on {home.root} already ({place}, {other['url']}): "
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
        "control": control,
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        "name": name,
        "started": time.time(),
        "token": token,
    }
    home.platform.unlink(missing_ok=True)  # the claim of a killed platform
    draft = home.platform.with_name(f".platform.{token[-12:]}")
    durable.write_file(draft, checksums.with_crc(json.dumps(info).encode()), 0o600)
    try:
        os.link(draft, home.platform)
    except FileExistsError as error:
        raise _claimed_error(home) from error
    finally:
        draft.unlink()
    durable.sync(home.root)
    return token


def give_back(home: Home, token: str) -> None:
    """Remove the claim, if it is still this platform's."""
    with suppress(OSError):  # Corrupt is an OSError
        if checksums.read_json(home.platform)["token"] == token:
            home.platform.unlink()
