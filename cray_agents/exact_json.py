"""Exact JSON: read and write what models and clients send without changing it.

orjson is the fast way, but makes floats of whole numbers beyond 64 bits, cannot write them, and
refuses half a character. Also here: the arguments of a tool call, which models may write malformed.
Imported everywhere; it imports nothing of the package.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Any

import orjson
from pydantic_core import from_json

MOST_MEMORY = 512 * 2**20  # bytes that the values of a record of a foreign file may take
MOST_CONTAINERS = MOST_MEMORY // 240  # bytes of a list or an object in memory, at most
DEEPEST = 64  # lists and objects within each other, in JSON that a model or a client wrote
DEEPEST_FOREIGN = 200  # in a foreign file; pydantic and orjson write some 250


def load_json(
    data: str | bytes | bytearray, on_replaced: Callable[[], object] = lambda: None
) -> Any:
    """Parse JSON as it is written: whole numbers keep all digits. Raises ValueError.

    Half a character (a lone surrogate, `\\ud83d`) is JSON that no UTF-8 can carry. It becomes "?",
    as in the results of an agent's own tools, and `on_replaced` is called. A byte order mark, which
    Windows programs put first, is dropped.
    """
    data = data.encode() if isinstance(data, str) else data
    if data[:3] == BOM_UTF8:
        data = data[3:]
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        if HALF_CHARACTER.search(data) is None:
            raise
        try:
            text = json.dumps(json.loads(data.decode()), ensure_ascii=False)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None
        data = text.encode(errors="replace")
        value = orjson.loads(data)
        on_replaced()
    # of 19 digits in a row, three are among each sixth byte: this is cheaper to look at
    if b"000" in data[::6].translate(_DIGITS) and _LONG in data.translate(_DIGITS):
        return from_json(data)
    return value


def memory_of(data: bytes) -> int:
    """Return the most bytes that the values of JSON take, by its marks, also those in texts."""
    opened = data.count(b"{") + data.count(b"[")
    return opened * (MOST_MEMORY // MOST_CONTAINERS) + data.count(b",") * 60  # of other values


def refuse_costly(data: bytes) -> bytes:
    """Return JSON whose values fit into MOST_MEMORY. Raises ValueError before any is made.

    A value takes up to eighty times its text.
    """
    if len(data) <= MOST_CONTAINERS:
        return data  # the usual one, however it is made
    memory = memory_of(data)
    if memory > MOST_MEMORY:
        most = f"{MOST_MEMORY >> 20} MiB is the most: write it as several records"
        raise ValueError(
            f"its lists and values could take {memory >> 20} MiB of memory, and {most}"
        )
    return data


#: An escape of half a character; one followed by its other half is a whole one.
HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_LONG = b"0" * 19  # digits of a number that 64 bits may not hold, which orjson makes a float
_DIGITS = bytes(ord("0" if chr(code).isdecimal() else " ") for code in range(256))


def dump_json(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return a value as JSON, whole numbers of any size too. Raises TypeError if it has none."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise
    try:
        return json.dumps(
            value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except (ValueError, RecursionError) as error:
        raise TypeError(f"not JSON: {error}") from error


def parse_json(
    text: str | bytes, deepest: int = DEEPEST, on_replaced: Callable[[], object] = lambda: None
) -> Any:
    """Parse JSON of a model, a client or a foreign file, `bounded` and not costly.

    Raises ValueError, also as `refuse_costly`.
    """
    data = text.encode() if isinstance(text, str) else text
    value = load_json(refuse_costly(data), on_replaced)
    return bounded(value, deepest) if data.count(b"[") + data.count(b"{") > deepest else value


def bounded(value: Any, deepest: int = DEEPEST) -> Any:
    """Return parsed JSON that is at most `deepest` deep. Raises ValueError for deeper JSON.

    Whatever reads or writes it later recurses: Python at most 1,000 deep, protobuf 100.
    """
    level = [value]
    for _ in range(deepest + 1):
        inner = [one.values() if isinstance(one, dict) else one for one in level
                 if isinstance(one, dict | list)]  # fmt: skip
        level = [one for values in inner for one in values]
    if level:
        raise ValueError(f"the JSON is nested more than {deepest} deep")
    return value


def read_arguments(given: Any) -> dict[str, Any] | None:
    """Return a tool call's arguments, given as JSON or an object; None if they are no object."""
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except ValueError:
            return None
    return given if isinstance(given, dict) else None


def sent_arguments(given: Any) -> dict[str, Any]:
    """Return arguments as a model reads them again: {"unparsed": what it wrote} if no object."""
    read = read_arguments(given)
    if read is not None:
        return read
    return {"unparsed": given} if given and not str(given).isspace() else {}


def sendable(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in a form that the next request may contain.

    Servers refuse a conversation with tool calls whose arguments are not a JSON object, or show the
    model none, though models write such calls. They are sent back as `sent_arguments`.
    """
    malformed = malformed_calls(message)
    if not malformed:
        return message
    calls = []
    for call in message["tool_calls"]:
        if call in malformed:
            arguments = json.dumps(sent_arguments(call["function"].get("arguments")))
            call = {**call, "function": {**call["function"], "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def malformed_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of a message whose arguments are no JSON object."""
    given = message.get("tool_calls")
    calls = [call for call in given if isinstance(call, dict)] if isinstance(given, list) else []
    functions = [call for call in calls if isinstance(call.get("function"), dict)]
    return [c for c in functions if read_arguments(c["function"].get("arguments")) is None]
