"""`runs list`, `show`, `outline`, `diff`, `stats`: stored runs, with or without a platform.

run_text.py prints one run, run_diff.py compares two. maintenance.py and reward.py add their
commands to this group.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cray_agents.cli.filter_options import FactOptions, FilterOptions
from cray_agents.cli.option_groups import expand_groups
from cray_agents.cli.root_access import open_root
from cray_agents.cli.screen import (
    HomeOption,
    JsonOption,
    cell,
    console,
    disarm,
    errors,
    one_line,
    show,
)
from cray_agents.config import load_config
from cray_agents.errors import BadInput
from cray_agents.queries import RunQuery

if TYPE_CHECKING:
    from cray_agents.runtime.store import Store
    from cray_agents.runtime.store.index import RunFacts

RunId = Annotated[str, typer.Argument(help="As `runs list` shows it.")]
ORDERS = get_args(RunQuery.model_fields["order"].annotation)
COLUMNS = (
    "id", "agent", "model", "stop_reason", "reward", "turns", "tokens", "age", "input", "output",
)  # fmt: skip
NUMBERS = {"reward", "turns", "tokens", "age"}
LONG = ("input", "output")  # columns that give way where the screen is narrow
MOST_TEXT, LEAST_TEXT = 40, 10  # characters of LONG columns
GAP = 2  # between columns
AGES = ((86_400 * 2, 86_400, "d"), (3600 * 2, 3600, "h"), (120, 60, "m"), (0, 1, "s"))

runs = typer.Typer(
    no_args_is_help=True,
    help="Runs of agents: list, show, outline, diff, stats, score, reward, rescore, fsck, compact, "
    "prune.",
)


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    app.add_typer(runs, name="runs")


@contextmanager
def open_store(home: Path | None) -> "Iterator[Store]":
    """Yield the store of a root, to read and append; close it at the end."""
    from cray_agents.runtime.store import Store

    checked_root = open_root(load_config({"home": home}))
    with errors.status("looking at what is stored"):
        store = Store(checked_root)
    try:
        yield store
    finally:
        asyncio.run(store.close())


@runs.command("list")
@expand_groups
def list_runs(
    home: HomeOption = None,
    *,
    filters: FilterOptions,
    order: Annotated[str, typer.Option(help=f"{', '.join(ORDERS)}.")] = "newest",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    after: Annotated[
        str | None, typer.Option(help="Those that come after this run in the order.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List stored runs, the newest first."""
    if order not in ORDERS:
        raise BadInput(f"--order must be one of {', '.join(ORDERS)}; not {order!r}", param="order")
    given: dict[str, Any] = filters.run_filter().model_dump()
    query = RunQuery(**given, order=order, after=after, limit=limit + 1)
    from cray_agents.runtime.views.run_pages import with_heads

    with open_store(home) as store:
        matches = list(islice(with_heads(store, store.facts(query)), limit + 1))
    rows = [row(facts) for facts in matches[:limit]]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console.print(table(rows, console.width))
    if len(matches) > limit:
        last = escape(matches[limit - 1].run_id)
        errors.print(f"there are more: --after {last}", highlight=False)


@runs.command("show")
def show_run(
    run_id: RunId,
    home: HomeOption = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also the exact tokens of each model call.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one run: what was said, which tools were called, its rewards, tokens and versions."""
    from cray_agents.cli.run_text import print_run

    with open_store(home) as store:
        run = store.run(run_id)
    if as_json:
        print(disarm(run.model_dump_json(indent=2)))
    else:
        print_run(run, tokens=tokens)


@runs.command("outline")
def outline_run(
    run_id: RunId,
    home: HomeOption = None,
    first: Annotated[
        int, typer.Option("--from", min=0, help="The first turn; they count from 0.")
    ] = 0,
    limit: Annotated[int, typer.Option(min=1, help="At most so many turns.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List the turns of a run without its texts: sizes, tokens, seconds, tools, errors, rewards."""
    from cray_agents.runtime.views.run_pages import RunPages

    with open_store(home) as store:
        outline = RunPages(store).outline(run_id, first, limit)
    columns = ["n", "seconds", "bytes", "prompt", "sampled", "tools", "errors", "reward", "finish"]
    rows = (
        outline["data"] if as_json else [{**dict.fromkeys(columns), **m} for m in outline["data"]]
    )
    show(rows, columns, as_json=as_json)
    if outline["has_more"]:
        errors.print(f"there are more: --from {first + limit}", highlight=False)


@runs.command("diff")
def diff_runs(
    one: RunId,
    other: Annotated[str, typer.Argument(help="Another one.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where two runs differ: what is known of them, what was said, rewards, tokens."""
    from cray_agents.cli.run_diff import print_differences
    from cray_agents.runtime.views.run_differences import differences

    with open_store(home) as store:
        diff = differences(store.run(one), store.run(other))
    if as_json:
        print(json.dumps(diff, indent=2, default=str))
    else:
        print_differences(one, other, diff)


@runs.command("stats")
@expand_groups
def stats(
    home: HomeOption = None,
    by: Annotated[
        str,
        typer.Option(
            help="Groups, with commas: agent, model, loop, generation, split, stop_reason, error, "
            "task, day."
        ),
    ] = "",
    *,
    filters: FactOptions,
    as_json: JsonOption = False,
) -> None:
    """Count runs, rewards, tokens and times, in groups."""
    run_filter = filters.run_filter()
    groups = [name.strip() for name in by.split(",") if name.strip()]
    with open_store(home) as store:
        rows = store.stats(run_filter, groups)
    columns = [*groups, "runs", "rewarded", "mean_reward", "calls", "prompt_tokens"]
    columns += ["sampled_tokens", "errors", "p50_seconds", "p95_seconds"]
    show(rows, columns, as_json=as_json)


def row(facts: "RunFacts") -> dict[str, Any]:
    """Return a run's facts in the index as a row."""
    known = facts._asdict()
    return {
        "id": known.pop("run_id"),
        **known,
        "tokens": facts.prompt_tokens + facts.sampled_tokens,
    }


def table(rows: list[dict[str, Any]], width: int) -> Table:
    """Return rows as a table of `width` characters; ids are never cut: people copy them."""
    now = time.time()
    aged = [{**row, "age": age(now - row["started"]) if row["started"] else None} for row in rows]
    cells = {name: [one_line(cell(row.get(name))) for row in aged] for name in COLUMNS}
    widths = {name: max(map(cell_len, [name, *cells[name]])) for name in COLUMNS}
    left = width - sum(widths[name] + GAP for name in COLUMNS if name not in LONG)
    result = Table(box=None, header_style="bold", pad_edge=False)
    names = [name for name in COLUMNS if name not in LONG or left >= len(LONG) * (LEAST_TEXT + GAP)]
    for name in names:
        most = min(MOST_TEXT, left // len(LONG) - GAP) if name in LONG else None
        result.add_column(
            name,
            justify="right" if name in NUMBERS else "left",
            no_wrap=True,
            min_width=widths[name] if name == "id" else None,
            max_width=most,
        )
    for each in zip(*(cells[name] for name in names), strict=True):
        result.add_row(*map(Text, each))
    return result


def age(seconds: float) -> str:
    """Return an age in one unit, such as 3h."""
    for least, unit, name in AGES:
        if seconds >= least:
            return f"{int(seconds // unit)}{name}"
    return "0s"
