"""`models`: versions, what happened to them, where they come from; and what changes that.

What only looks reads the shared root, platform or not. Promote, rollback and reject ask the running
platform, which swaps at once; where none runs they decide what the next one serves. A canary needs
a platform. Read next: runtime/registry.py, runtime/canary.py.
"""

import asyncio
import getpass
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.tree import Tree

from cray_agents.cli.platform.platform_process import client, fetch, owner, running
from cray_agents.cli.screen import HomeOption, JsonOption, console, errors, root, show, when
from cray_agents.config import load_config
from cray_agents.errors import BadInput, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.records import ModelVersion

if TYPE_CHECKING:
    from cray_agents.runtime.registry.registry import ModelEvent, Registry


def prune(
    name: Annotated[str | None, typer.Argument(help="Of this name alone.")] = None,
    keep: Annotated[
        int, typer.Option(min=1, help="How many versions that were promoted before stay, too.")
    ] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete the weights of versions that nobody needs, and resume points of jobs that ended.

    What stays: what is promoted, was promoted lately or is newest, canaries, what replicas hold,
    what jobs and loops go on from; and every record: a deleted version stays in the history.
    """
    from cray_agents.cli.screen import size
    from cray_agents.runtime.retention import prune

    where = load_config({"home": home}).root
    with errors.status("looking for what nobody needs"):
        found = prune.prune(where, name, keep=keep, in_use=lambda: held_on(where), dry_run=dry_run)
    if as_json:
        print(json.dumps(asdict(found) | {"bytes": found.bytes, "dry_run": dry_run}, indent=2))
        return
    parts = {"weights": found.weights, "resume points": found.points, "left over": found.drafts}
    rows = [
        {"what": what, "of": of, "size": size(count)}
        for what, part in parts.items()
        for of, count in part.items()
    ]
    if rows:
        show(rows, ["what", "of", "size"], as_json=False)
    for version, why in found.kept.items():
        console.print(f"{version} stays: {why}", highlight=False, markup=False)
    console.print(f"{size(found.bytes)} {'would be ' if dry_run else ''}given back")


def held_on(home: Home) -> set[str]:
    """The versions that the replicas of a root's platform hold. Raises SetupError."""
    info = running(home)
    if info is None:
        if (other := owner(home)) is None:
            return set()
        raise SetupError(
            f"the platform on {home.root} (pid {other['pid']}) does not say what its replicas hold:"
            " it is starting or ending; try again in a moment"
        )

    async def ask() -> list[dict[str, object]]:
        platform = client(info)
        try:
            return await platform.pool(spares=True)
        finally:
            await platform.close()

    found: set[str] = set()
    for replica in asyncio.run(ask()):
        versions = replica.get("versions")
        named = [replica.get("version"), *(versions if isinstance(versions, list) else [])]
        found.update(one for one in named if isinstance(one, str))
    return found


models = typer.Typer(
    no_args_is_help=True,
    help="Model versions: list, show, history, lineage, promote, rollback, reject, canary, prune.",
)
models.command("prune")(prune)

Name = Annotated[str, typer.Argument(help="A model's name.")]
Version = Annotated[str, typer.Argument(help="name@N")]
NameOrVersion = Annotated[str, typer.Argument(help="name or name@N")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it is kept in the history.")]
Who = Annotated[str, typer.Option("--who", help="Who; default: the user of this shell.")]


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    app.add_typer(models, name="models")


@models.command("list")
def list_models(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List every version of every name; the promoted one is what the bare name means.

    `replicas`: how many of the running platform's hold it; -: none runs.
    """
    from cray_agents.runtime.registry.registry import Registry

    where = root(home)
    registry, held = Registry(where), held_by(where)
    rows = [
        row | {"replicas": None if held is None else held[row["id"]]}
        for name in registry.names()
        for row in version_rows(registry, name)
    ]
    columns = ["id", "promoted", "replicas", "last", "weights", "job", "when", "checkpoint"]
    show(rows, columns, as_json=as_json)


@models.command("show")
def show_model(
    version: NameOrVersion, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Show one version: where it came from, its metrics and its files."""
    from cray_agents.runtime.registry.checkpoints import manifest_of
    from cray_agents.runtime.registry.registry import Registry

    where = root(home)
    found = Registry(where).resolve(version)
    directory = where.checkpoint(found.checkpoint)
    manifest = manifest_of(directory).model_dump(mode="json")
    probe = manifest.pop("probe")
    known = {"id": found.id, "weights": directory.is_dir(), "probes": len(probe)}
    record = found.model_dump() | known | {"manifest": manifest}
    print(json.dumps(record, indent=2)) if as_json else console.print_json(data=record)


@models.command("history")
def history(name: Name, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List what happened to a name: promotions, rollbacks, rejections, canaries; who and why."""
    from cray_agents.runtime.registry.registry import Registry

    events = Registry(root(home)).history(name)
    rows = [
        event.model_dump(mode="json") | {"id": f"{name}@{event.version}", "when": when(event.time)}
        for event in events
    ]
    show(rows, ["number", "when", "kind", "id", "who", "reason"], as_json=as_json)


@models.command("lineage")
def lineage(name: NameOrVersion, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show where versions come from: parent, dataset and job of each; of name@N both ways."""
    from cray_agents.runtime.registry.lineage import lineage_of
    from cray_agents.runtime.registry.registry import Registry

    kin = lineage_of(Registry(root(home)), name)
    if as_json:
        print(json.dumps(kin, indent=2))
        return
    for tree in trees(kin):
        console.print(tree)


@models.command("promote")
def promote(
    version: Version,
    force: Annotated[
        bool,
        typer.Option("--force", help="Although what another name means is then served no more."),
    ] = False,
    reason: Reason = "",
    who: Who = "",
    home: HomeOption = None,
) -> None:
    """Let the bare name mean a version, once all replicas hold it; no request is lost."""
    name, number = named(version)
    wanted, by = _version(name, number), who or user()
    decide(
        home,
        lambda p: p.promote(wanted, who=by, reason=reason, force=force),
        lambda registry: registry.promote(name, number, who=by, reason=reason),
    )


@models.command("rollback")
def rollback(
    name: Name,
    to: Annotated[int | None, typer.Option(help="This version instead of the last one.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also to a version that never was promoted.")
    ] = False,
    reason: Reason = "",
    who: Who = "",
    home: HomeOption = None,
) -> None:
    """Let the bare name mean what it meant before its last promotion."""
    by = who or user()

    def roll_back(registry: "Registry") -> "ModelEvent":
        before = registry.rollback_target(name, to, force=force)
        return registry.roll_back(name, before.number, who=by, reason=reason)

    decide(home, lambda p: p.rollback(name, to, who=by, reason=reason, force=force), roll_back)


@models.command("reject")
def reject(version: Version, reason: Reason = "", who: Who = "", home: HomeOption = None) -> None:
    """Note in the history that a version was found not good enough."""
    name, number = named(version)
    wanted, by = _version(name, number), who or user()
    decide(
        home,
        lambda p: p.reject(wanted, who=by, reason=reason),
        lambda registry: registry.reject(name, number, who=by, reason=reason),
    )


@models.command("canary")
def canary(
    version: NameOrVersion,
    share: Annotated[float, typer.Option(help="Of the live sessions, 0 to 1.")] = 0.1,
    promote_after: Annotated[
        int | None, typer.Option(help="Promote it after so many sessions, if it is no worse.")
    ] = None,
    giver: Annotated[
        list[str] | None,
        typer.Option(help="An API key whose rewards count, by name; repeatable."),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the one that runs.")] = False,
    reason: Reason = "",
    who: Who = "",
    home: HomeOption = None,
) -> None:
    """Let name@N answer a share of the live sessions; name alone shows the one that runs.

    It is rolled back by itself when more sessions fail or rewards are lower than beside it.
    """
    name, at, _ = version.partition("@")
    if stop:
        tell(asked(home, lambda p: p.stop_canary(name, who=who or user(), reason=reason)))
        return
    if not at:
        console.print_json(data=asked(home, lambda p: p.canary_status(name)))
        return
    wanted = _version(*named(version))
    test = {"share": share, "promote_after": promote_after, "givers": giver or []}
    tell(asked(home, lambda p: p.canary(wanted, who=who or user(), reason=reason, **test)))


def named(version: str) -> tuple[str, int]:
    """Name and number of `name@N`. Raises BadInput."""
    name, _, number = version.partition("@")
    if not number.isdecimal():
        raise BadInput(
            f"{version!r} names no version: write name@N, such as calc@3", param="version"
        )
    return name, int(number)


def decide(
    home: Path | None,
    online: Callable[[Platform], Awaitable[dict[str, Any]]],
    offline: "Callable[[Registry], ModelEvent]",
) -> None:
    """Let the root's platform decide on a version, or the registry itself where none runs.

    Raises SetupError while a platform starts or ends: it would not notice.
    """
    from cray_agents.runtime.registry.registry import Registry

    where = root(home)
    if running(where) is not None:
        tell(asked(home, online))
        return
    if (other := owner(where)) is not None:
        raise SetupError(
            f"the platform on {where.root} (pid {other['pid']}) is starting or ending: try again in"
            " a moment"
        )
    tell(offline(Registry(where)).model_dump(mode="json"))
    told = "no platform runs: `cray-agents up` serves what is promoted, once its probe has passed"
    errors.print(told, highlight=False, soft_wrap=True)


def held_by(home: Home) -> Counter[str] | None:
    """How many replicas hold each version; None: no platform runs, or none that can be asked."""
    try:
        info = running(home)
        if info is None:
            return None
        replicas = fetch(info, "/v1/pool")["data"]
    except (SetupError, OSError):  # it is another's, or just ended
        return None
    return Counter(version for replica in replicas for version in replica["versions"])


def asked(
    home: Path | None, what: Callable[[Platform], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """What the platform of a root answers. Raises SetupError where none runs."""
    where = root(home)
    info = running(where)
    if info is None:
        raise SetupError(f"no platform runs on {where.root}: start it with `cray-agents up`")

    async def ask() -> dict[str, Any]:
        platform = client(info)
        try:
            return await what(platform)
        finally:
            await platform.close()

    return asyncio.run(ask())


def tell(event: dict[str, Any]) -> None:
    """A line for what happened."""
    why = f": {event['reason']}" if event["reason"] else ""
    kind = event["kind"].replace("_", " ")
    said = f"{event['name']}@{event['version']} {kind} by {event['who']}{why}"
    if event["kind"] == "rolled_back":
        said = f"{event['name']} rolled back by {event['who']}{why}"
    if event["kind"] in ("promoted", "rolled_back"):
        said += f"; {event['name']} means {event['name']}@{event['version']} now"
    console.print(escape(said), soft_wrap=True)


def user() -> str:
    """Who sits at this shell."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "somebody"


def trees(kin: list[dict[str, Any]]) -> list[Tree]:
    """The kin as trees, from those that have no parent among them."""
    nodes = {one["id"]: Tree(label(one)) for one in kin}
    for one in kin:
        if one["parent"] in nodes:
            nodes[one["parent"]].add(nodes[one["id"]])
    return [nodes[one["id"]] for one in kin if one["parent"] not in nodes]


def label(one: dict[str, Any]) -> str:
    """A version in the tree: what happened to it last, and what it was trained on."""
    last = one["events"][-1] if one["events"] else None
    words = [f"[bold]{escape(one['id'])}[/]"]
    if one["promoted"]:
        words.append("[green]promoted[/]")
    elif last is not None:
        words.append(last["kind"].replace("_", " "))
    if one["job"]:
        about = one["about_dataset"]
        runs = f" of {about['accepted_runs']} runs" if about.get("accepted_runs") else ""
        words.append(escape(f"{one['method'] or 'job'} {one['job']} on {one['dataset']}{runs}"))
    if last is not None and last["reason"]:
        words.append(f"[dim]{escape(last['reason'])}[/]")
    return "  ".join(words)


def version_rows(registry: Any, name: str) -> list[dict[str, Any]]:
    """One row for each version of a name; `last`: what happened to it last."""
    try:
        promoted, versions = registry.promoted(name), registry.versions(name)
    except NotFound:  # a folder without a version
        return []
    last = lasts(registry.history(name))
    return [
        version.model_dump()
        | {
            "id": version.id,
            "promoted": promoted is not None and version.number == promoted.number,
            "last": last.get(version.number),
            "weights": registry.home.checkpoint(version.checkpoint).is_dir(),
            "when": when(version.created),
        }
        for version in versions
    ]


def lasts(events: "Iterable[ModelEvent]") -> dict[int, str]:
    """What happened to each version last; a rollback happens to two."""
    last: dict[int, str] = {}
    meant: int | None = None
    for event in events:
        last[event.version] = event.kind
        if event.kind == "rolled_back":
            last[event.version] = "rolled_back_to"
            if meant is not None and meant != event.version:
                last[meant] = "rolled_back_from"
        if event.kind in ("promoted", "rolled_back"):
            meant = event.version
    return last


def _version(name: str, number: int) -> ModelVersion:
    """A version as the platform's client wants it: it is known there by name and number."""
    return ModelVersion(name=name, number=number, checkpoint="", weights_sha256="")
