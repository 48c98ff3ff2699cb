"""`maintain fsck`, `compact`, `prune`, `backup`, `restore`: stored data, without a platform too."""

import asyncio
from collections import Counter
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import (
    errors,
    note,
    open_root,
    print_json,
    root,
    say,
    settings,
    show,
    size,
)
from cray_agents.cli.where import WhereOption, parse_where
from cray_agents.errors import BadInput, SetupError
from cray_agents.paths import Home
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.server.platform_process import ask_once, client, owner, running

if TYPE_CHECKING:
    from cray_agents.runtime.store import Store

FINDING_COLUMNS = ["path", "kind", "offset", "at", "lost", "repairable", "message"]
MAX_SAMPLE = 10  # run ids that `prune` names
KEEP = 2  # versions that were promoted before and whose weights stay

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]

commands = Commands(
    "maintain", help="Care for stored data: fsck (check), compact, prune (delete), backup, restore."
)


@commands.command("fsck")
def check(
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Mend what can be mended, and keep the damaged bytes."),
    ] = False,
) -> None:
    """Read everything under the root and say what is damaged, and where.

    Runs, datasets, checkpoints, files, batches, uploads, versions, jobs, loops, keys: all that has
    a checksum or a hash. --repair mends segments; what else is damaged stays as it is. The exit
    code is 1 if anything is damaged, with --repair if anything is lost.
    """
    from cray_agents.runtime.fsck import check as look
    from cray_agents.runtime.store.segments.repair import repair as mend

    home = root()
    rows = []
    with errors.status("reading everything"):
        for finding in look(home):
            done = mend(home.segments, finding) if repair else None
            rows.append({**finding._asdict(), "done": done})
    show(rows, [*FINDING_COLUMNS, "done"] if repair else FINDING_COLUMNS)
    if not rows:
        errors.print("everything is whole", style="green")
    elif not repair and any(row["repairable"] for row in rows):
        note("`cray-agents maintain fsck --repair` mends what it can; no byte is destroyed")
    if any(row["lost"] != 0 or not repair for row in rows):
        raise typer.Exit(1)


@commands.command("compact")
def compact_segments(dry_run: DryRun = False) -> None:
    """Merge small segments, and give back the space of forgotten runs; readers need not stop."""
    from cray_agents.runtime.store import Store
    from cray_agents.runtime.store.compaction import compact, plan

    store = Store(open_root(settings()))
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
    if given().json:
        print_json(rows)
        return
    verb = "would be compacted" if dry_run else "compacted"
    say(f"{sum(len(row['segments']) for row in rows)} segments {verb}")
    for row in rows if not dry_run else ():
        say(
            f"  {len(row['segments'])} -> {row['into']}: {size(row['bytes_before'])} -> "
            f"{size(row['bytes_after'])}, {row['forgotten']} events forgotten, "
            f"{row['doubled']} that were there twice"
        )


@commands.command("prune")
def prune(
    what: Annotated[
        str, typer.Argument(metavar="runs|models", help="What to delete: runs, or models' weights.")
    ],
    name: Annotated[
        str | None, typer.Argument(help="With `models`: prune the versions of this name alone.")
    ] = None,
    terms: WhereOption = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With `models`: how many versions that were promoted before stay"
            f" \\[default: {KEEP}].",
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With `runs`: do not ask before it is done.")
    ] = False,
) -> None:
    """Forget runs, or delete the weights of versions that nobody needs.

    `prune runs --where until=90d` forgets the runs of more than ninety days ago: they are gone from
    every answer at once, from the disk with `maintain compact`. Datasets that were made of them
    stay as they are.

    `prune models` deletes weights, and resume points of jobs that ended. What stays: what is
    promoted, was promoted lately or is newest, canaries, what replicas hold, what jobs and loops go
    on from; and every record: a deleted version stays in the history.
    """
    if what == "runs" and name is None and keep is None:
        _prune_runs(parse_where(terms), dry_run=dry_run, yes=yes)
    elif what == "models" and terms is None and not yes:
        _prune_models(name, keep or KEEP, dry_run=dry_run)
    else:
        raise BadInput(
            "give `runs` with --where and --yes, or `models` with a name and --keep", param="what"
        )


@commands.command("backup")
def back_up_root(
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A folder for backups alone.")],
) -> None:
    """Copy the root to a folder outside it; a platform may run on it meanwhile.

    Files that have not changed since the last backup in DEST are neither read nor copied. A backup
    that was killed goes on by the same command. Each backup is a file DEST/TIME.jsonl: delete those
    that you need no more. DEST holds what the root holds, prompts and keys: it is yours alone.
    """
    from cray_agents.runtime.store.backup import back_up

    home = root()
    with errors.status(f"copying {home.root}"):
        made = back_up(home, dest)
    if given().json:
        print_json(made.model_dump(mode="json"))
    else:
        say(f"{made.path}: {made.files} files, {size(made.bytes)}, new: {size(made.copied)}")


@commands.command("restore")
def restore_root(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="A folder of backups, or one: DEST/TIME.jsonl.")
    ],
    dry_run: DryRun = False,
) -> None:
    """Make a new root, --home, of the newest backup in a folder, or of one that is named.

    First all of the backup is read, and what is damaged or missing is listed, with exit code 1.
    Nothing is written then, nor with --dry-run. The root appears when it is whole; a restore that
    was killed goes on by the same command. It stands for the root that was lost: let no platform
    run on that one any more.
    """
    from cray_agents.runtime.store.backup import open_backup, restore

    backup, target = open_backup(src), settings().root.root
    with errors.status(f"reading {backup.path}"):
        flaws = restore(backup, target, dry_run=dry_run)
    if flaws:
        show(flaws, ["path", "content", "reason"])
        raise typer.Exit(1)
    if given().json:
        print_json(backup.model_dump(mode="json") | {"dry_run": dry_run})
    else:
        done = "is whole" if dry_run else f"is restored to {target}"
        say(f"{backup.path} {done}: {backup.files} files, {size(backup.bytes)}")


def _prune_models(name: str | None, keep: int, *, dry_run: bool) -> None:
    from cray_agents.runtime import retention

    home = root()
    with errors.status("looking for what nobody needs"):
        pruned = retention.prune(
            home,
            name,
            keep=keep,
            in_use=lambda: loaded_versions(home),
            dry_run=dry_run,
            kv_tier=settings().kv_tier,
        )
    if given().json:
        print_json(asdict(pruned) | {"bytes": pruned.bytes, "dry_run": dry_run})
        return
    kinds = {"weights": pruned.weights, "resume points": pruned.points, "left over": pruned.drafts}
    kinds |= {"KV blocks": pruned.blocks}
    rows = [
        {"what": kind, "of": owner_name, "size": size(count)}
        for kind, sizes in kinds.items()
        for owner_name, count in sizes.items()
    ]
    if rows:
        show(rows, ["what", "of", "size"])
    for version, why in pruned.kept.items():
        say(f"{version} stays: {why}")
    say(f"{size(pruned.bytes)} {'would be ' if dry_run else ''}given back")


def loaded_versions(home: Home) -> set[str]:
    """Return the versions that the replicas of a root's platform hold. Raises SetupError."""
    info = running(home)
    if info is None:
        if (platform_owner := owner(home)) is None:
            return set()
        raise SetupError(
            f"the platform on {home.root} (pid {platform_owner['pid']}) does not say what its"
            " replicas hold: it is starting or ending; try again in a moment"
        )
    return {
        version
        for replica in ask_once(client(info), lambda platform: platform.pool(spares=True))
        for version in (replica["version"], *replica["versions"])
        if version is not None
    }


def _prune_runs(wanted: RunFilter, *, dry_run: bool, yes: bool) -> None:
    if wanted == RunFilter():
        raise BadInput(
            "say which runs to forget: without --where it would be all of them", param="where"
        )
    from cray_agents.runtime.store import Store

    store = Store(open_root(settings()))
    report = preview(store, wanted)
    if not given().json:
        print_preview(report)
    if not dry_run and report["runs"]:
        if not yes:
            typer.confirm(f"Forget {report['runs']} runs?", abort=True)
        report["forgotten"] = asyncio.run(forget(store, wanted))
    if given().json:
        print_json(report)
    elif "forgotten" in report:
        count = report["forgotten"]
        say(f"{count} runs forgotten; `cray-agents maintain compact` frees space")


async def forget(store: "Store", wanted: RunFilter) -> int:
    """Forget the runs and close the store. Return their number."""
    query = RunQuery(**wanted.model_dump(), order="id")
    try:
        return await store.forget((row.run_id for row in store.facts(query)), "maintain prune")
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
    say(f"{report['runs']} runs match, with {report['tokens']} tokens")
    for loop, count in report["loops"].items():
        say(f"  {loop}: {count}")
    if report["first"]:
        say(f"  the oldest: {', '.join(report['first'])}")
