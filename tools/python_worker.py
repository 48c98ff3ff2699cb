"""The Python of a session: runs code that it is sent, and keeps its variables. Stands alone.

Started in a sandbox by tools/python.py, which sends its text along: it imports nothing of this
package. It reads lines of JSON, {"code", "seconds"}, and answers each with {"shown"}: what was
printed, the value of the last expression, a traceback. The pipes are moved out of the code's way.
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
    """The code took longer than it may."""


def overdue(signum: int, frame: FrameType | None) -> None:
    """Interrupt the code."""
    raise CodeTimeout


def main() -> None:
    """Serve until the pipe is closed."""
    chars = int(sys.argv[1])
    asked, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - stdout and stderr, as long as this lives
    os.dup2(printed.fileno(), 1)
    os.dup2(printed.fileno(), 2)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.argv = [""]
    signal.signal(signal.SIGALRM, overdue)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    for number, line in enumerate(asked, 1):
        order = json.loads(line)
        printed.seek(0)
        printed.truncate()
        run(order["code"], order["seconds"], f"<call {number}>", names)
        answers.write(json.dumps({"shown": shown(chars)}) + "\n")
        answers.flush()


def run(code: str, seconds: float, name: str, names: dict[str, Any]) -> None:
    """Run code as a REPL would; whatever goes wrong is printed."""
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body = compile(tree, name, "exec")
        value = compile(ast.Expression(last.value), name, "eval") if last else None  # type: ignore[attr-defined]
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            exec(body, names)  # what this program is for; the sandbox is around it
            result = eval(value, names) if value else None
            if result is not None:
                names["_"] = result
                print(repr(result))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except CodeTimeout:
        print(f"[interrupted: it took more than {seconds:g} s; variables are kept]")
    except BaseException as error:  # noqa: BLE001 - the edge to the model's code
        at = error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename != name:
            at = at.tb_next  # this module's own frames tell the model nothing
        print("".join(traceback.format_exception(error.with_traceback(at), limit=-8)), end="")
    finally:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "flush"):
                stream.flush()


def shown(chars: int) -> str:
    """What the code printed: all, or its beginning and end."""
    size = os.fstat(1).st_size
    if size <= chars:
        return os.pread(1, size, 0).decode(errors="replace").rstrip("\n") or "[no output]"
    half = chars // 2
    first, last = os.pread(1, half, 0), os.pread(1, half, size - half)
    note = f"\n[... {size - 2 * half} bytes left out ...]\n"
    return first.decode(errors="replace") + note + last.decode(errors="replace").rstrip("\n")


if __name__ == "__main__":
    main()
