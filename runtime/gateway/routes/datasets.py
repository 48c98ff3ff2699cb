"""Training sets: built in a process of their own, named by content, so asking twice is once."""

import asyncio
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from cray_agents.errors import BadInput, NotFound
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.reader import (
    CARD,
    file_in,
    list_datasets,
    read_dataset,
    runs_page,
)
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.gateway.http.auth import may_name
from cray_agents.runtime.gateway.http.bodies import (
    answer,
    listed,
    number,
    parse,
    path_id,
    query,
    read_json,
)
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.registry.model_files import refuse_links_outside

SUMMARY = (
    "id",
    "method",
    "samples",
    "trained_tokens",
    "accepted_runs",
    "considered_runs",
    "rejected",
)
MOST = 1000  # datasets or runs in a page


def routes(services: Services) -> list[Route]:
    """Everything under /v1/datasets."""
    files = Files(services.home)

    async def build(request: Request) -> Response:
        recipe = parse(DatasetRecipe, await read_json(request, services.max_body))
        for name in recipe.decontamination.files:
            _check_uploaded(files, name)
        if recipe.tokenizer is not None:
            within = may_name(request, services.model_roots)
            tokenizer = services.registry.directory(recipe.tokenizer, within)
            await asyncio.to_thread(_check_links, tokenizer)
            recipe = recipe.model_copy(update={"tokenizer": str(tokenizer)})
        manifest = await services.datasets.build(recipe)
        return answer({name: manifest[name] for name in SUMMARY})

    async def listing(request: Request) -> Response:
        given = query(request, "limit", "after")
        limit = number(given, "limit", 20, MOST)
        page = await asyncio.to_thread(
            list_datasets, services.home, after=given.get("after"), limit=limit
        )
        names = (*SUMMARY, "created")
        rows = [{name: each.get(name) for name in names} for each in page.manifests]
        return answer(listed(rows, page.has_more))

    async def one(request: Request) -> Response:
        return answer(await asyncio.to_thread(read_dataset, services.home, _id(request)))

    async def runs(request: Request) -> Response:
        given = query(request, "accepted", "reason", "limit", "after")
        look = partial(
            runs_page,
            services.home,
            _id(request),
            accepted=_flag(given, "accepted"),
            reason=given.get("reason"),
            after=given.get("after"),
            limit=number(given, "limit", 100, MOST),
        )
        page = await asyncio.to_thread(look)
        return answer(listed(page.rows, page.has_more, "run"))

    async def card(request: Request) -> Response:
        manifest = await asyncio.to_thread(read_dataset, services.home, _id(request))
        if CARD not in manifest.get("files", {}):
            raise NotFound(f"{manifest['id']} has no card: it was built before there were any")
        path = await asyncio.to_thread(file_in, services.home.dataset(manifest["id"]), CARD)
        return FileResponse(path, media_type="text/markdown")

    dataset = "/v1/datasets/{dataset_id}"
    return [
        Route("/v1/datasets", listing, methods=["GET"]),
        Route("/v1/datasets", build, methods=["POST"]),
        Route(dataset, one),
        Route(f"{dataset}/runs", runs),
        Route(f"{dataset}/card", card),
    ]


def _check_uploaded(files: Files, name: str) -> None:
    """Over HTTP no path is read: its texts would be told in the dataset's card."""
    try:
        files.get(name)
    except NotFound as error:
        raise BadInput(
            f"{name!r} is no uploaded file's id: send the file to /v1/files first",
            param="decontamination.files",
        ) from error


def _check_links(tokenizer: Path) -> None:
    """Its files are opened by name, by a library: none may lead elsewhere. Raises BadInput."""
    try:
        refuse_links_outside(tokenizer.resolve())
    except BadInput as error:
        raise BadInput(str(error), param="tokenizer") from error


def _id(request: Request) -> str:
    return path_id(request, "dataset_id", "dataset")


def _flag(given: dict[str, str], name: str) -> bool | None:
    if name not in given:
        return None
    if given[name] not in ("true", "false"):
        raise BadInput(f"{name} must be true or false, not {given[name]!r}", param=name)
    return given[name] == "true"
