"""`models`: list, promote, roll back, try out and prune model versions.

List, show, history and lineage only read the shared root, with or without a platform. Promote,
rollback and reject call the running platform, which swaps at once. Without a platform they decide
what the next one serves. A canary needs a platform. Read next: runtime/registry/registry.py,
runtime/registry/canary.py.
"""

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

from cray_agents.cli.platform.platform_process import ask, fetch, owner, running
from cray_agents.cli.screen import (
    HomeOption,
    JsonOption,
    command,
    console,
    errors,
    root,
    show,
    size,
    when,
)
from cray_agents.errors import BadInput, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.records import ModelVersion

if TYPE_CHECKING:
    from cray_agents.runtime.registry.registry import ModelEvent, Registry


models = typer.Typer(
    no_args_is_help=True,
    help="Model versions: list, show, history, lineage, promote, rollback, reject, canary,"
    " memorisation, drift, prune.",
)

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
    from cray_agents.runtime.disk.checksums import list_whole
    from cray_agents.runtime.registry.registry import Registry

    root_home = root(home)
    registry, counts = Registry(root_home), replica_counts(root_home)
    names = list_whole(registry.names(), lambda name: version_rows(registry, name))
    rows = [
        row | {"replicas": None if counts is None else counts[row["id"]]}
        for versions in names.rows
        for row in versions
    ]
    columns = ["id", "promoted", "replicas", "last", "weights", "job", "when", "checkpoint"]
    show(rows, columns, as_json=as_json, damaged=names.damaged)


@models.command("show")
def show_model(
    version: NameOrVersion, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Show one version: where it came from, its metrics and its files."""
    from cray_agents.runtime.registry.checkpoints import manifest_of
    from cray_agents.runtime.registry.registry import Registry

    root_home = root(home)
    model = Registry(root_home).resolve(version)
    directory = root_home.checkpoint(model.checkpoint)
    manifest = manifest_of(directory).model_dump(mode="json")
    probe = manifest.pop("probe")
    details = {"id": model.id, "weights": directory.is_dir(), "probes": len(probe)}
    record = model.model_dump() | details | {"manifest": manifest}
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
    for tree in lineage_trees(kin):
        console.print(tree)


@models.command("promote")
def promote(
    version: Version,
    force: Annotated[
        bool,
        typer.Option("--force", help="Even if another name's version is then not served any more."),
    ] = False,
    reason: Reason = "",
    who: Who = "",
    home: HomeOption = None,
) -> None:
    """Let the bare name mean a version, once all replicas hold it; no request is lost."""
    name, number = parse_version(version)
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
    name, number = parse_version(version)
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
    scanner: Annotated[
        list[str] | None,
        typer.Option(help="A scanner that must not find more (`cray-agents scan`); repeatable."),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the one that runs.")] = False,
    reason: Reason = "",
    who: Who = "",
    home: HomeOption = None,
) -> None:
    """Let name@N answer a share of the live sessions; name alone shows the one that runs.

    It is rolled back by itself when more sessions fail, rewards are lower or scanners find more
    than beside it.
    """
    name, at, _ = version.partition("@")
    if stop:
        print_event(
            call_platform(home, lambda p: p.stop_canary(name, who=who or user(), reason=reason))
        )
        return
    if not at:
        console.print_json(data=call_platform(home, lambda p: p.canary_status(name)))
        return
    wanted = _version(*parse_version(version))
    test = {
        "share": share,
        "promote_after": promote_after,
        "givers": giver or [],
        "scanners": scanner or [],
    }
    by = who or user()
    print_event(call_platform(home, lambda p: p.canary(wanted, who=by, reason=reason, **test)))


@models.command("prune")
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
    from cray_agents.runtime import retention

    root_home = root(home)
    with errors.status("looking for what nobody needs"):
        pruned = retention.prune(
            root_home, name, keep=keep, in_use=lambda: loaded_versions(root_home), dry_run=dry_run
        )
    if as_json:
        print(json.dumps(asdict(pruned) | {"bytes": pruned.bytes, "dry_run": dry_run}, indent=2))
        return
    kinds = {"weights": pruned.weights, "resume points": pruned.points, "left over": pruned.drafts}
    rows = [
        {"what": kind, "of": owner_name, "size": size(count)}
        for kind, sizes in kinds.items()
        for owner_name, count in sizes.items()
    ]
    if rows:
        show(rows, ["what", "of", "size"], as_json=False)
    for version, why in pruned.kept.items():
        console.print(f"{version} stays: {why}", highlight=False, markup=False)
    console.print(f"{size(pruned.bytes)} {'would be ' if dry_run else ''}given back")


def parse_version(version: str) -> tuple[str, int]:
    """Return the name and number of `name@N`. Raises BadInput."""
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
    """Change a version through the root's platform, or in the registry if no platform runs.

    Raises SetupError while a platform starts or ends, because it would not notice the change.
    """
    from cray_agents.runtime.registry.registry import Registry

    root_home = root(home)
    if running(root_home) is not None:
        print_event(call_platform(home, online))
        return
    if (platform_owner := owner(root_home)) is not None:
        raise SetupError(
            f"the platform on {root_home.root} (pid {platform_owner['pid']}) is starting or ending:"
            " try again in a moment"
        )
    print_event(offline(Registry(root_home)).model_dump(mode="json"))
    up = command("up", root_home)
    notice = f"no platform runs: `{up}` serves what is promoted, once its probe has passed"
    errors.print(notice, highlight=False, soft_wrap=True)


def replica_counts(home: Home) -> Counter[str] | None:
    """Count the replicas that hold each version. Return None if no platform can be reached."""
    try:
        info = running(home)
        if info is None:
            return None
        replicas = fetch(info, "/v1/pool")["data"]
    except (SetupError, OSError):  # the platform is another user's, or has just ended
        return None
    return Counter(version for replica in replicas for version in replica["versions"])


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
        for replica in ask(info, lambda platform: platform.pool(spares=True))
        for version in (replica["version"], *replica["versions"])
        if version is not None
    }


def call_platform(
    home: Path | None, method: Callable[[Platform], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Call a method of a root's platform. Raises SetupError if none runs."""
    root_home = root(home)
    info = running(root_home)
    if info is None:
        up = command("up", root_home)
        raise SetupError(f"no platform runs on {root_home.root}: start it with `{up}`")
    return ask(info, method)


def print_event(event: dict[str, Any]) -> None:
    """Print a line for an event of the registry."""
    why = f": {event['reason']}" if event["reason"] else ""
    kind = event["kind"].replace("_", " ")
    text = f"{event['name']}@{event['version']} {kind} by {event['who']}{why}"
    if event["kind"] == "rolled_back":
        text = f"{event['name']} rolled back by {event['who']}{why}"
    if event["kind"] in ("promoted", "rolled_back"):
        text += f"; {event['name']} means {event['name']}@{event['version']} now"
    console.print(escape(text), soft_wrap=True)


def user() -> str:
    """Return the name of this shell's user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "somebody"


def lineage_trees(kin: list[dict[str, Any]]) -> list[Tree]:
    """Draw related versions as trees; a root has no parent among them."""
    nodes = {version["id"]: Tree(label(version)) for version in kin}
    for version in kin:
        if version["parent"] in nodes:
            nodes[version["parent"]].add(nodes[version["id"]])
    return [nodes[version["id"]] for version in kin if version["parent"] not in nodes]


def label(version: dict[str, Any]) -> str:
    """Describe a version in the tree: its last event and its training data."""
    last = version["events"][-1] if version["events"] else None
    words = [f"[bold]{escape(version['id'])}[/]"]
    if version["promoted"]:
        words.append("[green]promoted[/]")
    elif last is not None:
        words.append(last["kind"].replace("_", " "))
    if version["job"]:
        about = version["about_dataset"]
        runs = f" of {about['accepted_runs']} runs" if about.get("accepted_runs") else ""
        words.append(
            escape(f"{version['method'] or 'job'} {version['job']} on {version['dataset']}{runs}")
        )
    if last is not None and last["reason"]:
        words.append(f"[dim]{escape(last['reason'])}[/]")
    return "  ".join(words)


def version_rows(registry: Any, name: str) -> list[dict[str, Any]]:
    """Return a row for each version of a name; `last` is its last event."""
    try:
        promoted, versions = registry.promoted(name), registry.versions(name)
    except NotFound:  # a folder without a version
        return []
    last = last_events(registry.history(name))
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


def last_events(events: "Iterable[ModelEvent]") -> dict[int, str]:
    """Return the kind of each version's last event; a rollback is an event of two versions."""
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
    """Return a version for the platform's client, which uses only its name and number."""
    return ModelVersion(name=name, number=number, checkpoint="", weights_sha256="")
