"""Server paths: shorten the paths of this machine in messages to clients.

Errors of the disk and of the engines name files whole, for readers of the log. To a client the
folders mean nothing, but they help an intruder. Paths that the client sent itself stay: a wrong
`parent` is best quoted as it was written. Called by error_envelope.py.
"""

import re

#: At least two names, at the start of a word: neither `and/or` nor a URL.
_NAME = r"[^\s/'\"`()\[\]{}<>,;:]"
PATH = re.compile(rf"(?<![\w./\\~%#?&@+*-])/{_NAME}+(?:/{_NAME}*)+")
OURS = re.compile(r"/(v1|runs|health|metrics|tokenize|detokenize|api)/")


def without_paths(message: str, sent: bytes = b"") -> str:
    """Return the message with `.../name` for absolute paths that are no route and were not sent."""

    def shorten(match: re.Match[str]) -> str:
        path = match[0]
        if OURS.match(path) or path.rstrip(".").encode(errors="replace") in sent:
            return path
        return ".../" + path.rstrip("/").rpartition("/")[2]

    return PATH.sub(shorten, message) if "/" in message else message
