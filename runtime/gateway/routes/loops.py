"""The journal of loops: a record per finished generation, and other entries; each written once."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import NotFound
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.gateway.http.bodies import answer, path_id, path_number, read_json
from cray_agents.runtime.gateway.services import Services


def routes(services: Services) -> list[Route]:
    """Everything under /v1/loops."""

    def folder(request: Request) -> Path:
        return services.home.loop(path_id(request, "loop", "loop")) / "generations"

    async def listing(request: Request) -> Response:
        return answer({"data": await asyncio.to_thread(_read, folder(request))})

    async def finish(request: Request) -> Response:
        record = await read_json(request, services.max_body)
        path = folder(request) / f"{path_number(request, 'number', 'generation')}.json"
        created = await asyncio.to_thread(durable.create_file, path, _text(record))
        return answer({"created": created})

    def entry(request: Request) -> Path:
        journal = services.home.loop(path_id(request, "loop", "loop")) / "journal"
        return journal / f"{path_id(request, 'entry', 'entry')}.json"

    async def recall(request: Request) -> Response:
        return answer(await asyncio.to_thread(_recall, entry(request)))

    async def remember(request: Request) -> Response:
        record = await read_json(request, services.max_body)
        path = entry(request)
        created = await asyncio.to_thread(durable.create_file, path, _text(record))
        return answer({"created": created})

    return [
        Route("/v1/loops/{loop}/journal/{entry}", recall, methods=["GET"]),
        Route("/v1/loops/{loop}/journal/{entry}", remember, methods=["POST"]),
        Route("/v1/loops/{loop}/generations", listing),
        Route("/v1/loops/{loop}/generations/{number}", finish, methods=["POST"]),
    ]


def _read(folder: Path) -> list[Any]:
    if not folder.is_dir():
        return []
    paths = [path for path in folder.glob("*.json") if path.stem.isdecimal()]
    return [checksums.read_json(path) for path in sorted(paths, key=lambda path: int(path.stem))]


def _recall(path: Path) -> Any:
    try:
        return checksums.read_json(path)
    except FileNotFoundError:
        loop = path.parent.parent.name
        raise NotFound(f"loop {loop!r} has no entry {path.stem!r}", param="entry") from None


def _text(record: Any) -> bytes:
    return checksums.with_crc(orjson.dumps(record))
