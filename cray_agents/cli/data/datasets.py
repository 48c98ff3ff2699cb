"""`dataset` command: build training sets, list them, and show why runs are in or out.

The commands work in this process, on the shared root; no platform is needed. Read next:
runtime/datasets/, cray_agents/queries.py.
"""

import json
import tomllib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.progress import MofNCompleteColumn

from cray_agents.cli.option_groups import expand_groups, options_under
from cray_agents.cli.platform.root.root_access import open_root
from cray_agents.cli.runs.filter_options import (
    AgentOption,
    GenerationOption,
    LoopOption,
    ModelOption,
    TagOption,
)
from cray_agents.cli.screen import HomeOption, JsonOption, console, progress_bar, root, show, when
from cray_agents.config import load_config
from cray_agents.errors import BadInput
from cray_agents.exact_json import DEEPEST_FOREIGN, parse_json
from cray_agents.processes import leave_out
from cray_agents.queries import DatasetRecipe
from cray_agents.tasks.record_source import read_whole

if TYPE_CHECKING:
    from cray_agents.runtime.datasets.build import OnProgress
    from cray_agents.runtime.datasets.considered_runs import ConsideredRun

COLUMNS = ["id", "method", "samples", "trained_tokens", "accepted_runs", "considered_runs", "when"]
LINES = ["run", "task", "generation", "attempt", "reward", "accepted", "reason", "detail"]
EXAMPLES = 3  # runs that a dry run shows for each reason

DatasetId = Annotated[str, typer.Argument(help="As `dataset list` shows it.")]
RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        exists=True,
        dir_okay=False,
        help="A DatasetRecipe as .toml or .json; options here go before it.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be in and out, and why; write nothing.")
]

dataset = typer.Typer(no_args_is_help=True, help="Training sets: build, list, show, runs.")


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    app.add_typer(dataset, name="dataset")


_option = options_under("How they are chosen")


@dataclass(frozen=True)
class RecipeOptions:
    """Options that set fields of the recipe; None: not given."""

    method: Annotated[str | None, _option("sft (the default), grpo, dpo, kto or distill.")] = None
    min_reward: Annotated[
        float | None, _option("sft, dpo: at least this; kto: desirable from it.")
    ] = None
    best_of: Annotated[int | None, _option("sft: the best so many of each task.", min=1)] = None
    min_margin: Annotated[float | None, _option("dpo: rewards differ by this.", min=0)] = None
    max_per_task: Annotated[int | None, _option("At most so many of a task.", min=1)] = None
    max_tokens: Annotated[int | None, _option("The longest sample.", min=2)] = None
    step: Annotated[int | None, _option("The loop's training set of this number.", min=0)] = None
    max_uses: Annotated[int | None, _option("Use a run in so many steps at most.", min=1)] = None
    validation: Annotated[
        float | None, _option("Keep this fraction of the tasks apart.", min=0)
    ] = None
    near_duplicates: Annotated[
        float | None,
        _option("Leave out what is so similar to an earlier sample: above 0, up to 1."),
    ] = None
    held_out: Annotated[
        list[str] | None,
        _option(
            "Leave out runs whose input is in this file (a path or an uploaded id); repeatable."
        ),
    ] = None
    balance_by: Annotated[str | None, _option("Balance groups of this key of metadata.")] = None
    balance_power: Annotated[
        float | None, _option("0: each group weighs the same; 1: each sample does.")
    ] = None
    tokenizer: Annotated[
        str | None, _option("A checkpoint's directory or id, or name@N, to render with.")
    ] = None
    render: Annotated[bool, _option("Render imported runs, which have no tokens.")] = False


@dataset.command()
@expand_groups
def build(
    recipe: RecipeOption = None,
    loop: LoopOption = None,
    generation: GenerationOption = None,
    agent: AgentOption = None,
    model: ModelOption = None,
    tag: TagOption = None,
    *,
    options: RecipeOptions,
    home: HomeOption = None,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Build a training set, or find it: the same recipe over the same runs is the same set."""
    given = asdict(options) | {
        "loop": loop,
        "generations": generation or None,
        "render": options.render or None,
    }
    held_out = given.pop("held_out")
    run_filter = {"agent": agent, "model": model, "tags": tag or None}
    _build_or_plan(
        home, recipe_of(recipe, given, run_filter, held_out), as_json=as_json, dry_run=dry_run
    )


def _build_or_plan(
    home: Path | None, recipe: DatasetRecipe, *, as_json: bool, dry_run: bool
) -> None:
    from cray_agents.runtime.datasets import build_dataset, plan_dataset
    from cray_agents.runtime.registry.registry import Registry
    from cray_agents.runtime.store import Store

    leave_out("torch")
    root_home = open_root(load_config({"home": home}), new=bool(recipe.demonstrations))
    if recipe.tokenizer is not None:
        folder = Path(recipe.tokenizer).expanduser().absolute()
        tokenizer = folder if folder.is_dir() else Registry(root_home).directory(recipe.tokenizer)
        recipe = recipe.model_copy(update={"tokenizer": str(tokenizer)})
    store = Store(root_home)
    examples = _Examples()
    with _progress() as on_progress:
        if dry_run:
            manifest = plan_dataset(store, root_home, recipe, on_progress, examples.add)
        else:
            manifest = build_dataset(store, root_home, recipe, on_progress)
    if as_json:
        print(json.dumps(manifest, indent=2))
        return
    _print_counts(manifest)
    if not dry_run:
        console.print(f"{root_home.dataset(manifest['id'])}", highlight=False, soft_wrap=True)
        return
    show(examples.rows(), LINES, as_json=False)
    console.print("nothing was written", highlight=False)


@dataset.command("list")
def list_all(
    home: HomeOption = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List training sets, the newest first."""
    from cray_agents.runtime.datasets import list_datasets

    listing = list_datasets(root(home), limit=limit)
    rows = [{**each, "when": when(each["created"])} for each in listing.rows]
    show(rows, COLUMNS, as_json=as_json, damaged=listing.damaged)


@dataset.command("show")
def show_one(dataset_id: DatasetId, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show one training set: counts, why runs are not in it, where its card lies."""
    from cray_agents.runtime.datasets import read_dataset
    from cray_agents.runtime.datasets.reader import CARD

    manifest = read_dataset(root(home), dataset_id)
    if as_json:
        print(json.dumps(manifest, indent=2))
        return
    _print_counts(manifest)
    card = root(home).dataset(dataset_id) / CARD
    console.print(f"card: {card}", highlight=False, soft_wrap=True)


@dataset.command()
def runs(
    dataset_id: DatasetId,
    home: HomeOption = None,
    reason: Annotated[
        str | None, typer.Option(help="Only those left out for this, such as low_reward.")
    ] = None,
    accepted: Annotated[
        bool | None, typer.Option("--in/--out", help="Only those that are in, or out.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List every run that a training set considered: in or out, and why."""
    from cray_agents.runtime.datasets import dataset_runs

    matches = (
        row
        for row in dataset_runs(root(home), dataset_id)
        if reason in (None, row["reason"]) and accepted in (None, row["accepted"])
    )
    show(list(islice(matches, limit)), LINES, as_json=as_json)


def recipe_of(
    path: Path | None,
    given: dict[str, Any],
    run_filter: dict[str, Any],
    held_out: list[str] | None = None,
) -> DatasetRecipe:
    """Return the recipe of a file with the options set. Raises BadInput naming the field."""
    fields = _read_recipe(path) if path is not None else {}
    fields |= {name: value for name, value in given.items() if value is not None}
    run_filter = {name: value for name, value in run_filter.items() if value is not None}
    if run_filter:
        fields["where"] = {**(fields.get("where") or {}), **run_filter}
    if held_out:
        section = fields.get("decontamination") or {}
        files = [*section.get("files", ()), *held_out]
        fields["decontamination"] = {**section, "files": files}
    try:
        return DatasetRecipe.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"])) or None
        raise BadInput(f"{param or 'the recipe'}: {first['msg']}", param=param) from error


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        text = read_whole(path).removeprefix(BOM_UTF8)
        toml = path.suffix == ".toml"
        fields = tomllib.loads(text.decode()) if toml else parse_json(text, DEEPEST_FOREIGN)
    except (OSError, ValueError, RecursionError) as error:  # too long, not UTF-8, or not as it says
        raise BadInput(f"{path} is no recipe: {error}", param="recipe") from error
    if not isinstance(fields, dict):
        raise BadInput(f"{path} is no recipe: it holds no object", param="recipe")
    return fields


class _Examples:
    """The first few runs of each reason."""

    def __init__(self) -> None:
        self._counts: Counter[str | None] = Counter()
        self._lines: list[ConsideredRun] = []

    def add(self, line: "ConsideredRun") -> None:
        self._counts[line.reason] += 1
        if self._counts[line.reason] <= EXAMPLES:
            self._lines.append(line)

    def rows(self) -> list[dict[str, Any]]:
        ordered = sorted(self._lines, key=lambda line: line.reason or "")
        return [line._asdict() for line in ordered]


def _print_counts(manifest: dict[str, Any]) -> None:
    """Print the counts of a dataset."""
    name = manifest["id"] or "an empty dataset, which is not built"
    console.print(f"[bold]{name}[/]  {manifest['method']}", highlight=False)
    if taken := manifest.get("step_taken"):
        console.print(f"its step has {taken}: that is what is built again", highlight=False)
    for split, counts in manifest["splits"].items():
        console.print(
            f"{split}: {counts['samples']:,} samples, {counts['tokens']:,} tokens, "
            f"{counts['trained_tokens']:,} of them trained on",
            highlight=False,
        )
    console.print(
        f"{manifest['accepted_runs']:,} of {manifest['considered_runs']:,} runs are in, and "
        f"{manifest['demonstrations']:,} demonstrations",
        highlight=False,
    )
    if split := manifest.get("split_runs"):
        console.print(
            f"{split:,} of these runs are several sequences: the chat template renders earlier "
            "turns differently than they were sampled, or another agent went on",
            highlight=False,
        )
    for loss, count in manifest.get("losses", {}).items():
        console.print(f"{count:,} samples lack {loss}", highlight=False, markup=False)
    left_out = Counter(manifest["rejected"]) + Counter(manifest["rejected_demonstrations"])
    for reason, count in left_out.most_common():
        console.print(f"  {reason:<22} {count:,}", highlight=False)


@contextmanager
def _progress() -> "Iterator[OnProgress]":
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("opening the store", total=None)

        def on_progress(done: int, total: int, phase: str) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        yield on_progress
