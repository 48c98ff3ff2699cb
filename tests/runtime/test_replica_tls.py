"""TLS of replicas in Slurm: who may pose as a replica, and who reads along."""

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from cray_agents.errors import EngineUnavailable, SetupError
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool.published_replicas import (
    FollowedPool,
    PublishedPool,
    PublishedReplica,
    ServingLimits,
)
from cray_agents.runtime.pool.replica_certificates import make_authority, server_files, tls_folder
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_http import Http, TlsFiles, client_context
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from tests.support.scripted_pool import checkpoint
from tests.support.scripted_server import PROGRAM
from tests.support.slurm_pool import ask


@asynccontextmanager
async def answering(files: TlsFiles) -> AsyncIterator[str]:
    """A server's place, without the scheme."""

    async def show_headers(request: web.Request) -> web.Response:
        return web.json_response(dict(request.headers))

    heard = web.Application()
    heard.router.add_get("/secret", show_headers)
    runner = web.AppRunner(heard)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=files.server_context()).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def asked(url: str, ca: Path | None) -> int:
    http = Http(url, "s3cret", 60, None if ca is None else client_context(ca))
    try:
        async with http.answer("GET", "/secret") as response:
            return response.status
    finally:
        await http.close()


async def test_only_the_ca_and_the_address_are_trusted(tmp_path: Path) -> None:
    folder, other, attempt = tmp_path / "tls", tmp_path / "other", tmp_path / "attempt"
    make_authority(folder)
    make_authority(other)
    made = (folder / "ca.pem").read_bytes()
    make_authority(folder)  # a gateway that comes later
    assert (folder / "ca.pem").read_bytes() == made != (other / "ca.pem").read_bytes()
    files = server_files(folder, "127.0.0.1", attempt)
    for private in (folder / "ca-key.pem", attempt / "key.pem"):
        assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    async with answering(files) as place:
        assert await asked(f"https://{place}", files.ca) == 200
        for ca, why in ((other / "ca.pem", "CERTIFICATE_VERIFY_FAILED"), (None, "does not prove")):
            with pytest.raises(EngineUnavailable, match=why):
                await asked(f"https://{place}", ca)
        with pytest.raises(EngineUnavailable):
            await asked(f"http://{place}", None)
        with pytest.raises(EngineUnavailable, match="without TLS, which replica_tls asks for"):
            await asked(f"http://{place}", files.ca)
    async with answering(server_files(folder, "127.0.0.1", attempt, days=-0.5)) as place:
        with pytest.raises(EngineUnavailable, match="expired"):
            await asked(f"https://{place}", files.ca)
    async with answering(server_files(folder, "127.0.0.2", attempt)) as place:
        with pytest.raises(EngineUnavailable, match="IP address mismatch"):
            await asked(f"https://{place}", files.ca)


async def further_answer(server: VllmEngine, folder: Path, ca: Path) -> str:
    """The answer to a further gateway, which trusts this CA."""
    published = PublishedReplica(
        url=server.url, secret=server.secret, names={"m@1": server.model}, expected=["m@1"],
        state="serving",
    )  # fmt: skip
    limits = ServingLimits(swap_timeout=1)
    told = PublishedPool(replicas=[published], incumbent="m@1", limits=limits)
    content = told.model_dump_json().encode()
    (folder / "serving.json").write_bytes(checksums.with_crc(content))
    pool = FollowedPool(
        folder / "serving.json", answer_timeout=60,
        on_failure=lambda place, losses, why: None, tls=client_context(ca),
    )  # fmt: skip
    try:
        await pool.look()
        return await ask(pool, "m@1")
    finally:
        await pool.close()


async def test_a_replica_serves_over_tls_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tls_folder("on", tmp_path / "tls")
    assert folder is not None
    tls = server_files(folder, "127.0.0.1", tmp_path / "attempt")
    settings = EngineSettings(program=PROGRAM, dtype="float32", start_timeout=100)
    replica = VllmProcess("m", settings, tmp_path / "log", address="127.0.0.1", tls=tls)
    try:
        await replica.start(checkpoint(tmp_path, 1), "m@1")
        assert replica.server is not None and replica.server.url.startswith("https://")
        await replica.check_alive()
        with pytest.raises(EngineUnavailable):
            await asked(replica.server.url.replace("https", "http"), None)
        await replica.engine.resume()
        await replica.engine.admit("m@1")
        assert await further_answer(replica.engine, tmp_path, tls.ca) == "m@1: hello"
        with pytest.raises(EngineUnavailable):
            make_authority(tmp_path / "other")
            await further_answer(replica.engine, tmp_path, tmp_path / "other" / "ca.pem")
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    finally:
        await replica.stop()


def test_the_operators_own_files_are_used_and_missing_ones_named(tmp_path: Path) -> None:
    assert tls_folder("off", tmp_path) is None and tls_folder(tmp_path, Path("x")) == tmp_path
    files = server_files(tmp_path, "10.0.0.1", Path("/attempt"))
    assert files == TlsFiles(*(tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")))
    assert files.arguments[1:] == (str(files.certificate), "--ssl-keyfile", str(files.key))
    for reads in (files.server_context, lambda: client_context(files.ca)):
        with pytest.raises(SetupError, match=r"\.pem.* cannot be used"):
            reads()
    (tmp_path / "ca-key.pem").write_text("no key")
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(SetupError, match="cannot sign"):
        server_files(tmp_path, "10.0.0.1", tmp_path)
