"""Sign-ins: one-time tokens, for which a browser gets the key of the command that asked for one.

A URL with a key in it would stay in a browser's history. A token is worth nothing once it was
exchanged, after a minute, or after a restart. Called by gateway/routes/dashboard.py.
"""

import hashlib
import secrets
import time

from cray_agents.errors import AccessDenied, TooManyRequests

SECONDS = 60.0
MOST = 1000  # tokens that wait at once


class SignIns:
    """The tokens that wait to be exchanged, by their hashes, with the keys that they stand for."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[float, str]] = {}

    def make(self, api_key: str) -> str:
        """Return a token for a key, "" where none is needed. Raises TooManyRequests."""
        now = time.monotonic()
        self._waiting = {name: one for name, one in self._waiting.items() if one[0] > now}
        if len(self._waiting) >= MOST:
            raise TooManyRequests(
                f"{MOST} links to the dashboard wait to be used: try again in a minute",
                retry_after=SECONDS,
            )
        token = secrets.token_urlsafe(32)
        self._waiting[_hash(token)] = (now + SECONDS, api_key)
        return token

    def exchange(self, token: str) -> str:
        """Return the key that a token stands for, once. Raises AccessDenied."""
        until, api_key = self._waiting.pop(_hash(token), (0.0, ""))
        if until <= time.monotonic():
            raise AccessDenied(
                f"this link was used, or is older than {SECONDS:.0f} s: `cray-agents dashboard` "
                "makes a new one; or give an API key",
                code="invalid_token",
                param="token",
            )
        return api_key


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
