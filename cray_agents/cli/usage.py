"""`usage`: what keys and models used, what it cost, and what came of the hours of devices.

Reads the runs and the ledger of the shared root; no platform is needed. Prices are those of
`[prices]`. Read next: runtime/views/usage.py, runtime/accounting/cost_table.py.
"""

import time
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import note, open_store, print_json, root, say, settings, show, when
from cray_agents.cli.where import duration
from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter

if TYPE_CHECKING:
    from cray_agents.runtime.accounting.cost_account import CostAmount
    from cray_agents.runtime.accounting.cost_table import CostRow, CostTable

GOODPUT = [
    "name",
    "held_hours",
    "goodput",
    "useful_hours",
    "idle_hours",
    "asleep_hours",
    "lost_hours",
    "other_hours",
    "tokens_served",
    "tokens_trained",
    "steps",
    "steps_lost",
]
HOUR, KWH, DAY = 3600.0, 3.6e6, 86_400.0
MOST_ROWS = 1000  # of `usage keys`

Since = Annotated[
    str | None,
    typer.Option("--since", help="Count the last 30m, 12h or 7d alone \\[default: everything]."),
]

commands = Commands("usage", help="What was used and what came of it: keys, cost, goodput.")


def _begin(since: str | None) -> float:
    return 0.0 if since is None else time.time() - duration(since, "since")


@commands.command("goodput")
def goodput(
    since: Since = None,
    by: Annotated[str, typer.Option(help="The groups: kind, holder or node.")] = "kind",
) -> None:
    """Show what came of the hours that replicas and jobs held GPUs, or nodes without any."""
    from cray_agents.runtime.accounting.holdings import GroupedBy
    from cray_agents.runtime.accounting.holdings import goodput as add_up

    groups: dict[str, GroupedBy] = {name: name for name in get_args(GroupedBy)}
    if by not in groups:
        raise BadInput(f"--by {by!r}: give {', '.join(groups)}", param="by")
    show(add_up(root(), _begin(since), by=groups[by]), GOODPUT)


@commands.command("keys")
def keys(
    by: Annotated[str, typer.Option(help="The groups, with commas: key, model.")] = "key,model",
    every: Annotated[
        str | None, typer.Option(help="Group by time as well, in spans of 1h or 1d, say.")
    ] = None,
    since: Since = None,
) -> None:
    """Sum up the recorded runs, calls, tokens and seconds of API keys and models."""
    from cray_agents.runtime.gateway.http.api_keys import key_names
    from cray_agents.runtime.views.usage import check_groups, usage_table

    groups = [name.strip() for name in by.split(",") if name.strip()]
    check_groups(groups)
    bucket = None if every is None else duration(every, "every")
    which = RunFilter() if since is None else RunFilter(since=_begin(since))
    with open_store() as store:
        table = usage_table(
            store, which, groups, key_names(root()), bucket=bucket, owner=None, limit=MOST_ROWS
        )
    if given().json:
        print_json(table)
        return
    rows = [{**row, "key": row["name"], "time": row["time"] and when(row["time"])}
            for row in table["data"]]  # fmt: skip
    columns = [*(["time"] if bucket else []), *groups, "runs", "calls", "prompt_tokens"]
    show(rows, [*columns, "cached_tokens", "sampled_tokens", "seconds", "errors"])
    if table["has_more"]:
        note(f"and more groups: these {MOST_ROWS} are the largest")


@commands.command("cost")
def cost(
    by: Annotated[
        str | None,
        typer.Option(help="The groups: use, key, model, loop, iteration or job \\[default: use]."),
    ] = None,
    loop: Annotated[str | None, typer.Option(help="Count the iterations of this loop.")] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Count this API key by day: its name or id, or `none` for no key."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Count the requests of this run.")] = None,
    since: Since = None,
) -> None:
    """Show what GPUs and cores were held for: time, measured energy, and money by your prices.

    --since is rounded down to a whole hour.
    """
    from cray_agents.runtime.accounting.cost_table import CostQuery, cost_table, run_cost
    from cray_agents.runtime.gateway.http.api_keys import id_of_key, key_names

    if len([name for name in (loop, key, run) if name is not None]) > 1:
        raise BadInput("give one of --loop, --key and --run", param="loop")
    if run is not None and (by is not None or since is not None):
        raise BadInput("--run: give it alone", param="run")
    grouped = by or ("iteration" if loop is not None else "key" if key is not None else "use")
    opened, prices = root(), settings().prices
    names = key_names(opened)
    query = CostQuery(
        by=grouped,
        bucket=DAY if key is not None and grouped == "key" else None,
        key=None if key is None else id_of_key(key, names),
        loop=loop,
        since=_begin(since),
    )
    with open_store() as store:
        if run is not None:
            table = run_cost(opened, store, prices, run, names)
        else:
            table = cost_table(opened, store, prices, query, names)
    if given().json:
        print_json(table)
    else:
        _print_cost(table)


def _print_cost(table: "CostTable") -> None:
    """Print a table for people."""
    columns = ["gpu_hours", "core_hours", "kwh", "cost"]
    if table.by == "run":
        rows = [
            {"request": each.id, "prompt_tokens": each.prompt_tokens,
             "sampled_tokens": each.sampled_tokens, **_amount(each.spent)}
            for each in table.requests or ()
        ]  # fmt: skip
        whole = {"request": "all", **_counts(table.data[0]), **_amount(table.data[0].spent)}
        show([*rows, whole], ["request", "prompt_tokens", "sampled_tokens", *columns])
    elif table.by == "use":
        rows = [{"use": use, **_amount(amount)} for use, amount in table.uses.items()]
        show([*rows, {"use": "held", **_amount(table.total)}], ["use", *columns])
    else:
        unit = _unit(table)
        lines = [*table.data, *([table.whole] if table.whole is not None else [])]
        rows = [{**_name(row), **_counts(row), **_amount(row.spent), **_ratios(row, unit)}
                for row in lines]  # fmt: skip
        of = ["name", "runs", "succeeded"]
        if table.by in ("loop", "iteration"):
            of += ["holdout", "gain"]
            columns += ["per_point"]
        show(rows, [*of, *columns, "per_success"])
        if table.has_more:
            note(f"more rows than {len(table.data)} are left out: see GET /v1/cost")
    hours = f"from {when(table.since)}" if table.since else "from the beginning"
    say(f"{hours} to {when(table.until)}; {_money(table)}")


def _unit(table: "CostTable") -> str:
    """Return the unit of ratios: money where there are prices, else the devices that were held."""
    return table.currency or ("GPU-seconds" if table.total.gpu_seconds else "core-seconds")


def _money(table: "CostTable") -> str:
    if table.currency is None:
        return f"no [prices] are given: costs per success or point are in {_unit(table)}"
    missing = ", ".join(table.unpriced)
    return f"cost in {table.currency}" + (f", without a price for {missing}" if missing else "")


def _name(row: "CostRow") -> dict[str, Any]:
    label = row.name or row.key or row.model or row.loop or row.job or "none"
    if row.id == "whole":
        return {"name": f"{label} in all"}
    if row.iteration is not None:
        return {"name": f"iteration {row.iteration}"}
    if row.loop and row.id.endswith(":None"):
        return {"name": "no iteration"}
    return {"name": label if row.time is None else f"{label} {when(row.time)[:10]}"}


def _counts(row: "CostRow") -> dict[str, Any]:
    return {
        "runs": row.runs,
        "succeeded": row.succeeded,
        "prompt_tokens": row.prompt_tokens,
        "sampled_tokens": row.sampled_tokens,
        "holdout": row.holdout_success,
        "gain": row.gain,
    }


def _amount(amount: "CostAmount") -> dict[str, Any]:
    return {
        "gpu_hours": _figure(amount.gpu_seconds / HOUR),
        "core_hours": _figure(amount.core_seconds / HOUR),
        "kwh": _figure(None if amount.joules is None else amount.joules / KWH),
        "cost": _figure(amount.cost),
    }


def _figure(value: float | None) -> str:
    """Return a number with four digits that count: hours and money may be tiny."""
    return "-" if value is None else f"{value:.4g}"


def _ratios(row: "CostRow", unit: str) -> dict[str, Any]:
    def in_unit(amount: "CostAmount | None") -> str:
        if amount is None:
            return "-"
        seconds = amount.gpu_seconds if unit == "GPU-seconds" else amount.core_seconds
        return _figure(seconds if amount.cost is None else amount.cost)

    return {"per_success": in_unit(row.per_success), "per_point": in_unit(row.per_point)}
