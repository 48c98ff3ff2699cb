"""Dataset build: one pass over the runs a recipe considers, in constant memory, then one rename.

The store's index lists the runs in the order of their tasks. selection/ accepts or refuses them,
group by group. Samples go into shards (samples/token_shards.py), and every run into runs.parquet
(selection/considered_runs.py). All files go into a hidden draft (draft.py), which is renamed to
the dataset when it is complete. A step of a loop is built once (uses.py). Called by
build_process.py, fine_tuning and the command line.
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
from cray_agents.runtime.datasets.description.counts import BuildCounts
from cray_agents.runtime.datasets.draft import BuildPass, OnLine, OnProgress
from cray_agents.runtime.datasets.reader import MANIFEST, read_dataset, verify
from cray_agents.runtime.datasets.recipe_checks import check
from cray_agents.runtime.datasets.uses import Ledger, Uses
from cray_agents.runtime.disk import durable
from cray_agents.runtime.store import Store

DRAFT = "building"
ABANDONED_SECONDS = 86_400.0  # a draft without writes for so long has lost its builder

log = logging.getLogger(__name__)


def _ignore_progress(done: int, total: int, stage: str) -> None:
    """Ignore the progress."""


def build_dataset(
    store: Store, home: Home, recipe: DatasetRecipe, on_progress: OnProgress = _ignore_progress
) -> dict[str, Any]:
    """Build a dataset, unless it exists. Return its manifest. `recipe.tokenizer` is a directory.

    `on_progress(done, total, stage)` counts runs and demonstrations. Raises BadInput with the code
    `empty_dataset` if nothing was accepted, or `step_taken` if the step has another recipe's
    dataset. Raises StoreError if the shared root cannot be read or written.
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
    """Return the dataset of a step; build and commit it if there is none (uses.py)."""
    while True:
        dataset = ledger.find_or_resume()
        counted = ledger.count() if dataset is None else None
        if counted is not None:
            seen, uses = counted
            built = make(uses, partial(ledger.prepare, seen=seen))
            dataset = ledger.commit(built, seen)
        if dataset is not None:
            return dataset


def plan_dataset(
    store: Store,
    home: Home,
    recipe: DatasetRecipe,
    on_progress: OnProgress = _ignore_progress,
    on_line: OnLine = lambda line: None,
) -> dict[str, Any]:
    """Return the counts of the manifest that `build_dataset` would write. Writes nothing.

    `on_line` is called for each run. If the step already has a dataset, `step_taken` names it;
    building the step again returns that one. Raises BadInput, but not for an empty dataset.
    """
    check(recipe)
    ledger = Ledger.of(home, recipe)
    existing, uses = ledger.read() if ledger is not None else (None, Uses())
    build_pass = BuildPass(store, home, recipe, uses, on_progress, None, on_line)
    counts = build_pass.run()
    name = build_pass.naming.name if counts.total("samples") else None
    plan = {"id": name, **counts.manifest_fields()}
    return plan if existing is None else {**plan, "step_taken": existing}


def _build(
    store: Store,
    home: Home,
    recipe: DatasetRecipe,
    on_progress: OnProgress,
    uses: Uses | None = None,
    prepare: Callable[[str], None] = lambda name: None,
) -> str:
    """Build a dataset and publish it, unless it exists. Return its id. Raises BadInput.

    `prepare` is called with the id right before the dataset is published.
    """
    draft = durable.draft_directory(home.dataset(DRAFT))
    try:
        _remove_abandoned(draft)
        build_pass = BuildPass(store, home, recipe, uses or Uses(), on_progress, draft)
        _check_filled(build_pass.run())
        name = build_pass.naming.name
        if not _is_intact(home.dataset(name)):
            build_pass.finish(name)
            prepare(name)
            durable.publish_directory(draft, home.dataset(name))
        return name
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _is_intact(directory: Path) -> bool:
    """Tell whether a dataset exists undamaged. A damaged one is renamed, to be built anew."""
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
    cause = ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))
    if counts.splits:
        cause = f"all {counts.total('samples')} samples fell to the validation split"
    hint, most = "", reasons.most_common(1)[0][0] if reasons else None
    if most == "reward_error":
        hint = f": `cray-agents runs show {counts.failed_reward}` has the error of one"
    if most == "contaminated":
        hint = (
            ": most are taken for held-out tasks; where all tasks share a long text, put it into "
            "the agent's instructions, or raise decontamination.threshold"
        )
    raise BadInput(
        f"no run can be trained on: {counts.considered} considered ({cause or 'none match'}){hint}",
        code="empty_dataset",
    )


def _remove_abandoned(draft: Path) -> None:
    """Remove drafts of dead builders on any host. Ages use the clock of the file system."""
    now = draft.stat().st_mtime
    for other in draft.parent.glob(f".{DRAFT}.draft_*"):
        try:
            written = max(path.stat().st_mtime for path in (other, *other.iterdir()))
        except FileNotFoundError:  # published or removed meanwhile
            continue
        if now - written > ABANDONED_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
