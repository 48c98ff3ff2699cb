"""`runs fsck`, `compact`, `prune`: care for stored data, with or without a platform."""

import asyncio
import json
from collections import Counter
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cray_agents.cli.data.datasets import dataset
from cray_agents.cli.option_groups import expand_groups
from cray_agents.cli.platform.root.root_access import open_root
from cray_agents.cli.runs.filter_options import FilterOptions
from cray_agents.cli.runs.runs import runs
from cray_agents.cli.screen import HomeOption, JsonOption, console, errors, root, show, size
from cray_agents.config import load_config
from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter, RunQuery

if TYPE_CHECKING:
    from cray_agents.runtime.store import Store

FINDING_COLUMNS = ["path", "kind", "offset", "at", "lost", "repairable", "message"]
MAX_SAMPLE = 10  # run ids that `prune` names

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands, in the group `runs`."""
    runs.command("fsck")(check)
    dataset.command("fsck")(check)
    runs.command("compact")(compact_segments)
    runs.command("prune")(prune)


def check(
    home: HomeOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended, keep the damaged bytes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read everything under the root and tell what is damaged, and where.

    Runs, datasets, checkpoints, files, batches, uploads, versions, jobs, loops, keys: all that has
    a checksum or a hash. --repair mends segments; what else is damaged stays as it is. Exit code 1
    if anything is damaged, with --repair if anything is lost.
    """
    from cray_agents.runtime.fsck import check as look
    from cray_agents.runtime.store.segments.repair import repair as mend

    home_ = root(home)
    rows = []
    with errors.status("reading everything"):
        for finding in look(home_):
            done = mend(home_.segments, finding) if repair else None
            rows.append({**finding._asdict(), "done": done})
    columns = [*FINDING_COLUMNS, "done"] if repair else FINDING_COLUMNS
    show(rows, columns, as_json=as_json)
    if not rows:
        errors.print("everything is whole", style="green")
    elif not repair and any(row["repairable"] for row in rows):
        errors.print("`cray-agents runs fsck --repair` mends what it can; no byte is destroyed")
    if any(row["lost"] != 0 or not repair for row in rows):
        raise typer.Exit(1)


def compact_segments(
    home: HomeOption = None,
    dry_run: DryRun = False,
    as_json: JsonOption = False,
) -> None:
    """Merge small segments, and give back the space of forgotten runs; readers need not stop."""
    from cray_agents.runtime.store import Store
    from cray_agents.runtime.store.compaction import compact, plan

    store = Store(open_root(load_config({"home": home})))
    if not dry_run:
        store.seal_orphans()
    groups = plan(store, thorough=True)
    rows: list[dict[str, Any]]
    if dry_run:
        rows = [
            {"segments": [s.stem for s in group], "bytes_before": sum(s.size for s in group)}
            for group in groups
        ]
    else:
        rows = [asdict(done) for group in groups if (done := compact(store, group))]
    asyncio.run(store.close())
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    verb = "would be compacted" if dry_run else "compacted"
    console.print(f"{sum(len(row['segments']) for row in rows)} segments {verb}")
    for row in rows if not dry_run else ():
        console.print(
            f"  {len(row['segments'])} -> {row['into']}: {size(row['bytes_before'])} -> "
            f"{size(row['bytes_after'])}, {row['forgotten']} events forgotten, "
            f"{row['doubled']} that were there twice"
        )


@expand_groups
def prune(
    home: HomeOption = None,
    *,
    filters: FilterOptions,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Forget the runs that match: `--until 90d` those of more than ninety days ago.

    They are gone from every answer at once, from the disk with `runs compact`. Datasets that were
    made of them stay as they are.
    """
    wanted = filters.run_filter()
    if wanted == RunFilter():
        raise BadInput("say which runs to forget: without a filter it would be all of them")
    from cray_agents.runtime.store import Store

    store = Store(open_root(load_config({"home": home})))
    report = preview(store, wanted)
    if not as_json:
        print_preview(report)
    if not dry_run and report["runs"]:
        if not yes:
            typer.confirm(f"Forget {report['runs']} runs?", abort=True)
        report["forgotten"] = asyncio.run(forget(store, wanted))
    if as_json:
        print(json.dumps(report, indent=2))
    elif "forgotten" in report:
        count = report["forgotten"]
        console.print(f"{count} runs forgotten; `cray-agents runs compact` frees space")


async def forget(store: "Store", wanted: RunFilter) -> int:
    """Forget the runs and close the store. Return their number."""
    query = RunQuery(**wanted.model_dump(), order="id")
    try:
        return await store.forget((row.run_id for row in store.facts(query)), "runs prune")
    finally:
        await store.close()


def preview(store: "Store", wanted: RunFilter) -> dict[str, Any]:
    """Count the runs that match, their tokens and their loops, with the ids of the oldest."""
    query = RunQuery(**wanted.model_dump(), order="oldest")
    runs_, tokens, loops = 0, 0, Counter[str]()
    for row in store.facts(query):
        runs_ += 1
        tokens += row.prompt_tokens + row.sampled_tokens
        loops[row.loop or "(none)"] += 1
    first = [row.run_id for row in islice(store.facts(query), MAX_SAMPLE)]
    return {"runs": runs_, "tokens": tokens, "loops": dict(loops.most_common()), "first": first}


def print_preview(report: dict[str, Any]) -> None:
    """Print the result of `preview` for people."""
    console.print(f"{report['runs']} runs match, with {report['tokens']} tokens")
    for loop, count in report["loops"].items():
        console.print(f"  {loop}: {count}", markup=False)
    if report["first"]:
        console.print(f"  the oldest: {', '.join(report['first'])}", markup=False)
