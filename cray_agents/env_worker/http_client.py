"""HTTP client of the environment worker: JSON by urllib, with retries.

It takes no package, so that it runs beside any pins. Used by leased_runs.py, and by adapters that
ask the model themselves.
"""

import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

RETRIES = 6
BUSY = (408, 429, 500, 502, 503, 504)


class RequestRefused(Exception):
    """The server refused a request: `status`, and the `code` of the error's envelope."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message = status, code, message


class ServerUnreachable(Exception):
    """No server answers."""


class HttpClient:
    """JSON requests to one base URL."""

    def __init__(self, base_url: str, api_key: str, timeout: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        self._timeout = timeout

    def post(
        self, path: str, body: dict[str, Any], *, key: str | None = None, retries: int = RETRIES
    ) -> dict[str, Any]:
        """Post JSON; return the answer. Raises RequestRefused, ServerUnreachable.

        key: an Idempotency-Key, under which a repeated request is answered and recorded once.
        """
        headers = {**self._headers, **({"idempotency-key": key} if key else {})}
        data = json.dumps(body).encode()
        for turn in range(retries + 1):
            request = urllib.request.Request(self.base_url + path, data, headers, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                    return dict(json.loads(answer.read()))
            except urllib.error.HTTPError as error:
                refused = _refused(error)
                if refused.status not in BUSY or turn == retries:
                    raise refused from None
            except (
                OSError,
                HTTPException,
                TypeError,
                ValueError,
                RecursionError,
            ) as error:  # no JSON
                if turn == retries:
                    raise ServerUnreachable(f"{self.base_url} does not answer: {error}") from None
            time.sleep(min(8.0, 0.25 * 2**turn))
        raise AssertionError


def _refused(error: urllib.error.HTTPError) -> RequestRefused:
    try:
        envelope = json.loads(error.read())["error"]
        return RequestRefused(error.code, str(envelope["message"]), str(envelope.get("code")))
    except (ValueError, KeyError, TypeError, OSError):
        return RequestRefused(error.code, str(error.reason), "")
