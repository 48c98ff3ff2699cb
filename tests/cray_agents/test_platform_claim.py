"""The claim of a platform on a root: of this host, of another one, of none any more."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cray_agents.config import Config
from cray_agents.errors import BadInput, SetupError
from cray_agents.paths import Home
from cray_agents.processes import start_time
from cray_agents.runtime.controller_lease import ControllerLease
from cray_agents.server import compose, gateway_ports, platform_process, root_claim
from cray_agents.server.gateway_ports import Ports
from tests.support.command_line import bystander, cli
from tests.support.scripted_gateway import served

TOKEN = "sk-platform-its-own"


@contextmanager
def another_host(name: str = "node7") -> Iterator[None]:
    """What is done in the block is done on another host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: name)
        yield


@contextmanager
def claimed_elsewhere(home: Home) -> Iterator[str]:
    """A platform of another host on loopback, which nobody here can look at, but for its beat."""
    home.root.mkdir()
    with another_host(), gateway_ports.listen("127.0.0.1", 0) as listener:
        lease = root_claim.claim(home, Ports(listener), "m")
    yield lease.token
    lease.give_back(hand_over=False)


def test_one_that_only_its_host_reaches_is_named_and_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CRAY_AGENTS_URL", raising=False)
    home = Home(tmp_path / "home")
    with claimed_elsewhere(home) as token:
        for command in (("status",), ("down",), ("models", "rollback", "m"), ("batch", "status")):
            done = cli(*command, "--home", home.root, cwd=tmp_path)
            said = " ".join(done.stderr.split())
            assert done.returncode == 2
            assert "is on host node7 and listens at http://127.0.0.1:" in said
            assert "` here takes over once its heartbeat has stood still" in said
        config = Config.model_validate({"home": home.root, "port": 0, "scheduler": "local"})
        with pytest.raises(SetupError, match="node7"), platform_process.serving(config):
            pass
        with pytest.raises(SetupError, match=r"runs on .* already .host node7"):
            compose.serve(config, None, "m", platform_process.ReplicaCount(1))
        assert json.loads(home.platform.read_text())["token"] == token
    with pytest.raises(BadInput, match="no version of 'm' is promoted"):  # it gave the root back
        compose.serve(config, None, "m", platform_process.ReplicaCount(1))


async def test_one_that_answers_is_used_from_another_host(tmp_path: Path) -> None:
    async with served(tmp_path, token=TOKEN, api_keys="required") as gateway:
        home = gateway.services.home
        info = {"url": "http://127.0.0.1:9", "elsewhere": gateway.url, "host": "node7",
                "boot": "b", "pid": os.getppid(), "name": "calc", "token": TOKEN}  # fmt: skip
        home.platform.write_text(json.dumps(info))
        found = await asyncio.to_thread(platform_process.running, home)
        assert found is not None and (found["url"], found["pid"]) == (gateway.url, None)

        def command(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
            return cli(*words, "--home", home.root, cwd=tmp_path, **environment)

        rejected = await asyncio.to_thread(command, "models", "reject", "calc@1")
        assert "calc@1 is promoted" in rejected.stderr  # so it was asked
        ended = await asyncio.to_thread(command, "down")
        assert ended.returncode == 2 and "is another host's" in " ".join(ended.stderr.split())
        with pytest.raises(SetupError, match=r"runs on .* already .host node7"):
            await asyncio.to_thread(claim, home)

        # by a forwarded port, where it listens on its own loopback
        home.platform.write_text(json.dumps(info | {"elsewhere": None}))
        forwarded = {"CRAY_AGENTS_URL": f"{gateway.url}/v1"}
        rejected = await asyncio.to_thread(command, "models", "reject", "calc@1", **forwarded)
        assert "calc@1 is promoted" in rejected.stderr

        # something else answers there: it does not take the platform's key
        home.platform.write_text(json.dumps(info | {"token": "sk-platform-of-another"}))
        with pytest.raises(SetupError, match="does not answer at"):
            await asyncio.to_thread(platform_process.running, home)

    # nothing of the platform's key goes to who listens where it was
    received = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        received += await reader.read(65536)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        there = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        home.platform.write_text(json.dumps(info | {"elsewhere": there}))
        with pytest.raises(SetupError, match="does not answer at"):
            await asyncio.to_thread(platform_process.running, home)
    assert received and TOKEN.encode() not in received


def claim(home: Home) -> str:
    """Claim a root as a process does that is then killed; this process counts as none."""
    return claim_and_stop(home).token


def claim_and_stop(home: Home) -> ControllerLease:
    with gateway_ports.listen("127.0.0.1", 0) as listener:
        lease = root_claim.claim(home, Ports(listener), "m")
    lease._stopped.set()
    return lease


def test_where_others_reach_it() -> None:
    with gateway_ports.listen("127.0.0.1", 0) as listener:
        assert gateway_ports.address_elsewhere(listener) is None
    with another_host("gpu1"), gateway_ports.listen("0.0.0.0", 0) as listener:
        port = listener.getsockname()[1]
        assert gateway_ports.address_elsewhere(listener) == f"http://gpu1:{port}"


def test_one_from_before_a_reboot_is_gone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    claim(home)
    info = json.loads(home.platform.read_text())
    with bystander() as pid:
        home.platform.write_text(json.dumps(info | {"pid": pid}))
        assert platform_process.owner(home) is None  # another process has its pid now
        info |= {"pid": pid, "ticks": start_time(pid)}
        home.platform.write_text(json.dumps(info))
        assert platform_process.owner(home) is not None
        home.platform.write_text(json.dumps(info | {"boot": "before"}))
        assert platform_process.owner(home) is None
    assert claim(home) != info["token"]


def test_a_claim_is_given_back_by_who_has_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    mine, later = claim_and_stop(home), claim_and_stop(home)
    assert (mine.term, later.term) == (1, 2)
    for lease in (mine, later):
        lease._stopped.clear()
    mine.give_back(hand_over=False)
    assert json.loads(home.platform.read_text())["token"] == later.token
    later.give_back(hand_over=False)
    later.give_back(hand_over=False)
    assert not home.platform.exists()
    config = Config.model_validate({"home": home.root, "port": 0, "scheduler": "local"})
    with pytest.raises(BadInput, match="no version of 'm' is promoted"):
        compose.serve(config, None, "m", platform_process.ReplicaCount(1))
    assert not home.platform.exists()


CLAIMING = """
import sys
import time
from pathlib import Path
from cray_agents.server import gateway_ports
from cray_agents.server import root_claim
from cray_agents.server.gateway_ports import Ports
from cray_agents.errors import SetupError
from cray_agents.paths import Home

folder, me, others = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def meet(place):
    (folder / f"{place}.{me}").touch()
    while len(list(folder.glob(f"{place}.*"))) < others:
        time.sleep(0)

leases = []
with gateway_ports.listen("127.0.0.1", 0) as listener:
    for root in sorted(folder.glob("root-*")):
        meet(f"before-{root.name}")
        try:
            leases.append(root_claim.claim(Home(root), Ports(listener), "m", "1", 100.0))
        except SetupError as error:
            assert "another platform was just started" in str(error) or "runs on" in str(error)
        else:
            (folder / f"won-{root.name}.{me}").touch()
    meet("end")
    for lease in leases:
        lease.give_back(hand_over=False)
"""


@pytest.mark.slow
def test_of_several_that_start_where_one_was_killed_one_has_it(tmp_path: Path) -> None:
    rounds, starting = 25, 3
    for number in range(rounds):
        (tmp_path / f"root-{number}").mkdir()
        claim(Home(tmp_path / f"root-{number}"))
        file = tmp_path / f"root-{number}/platform.json"
        info = json.loads(file.read_text()) | {"pid": 2**22, "lease": 100.0}
        file.write_text(json.dumps(info))
    argv = [sys.executable, "-c", CLAIMING, str(tmp_path)]
    several = [
        subprocess.Popen([*argv, str(one), str(starting), "cray"]) for one in range(starting)
    ]
    assert [one.wait() for one in several] == [0] * starting
    winners = sorted(path.name.split(".")[0] for path in tmp_path.glob("won-*"))
    assert winners == sorted(f"won-root-{number}" for number in range(rounds))
    assert not list(tmp_path.glob("root-*/.platform.*"))


FAILING = """
import http.server, json, os, sys, time
from pathlib import Path

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/live" else 503)
        self.end_headers()
        self.wfile.write(b"{}")

home = Path(sys.argv[1])
server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
server.timeout = 0.1
info = {"url": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid()}
(home / "draft").write_text(json.dumps(info))
(home / "draft").rename(home / "platform.json")
for _ in range(10):
    server.handle_request()
server.server_close()  # a platform that failed closes its socket first, and its engines after
(home / "platform.json").unlink()
time.sleep(1)
print("RuntimeError: no engine", file=sys.stderr)
"""


@pytest.mark.slow
def test_one_that_fails_while_it_is_waited_for_tells_its_log(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.logs.mkdir()
    argv = [sys.executable, "-c", FAILING, str(tmp_path), "cray"]
    with (home.logs / "platform.log").open("ab") as log, subprocess.Popen(argv, stderr=log) as one:
        begun = time.monotonic()
        with pytest.raises(SetupError, match="RuntimeError: no engine"):
            platform_process.wait_until_ready(home, one)
        assert time.monotonic() - begun < platform_process.START_SECONDS - 20
