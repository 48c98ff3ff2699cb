"""Bounds of every input of the gateway, in one place.

What is larger is refused before it is read, parsed or sent on.
"""

import re
from collections.abc import Iterator, Mapping, Sized
from contextlib import suppress
from typing import Any, NoReturn

import orjson

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
MAX_EVENTS = 10_000  # of runs, in one request: a reward for each run of a large iteration
MAX_DESCRIPTIONS = 1_000  # of these events that describe a run
MAX_CHOICES = 1024  # sequences of one request: `n` times its prompts
MAX_RECORDED = 256 * 2**20  # bytes of a request times its choices: each is recorded with all of it
MAX_DATUM = 2**21  # tokens of one datum of a training pass

# ---- lists in answers
ANSWER = 64 * 2**20  # bytes of runs in a page: a page of more runs ends there, and has more

# ---- what engines sample by
# What vLLM is given to sample by. It compiles a constraint before the answer begins. At these
# bounds that takes seconds of a core, in which other requests go on (vllm_plugins/scheduler.py).
CONSTRAINT_BYTES = 64 * 2**10  # of a field below, or of the tools of which one has to be called
CHOICES = 1000
GRAMMAR = 16 * 2**10  # characters of a grammar, a pattern, or all choices
REPEATS = 512  # characters that a pattern's repeats may spell out: [a-z]{1,50} has 50
OPTIONAL = 150  # properties that need not be there, of an object (of k objects: divided by sqrt k)
DIGITS = 100  # of the limits of numbers: of k numbers divided by sqrt k, too
LISTS = {  # the most members
    "tools": 256,
    "stop": 256,
    "stop_sequences": 256,
    "stop_token_ids": 1024,
    "bad_words": 128,
    "logit_bias": 8192,
    "allowed_token_ids": 2**18,
}
PROMPTS = 2048  # texts or lists of tokens in a request
TEXT = 4 * 2**20  # characters of several texts: the engine bounds one, by the model's context
_CONSTRAINTS = ("structured_outputs", "response_format", "text", "output_config", "output_format")
_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_PATTERNS = {"pattern", "regex", "whitespace_pattern"}
_FREE = {"description", "title", "examples", "$comment"}  # not compiled
_PIECES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)


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


def check_sampling(body: Mapping[str, Any]) -> None:
    """Raise BadInput for a field of a sampling request that is larger than its bound."""
    for name, most in LISTS.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise BadInput(f"{name} has {len(value)} members: at most {most}", param=name)
    check_texts("prompt", body.get("prompt"))
    for name in _CONSTRAINTS:
        _check_constraint(name, body.get(name))
    tools = body.get("tools") or []
    named = [one for tool in tools for one in (tool, tool.get("function")) if isinstance(one, dict)]
    strict = any(one.get("strict") for one in named)
    if strict or body.get("tool_choice") not in (None, "auto", "none"):
        _check_constraint("tools", tools)


def check_texts(name: str, texts: Any) -> None:
    """Raise BadInput for more prompts than an engine should turn into tokens at once."""
    if not isinstance(texts, list) or not texts or isinstance(texts[0], int):
        return
    if len(texts) > PROMPTS or sum(len(one) for one in texts if isinstance(one, str)) > TEXT:
        raise BadInput(f"{name} holds at most {PROMPTS} texts, {TEXT} characters", param=name)


def _check_constraint(name: str, constraint: Any) -> None:
    """Raise BadInput for a constraint that takes an engine too long to compile."""
    size = optional = digits = 0
    for key, value in _members(constraint):
        size += len(key) + (len(value) if isinstance(value, str | list | dict) else 4)
        if size > CONSTRAINT_BYTES:
            _refuse(name, f"more than {CONSTRAINT_BYTES} characters, without descriptions")
        if isinstance(value, dict) and isinstance(fields := value.get("properties"), dict):
            required = value.get("required")
            names = {str(one) for one in required} if isinstance(required, list) else set()
            optional += len(fields.keys() - names) ** 2
        elif key in _LIMITS:
            digits += len(str(value)) ** 2
        elif key == "choice" and isinstance(value, list):
            if len(value) > CHOICES or sum(len(str(one)) for one in value) > GRAMMAR:
                _refuse(name, f"more than {CHOICES} choices or {GRAMMAR} characters of them")
        elif (key == "grammar" or key in _PATTERNS) and isinstance(value, str):
            if len(value) > GRAMMAR:
                _refuse(name, f"a {key} has more than {GRAMMAR} characters")
            if key in _PATTERNS and _spelled_out(value) > REPEATS:
                _refuse(name, f"the repeats of a pattern spell out more than {REPEATS} characters")
    if optional > OPTIONAL**2:
        _refuse(name, f"more than {OPTIONAL} properties that are not required")
    if digits > DIGITS**2:
        _refuse(name, "too many numbers have a minimum or maximum of many digits")


def _refuse(name: str, why: str) -> NoReturn:
    raise BadInput(f"{name}: this constraint takes too long to compile: {why}", param=name)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a JSON value, and all in it, with its key; a list's members have none."""
    rest = [("", value)]
    while rest:
        key, value = rest.pop()
        if key in _FREE and not isinstance(value, dict):
            continue
        if key in ("json", "structural_tag") and isinstance(value, str):
            with suppress(orjson.JSONDecodeError):  # too long, or the engine's to refuse
                value = orjson.loads(value[: CONSTRAINT_BYTES + 1])
        yield key, value
        if isinstance(value, dict):
            rest += value.items()
            if key == "patternProperties":
                rest += [("pattern", one) for one in value]
        elif isinstance(value, list):
            rest += [("", one) for one in value]


def _spelled_out(pattern: str) -> int:
    """Return the characters of a pattern with its counted repeats written out, at the most."""
    sizes, last = [0], 0  # of the groups that are open; of what a repeat would repeat
    for match in _PIECES.finditer(pattern[:GRAMMAR]):
        piece = match[0]
        if piece == "(":
            sizes.append(0)
        elif piece == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif piece[0] == "{" and (counts := re.findall(r"\d+", piece)):
            times = int(counts[-1][:9])
            sizes[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            sizes[-1] += 1
    return sum(sizes)
