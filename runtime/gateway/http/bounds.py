"""Bounds of every input of the gateway, in one place.

What is larger is refused before it is read, parsed or sent on.
"""

from collections.abc import Sized

from cray_agents.errors import BadInput
from cray_agents.runtime.gateway.http.error_envelope import BodyTooLarge

# ---- bodies: what they weigh, and what they are made of
MAX_BODY = 64 * 2**20  # bytes of a JSON body: a context of a million tokens, or images in base64
MAX_SETTINGS = 2**20  # bytes of one that no model reads and that holds no runs
MAX_FILE = 8 * 2**30  # bytes of a file sent in one request
MAX_UPLOAD = 2**40  # bytes of a file sent in parts
MAX_VALUES = 1_500_000  # in a JSON body: the token ids of a context of a million, and more
MAX_OBJECTS = 100_000  # of these values; each costs the parser as much as ten numbers
MAX_TEXTS = 500_000  # names of members too

# ---- lists in bodies
MAX_MESSAGES = 20_000  # in a conversation, as items of one too
MAX_EVENTS = 10_000  # of runs, in one request: a reward for each run of a large generation
MAX_DESCRIPTIONS = 1_000  # of these events that describe a run
MAX_CHOICES = 1024  # sequences of one request: `n` times its prompts
MAX_RECORDED = 256 * 2**20  # bytes of a request times its choices: each is recorded with all of it
MAX_DATUM = 2**21  # tokens of one datum of a training pass

# ---- lists in answers
ANSWER = 64 * 2**20  # bytes of runs in a page: a page of more runs ends there, and has more


def check_count(given: Sized, most: int, what: str, param: str) -> None:
    """Raise BadInput, which names the count and the bound, for more than `most` of something."""
    if len(given) > most:
        raise too_many(len(given), most, what, param)


def too_many(count: int, most: int, what: str, param: str | None) -> BadInput:
    """Return the refusal of more than `most` of something."""
    message = f"there are {count:,} {what}, and at most {most:,} are taken in one request"
    return BadInput(message, param=param, code="too_many_items")


def check_json(body: bytes | bytearray) -> None:
    """Raise BodyTooLarge for JSON of too many values, without parsing it.

    Commas and brackets within texts count for nothing. They are told apart only where there are
    many: without what is escaped, each second part between quotation marks is a text.
    """
    if not _too_many(body, body.count(b'"') // 2):
        return
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    texts = plain.count(b'"') // 2
    outside = b"".join(plain.split(b'"')[::2]) if texts <= MAX_TEXTS else b""
    if excess := _too_many(outside, texts):
        raise BodyTooLarge(f"the body holds {excess}")


def _too_many(outside: bytes | bytearray, texts: int) -> str:
    """Return what JSON has too much of, given without its texts; "" if nothing."""
    objects = outside.count(b"{")
    values = objects + outside.count(b",") + outside.count(b"[")  # one after each, at most
    of = (
        (texts, MAX_TEXTS, "texts"),
        (objects, MAX_OBJECTS, "objects"),
        (values, MAX_VALUES, "values"),
    )
    return next(
        (f"{n:,} {what}, and at most {most:,} are taken" for n, most, what in of if n > most), ""
    )
