"""The folder of an engine's sockets: private, short, and gone with its process; and its socket."""

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from cray_agents.errors import EngineUnavailable
from cray_agents.runtime.pool.private_folder import PrivateFolder
from cray_agents.runtime.pool.vllm_http import UNIX, Http
from tests.support.strangers import as_stranger, needs_root

KILLED = """
import os, signal
from cray_agents.runtime.pool.private_folder import PrivateFolder
print(PrivateFolder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What TMPDIR names; its path is short."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    monkeypatch.setenv("TMPDIR", str(short))
    return short


def test_the_folder_of_a_killed_process_is_removed_by_the_next_alone(parent: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    left = Path(done.stdout.strip())
    assert left.parent == parent and left.is_dir()
    (left / "socket").touch()
    with closing(PrivateFolder()) as first, closing(PrivateFolder()) as second:
        assert not left.exists()
        assert first.path.is_dir() and stat.S_IMODE(second.path.stat().st_mode) == 0o700
        assert first.variables["TMPDIR"] == first.variables["VLLM_RPC_BASE_PATH"] == str(first.path)
    assert list(parent.iterdir()) == []


@needs_root
def test_another_users_folder_is_left_alone(parent: Path) -> None:
    parent.chmod(0o1777)
    as_stranger(os.mkdir, f"{parent}/cray-agents-engine-mine")
    with closing(PrivateFolder()) as folder:
        assert sorted(parent.iterdir()) == sorted([parent / "cray-agents-engine-mine", folder.path])
    (parent / "cray-agents-engine-mine").rmdir()


def test_a_long_or_missing_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    with closing(PrivateFolder()) as folder:
        assert folder.path.parent == Path("/tmp")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/missing")
    with pytest.raises(EngineUnavailable, match="name another with TMPDIR"):
        PrivateFolder()


def test_more_come_at_once_than_a_socket_lets_wait(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({})

    async def ask_all() -> None:
        application = web.Application()
        application.router.add_get("/health", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        with closing(PrivateFolder()) as folder:
            path = folder.path / "http"
            await web.UnixSite(runner, path, backlog=1).start()
            http = Http(f"{UNIX}{path}", "s3cret", 60)

            async def ask() -> int:
                async with http.answer("GET", "/health") as response:
                    return response.status

            assert await asyncio.gather(*(ask() for _ in range(50))) == [200] * 50
            await http.close()
            await runner.cleanup()

    uvloop.run(ask_all())
