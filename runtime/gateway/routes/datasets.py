"""Training sets: built once in a process of their own, and named by their content."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cray_agents.errors import BadInput, NotFound
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets import reader
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import may_name
from cray_agents.runtime.gateway.http.bodies import json_response, page
from cray_agents.runtime.gateway.http.fields import After, Count, DatasetId, Limit, ListPage, named
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.services import Current, vocabulary_of
from cray_agents.runtime.registry.foreign_model import refuse_links_outside
from cray_agents.runtime.views.dataset_views import (
    Change,
    ChangedRun,
    ConsideredRow,
    DatasetDifferences,
    DatasetHistograms,
    DatasetSummary,
    ListedDataset,
    SamplePage,
    add_texts,
    changed_runs,
    dataset_differences,
    dataset_histograms,
    sample_page,
)

MOST_BINS, MOST_SAMPLES = 200, 50
Bins = Annotated[int, Query(ge=1, le=MOST_BINS)]
One = Annotated[str, named("dataset", "a"), Query(description="A training set.")]
Other = Annotated[str, named("dataset", "b"), Query(description="Another one.")]
LastRun = Annotated[str | None, Query(description="The last run of the page before.")]

router = Router("Training")


@router.get("/v1/datasets", Role.train, answer=ListPage[ListedDataset], long=True)
def list_datasets(services: Current, limit: Limit = 20, after: After = None) -> dict[str, Any]:
    """List the training sets, newest first."""
    listing = reader.list_datasets(services.home, after=after, limit=limit)
    rows = [{name: each.get(name) for name in ListedDataset.model_fields} for each in listing.rows]
    return page(rows, listing.has_more, damaged=listing.damaged)


@router.post(
    "/v1/datasets",
    Role.train,
    answer=DatasetSummary,
    fails="400 empty_dataset, 400 step_taken",
    max_body="runs",
)
async def build_dataset(services: Current, request: Request, body: DatasetRecipe) -> Response:
    """Build a training set from runs and demonstrations, or from documents.

    The same recipe is built once. `tokenizer` is a checkpoint directory, an id, or `name@N`.
    `rejected` counts the runs left out by reason.
    """
    for param, names in (
        ("decontamination.files", body.decontamination.files),
        ("documents", body.documents),
    ):
        await asyncio.to_thread(_check_uploaded, services.files, names, param)
    if body.tokenizer is not None:
        roots = may_name(request, services.model_roots)
        tokenizer = await asyncio.to_thread(services.registry.directory, body.tokenizer, roots)
        await asyncio.to_thread(_check_links, tokenizer)
        body = body.model_copy(update={"tokenizer": str(tokenizer)})
    manifest = await services.datasets.build(body)
    return json_response({name: manifest.get(name) for name in DatasetSummary.model_fields})


@router.get(
    "/v1/datasets/diff", Role.train, answer=DatasetDifferences, fails="404 not_found", long=True
)
def diff_datasets(services: Current, a: One, b: Other, bins: Bins = 24) -> Any:
    """Tell how two training sets differ: runs, reasons, recipes, counts and distributions.

    A run is the same by its id, a demonstration by its messages.
    """
    return dataset_differences(services.home, a, b, bins)


@router.get(
    "/v1/datasets/diff/runs", Role.train, answer=ListPage[ChangedRun], fails="404 not_found"
)
def list_changed_runs(
    services: Current,
    a: One,
    b: Other,
    change: Annotated[
        Change | None, Query(description="Only these; else all that are not the same in both.")
    ] = None,
    limit: Limit = 100,
    after: LastRun = None,
) -> dict[str, Any]:
    """List the runs that two training sets treat differently, by id."""
    return page(*changed_runs(services.home, a, b, change, after, limit), "run")


@router.get("/v1/datasets/{dataset_id}", Role.train, answer=DatasetSummary)
def retrieve_dataset(services: Current, dataset_id: DatasetId) -> dict[str, Any]:
    """Return a training set's manifest.

    Beyond the summary it has `tokens`, `splits`, `versions`, `demonstrations`, `recipe`, `loop`,
    `step`, and `files` with the sha256, bytes and rows of each.
    """
    return reader.read_dataset(services.home, dataset_id)


@router.get("/v1/datasets/{dataset_id}/runs", Role.train, answer=ListPage[ConsideredRow])
def list_dataset_runs(
    services: Current,
    dataset_id: DatasetId,
    accepted: Annotated[bool | None, Query(description="Only the runs in, or out.")] = None,
    reason: Annotated[
        str | None, Query(description="Only the runs left out for this reason.")
    ] = None,
    limit: Limit = 100,
    after: LastRun = None,
) -> dict[str, Any]:
    """List every run that a training set considered: in or out, and why."""
    rows = reader.runs_page(
        services.home, dataset_id, accepted=accepted, reason=reason, after=after, limit=limit
    )
    return page(*rows, "run")


@router.get("/v1/datasets/{dataset_id}/histograms", Role.train, answer=DatasetHistograms)
def read_dataset_histograms(services: Current, dataset_id: DatasetId, bins: Bins = 24) -> Any:
    """Return distributions over a training set: rewards, tokens, trained tokens, versions."""
    return dataset_histograms(services.home, dataset_id, bins)


@router.get(
    "/v1/datasets/{dataset_id}/samples", Role.train, answer=SamplePage, fails="404 model_not_found"
)
def list_samples(
    services: Current,
    dataset_id: DatasetId,
    at: Annotated[Count, Query(description="The first sample, from 0.")] = 0,
    limit: Annotated[int, Query(ge=0, le=MOST_SAMPLES)] = 1,
    split: Literal["train", "validation"] = "train",
    model: Annotated[
        str | None, Query(description="The version whose tokenizer has the texts.")
    ] = None,
) -> dict[str, Any]:
    """List samples as the trainer reads them, with the text of each token.

    The text comes from the tokenizer of `model`, else of the version that sampled, else of the
    recipe. Without any `texts` is null.
    """
    if model is not None:
        services.registry.resolve(model)
    manifest = reader.read_dataset(services.home, dataset_id)
    tokenizer = (manifest.get("recipe") or {}).get("tokenizer")
    samples = sample_page(services.home, dataset_id, split, at, limit)
    for sample in samples["data"]:
        version = model or next(iter(sample["versions"]), None)
        with suppress(NotFound):  # the version was never here, or has no tokenizer
            if version is not None:
                add_texts(sample, vocabulary_of(services, version))
            elif tokenizer is not None:
                add_texts(sample, services.vocabularies.of(Path(tokenizer)))
    return samples


@router.get(
    "/v1/datasets/{dataset_id}/card", Role.train, media={"text/markdown": {"type": "string"}}
)
async def read_dataset_card(services: Current, dataset_id: DatasetId) -> Response:
    """Return a training set's card."""
    manifest = await asyncio.to_thread(reader.read_dataset, services.home, dataset_id)
    if reader.CARD not in manifest.get("files", {}):
        raise NotFound(f"{dataset_id} has no card: it was built before there were any")
    path = await asyncio.to_thread(reader.file_in, services.home.dataset(dataset_id), reader.CARD)
    return FileResponse(path, media_type="text/markdown")


def _check_uploaded(files: Files, names: list[str], param: str) -> None:
    """Raise BadInput unless these are uploaded files: a client gets to read their texts."""
    for name in names:
        try:
            files.get(name)
        except NotFound as error:
            raise BadInput(
                f"{name[:200]!r} is no uploaded file's id: send the file to /v1/files first",
                param=param,
            ) from error


def _check_links(tokenizer: Path) -> None:
    """Raise BadInput where a tokenizer's file leads elsewhere: a library opens them by name."""
    try:
        refuse_links_outside(tokenizer.resolve())
    except BadInput as error:
        raise BadInput(str(error), param="tokenizer") from error
