"""`top`: the overview of a platform in a terminal, with a key's rights, through a restart."""

import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cray_agents.cli.overview import draw
from cray_agents.cli.screen import console
from cray_agents.paths import Home
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from tests.support.campaign import free_port
from tests.support.command_line import cli
from tests.support.gateway_process import gateway

ROOT = Path(__file__).parents[1]


class Terminal:
    """A command on a terminal of its own, and all that it has drawn."""

    def __init__(self, process: "subprocess.Popen[bytes]", screen: int) -> None:
        self.process, self._screen = process, screen
        self.drawn = b""

    def wait_for(self, text: bytes) -> None:
        """Read until the text is drawn that was not before."""
        end = time.monotonic() + 300
        ready = select.poll()  # a test worker has more files open than `select` takes
        ready.register(self._screen, select.POLLIN)
        while text not in self.drawn:
            assert time.monotonic() < end, self.drawn[-2000:]
            if ready.poll(1000):
                self.drawn += os.read(self._screen, 65536)

    def press(self, keys: bytes) -> None:
        os.write(self._screen, keys)


@contextmanager
def terminal(*words: str, columns: int, key: str) -> Iterator[Terminal]:
    screen, other = pty.openpty()
    ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    argv = [sys.executable, "-m", "cray_agents", "status", "--watch", *words]
    environment = {**os.environ, "CRAY_AGENTS_API_KEY": key, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        argv, cwd=ROOT, stdin=other, stdout=other, stderr=other, env=environment
    )
    os.close(other)
    try:
        yield Terminal(process, screen)
    finally:
        process.kill()
        process.wait()
        os.close(screen)


@pytest.mark.slow
def test_it_follows_until_q_and_through_a_restart(tmp_path: Path) -> None:
    secret = Keys(Home(tmp_path / "home")).create("ops", Role.admin)[1]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    watched = terminal("--url", url, columns=60, key=secret)
    with gateway(tmp_path / "home", port=port) as (_, process), watched as top:
        top.wait_for(b"serving")
        top.wait_for(b"at the engines")
        top.wait_for(b"no training job yet")
        assert b"ops (admin)" in top.drawn
        process.kill()
        process.wait()
        top.wait_for(b"no platform answers")
        top.drawn = b""
        with gateway(tmp_path / "home", port=port):
            top.wait_for(b"serving")
            top.press(b"q")
            assert top.process.wait(120) == 0


@pytest.mark.slow
def test_a_key_sees_what_it_may_read(tmp_path: Path) -> None:
    keys = Keys(Home(tmp_path / "home"))
    secrets = {role: keys.create(role.name, role)[1] for role in Role}
    with gateway(tmp_path / "home") as (url, _):
        watch = partial(cli, "status", "--watch", "--url", url, cwd=tmp_path)
        for role, secret in secrets.items():
            done = watch("--json", CRAY_AGENTS_API_KEY=secret)
            assert done.returncode == 0, done.stderr
            overview = json.loads(done.stdout)
            assert overview["who"]["role"] == role.name
            assert (overview["jobs"] is None) == (role < Role.train)
            text = watch(CRAY_AGENTS_API_KEY=secret).stdout
            assert ("not for this key" in text) == (role < Role.admin)
        wrong = watch(CRAY_AGENTS_API_KEY="sk-wrong")
    assert wrong.returncode == 1 and "incorrect API key" in wrong.stderr


@pytest.mark.parametrize("columns", [60, 160])
def test_no_name_and_no_number_is_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", columns)
    replica: Any = {"state": "serving", "version": "assistant@1234", "host": "n0123.cluster.lan"}
    replica |= {"in_flight": 256, "probe": {"max_logprob_diff": 1.2345e-05}, "restarts": 17}
    loop: Any = {"id": "an-assistant-" * 4, "last": {"iteration": 104, "holdout_success": 0.98765},
            "holdout": [{"success": n / 24} for n in range(24)], "updated": 0.0}  # fmt: skip
    job: Any = {"id": f"job-{'0123456789' * 4}", "state": "failed", "step": 123456, "steps": 2**18}
    here = {"url": "http://h", "time": 9e5, "who": {}, "warnings": None, "queue": None}
    overview = here | {"replicas": [replica], "loops": [loop], "jobs": [job | {"loss_last": 2.5}]}
    with console.capture() as drawn:
        console.print(draw(overview))
    shown = drawn.get()
    assert max(map(len, shown.splitlines())) <= columns and "…" not in shown
    told = "assistant@1234 n0123.cluster.lan 256 1.23e-05 17 104 98.8% failed 123456/262144 2.5"
    assert [each for each in (*told.split(), loop["id"], job["id"]) if each not in shown] == []


@pytest.mark.slow
def test_there_must_be_a_platform(tmp_path: Path) -> None:
    done = cli("status", "--watch", "--home", tmp_path / "home", cwd=tmp_path)
    words = " ".join(done.stderr.split())
    assert done.returncode == 2 and "start one with `cray-agents up --home home" in words
    gone = cli("status", "--watch", "--url", "http://127.0.0.1:9", cwd=tmp_path)
    assert gone.returncode == 1 and "no platform answers" in " ".join(gone.stderr.split())
