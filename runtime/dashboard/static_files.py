"""Static files: the built pages with their headers, compressed beforehand, or a page that says how.

`make ui` builds ui/ into the folder `static`, which wheels carry. The page `index.html` names the
files in `assets` by hashes of their contents, so these may be kept for ever. The policy lets a page
load nothing from elsewhere and make no markup of text. Called by gateway/routes/dashboard.py.
`viewer.html` is not served: exports/formats/html.py makes files of it.
"""

import re
import secrets
import time
from pathlib import Path

from cray_agents.errors import AccessDenied, NotFound, SetupError, TooManyRequests
from cray_agents.runtime.disk import durable

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}
MEDIA = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
ENCODINGS = (("zstd", ".zst"), ("gzip", ".gz"))  # the better one first
NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
NOT_BUILT = b"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>cray-agents</title>
<h1>The dashboard is not built</h1>
<p>This checkout has its sources only. <code>make ui</code> builds it; it needs npm's registry once.
Then load this page again. Packages of cray-agents have it built.</p>
<p>The API is at <code>/v1</code>; <a href="openapi.json">openapi.json</a> describes it.</p>
</html>
"""


class StaticFile:
    """A file in the encoding that suits a client: `body` and `headers` of the answer."""

    def __init__(self, path: Path, accepted: str) -> None:
        self.headers = {**HEADERS, "content-type": MEDIA[path.suffix]}
        self.body = b""
        for encoding, suffix in ENCODINGS:
            packed = path.with_name(path.name + suffix)
            if accepts(accepted, encoding) and packed.is_file():
                self.body = packed.read_bytes()
                self.headers["content-encoding"] = encoding
                break
        else:
            self.body = path.read_bytes()
        self.headers["etag"] = f'"{durable.sha256(self.body)[:24]}"'


def page(accepted: str, folder: Path = STATIC) -> StaticFile | None:
    """Return the page itself, asked for anew each time; None where it is not built."""
    if not (folder / "index.html").is_file():
        return None
    made = StaticFile(folder / "index.html", accepted)
    made.headers["cache-control"] = "no-cache"
    return made


def asset(name: str, accepted: str, folder: Path = STATIC) -> StaticFile:
    """Return a file that the page names by its hash. Raises NotFound."""
    path = folder / "assets" / name
    if not NAME.fullmatch(name) or path.suffix not in MEDIA or not path.is_file():
        raise NotFound(f"the dashboard has no file {name!r}: load its page anew", param="asset")
    made = StaticFile(path, accepted)
    made.headers["cache-control"] = "public, max-age=31536000, immutable"
    return made


def viewer() -> bytes:
    """Return the page behind which exports put runs. Raises SetupError where it is not built."""
    try:
        return (STATIC / "viewer.html").read_bytes()
    except FileNotFoundError:
        raise SetupError(
            "the viewer of runs is not built: in a checkout `make ui` builds it, which needs npm's "
            "registry once; packages of cray-agents have it. `--format jsonl` needs none"
        ) from None


def accepts(header: str, encoding: str) -> bool:
    """Tell whether a client's Accept-Encoding names an encoding, and not with the weight 0."""
    for entry in header.lower().split(","):
        name, _, weight = entry.partition(";")
        if name.strip() == encoding:
            return not re.fullmatch(r"\s*q=0(\.0*)?\s*", weight)
    return False


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
        self._waiting[durable.sha256(token.encode(errors="replace"))] = (now + SECONDS, api_key)
        return token

    def exchange(self, token: str) -> str:
        """Return the key that a token stands for, once. Raises AccessDenied."""
        until, api_key = self._waiting.pop(
            durable.sha256(token.encode(errors="replace")), (0.0, "")
        )
        if until <= time.monotonic():
            raise AccessDenied(
                f"this link was used, or is older than {SECONDS:.0f} s: `cray-agents dashboard` "
                "makes a new one; or give an API key",
                code="invalid_token",
                param="token",
            )
        return api_key
