"""Another user of the host reaches nothing of a platform, and hears nothing at its lost ports."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.processes import alive
from cray_agents.runtime.disk import checksums
from tests.support.bare_models import provable_model
from tests.support.strangers import (
    ONLY_ASKED,
    Listener,
    as_stranger,
    listeners,
    needs_root,
    say,
    taker,
    tree,
)
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
PATHS = ("/v1/models", "/v1/pool", "/metrics", "/v1/trajectories", "/state", "/is_sleeping",
         "/v1/gateways/proof", "/openapi.json", "/docs")  # fmt: skip
SAID = [f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" for path in PATHS]
SAID += [
    f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-cray-secret: guess\r\n"
    "content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    for path in ("/v1/chat/completions", "/collective_rpc", "/sleep", "/exit", "/v1/gateways")
]
SAID_BYTES = [said.encode() for said in SAID]
PROMPT = "the diagnosis of a patient"


class Platform:
    """`up` with scripted engines, two gateways and keys."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder / "home")
        self.process: subprocess.Popen[bytes] | None = None
        (folder / "cray-agents.toml").write_text('api_keys = "required"\nspare_replicas = 0\n')
        provable_model(folder / "model", b"weights")

    def up(self) -> None:
        argv = ["-m", "tests.support.scripted_cray_agents", "up", "--home", str(self.home.root)]
        argv += ["--model", str(self.folder / "model"), "--name", "m", "--port", "0"]
        argv += ["--scheduler", "local", "--replicas", "1", "--gateways", "2"]
        with (self.folder / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *argv], cwd=self.folder, stdout=log, stderr=log,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        wait_until(self.ready, self.said)

    def said(self) -> str:
        return (self.folder / "up.log").read_text()

    @property
    def claim(self) -> dict[str, Any]:
        return checksums.read_json(self.home.platform)

    def ready(self) -> bool:
        assert self.process is not None
        with suppress(OSError, KeyError):
            if self.claim["pid"] != self.process.pid:
                return False  # of the one before, whose port may be anybody's
            pool = self.call("/v1/pool")["data"]
            served = pool[0]["state"] == "serving" and self.ask() == f"m@1: {PROMPT}"
            served &= "further gateway: " in (self.home.logs / "gateway-1.log").read_text()
            return bool(served and self.serving()[0])  # further gateways are told a little later
        return False

    def call(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.claim["url"] + path, None if body is None else json.dumps(body).encode(),
            {"authorization": f"Bearer {self.claim['token']}", "content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def ask(self) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
        answer = self.call("/v1/chat/completions", body)
        return str(answer["choices"][0]["message"]["content"])

    def serving(self) -> tuple[str, str]:
        """The engine's URL and secret, as further gateways read them."""
        (replica,) = checksums.read_json(self.home.serving)["replicas"]
        return replica["url"], replica["secret"]

    def named(self, word: str) -> list[int]:
        """The pids of the platform's processes with this word in their command lines."""
        assert self.process is not None
        pids = []
        for pid in tree(self.process.pid):
            with suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    pids.append(pid)
        return pids

    def listeners(self) -> list[Listener]:
        assert self.process is not None
        return listeners(self.process.pid)


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    platform = Platform(tmp_path)
    platform.up()
    yield platform
    assert platform.process is not None
    pids = tree(platform.process.pid)
    platform.process.terminate()
    platform.process.wait(120)
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@needs_root
def test_another_user_reaches_nothing_and_hears_nothing_at_lost_ports(platform: Platform) -> None:
    url, secret = platform.serving()
    token = platform.claim["token"]
    found = platform.listeners()
    ports = [one.place for one in found if isinstance(one.place, tuple)]
    assert url.removeprefix("unix:") in [one.place for one in found]
    engine = platform.named("--uds")
    assert not any(set(one.pids) & set(engine) for one in found if one.place in ports)
    for one in found:
        for answer in as_stranger(say, one.place, *SAID_BYTES):
            status = answer.partition(" ")[2][:3]
            assert answer == "refused" or status in ("400", "401", "403", "404"), (one, answer)
            assert isinstance(one.place, tuple) or answer == "refused", (one, answer)
            for kept in (secret, token, PROMPT):
                assert kept not in answer

    with taker(platform.folder, *ports) as stranger:
        # the engine dies: its successor comes, and nobody between them
        os.kill(engine[0], signal.SIGKILL)
        wait_until(lambda: platform.named("--uds") not in ([], engine), platform.said)
        wait_until(platform.ready, platform.said)
        # a further gateway dies: its port is its siblings', and no one else's
        (gateway,) = platform.named("--gateway-only")
        os.kill(gateway, signal.SIGKILL)
        wait_until(lambda: platform.named("--gateway-only") not in ([], [gateway]), platform.said)
        wait_until(platform.ready, platform.said)
        assert stranger.taken() == []
        # the controller dies: he gets the port at which its gateways reached it
        (further,) = platform.named("--gateway-only")
        wait_until(lambda: listeners(further), platform.said)
        assert platform.process is not None
        folder = Path(platform.serving()[0].removeprefix("unix:")).parent
        assert folder.is_dir()
        platform.process.kill()
        platform.process.wait()
        wait_until(stranger.taken)
        headers = {"authorization": f"Bearer {token}"}
        asked = urllib.request.Request(platform.claim["url"] + "/v1/jobs", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=120)
        assert refused.value.code == 503
        wait_until(stranger.heard)
        assert ONLY_ASKED.fullmatch(stranger.heard())
        os.kill(further, signal.SIGKILL)
        wait_until(lambda: not alive(further))
        platform.up()
        assert ONLY_ASKED.fullmatch(stranger.heard()), stranger.heard()
    assert not folder.exists()
