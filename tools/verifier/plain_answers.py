"""Plain answers: read the data that the agent's code wrote, and compare them.

This module never runs or keeps an object of the code's classes, and hashes no value that the code
chose. Answers are lists and numbers, texts and bytes, sets and dicts (as Items and Pairs), with
bounds on size and depth. call_worker.py writes them. Called by cases.py and judge.py.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from cray_agents.tools.verifier.call_worker import DEPTH, plain

SIZE = 1 << 20  # bytes of an answer, or of a program's output

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
_LONGEST = 400  # characters of a text that is compared as a number
_SAME_HASH = 16  # values in a set that may share a hash


class Malformed(ValueError):
    """A line is not an answer of call_worker.py."""


@dataclass(frozen=True)
class Items:
    """The elements of a set, in the order written."""

    items: list[Any]


@dataclass(frozen=True)
class Pairs:
    """The keys and values of a dict, in the order written."""

    pairs: list[list[Any]]


@dataclass(frozen=True)
class Other:
    """A value that is not plain data. It equals nothing."""

    kind: str


@dataclass(frozen=True)
class AnswerLine:
    """A line of call_worker.py: the id of the request (or ready), and the result."""

    words: dict[str, Any]


def read(text: str | bytes) -> Any:
    """Return the value of JSON made by `call_worker.plain`, or an AnswerLine. Raises Malformed."""
    try:
        value = json.loads(
            text, object_pairs_hook=_parse_object, parse_constant=_refuse, parse_float=_finite
        )
        check_depth(value.words.get("returned") if isinstance(value, AnswerLine) else value)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)[:200]) from error
    return value


def to_json(value: Any) -> str:
    """Return a value as JSON. Raises ValueError if it is not plain data, or too large."""
    text = json.dumps(plain(value))
    if len(text) > SIZE:
        raise ValueError(f"it takes {len(text)} bytes, and {SIZE} are the most")
    if isinstance(other := _first_other(read(text)), Other):
        raise ValueError(f"a {other.kind} is not plain data")
    return text


def values_equal(got: Any, expected: Any, tolerance: float) -> bool:
    """Return True if an answer is the expected one.

    Numbers may differ by `tolerance`, relative to the larger or absolute. Whole numbers, elements
    of sets, and keys may not. A list equals a tuple, an int a float, but no number equals a bool.
    """
    if isinstance(expected, list | tuple):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(values_equal(a, b, tolerance) for a, b in zip(got, expected, strict=True))
        )
    if isinstance(expected, Items):
        return isinstance(got, Items) and _sort(got.items) == _sort(expected.items)
    if isinstance(expected, Pairs):
        if not isinstance(got, Pairs) or len(got.pairs) != len(expected.pairs):
            return False
        values = {_key(key): value for key, value in got.pairs}
        missing = Other("missing")
        return len(values) == len(expected.pairs) and all(
            values_equal(values.get(_key(key), missing), value, tolerance)
            for key, value in expected.pairs
        )
    if _is_number(expected):
        return _is_number(got) and _close(got, expected, tolerance)
    return type(got) is type(expected) and not isinstance(got, Other) and bool(got == expected)


def outputs_equal(got: str, expected: str, tolerance: float) -> bool:
    """Return True if a program's output is the expected one, except for trailing blanks.

    A word of the expected text that is a number with a point or an exponent may be written
    differently in the output, and differ by `tolerance`.
    """
    lines, expected_lines = _lines(got), _lines(expected)
    return len(lines) == len(expected_lines) and all(
        a == b or _same_words(a.split(" "), b.split(" "), tolerance)
        for a, b in zip(lines, expected_lines, strict=True)
    )


def native(value: Any) -> Any:
    """Return an answer as Python's own lists, sets and dicts, for an author's function.

    Raises Malformed for values with colliding hashes, which would take for ever.
    """
    if isinstance(value, list | tuple):
        return type(value)(map(native, value))
    try:
        if isinstance(value, Items):
            return set(_distinct([_hashable(each) for each in value.items]))
        if isinstance(value, Pairs):
            keys = _distinct([_hashable(key) for key, _ in value.pairs])
            return dict(zip(keys, (native(of) for _, of in value.pairs), strict=True))
    except TypeError as error:
        raise Malformed(str(error)) from error
    return value


def check_depth(value: Any, depth: int = 0) -> None:
    """Raise Malformed for a value deeper than call_worker.py writes."""
    if depth > DEPTH:
        raise Malformed("too deep")
    for each in _elements(value):
        check_depth(each, depth + 1)


def _parse_object(pairs: list[tuple[str, Any]]) -> Any:
    words = dict(pairs)
    if len(words) != len(pairs):
        raise Malformed("a key stands twice")
    if "id" in words or "ready" in words:
        return AnswerLine(words)
    if len(pairs) != 1:
        raise Malformed("an object of several keys")
    ((kind, of),) = pairs
    if kind == "dict" and isinstance(of, list):
        if all(isinstance(each, list) and len(each) == 2 for each in of):
            return Pairs(of)
    elif isinstance(of, list) and kind in ("tuple", "set"):
        return tuple(of) if kind == "tuple" else Items(of)
    elif isinstance(of, str):
        if kind == "int":
            return int(of, 16)
        if kind == "float" and of in ("nan", "inf", "-inf"):
            return float(of)
        if kind == "bytes":
            return bytes.fromhex(of)
        if kind == "other":
            return Other(of)
    raise Malformed(f"an object of kind {kind!r:.100}")


def _refuse(word: str) -> Any:
    raise Malformed(f"{word} is not JSON")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise Malformed(f"{word:.100} is no float")
    return number


def _elements(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Items):
        return value.items
    if isinstance(value, Pairs):
        return [each for pair in value.pairs for each in pair]
    return []


def _first_other(value: Any) -> Other | None:
    """Return the first element of a value that is not plain data, if any."""
    if isinstance(value, Other):
        return value
    return next(filter(None, map(_first_other, _elements(value))), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _close(got: float, expected: float, tolerance: float) -> bool:
    if isinstance(got, int) and isinstance(expected, int):
        return got == expected
    if math.isnan(expected):
        return math.isnan(got)
    try:
        return math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an int too large for a float
        return False


def _key(value: Any) -> str:
    """Return a text that is the same for equal values only."""
    return json.dumps(_canonical(value))


def _sort(values: list[Any]) -> list[Any]:
    return sorted(map(_canonical, values), key=json.dumps)


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Items):
        return ["set", _sort(value.items)]
    if isinstance(value, Pairs):
        return ["dict", _sort([list(pair) for pair in value.pairs])]
    if isinstance(value, list | tuple):
        return ["list", list(map(_canonical, value))]
    if isinstance(value, str | bool) or value is None:
        return value
    return [type(value).__name__, hex(value) if isinstance(value, int) else repr(value)]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_words(got: list[str], expected: list[str], tolerance: float) -> bool:
    return len(got) == len(expected) and all(
        a == b or _same_number(a, b, tolerance) for a, b in zip(got, expected, strict=True)
    )


def _same_number(got: str, expected: str, tolerance: float) -> bool:
    numbers = [
        float(word)
        for word in (got, expected)
        if len(word) <= _LONGEST and _NUMBER.fullmatch(word) is not None
    ]
    if len(numbers) < 2 or expected.lstrip("+-").isdigit():
        return False
    return all(map(math.isfinite, numbers)) and _close(numbers[0], numbers[1], tolerance)


def _hashable(value: Any) -> Any:
    """Return a set's element as a hashable value of Python."""
    made = native(value)
    return frozenset(made) if isinstance(made, set) else made


def _distinct(values: list[Any]) -> list[Any]:
    hashes = sorted(map(hash, values))
    for first, last in zip(hashes, hashes[_SAME_HASH:], strict=False):
        if first == last:
            raise Malformed("values of one hash")
    return values
