"""`models`: list, show, promote, roll back and try out model versions.

List and show only read the shared root, with or without a platform, and so does export. Promote,
rollback and reject call the running platform, which swaps at once. Without a platform they decide
what the next one serves. A canary needs a platform. Read next: runtime/registry/registry.py,
runtime/registry/canary.py.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.markup import escape
from rich.tree import Tree

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import (
    ask_root,
    console,
    note,
    print_json,
    print_table,
    root,
    say,
    show,
    user,
    when,
)
from cray_agents.errors import BadInput, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.records import ModelVersion
from cray_agents.runtime.disk.checksums import list_whole
from cray_agents.runtime.registry.checkpoints import manifest_of
from cray_agents.runtime.registry.registry import ModelEvent, Registry
from cray_agents.server.platform_process import ask_once, client, command, fetch, owner, running

commands = Commands(
    "models", help="Model versions: list, show, promote, rollback, reject, export, canary."
)

Name = Annotated[str, typer.Argument(help="The name of a model.")]
Version = Annotated[str, typer.Argument(help="The version, as name@N.")]
NameOrVersion = Annotated[str, typer.Argument(help="A name, or a version as name@N.")]
Reason = Annotated[str, typer.Option("--reason", help="The reason; it is kept in the history.")]
Who = Annotated[str, typer.Option("--who", help="Who decides \\[default: the user of this shell].")]


@commands.command("list")
def list_models() -> None:
    """List every version of every name; the promoted one is what the bare name means.

    `replicas`: how many of the running platform's hold it; -: none runs. `prompt`: the hash of what
    a loop learned to put before its agent's input, if it did.
    """
    home = root()
    registry, counts = Registry(home), replica_counts(home)
    names = list_whole(registry.names(), lambda name: version_rows(registry, name))
    rows = [
        row | {"replicas": None if counts is None else counts[row["id"]]}
        for versions in names.rows
        for row in versions
    ]
    columns = ["id", "promoted", "replicas", "last", "weights", "prompt", "job", "when"]
    show(rows, columns, damaged=names.damaged)


@commands.command("show")
def show_model(name: NameOrVersion) -> None:
    """Show a version: its record, its files, the versions it is related to, and its name's history.

    A bare name shows the lineage and the history of all its versions.
    """
    from cray_agents.runtime.registry.lineage import lineage_of

    home = root()
    registry = Registry(home)
    record: dict[str, Any] = {}
    if "@" in name or registry.promoted(name) is not None:
        version = registry.resolve(name)
        directory = home.checkpoint(version.checkpoint)
        manifest = manifest_of(directory).model_dump(mode="json")
        probes = len(manifest.pop("probe"))
        details = {"id": version.id, "weights": directory.is_dir(), "probes": probes}
        record = version.model_dump() | details | {"manifest": manifest}
    kin = lineage_of(registry, name)
    history = [
        event.model_dump(mode="json") | {"id": f"{event.name}@{event.version}"}
        for event in registry.history(name.partition("@")[0])
    ]
    if given().json:
        print_json(record | {"lineage": kin, "history": history})
        return
    if "@" in name:
        console.print_json(data=record)
    for tree in lineage_trees(kin):
        console.print(tree)
    rows = [event | {"when": when(event["time"])} for event in history]
    if rows:
        print_table(rows, ["number", "when", "kind", "id", "who", "reason"])


@commands.command("promote", takes="")
def promote(
    version: Version,
    force: Annotated[
        bool,
        typer.Option("--force", help="Promote even if another name's version loses its replica."),
    ] = False,
    reason: Reason = "",
    who: Who = "",
) -> None:
    """Let the bare name mean a version, once all replicas hold it; no request is lost."""
    name, number = parse_version(version)
    wanted, by = _version(name, number), who or user()
    decide(
        lambda p: p.promote(wanted, who=by, reason=reason, force=force),
        lambda registry: registry.promote(name, number, who=by, reason=reason),
    )


@commands.command("rollback", takes="")
def rollback(
    name: Name,
    to: Annotated[
        int | None, typer.Option(help="Go back to the version of this number instead.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Allow a version that never was promoted.")
    ] = False,
    reason: Reason = "",
    who: Who = "",
) -> None:
    """Let the bare name mean what it meant before its last promotion."""
    by = who or user()

    def roll_back(registry: Registry) -> ModelEvent:
        before = registry.rollback_target(name, to, force=force)
        return registry.roll_back(name, before.number, who=by, reason=reason)

    decide(lambda p: p.rollback(name, to, who=by, reason=reason, force=force), roll_back)


@commands.command("reject", takes="")
def reject(version: Version, reason: Reason = "", who: Who = "") -> None:
    """Note in the history that a version was found not good enough."""
    name, number = parse_version(version)
    wanted, by = _version(name, number), who or user()
    decide(
        lambda p: p.reject(wanted, who=by, reason=reason),
        lambda registry: registry.reject(name, number, who=by, reason=reason),
    )


@commands.command("export")
def export(
    version: NameOrVersion,
    output: Annotated[Path, typer.Option(help="The new folder to write.")],
    to: Annotated[str, typer.Option(help="The form: hf, gguf or adapter.")] = "hf",
) -> None:
    """Write a version for other programs, with a model card of its data, decision and parents.

    hf: whole weights as Hugging Face's libraries read them, an adapter merged with its base. gguf:
    a file for llama.cpp, whose log-probabilities are compared with the version's. adapter: the LoRA
    adapter alone, in PEFT's layout.
    """
    from cray_agents.runtime.registry.model_export import Form, export_version

    forms: dict[str, Form] = {name: name for name in get_args(Form)}
    if to not in forms:
        raise BadInput(f"--to {to!r}: give {', '.join(forms)}", param="to")
    done = export_version(Registry(root()), version, forms[to], output.absolute())
    if given().json:
        print_json(done)
        return
    say(f"{done.id} is in {done.output}: {', '.join(done.files)}")
    if done.checked is not None:
        say(f"read back: logprobs of {done.checked.tokens} tokens, {done.checked.max:.2g} off")
    if done.licence is None:
        note("no licence is on record: ask where the weights come from before you pass them on")


@commands.command("canary", takes="")
def canary(
    version: NameOrVersion,
    share: Annotated[
        float, typer.Option(help="The share of the live sessions that it answers, 0 to 1.")
    ] = 0.1,
    promote_after: Annotated[
        int | None, typer.Option(help="Promote it after so many sessions, if it is no worse.")
    ] = None,
    giver: Annotated[
        list[str] | None,
        typer.Option(help="The name of an API key whose rewards count; repeatable."),
    ] = None,
    scanner: Annotated[
        list[str] | None,
        typer.Option(
            help="The name of a scanner that must not find more (`cray-agents scan`); repeatable."
        ),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the canary that runs.")] = False,
    reason: Reason = "",
    who: Who = "",
) -> None:
    """Let name@N answer a share of the live sessions; name alone shows the one that runs.

    It is rolled back by itself when more sessions fail, rewards are lower or scanners find more
    than beside it.
    """
    name, at, _ = version.partition("@")
    by = who or user()
    if stop:
        print_event(ask_root(lambda p: p.stop_canary(name, who=by, reason=reason)))
        return
    if not at:
        console.print_json(data=ask_root(lambda p: p.canary_status(name)))
        return
    wanted = _version(*parse_version(version))
    test = {
        "share": share,
        "promote_after": promote_after,
        "givers": giver or [],
        "scanners": scanner or [],
    }
    print_event(ask_root(lambda p: p.canary(wanted, who=by, reason=reason, **test)))


def parse_version(version: str) -> tuple[str, int]:
    """Return the name and number of `name@N`. Raises BadInput."""
    name, _, number = version.partition("@")
    if not number.isdecimal():
        raise BadInput(
            f"{version!r} names no version: write name@N, such as calc@3", param="version"
        )
    return name, int(number)


def decide(
    online: Callable[[Platform], Awaitable[dict[str, Any]]],
    offline: Callable[[Registry], ModelEvent],
) -> None:
    """Change a version through the root's platform, or in the registry if no platform runs.

    Raises SetupError while a platform starts or ends, because it would not notice the change.
    """
    root_home = root()
    if (running_here := running(root_home)) is not None:
        print_event(ask_once(client(running_here), online))
        return
    if (platform_owner := owner(root_home)) is not None:
        raise SetupError(
            f"the platform on {root_home.root} (pid {platform_owner['pid']}) is starting or ending:"
            " try again in a moment"
        )
    print_event(offline(Registry(root_home)).model_dump(mode="json"))
    up = command("up", root_home)
    note(f"no platform runs: `{up}` serves what is promoted, once its probe has passed")


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


def print_event(event: dict[str, Any]) -> None:
    """Print a line for an event of the registry."""
    why = f": {event['reason']}" if event["reason"] else ""
    kind = event["kind"].replace("_", " ")
    text = f"{event['name']}@{event['version']} {kind} by {event['who']}{why}"
    if event["kind"] == "rolled_back":
        text = f"{event['name']} rolled back by {event['who']}{why}"
    if event["kind"] in ("promoted", "rolled_back"):
        text += f"; {event['name']} means {event['name']}@{event['version']} now"
    say(text)


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
    if version["base"]:
        words.append(escape(f"adapter over {version['base']}"))
    for agent, prompt in version["prompts"].items():
        words.append(escape(f"prompt {prompt} of {agent}"))
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
            "prompt": ", ".join(prompt.id for prompt in version.prompts.values()) or None,
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
