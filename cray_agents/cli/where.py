"""The grammar of `--where`, by which commands choose runs: `loop=support reward<1 tag!=judge`.

    expression = term { " " term }            all terms must match
    term       = field operator value
    operator   = "=" | "!=" | "<" | "<=" | ">" | ">="
    value      = a word, or a text in double quotes

| field | operators | value |
|---|---|---|
| loop, agent, task, split, stop_reason | = | a name |
| model | = | `name@N`, or `name` for all its versions |
| iteration | = | a number, or several with commas: `iteration=2,3` |
| error | = | the error's type, or `*` for any error |
| reward, seconds, turns, tokens | = < <= > >= | a number; tokens are read and sampled |
| since, until | = | a date, or an age such as 7d, 12h or 30m |
| tag | = != | a tag; several terms: all of them |
| text | = | what stands in input, output or messages |
"""

import difflib
import math
import re
import time
from datetime import datetime
from typing import Annotated, Any, get_args

import typer

from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter
from cray_agents.records import Split, StopReason

WhereOption = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="TERMS",
        help='Only runs that match all terms, as in "loop=support reward<1 tag!=judge". Fields: '
        "loop, iteration, agent, task, split, model, stop_reason, error, reward, seconds, turns, "
        "tokens, since, until, tag, text.",
    ),
]

_TERM = re.compile(r'([A-Za-z_]+)\s*(<=|>=|!=|=|<|>)\s*(?:"([^"]*)"|([^\s"]+))(?=\s|$)')
_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NAMES = ("loop", "agent", "task", "split", "model", "stop_reason", "error", "text")
_NUMBERS = {"reward": float, "seconds": float, "turns": int, "tokens": int}
_TIMES = ("since", "until")
FIELDS = ("iteration", *_NAMES, *_NUMBERS, *_TIMES, "tag")
_CHOICES: dict[str, tuple[str, ...]] = {
    "split": get_args(Split),
    "stop_reason": tuple(str(reason) for reason in StopReason),
}


def parse_where(terms: str | None) -> RunFilter:
    """Return the filter of a `--where`. Raises BadInput with the position of a wrong term."""
    text, place = terms or "", 0
    fields: dict[str, Any] = {}
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        match = _TERM.match(text, place)
        if match is None:
            raise _refused(place, f"no term at {text[place:][:20]!r}: write it as field=value")
        name, operator, quoted, word = match.groups()
        value = word if quoted is None else quoted
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise _refused(place, f"no field {name!r}{hint}; there are {', '.join(FIELDS)}")
        for key, part in _fields_of(name, operator, value, place).items():
            if isinstance(part, list):
                fields[key] = [*fields.get(key, []), *part]
            elif key in fields:
                raise _refused(place, f"{name} is given twice")
            else:
                fields[key] = part
        place = match.end()
    for name in _NUMBERS:
        low, high = fields.get(f"min_{name}"), fields.get(f"max_{name}")
        if low is not None and high is not None and low > high:
            raise BadInput(f"--where: no {name} can match from {low:g} to {high:g}", param="where")
    return RunFilter(**fields)


def _fields_of(name: str, operator: str, value: str, place: int) -> dict[str, Any]:
    """Return the fields of RunFilter that one term sets."""
    if name in _NUMBERS:
        return _bounds(name, operator, value, place)
    if name == "tag" and operator in ("=", "!="):
        return {"tags" if operator == "=" else "without_tags": [value]}
    if operator != "=":
        raise _refused(place, f"{name} takes = alone, not {operator}")
    if name == "iteration":
        if not all(part.isdecimal() for part in value.split(",")):
            raise _refused(place, f"iteration takes numbers, as 2 or 2,3; not {value!r}")
        numbers = [int(part) for part in value.split(",")]
        return {"iteration": numbers[0]} if len(numbers) == 1 else {"iterations": numbers}
    if name in _TIMES:
        return {name: moment(value, name, time.time(), place)}
    if name in _CHOICES and value not in _CHOICES[name]:
        raise _refused(place, f"{name} must be one of {', '.join(_CHOICES[name])}; not {value!r}")
    return {name: value}


def _bounds(name: str, operator: str, value: str, place: int) -> dict[str, Any]:
    """Return the least and the most of a number; those of RunFilter are included."""
    kind = _NUMBERS[name]
    try:
        number = kind(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        whole = "a whole number" if kind is int else "a number"
        raise _refused(place, f"{name} takes {whole}, not {value!r}")
    if operator == "!=":
        raise _refused(place, f"{name} takes = < <= > >=, not !=")
    above, below = f"min_{name}", f"max_{name}"
    if operator == "=":
        return {above: number, below: number}
    if operator in ("<=", ">="):
        return {below if operator == "<=" else above: number}
    direction = -math.inf if operator == "<" else math.inf
    beside = (
        math.nextafter(number, direction)
        if kind is float
        else number + (-1 if operator == "<" else 1)
    )
    if beside < 0 and kind is int:
        raise _refused(place, f"no {name} can match {operator}{value}")
    return {below if operator == "<" else above: beside}


def moment(value: str, name: str, now: float, place: int = 0) -> float:
    """Parse a time to unix seconds: `7d` counts back from `now`, a date without a zone is local.

    Raises BadInput.
    """
    if match := _AGE.fullmatch(value.strip().lower()):
        return now - float(match[1]) * _SECONDS[match[2]]
    try:
        return datetime.fromisoformat(value.strip()).timestamp()
    except (ValueError, OverflowError, OSError) as error:  # the last two: years out of range
        raise _refused(
            place,
            f"{name} must be a date such as 2026-07-01 or 2026-07-01T12:30, or an age such as 7d, "
            f"12h or 30m; not {value!r}",
        ) from error


def duration(text: str, option: str) -> float:
    """Return the seconds of a time such as 30m, 12h or 7d. Raises BadInput."""
    match = _AGE.fullmatch(text.strip().lower())
    if match is None or not float(match[1]):
        raise BadInput(f"--{option} {text!r}: give a time such as 30m, 12h or 7d", param=option)
    return float(match[1]) * _SECONDS[match[2]]


def _refused(place: int, why: str) -> BadInput:
    return BadInput(f"--where, at character {place + 1}: {why}", param="where")
