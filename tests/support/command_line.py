"""The `cray-agents` command, run in the tests' own process."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from cray_agents.cli import main
from cray_agents.paths import Home


def cli(
    *words: object, cwd: Path, typed: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """What the command says and ends with; in this process, as to start one takes a second."""
    argv = ["cray-agents", *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in [name for name in os.environ if name.startswith("CRAY_AGENTS_")]:
            if name != "CRAY_AGENTS_CACHE":
                patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", argv)
        patch.setattr(sys, "stdin", io.StringIO(typed))
        patch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return subprocess.CompletedProcess(argv, code or 0, out.getvalue(), err.getvalue())


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Fail unless the command ended with 2 and said these words, without a traceback."""
    assert done.returncode == 2, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "Traceback" not in said
    assert [word for word in words if word not in said] == [], said


@contextmanager
def claimed(home: Home, url: str, name: str = "m") -> Iterator[None]:
    """Let commands find a scripted platform: they look for its process by the file under a root."""
    with bystander() as pid:
        info = {"url": url, "name": name, "started": 0.0, "pid": pid}
        home.platform.write_text(json.dumps(info))
        yield


@contextmanager
def bystander() -> Iterator[int]:
    """Run a process that does nothing and passes for one of ours; yield its pid."""
    argv = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", "cray"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its command line cannot be read before it has started
        try:
            yield process.pid
        finally:
            process.kill()
