"""Builds a dataset: one pass over the runs a recipe considers, in flat memory, then one rename.

The store's index tells the runs in the order of their tasks; selection.py and methods.py settle
them group by group; what is accepted goes into shards (token_shards.py), every run into
runs.parquet (considered.py), and all of it into a hidden draft (making.py), which becomes the
dataset when it is whole. A step of a loop is built once (uses.py). Called by process.py,
fine_tuning and the command line.
"""

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, Corrupt, CrayError, StoreError
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import new_id
from cray_agents.runtime.datasets.counts import BuildCounts
from cray_agents.runtime.datasets.draft import Making, OnLine, OnProgress
from cray_agents.runtime.datasets.reader import MANIFEST, read_dataset, verify
from cray_agents.runtime.datasets.recipe_checks import check
from cray_agents.runtime.datasets.uses import Ledger, Uses
from cray_agents.runtime.disk import durable
from cray_agents.runtime.store import Store

DRAFT = "building"
LEFT_SECONDS = 86_400.0  # a draft that nobody wrote to for so long has lost its builder

log = logging.getLogger(__name__)


def _silent(done: int, total: int, what: str) -> None:
    """Nobody wants to know."""


def build_dataset(
    store: Store, home: Home, recipe: DatasetRecipe, on_progress: OnProgress = _silent
) -> dict[str, Any]:
    """Build the dataset, or find it; returns its manifest. `recipe.tokenizer` is a directory.

    `on_progress(done, total, what)` counts runs and demonstrations. Raises BadInput, with the code
    `empty_dataset` if nothing was accepted, `step_taken` if the step has another recipe's dataset;
    StoreError where the shared root cannot be read or written.
    """
    check(recipe)
    ledger = Ledger.of(home, recipe)
    make = partial(_build, store, home, recipe, on_progress)
    try:
        return read_dataset(home, make() if ledger is None else _build_step(make, ledger))
    except OSError as error:
        if isinstance(error, CrayError):
            raise
        raise StoreError(f"cannot build in {home.datasets}: {error}") from error


def _build_step(make: Callable[..., str], ledger: Ledger) -> str:
    """The dataset of a step: what is committed, or what becomes so. uses.py tells how."""
    while True:
        found = ledger.committed()
        counted = ledger.count() if found is None else None
        if counted is not None:
            seen, uses = counted
            made = make(uses, partial(ledger.prepare, seen=seen))
            found = ledger.commit(made, seen)
        if found is not None:
            return found


def plan_dataset(
    store: Store,
    home: Home,
    recipe: DatasetRecipe,
    on_progress: OnProgress = _silent,
    on_line: OnLine = lambda line: None,
) -> dict[str, Any]:
    """What `build_dataset` would make: the counts of its manifest. Nothing is written.

    `on_line` is told of each run. `step_taken` holds the dataset that the step has already, if it
    has one: that is what building it again gives. Raises BadInput, but not for an empty dataset.
    """
    check(recipe)
    ledger = Ledger.of(home, recipe)
    has, uses = ledger.look() if ledger is not None else (None, Uses())
    making = Making(store, home, recipe, uses, on_progress, None, on_line)
    counts = making.run()
    found = {"id": making.naming.name if counts.total("samples") else None, **counts.plain()}
    return found if has is None else {**found, "step_taken": has}


def _build(
    store: Store,
    home: Home,
    recipe: DatasetRecipe,
    on_progress: OnProgress,
    uses: Uses | None = None,
    prepare: Callable[[str], None] = lambda name: None,
) -> str:
    """Make a dataset and publish it, unless it is there; returns its id. Raises BadInput.

    `prepare` is told the id when all but the publishing is done.
    """
    draft = durable.draft_directory(home.dataset(DRAFT))
    try:
        _sweep(draft)
        making = Making(store, home, recipe, uses or Uses(), on_progress, draft)
        _check_filled(making.run())
        name = making.naming.name
        if not _whole(home.dataset(name)):
            making.finish(name)
            prepare(name)
            durable.publish_directory(draft, home.dataset(name))
        return name
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _whole(directory: Path) -> bool:
    """Whether a dataset is there; a damaged one is set aside, and so made anew."""
    if not (directory / MANIFEST).is_file():
        return False
    try:
        verify(directory)
    except Corrupt as error:
        aside = directory.with_name(f".{directory.name}.{new_id('damaged')}")
        log.error("%s; it is made anew, the damaged one is kept as %s", error, aside)
        directory.rename(aside)
        return False
    return True


def _check_filled(counts: BuildCounts) -> None:
    if "train" in counts.splits:
        return
    reasons = counts.rejected + counts.rejected_demonstrations
    told = ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))
    if counts.splits:
        told = f"all {counts.total('samples')} samples fell to the validation split"
    hint = ""
    if reasons and reasons.most_common(1)[0][0] == "contaminated":
        hint = (
            ": most are taken for held-out tasks; where all tasks share a long text, put it into "
            "the agent's instructions, or raise decontamination.threshold"
        )
    raise BadInput(
        f"no run can be trained on: {counts.considered} considered ({told or 'none match'}){hint}",
        code="empty_dataset",
    )


def _sweep(draft: Path) -> None:
    """Remove drafts whose builders are gone, on whatever host: by the file system's own clock."""
    now = draft.stat().st_mtime
    for other in draft.parent.glob(f".{DRAFT}.draft_*"):
        try:
            written = max(path.stat().st_mtime for path in (other, *other.iterdir()))
        except FileNotFoundError:  # published or swept in this moment
            continue
        if now - written > LEFT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
