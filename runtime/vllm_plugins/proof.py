"""Proof: a server shows that it is of the platform before anybody sends it a secret.

A port outlives its process: when a controller, an engine or a replica's supervisor has died,
another user's process may listen there. So whoever is about to send a secret (the platform's own
key, keys of clients in requests that are forwarded, an engine's secret and prompts) first sends a
random number, and gets its HMAC under a key that both sides know: the platform's, which is in the
claim on the shared root and new for each process that controls the root, or the engine's own.

The proof is of a connection: the secrets follow on the same one, which no other process can take
over. The HMAC is also of the address and port that the answering socket has, and they must be those
of the connection: so a process that passes the number on to a server that lives gets a proof for
the wrong place. A network between hosts whose packets others change is not kept out; TLS would be.

gateway/routes/platform.py, lock.py and pool/replica_supervisor.py answer.
pool/vllm_http.py and server/platform_process.py ask.
"""

import errno
import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
import time
from typing import Any

CONNECT, SECONDS = 2.0, 5.0  # until a connection must stand, and until it must be proved
PATH = "/v1/gateways/proof"
LONGEST = 8192  # bytes of an answer
_NONCE = re.compile("[0-9a-f]{64}")


def proof_of(key: str, nonce: str, host: str, port: int) -> str | None:
    """Return the proof for a nonce by the server whose socket has this address.

    None if the nonce is not 64 hexadecimal digits, or there is no key.
    """
    if not key or not _NONCE.fullmatch(nonce):
        return None
    address = ipaddress.ip_address(host)
    address = getattr(address, "ipv4_mapped", None) or address
    text = f"cray-agents gateway {nonce} {address} {port}"
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


class Challenge:
    """The question to who answers on a connection to `peer`, which has to know `key`."""

    def __init__(self, key: str, peer: tuple[Any, ...]) -> None:
        nonce = secrets.token_hex(32)
        self.request = f"GET {PATH}?nonce={nonce} HTTP/1.1\r\nhost: platform\r\n\r\n".encode()
        proof = proof_of(key, nonce, *peer[:2])
        self._wanted = b"" if proof is None else f'{{"proof":"{proof}"}}'.encode()

    def check(self, answer: bytes) -> None:
        """Raise ConnectionRefusedError unless the answer, HTTP's head and body, proves the key."""
        body = answer.rpartition(b"\r\n\r\n")[2]
        if not self._wanted or not hmac.compare_digest(body, self._wanted):
            raise ConnectionRefusedError(
                errno.ECONNREFUSED, "who listens there does not prove to be of this root's platform"
            )


def connect(host: str, port: int, key: str) -> socket.socket:
    """Connect to a gateway that proves to know the platform's key. Raises OSError."""
    connection = socket.create_connection((host, port), CONNECT)
    try:
        challenge, deadline = Challenge(key, connection.getpeername()), time.monotonic() + SECONDS
        connection.sendall(challenge.request)
        answer = b""
        while len(answer) < LONGEST and not answer.endswith(b"}"):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (piece := connection.recv(LONGEST)):
                break
            answer += piece
        challenge.check(answer)
    except BaseException:
        connection.close()
        raise
    return connection
