"""Scripted services: the version that a gateway of the tests begins with, and its server."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from cray_agents.errors import NotFound
from cray_agents.paths import Home
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.runtime.registry.registry import Registry
from tests.support.bare_models import bare_model


def first_version(home: Home, name: str = "m", model: Path | None = None) -> Registry:
    """The home's registry, with something that the name means; also after a start was killed."""
    registry = Registry(home)
    try:
        promoted = registry.promoted(name)
    except NotFound:
        promoted = None
    if promoted is None:
        source = model or bare_model(home.root / f"first-{name}-{os.getpid()}")
        checkpoint, manifest = registry.import_checkpoint(source)
        registry.promote(name, registry.register(name, checkpoint, manifest).number)
    return registry


async def start_pool(pool: Pool, home: Home, registry: Registry, name: str = "m") -> None:
    """Let a pool serve what the name means."""
    version = registry.resolve(name)
    folder = home.checkpoint(version.checkpoint)
    await pool.start(folder, version.id, read_manifest(folder).probe)


def server_of(app: Any, **options: Any) -> uvicorn.Server:
    """A server of an application. `options` are uvicorn's."""
    usual: dict[str, Any] = {"log_config": None, "log_level": "error", "lifespan": "off"}
    usual["timeout_keep_alive"] = 75  # as `up` has it: longer than a client keeps a connection
    return uvicorn.Server(uvicorn.Config(app, **usual | options))


@asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve an application at a free port of this host; its URL. `options` are uvicorn's."""
    server = server_of(app, **{"port": 0} | options)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells it by this flag alone
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
