"""`dataset` command: build training sets, list them, and show how many runs are in, or out and why.

The commands work in this process, on the shared root; no platform is needed. Read next:
runtime/datasets/, cray_agents/queries.py.
"""

import tomllib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.progress import MofNCompleteColumn

from cray_agents.cli.options import Commands, given, key_value
from cray_agents.cli.screen import (
    console,
    open_root,
    print_json,
    progress_bar,
    root,
    say,
    settings,
    show,
    when,
)
from cray_agents.cli.where import WhereOption, parse_where
from cray_agents.errors import BadInput
from cray_agents.exact_json import DEEPEST_FOREIGN, parse_json
from cray_agents.processes import leave_out
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.registry.registry import Registry
from cray_agents.tasks.record_source import read_whole

if TYPE_CHECKING:
    from cray_agents.runtime.datasets.build import OnProgress
    from cray_agents.runtime.datasets.considered_runs import ConsideredRun

COLUMNS = ["id", "method", "samples", "trained_tokens", "accepted_runs", "considered_runs", "when"]
LINES = ["run", "task", "iteration", "attempt", "reward", "accepted", "reason", "detail"]
EXAMPLES = 3  # runs that a dry run shows for each reason


commands = Commands("dataset", help="Training sets: build, list, show.")


@commands.command("build")
def build(
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            exists=True,
            dir_okay=False,
            help="A DatasetRecipe as .toml or .json; the options here override its fields.",
        ),
    ] = None,
    terms: WhereOption = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A field of DatasetRecipe, such as min_reward=0.5, best_of=2, min_margin=0.1,"
            " max_per_task=4, max_tokens=4096, step=3, max_uses=2, validation=0.1,"
            " near_duplicates=0.8, balance_by=kind, balance_power=0.5 or render=true; repeatable.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="The training method: sft (the default), grpo, dpo, kto or distill."),
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            help="A file (a path or an uploaded id) whose inputs must stay out; repeatable."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The checkpoint's directory or id, or name@N, to render with."),
    ] = None,
    documents: Annotated[
        list[str] | None,
        typer.Option(
            help="Texts (.txt, .jsonl, .parquet; a file, a folder or an uploaded id) to learn as"
            " they are, in contexts of max_tokens; repeatable."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be in and out, and why; write nothing."),
    ] = False,
) -> None:
    """Build a training set, or find it: the same recipe over the same runs is the same set.

    The recipe's fields are in cray_agents/queries.py. `--where` chooses the runs; its `loop` and
    `iteration` are the recipe's own.
    """
    fields = dict(key_value(text, "set") for text in setting or ())
    fields |= {"method": method, "tokenizer": tokenizer, "documents": documents or None}
    chosen = parse_where(terms).model_dump(exclude_defaults=True)
    if (one := chosen.pop("iteration", None)) is not None:
        chosen["iterations"] = [one]
    fields |= {name: chosen.pop(name) for name in ("loop", "iterations") if name in chosen}
    _build_or_plan(recipe_of(recipe, fields, chosen, held_out), dry_run=dry_run)


def _build_or_plan(recipe: DatasetRecipe, *, dry_run: bool) -> None:
    from cray_agents.runtime.datasets.build import build_dataset, plan_dataset
    from cray_agents.runtime.store import Store

    leave_out("torch")
    home = open_root(settings(), new=bool(recipe.demonstrations or recipe.documents))
    if recipe.tokenizer is not None:
        tokenizer = Registry(home).named(recipe.tokenizer)
        recipe = recipe.model_copy(update={"tokenizer": str(tokenizer)})
    store = Store(home)
    examples = _Examples()
    with _progress() as on_progress:
        if dry_run:
            manifest = plan_dataset(store, home, recipe, on_progress, examples.add)
        else:
            manifest = build_dataset(store, home, recipe, on_progress)
    if given().json:
        print_json(manifest)
        return
    _print_counts(manifest)
    if not dry_run:
        say(f"{home.dataset(manifest['id'])}")
        return
    show(examples.rows(), LINES)
    say("nothing was written")


@commands.command("list")
def list_all(
    limit: Annotated[int, typer.Option(min=1, help="The length of the list, at most.")] = 20,
) -> None:
    """List training sets, the newest first."""
    from cray_agents.runtime.datasets.reader import list_datasets

    listing = list_datasets(root(), limit=limit)
    rows = [{**each, "when": when(each["created"])} for each in listing.rows]
    show(rows, COLUMNS, damaged=listing.damaged)


@commands.command("show")
def show_one(
    dataset_id: Annotated[
        str, typer.Argument(help="The dataset's id, as `dataset list` shows it.")
    ],
) -> None:
    """Show one training set: counts, why runs are not in it, where its card lies."""
    from cray_agents.runtime.datasets.reader import CARD, read_dataset

    manifest = read_dataset(root(), dataset_id)
    if given().json:
        print_json(manifest)
        return
    _print_counts(manifest)
    card = root().dataset(dataset_id) / CARD
    say(f"card: {card}")


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
    console.print(f"[bold]{name}[/]  {manifest['method']}")
    if taken := manifest.get("step_taken"):
        say(f"its step has {taken}: that is what is built again")
    for split, counts in manifest["splits"].items():
        say(
            f"{split}: {counts['samples']:,} samples, {counts['tokens']:,} tokens, "
            f"{counts['trained_tokens']:,} of them trained on"
        )
    if (documents := manifest.get("documents")) is not None:
        say(f"{documents:,} documents are in")
    else:
        say(
            f"{manifest['accepted_runs']:,} of {manifest['considered_runs']:,} runs are in, and "
            f"{manifest['demonstrations']:,} demonstrations"
        )
    if split := manifest.get("split_runs"):
        say(
            f"{split:,} of these runs are several sequences: the chat template renders earlier "
            "turns differently than they were sampled, or another agent went on"
        )
    for loss, count in manifest.get("losses", {}).items():
        say(f"{count:,} samples lack {loss}")
    left_out = Counter(manifest["rejected"]) + Counter(manifest["rejected_demonstrations"])
    left_out += Counter(manifest.get("rejected_documents"))
    for reason, count in left_out.most_common():
        say(f"  {reason:<22} {count:,}")


@contextmanager
def _progress() -> "Iterator[OnProgress]":
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("opening the store", total=None)

        def on_progress(done: int, total: int, phase: str) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        yield on_progress
