"""`runs list`, `show` and `stats`: stored runs, with or without a platform.

run_text.py prints one run. rewards.py adds its commands to this group.
"""

import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import console, note, open_store, print_json, show
from cray_agents.cli.where import WhereOption, parse_where
from cray_agents.errors import BadInput
from cray_agents.queries import RunQuery

if TYPE_CHECKING:
    from cray_agents.runtime.store.index import RunFacts

RunId = Annotated[str, typer.Argument(help="The run's id, as `runs list` shows it.")]
ORDERS = get_args(RunQuery.model_fields["order"].annotation)
COLUMNS = (
    "id", "agent", "model", "stop_reason", "reward", "turns", "tokens", "age", "input", "output",
)  # fmt: skip
WIDE, MOST_TEXT, LEAST_TEXT = 110, 40, 10  # a wider screen shows so much of input and output
AGES = ((86_400 * 2, 86_400, "d"), (3600 * 2, 3600, "h"), (120, 60, "m"), (0, 1, "s"))
TURNS = ["turn", "seconds", "bytes", "prompt", "sampled", "tools", "errors", "reward", "finish"]
MOST_TURNS = 100_000  # of an outline
TOGETHER = 64  # runs that are scored or scanned at once
T = TypeVar("T")

commands = Commands("runs", help="Runs of agents: list, show, stats, reward, rescore.")


@commands.command("list")
def list_runs(
    terms: WhereOption = None,
    order: Annotated[
        str, typer.Option(help=f"The order of the list: {', '.join(ORDERS)}.")
    ] = "newest",
    limit: Annotated[int, typer.Option(min=1, help="The length of the list, at most.")] = 50,
    after: Annotated[
        str | None, typer.Option(help="Begin behind this run, the last one of another list.")
    ] = None,
) -> None:
    """List stored runs, the newest first."""
    if order not in ORDERS:
        raise BadInput(f"--order must be one of {', '.join(ORDERS)}; not {order!r}", param="order")
    chosen: dict[str, Any] = parse_where(terms).model_dump()
    query = RunQuery(**chosen, order=order, after=after, limit=limit + 1)
    from cray_agents.runtime.views.run_pages import with_heads

    with open_store() as store:
        matches = list(islice(with_heads(store, store.facts(query)), limit + 1))
    rows = [row(facts) for facts in matches[:limit]]
    if given().json:
        print_json(rows)
        return
    room = min(MOST_TEXT, (console.width - WIDE) // 2)
    for each in rows:
        each["age"] = age(time.time() - each["started"]) if each["started"] else None
        for name in ("input", "output"):
            text = " ".join(str(each[name] or "-").split())
            each[name] = text if len(text) <= room else f"{text[: room - 1]}…"
    show(rows, COLUMNS if room >= LEAST_TEXT else COLUMNS[:-2])
    if len(matches) > limit:
        note(f"there are more: --after {matches[limit - 1].run_id}")


@commands.command("show")
def show_run(
    run_id: RunId,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the exact tokens of each model call, too.")
    ] = False,
    outline: Annotated[
        bool,
        typer.Option(
            "--outline",
            help="List the turns without their texts: sizes, tokens, seconds, tools, errors.",
        ),
    ] = False,
) -> None:
    """Show one run: its messages and tool calls by turn, its rewards, tokens and versions."""
    if outline:
        if tokens:
            raise BadInput("give --tokens or --outline, not both", param="outline")
        _show_outline(run_id)
        return
    from cray_agents.cli.run_text import print_run

    with open_store() as store:
        run = store.run(run_id)
    if given().json:
        print_json(run)
    else:
        print_run(run, tokens=tokens)


def _show_outline(run_id: str) -> None:
    """List the turns of a run; they count from 1, as everywhere for people."""
    from cray_agents.runtime.views.run_pages import RunPages

    with open_store() as store:
        turns = RunPages(store).outline(run_id, 0, MOST_TURNS)["data"]
    rows = [{**dict.fromkeys(TURNS), "turn": turn.pop("n") + 1, **turn} for turn in turns]
    show(rows, TURNS)


@commands.command("stats")
def stats(
    by: Annotated[
        str,
        typer.Option(
            help="The groups, with commas: agent, model, loop, iteration, split, stop_reason,"
            " error, task, day."
        ),
    ] = "",
    terms: WhereOption = None,
) -> None:
    """Count runs, rewards, tokens and times, in groups."""
    run_filter = parse_where(terms)
    if run_filter.text is not None:
        raise BadInput("--where: statistics do not search for text", param="where")
    groups = [name.strip() for name in by.split(",") if name.strip()]
    with open_store() as store:
        rows = store.stats(run_filter, groups)
    columns = [*groups, "runs", "rewarded", "mean_reward", "sampled_tokens", "errors"]
    columns += ["p50_seconds", "p95_seconds"]
    show(rows, columns)


def row(facts: "RunFacts") -> dict[str, Any]:
    """Return a run's facts in the index as a row."""
    known = facts._asdict()
    return {
        "id": known.pop("run_id"),
        **known,
        "tokens": facts.prompt_tokens + facts.sampled_tokens,
    }


def age(seconds: float) -> str:
    """Return an age in one unit, such as 3h."""
    for least, unit, name in AGES:
        if seconds >= least:
            return f"{int(seconds // unit)}{name}"
    return "0s"


def chunks(stored: Iterator[T]) -> Iterator[list[T]]:
    """Yield runs, or what is known of them, some at a time."""
    while some := list(islice(stored, TOGETHER)):
        yield some
