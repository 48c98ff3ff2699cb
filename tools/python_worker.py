"""Python worker: a script that runs the code of a session, and keeps its variables.

Started in a sandbox by python.py, which passes its source text; imports nothing of this package. It
reads lines of JSON, {"code", "seconds"}, and answers each with {"shown"}: the prints, the value of
the last expression, a traceback. The pipes are moved to other descriptors than the code's.
"""

import ast
import json
import linecache
import os
import signal
import sys
import tempfile
import traceback
from types import FrameType
from typing import Any


class CodeTimeout(BaseException):
    """The code took longer than allowed."""


def overdue(signum: int, frame: FrameType | None) -> None:
    """Interrupt the code."""
    raise CodeTimeout


def main() -> None:
    """Serve until the pipe is closed."""
    chars = int(sys.argv[1])
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - stdout and stderr of the code
    os.dup2(printed.fileno(), 1)
    os.dup2(printed.fileno(), 2)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.argv = [""]
    signal.signal(signal.SIGALRM, overdue)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    for number, line in enumerate(requests, 1):
        request = json.loads(line)
        printed.seek(0)
        printed.truncate()
        run(request["code"], request["seconds"], f"<call {number}>", names)
        answers.write(json.dumps({"shown": read_output(chars)}) + "\n")
        answers.flush()


def run(code: str, seconds: float, name: str, names: dict[str, Any]) -> None:
    """Run code as a REPL would, and print its errors."""
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body = compile(tree, name, "exec")
        value = compile(ast.Expression(last.value), name, "eval") if last else None  # type: ignore[attr-defined]
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            exec(body, names)  # the purpose of this program, which runs in a sandbox
            result = eval(value, names) if value else None
            if result is not None:
                names["_"] = result
                print(repr(result))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except CodeTimeout:
        print(f"[interrupted: it took more than {seconds:g} s; variables are kept]")
    except BaseException as error:  # noqa: BLE001 - any error of the model's code
        at = error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename != name:
            at = at.tb_next  # skip this module's own frames
        print("".join(traceback.format_exception(error.with_traceback(at), limit=-8)), end="")
    finally:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "flush"):
                stream.flush()


def read_output(chars: int) -> str:
    """Return the code's output: all, or its beginning and end."""
    size = os.fstat(1).st_size
    if size <= chars:
        return os.pread(1, size, 0).decode(errors="replace").rstrip("\n") or "[no output]"
    half = chars // 2
    first, last = os.pread(1, half, 0), os.pread(1, half, size - half)
    note = f"\n[... {size - 2 * half} bytes left out ...]\n"
    return first.decode(errors="replace") + note + last.decode(errors="replace").rstrip("\n")


if __name__ == "__main__":
    main()
