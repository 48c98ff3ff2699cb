"""Training sets: built in a thread, named by content, so that asking twice builds once."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.records import DatasetRecipe
from cray_agents.runtime.datasets import build_dataset, read_dataset
from cray_agents.runtime.gateway.bodies import answer, parse, path_id, read_json
from cray_agents.runtime.gateway.services import Services

SUMMARY = ("id", "samples", "trained_tokens", "accepted_runs", "considered_runs", "rejected")


def routes(services: Services) -> list[Route]:
    """Everything under /v1/datasets."""
    building = asyncio.Lock()  # one at a time: it takes a core and memory

    async def build(request: Request) -> Response:
        recipe = parse(DatasetRecipe, await read_json(request, services.max_body))
        if recipe.tokenizer is not None:
            tokenizer = services.registry.directory(recipe.tokenizer)
            recipe = recipe.model_copy(update={"tokenizer": str(tokenizer)})
        async with building:
            manifest = await asyncio.to_thread(build_dataset, services.store, services.home, recipe)
        return answer({name: manifest[name] for name in SUMMARY})

    async def one(request: Request) -> Response:
        dataset_id = path_id(request, "dataset_id", "dataset")
        return answer(await asyncio.to_thread(read_dataset, services.home, dataset_id))

    return [
        Route("/v1/datasets", build, methods=["POST"]),
        Route("/v1/datasets/{dataset_id}", one),
    ]
