"""Proof: a gateway shows that it is of the platform before anybody sends it a key.

A port outlives its process: when a controller has died, another user's process may listen there. So
whoever is about to send a secret (the platform's own key, or keys of clients in requests that are
forwarded) first sends a random number, and gets its HMAC under the platform's key. That key is in
the claim on the shared root, which the platform's user alone can read, and is new for each process
that controls the root.

The proof is of a connection: the secrets follow on the same one, which no other process can take
over. The HMAC is also of the address and port that the answering socket has, and they must be those
of the connection: so a process that passes the number on to a gateway that lives gets a proof for
the wrong place. A network between hosts whose packets others change is not kept out; TLS would be.

routes/gateways.py answers. controller_link.py and cli/platform/platform_process.py ask.
"""

import errno
import hashlib
import hmac
import ipaddress
import secrets
import socket
import time

CONNECT, SECONDS = 2.0, 5.0  # until a connection must stand, and until it must be proved
PATH = "/v1/gateways/proof"
_LONGEST = 8192  # bytes of an answer


def proof_of(key: str, nonce: str, host: str, port: int) -> str:
    """Return the proof for a nonce by the gateway whose socket has this address."""
    address = ipaddress.ip_address(host)
    address = getattr(address, "ipv4_mapped", None) or address
    text = f"cray-agents gateway {nonce} {address} {port}"
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def connect(host: str, port: int, key: str) -> socket.socket:
    """Connect to a gateway that proves to know the platform's key. Raises OSError."""
    connection = socket.create_connection((host, port), CONNECT)
    try:
        _require_proof(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


def _require_proof(connection: socket.socket, key: str) -> None:
    nonce, deadline = secrets.token_hex(32), time.monotonic() + SECONDS
    connection.sendall(f"GET {PATH}?nonce={nonce} HTTP/1.1\r\nhost: platform\r\n\r\n".encode())
    host, port = connection.getpeername()[:2]
    wanted, answer = f'{{"proof":"{proof_of(key, nonce, host, port)}"}}'.encode(), b""
    while len(answer) < _LONGEST and not answer.endswith(b"}"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (piece := connection.recv(_LONGEST)):
            break
        answer += piece
    if not key or not hmac.compare_digest(answer.rpartition(b"\r\n\r\n")[2], wanted):
        raise ConnectionRefusedError(
            errno.ECONNREFUSED, "who listens there does not prove to be of this root's platform"
        )
