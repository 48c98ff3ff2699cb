"""Training sets: built once in a process of their own, and named by their content."""

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cray_agents.errors import BadInput, NotFound
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets import reader
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import may_name
from cray_agents.runtime.gateway.http.bodies import (
    ID,
    answer_read,
    json_response,
    number,
    page,
    path_id,
    read_record,
)
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    AFTER,
    ANY,
    BOOL,
    COUNT,
    FLAG,
    REAL,
    REAL_OR_NONE,
    TEXT,
    TEXT_OR_NONE,
    WHOLE,
    WHOLE_OR_NONE,
    Described,
    NamedShape,
    all_of,
    count_up_to,
    object_of,
    page_of,
)
from cray_agents.runtime.gateway.services import Services, vocabulary_of
from cray_agents.runtime.registry.foreign_model import refuse_links_outside
from cray_agents.runtime.views.dataset_differences import (
    CHANGES,
    changed_runs,
    dataset_differences,
)
from cray_agents.runtime.views.dataset_records import (
    ChangedRun,
    DatasetDifferences,
    DatasetHistograms,
    SamplePage,
)
from cray_agents.runtime.views.dataset_views import add_texts, dataset_histograms, sample_page

PAGE_LIMIT = 1000  # datasets or runs in a page
MOST_BINS, MOST_SAMPLES = 200, 50
_SUMMARY = {
    "id": TEXT,
    "method": TEXT,
    "samples": WHOLE,
    "trained_tokens": WHOLE,
    "accepted_runs": WHOLE,
    "considered_runs": WHOLE,
    "split_runs": WHOLE_OR_NONE,  # None: built by an older version
    "losses": ANY,  # what was left out of samples, with their number; None: as above
    "rejected": ANY,
    "demonstrations": WHOLE_OR_NONE,
    "rejected_demonstrations": ANY,
}
SUMMARY = NamedShape("DatasetSummary", object_of(_SUMMARY))
CONSIDERED_RUN = NamedShape(
    "ConsideredRun",
    object_of(
        {
            "run": TEXT,
            "task": TEXT_OR_NONE,
            "generation": WHOLE_OR_NONE,
            "attempt": WHOLE_OR_NONE,
            "reward": REAL_OR_NONE,
            "accepted": BOOL,
            "reason": TEXT_OR_NONE,
            "detail": TEXT_OR_NONE,
            "samples": WHOLE,
        }
    ),
)

PAIR = {"a": Described(TEXT, "A training set."), "b": Described(TEXT, "Another one.")}

router = Router("Training")


@router.get(
    "/v1/datasets",
    Role.train,
    query={"limit": count_up_to(PAGE_LIMIT), "after": AFTER},
    answer=page_of(all_of(SUMMARY, object_of({"created": REAL}))),
)
async def list_datasets(services: Services, request: Request) -> Response:
    """List the training sets, newest first."""
    params = query(request)
    limit = number(params, "limit", 20, PAGE_LIMIT)

    def read() -> dict[str, Any]:
        listing = reader.list_datasets(services.home, after=params.get("after"), limit=limit)
        names = (*_SUMMARY, "created")
        rows = [{name: each.get(name) for name in names} for each in listing.rows]
        return page(rows, listing.has_more, damaged=listing.damaged)

    return await answer_read(request, read, long=True)


@router.post(
    "/v1/datasets",
    Role.train,
    body=DatasetRecipe,
    answer=SUMMARY,
    fails="400 empty_dataset, 400 step_taken",
)
async def build_dataset(services: Services, request: Request) -> Response:
    """Build a training set from runs and demonstrations.

    The same recipe is built once. `tokenizer` is a checkpoint directory, an id, or `name@N`.
    `rejected` counts the runs left out by reason.
    """
    recipe = await read_record(DatasetRecipe, request, services.max_body)
    await asyncio.to_thread(_check_uploaded, services.files, recipe.decontamination.files)
    if recipe.tokenizer is not None:
        roots = may_name(request, services.model_roots)
        tokenizer = services.registry.directory(recipe.tokenizer, roots)
        await asyncio.to_thread(_check_links, tokenizer)
        recipe = recipe.model_copy(update={"tokenizer": str(tokenizer)})
    manifest = await services.datasets.build(recipe)
    return json_response({name: manifest.get(name) for name in _SUMMARY})


@router.get(
    "/v1/datasets/diff",
    Role.train,
    query={**PAIR, "bins": {**COUNT, "minimum": 1, "maximum": MOST_BINS}},
    answer=DatasetDifferences,
    fails="404 not_found",
)
async def diff_datasets(services: Services, request: Request) -> Response:
    """Tell how two training sets differ: runs, reasons, recipes, counts and distributions.

    A run is the same by its id, a demonstration by its messages.
    """
    params = query(request)
    one, other = _two_ids(params)
    read = partial(dataset_differences, services.home, one, other, _bins(params))
    return await answer_read(request, read, long=True)


@router.get(
    "/v1/datasets/diff/runs",
    Role.train,
    query={
        **PAIR,
        "change": Described(
            {"enum": list(CHANGES)}, "Only these; without it all that are not the same in both."
        ),
        "limit": count_up_to(PAGE_LIMIT),
        "after": Described(TEXT, "The last run of the page before."),
    },
    answer=page_of(ChangedRun),
    fails="404 not_found",
)
async def list_changed_runs(services: Services, request: Request) -> Response:
    """List the runs that two training sets treat differently, by id."""
    params = query(request)
    read_page = partial(
        changed_runs,
        services.home,
        *_two_ids(params),
        params.get("change"),
        params.get("after"),
        number(params, "limit", 100, PAGE_LIMIT),
    )
    return await answer_read(request, lambda: page(*read_page(), "run"))


@router.get("/v1/datasets/{dataset_id}", Role.train, answer=SUMMARY, fails="404 not_found")
async def retrieve_dataset(services: Services, request: Request) -> Response:
    """Return a training set's manifest.

    Beyond the summary it has `tokens`, `splits`, `versions`, `demonstrations`, `recipe`, `loop`,
    `step`, and `files` with the sha256, bytes and rows of each.
    """
    dataset_id = _dataset_id(request)
    return await answer_read(request, partial(reader.read_dataset, services.home, dataset_id))


@router.get(
    "/v1/datasets/{dataset_id}/runs",
    Role.train,
    query={
        "accepted": Described(FLAG, "Only the runs that are in, or out."),
        "reason": Described(TEXT, "Only the runs left out for this reason."),
        "limit": count_up_to(PAGE_LIMIT),
        "after": Described(TEXT, "The last run of the page before."),
    },
    answer=page_of(CONSIDERED_RUN),
    fails="404 not_found",
)
async def list_dataset_runs(services: Services, request: Request) -> Response:
    """List every run that a training set considered: in or out, and why."""
    params = query(request)
    read_page = partial(
        reader.runs_page,
        services.home,
        _dataset_id(request),
        accepted=_flag(params, "accepted"),
        reason=params.get("reason"),
        after=params.get("after"),
        limit=number(params, "limit", 100, PAGE_LIMIT),
    )
    return await answer_read(request, lambda: page(*read_page(), "run"))


@router.get(
    "/v1/datasets/{dataset_id}/histograms",
    Role.train,
    query={"bins": {**COUNT, "minimum": 1, "maximum": MOST_BINS}},
    answer=DatasetHistograms,
    fails="404 not_found",
)
async def read_dataset_histograms(services: Services, request: Request) -> Response:
    """Return distributions over a training set: rewards, tokens, trained tokens, versions."""
    read = partial(dataset_histograms, services.home, _dataset_id(request), _bins(query(request)))
    return await answer_read(request, read)


@router.get(
    "/v1/datasets/{dataset_id}/samples",
    Role.train,
    query={
        "at": Described(COUNT, "The first sample, from 0."),
        "limit": count_up_to(MOST_SAMPLES),
        "split": {"enum": ["train", "validation"]},
        "model": Described(TEXT, "The version whose tokenizer has the texts."),
    },
    answer=SamplePage,
    fails="404 not_found, 404 model_not_found",
)
async def list_samples(services: Services, request: Request) -> Response:
    """List samples as the trainer reads them, with the text of each token.

    The text comes from the tokenizer of `model`, else of the version that sampled, else of the
    recipe. Without any `texts` is null.
    """
    params = query(request)
    at, limit = number(params, "at", 0), number(params, "limit", 1, MOST_SAMPLES)
    split = params.get("split", "train")
    if split not in ("train", "validation"):
        raise BadInput(f"split must be train or validation, not {split[:50]!r}", param="split")
    model = params.get("model")
    if model is not None:
        services.registry.resolve(model)
    dataset_id = _dataset_id(request)

    def read() -> dict[str, Any]:
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

    return await answer_read(request, read)


@router.get(
    "/v1/datasets/{dataset_id}/card",
    Role.train,
    media={"text/markdown": TEXT},
    fails="404 not_found",
)
async def read_dataset_card(services: Services, request: Request) -> Response:
    """Return a training set's card."""
    manifest = await asyncio.to_thread(reader.read_dataset, services.home, _dataset_id(request))
    if reader.CARD not in manifest.get("files", {}):
        raise NotFound(f"{manifest['id']} has no card: it was built before there were any")
    path = await asyncio.to_thread(
        reader.file_in, services.home.dataset(manifest["id"]), reader.CARD
    )
    return FileResponse(path, media_type="text/markdown")


def _check_uploaded(files: Files, names: list[str]) -> None:
    """Raise BadInput unless these are uploaded files: the dataset's card quotes their texts."""
    for name in names:
        try:
            files.get(name)
        except NotFound as error:
            raise BadInput(
                f"{name[:200]!r} is no uploaded file's id: send the file to /v1/files first",
                param="decontamination.files",
            ) from error


def _check_links(tokenizer: Path) -> None:
    """Raise BadInput where a tokenizer's file leads elsewhere: a library opens them by name."""
    try:
        refuse_links_outside(tokenizer.resolve())
    except BadInput as error:
        raise BadInput(str(error), param="tokenizer") from error


def _dataset_id(request: Request) -> str:
    return path_id(request, "dataset_id", "dataset")


def _two_ids(params: dict[str, str]) -> tuple[str, str]:
    """Return the ids `a` and `b` of a query. Raises BadInput, NotFound."""
    for name in ("a", "b"):
        if name not in params:
            raise BadInput(f"{name} must name a dataset", param=name)
        if not ID.fullmatch(params[name]):
            raise NotFound(f"no dataset {params[name][:200]!r}", param=name)
    return params["a"], params["b"]


def _bins(params: dict[str, str]) -> int:
    bins = number(params, "bins", 24, MOST_BINS)
    if not bins:
        raise BadInput("bins must be 1 or more", param="bins")
    return bins


def _flag(params: dict[str, str], name: str) -> bool | None:
    if name not in params:
        return None
    if params[name] not in ("true", "false"):
        raise BadInput(f"{name} must be true or false, not {params[name]!r}", param=name)
    return params[name] == "true"
