"""Messages without the paths of this machine: what a client is told of a file is its name.

Errors of the disk and of the engines name files whole, for whoever reads the log. A client learns
nothing from where they lie, and somebody who looks for a way in does. What it sent itself it is
told again: a wrong `parent` is best shown as it was written. Called by errors.py.
"""

import re

#: At least two names, where a word may begin: not what follows a word, as in `and/or`, or a URL.
_NAME = r"[^\s/'\"`()\[\]{}<>,;:]"
PATH = re.compile(rf"(?<![\w./\\~%#?&@+*-])/{_NAME}+(?:/{_NAME}*)+")
OURS = re.compile(r"/(v1|runs|health|metrics|tokenize|detokenize|api)/")


def without_paths(message: str, sent: bytes = b"") -> str:
    """The message with `.../name` for each absolute path that is no route and was not `sent`."""

    def named(found: re.Match[str]) -> str:
        path = found[0]
        if OURS.match(path) or path.rstrip(".").encode(errors="replace") in sent:
            return path
        return ".../" + path.rstrip("/").rpartition("/")[2]

    return PATH.sub(named, message) if "/" in message else message
