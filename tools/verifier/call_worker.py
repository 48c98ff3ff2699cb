"""Call worker: a script that calls the agent's code in the sandbox, and reports the results.

Started by judge.py, which passes its source text; imports nothing of this package. It reports that
it is ready, and imports solution.py. It answers lines of JSON, {"id", "call", "args", "kwargs"},
each with one of {"id", "returned"}, {"id", "raised"}, {"id", "broken"}. It has no expected values.
The code may manipulate it at will, as its output is only data, which the judge compares.
cases.py imports `plain` from here.
"""

import importlib
import json
import os
import sys
from typing import Any

DEPTH = 40  # of nested lists and the like
LONG = 14_000  # bits; Python reads no longer ints from decimals


def main() -> None:
    """Serve until the pipe is closed."""
    requests = os.fdopen(os.dup(0), "rb")
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
    except BaseException as error:  # noqa: BLE001 - any error of the model's code
        broken = name_of(error)
    for line in requests:
        request = json.loads(line)
        answer = {"broken": broken} if broken else answer_call(request, names)
        send(answers, {"id": request["id"], **answer})


def answer_call(request: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """Make one call of the code, and return its result."""
    try:
        value = eval(request["call"], names)  # the purpose of this program, which runs in a sandbox
        if request["args"] is not None:
            args, kwargs = native(request["args"]), native(request["kwargs"])
            value = value(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - any error of the model's code
        return {"raised": name_of(error)}
    try:
        return {"returned": plain(value)}
    except BaseException:  # noqa: BLE001 - its classes are the model's code, too
        return {"returned": {"other": "unreadable"}}


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON data. Kinds that JSON lacks become an object of one key, the kind."""
    if depth > DEPTH:
        return {"other": "too deep"}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int(value)
        return {"other": "very long int"} if number.bit_length() > LONG else number
    if isinstance(value, float):
        return float(value)
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
    """Return the value that `plain` wrote."""
    if isinstance(value, list):
        return [native(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, of),) = value.items()
    if kind == "bytes":
        return bytes.fromhex(of)
    if kind == "dict":
        return {native(key): native(each) for key, each in of}
    return {"tuple": tuple, "set": set}[kind](native(each) for each in of)


def name_of(error: BaseException) -> str:
    """Return the name of an exception's class."""
    return str(type(error).__name__)[:100]


def send(answers: int, answer: dict[str, Any]) -> None:
    """Write one line."""
    line = json.dumps(answer).encode() + b"\n"
    while line:
        line = line[os.write(answers, line) :]


if __name__ == "__main__":
    main()
