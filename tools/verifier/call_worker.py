"""The Python that calls the agent's code in the sandbox, and tells what it returns. Stands alone.

Started by judge.py, which sends its text along. It says that it is ready, imports solution.py, and
answers lines of JSON, {"id", "call", "args", "kwargs"}, each with one of {"id", "returned"},
{"id", "raised"}, {"id", "broken"}. It knows no expected value, and the code may do with it what it
likes: all that comes out is data, which the judge compares. answers.py imports `plain` from here.
"""

import importlib
import json
import os
import sys
from typing import Any

DEPTH = 40  # of lists and the like within each other
LONG = 4096  # bits: longer ints are written in hexadecimal, for JSON's decimals are read slowly


def main() -> None:
    """Serve until the pipe is closed."""
    asked = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    sys.argv = ["solution.py"]
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - pathlib is slow to load
    send(answers, {"ready": True})
    names: dict[str, Any] = {}
    broken = None
    try:
        names = vars(importlib.import_module("solution"))
    except BaseException as error:  # noqa: BLE001 - the edge to the model's code
        broken = name_of(error)
    for line in asked:
        order = json.loads(line)
        answer = {"broken": broken} if broken else called(order, names)
        send(answers, {"id": order["id"], **answer})


def called(order: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """What the code makes of one call."""
    try:
        value = eval(order["call"], names)  # what this program is for; the sandbox is around it
        if order["args"] is not None:
            args, kwargs = native(order["args"]), native(order["kwargs"])
            value = value(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the edge to the model's code
        return {"raised": name_of(error)}
    try:
        return {"returned": plain(value)}
    except BaseException:  # noqa: BLE001 - its classes are the model's code as well
        return {"returned": {"other": "unreadable"}}


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON: what JSON has no word for is an object of one key, its kind."""
    if depth > DEPTH:
        return {"other": "too deep"}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int(value)
        return {"int": hex(number)} if number.bit_length() > LONG else number
    if isinstance(value, float):
        real = float(value)
        return real if abs(real) < float("inf") else {"float": repr(real)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [plain(each, depth + 1) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(each, depth + 1) for each in value]}
    if isinstance(value, set | frozenset):
        return {"set": [plain(each, depth + 1) for each in value]}
    if isinstance(value, dict):
        return {
            "dict": [[plain(key, depth + 1), plain(of, depth + 1)] for key, of in value.items()]
        }
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return plain(value.tolist(), depth + 1)
    return {"other": type(value).__name__}


def native(value: Any) -> Any:
    """The value that `plain` wrote."""
    if isinstance(value, list):
        return [native(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, of),) = value.items()
    if kind == "int":
        return int(of, 16)
    if kind == "float":
        return float(of)
    if kind == "bytes":
        return bytes.fromhex(of)
    if kind == "dict":
        return {native(key): native(each) for key, each in of}
    return {"tuple": tuple, "set": set}[kind](native(each) for each in of)


def name_of(error: BaseException) -> str:
    """The name of an exception's class."""
    return str(type(error).__name__)[:100]


def send(answers: int, answer: dict[str, Any]) -> None:
    """Write one line."""
    line = json.dumps(answer).encode() + b"\n"
    while line:
        line = line[os.write(answers, line) :]


if __name__ == "__main__":
    main()
