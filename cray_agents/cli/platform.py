"""`up`, `down`, `status` commands: run a platform, end it, show its state.

`up` composes gateway, pool, store, scheduler and trainer in one process (compose.py);
platform_process.py finds, starts and ends that process.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cray_agents.cli.screen import HomeOption, JsonOption, console, show, when
from cray_agents.config import load_config
from cray_agents.errors import SetupError
from cray_agents.paths import Home
from cray_agents.processes import die_with_parent
from cray_agents.runtime.controller_lease import end_for_good
from cray_agents.server.platform_process import (
    ReplicaCount,
    check_vllm,
    command,
    fetch,
    log_file,
    running,
    start,
    stop,
    wait_until_live,
    wait_until_ready,
    wait_until_waiting,
)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(up)
    app.command()(down)
    app.command()(status)
    app.command()(gateway)


def up(
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face checkpoint directory. Default: what the root promotes."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="The name people ask for \\[default: the root's, if it has one; else 'default']."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="0 picks a free one \\[default: 8000].")] = None,
    home: HomeOption = None,
    replicas: Annotated[
        str,
        typer.Option(
            help="vLLM servers behind the gateway: N on this host, slurm:N or slurm:MIN-MAX as"
            " Slurm jobs, or 0."
        ),
    ] = "1",
    standby: Annotated[
        bool, typer.Option(help="Wait while another process controls the root; then follow it.")
    ] = False,
    gateways: Annotated[
        int | None,
        typer.Option(help="Gateway processes that share the port \\[default: 1]."),
    ] = None,
    detach: Annotated[
        bool, typer.Option(help="Return when it is ready; end it with down.")
    ] = False,
    scheduler: Annotated[
        str | None, typer.Option(help="auto, slurm or local \\[default: auto].")
    ] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the platform: gateway, vLLM, store, scheduler and trainer. Ctrl-C ends it."""
    flags = {"home": home, "port": port, "scheduler": scheduler, "gateways": gateways}
    config = load_config(flags)
    name = name or _only_name(config.root, model)
    count = ReplicaCount.parse(replicas)
    if detach:
        process = start(config, model, name, count, with_parent=False, standby=standby)
        end = command("down", config.root)
        if standby and wait_until_waiting(config.root, process) is None:
            log = log_file(config.root, standby=True)
            console.print(f"a standby waits (pid {process.pid}); its log is {log}")
            return
        if not count.total:
            info = wait_until_live(config.root, process)
            console.print(f"{info['url']} is up, without replicas (end it: {end})")
            return
        info = wait_until_ready(config.root, process)
        console.print(f"{name} is served at {info['url']}/v1 (end it: {end})")
        return
    if parent is not None:
        die_with_parent(parent)
    if count.total:
        check_vllm()
    from cray_agents.server.compose import serve

    serve(config, model, name, count, standby=standby)


def _only_name(home: Home, model: Path | None) -> str:
    """Return the only name in a root; "default" with a model, or if there are more or none."""
    from cray_agents.runtime.registry.registry import Registry

    names = Registry(home).names() if model is None else []
    return names[0] if len(names) == 1 else "default"


def down(
    home: HomeOption = None,
    hand_over: Annotated[
        bool, typer.Option("--hand-over", help="Let a standby take over, without a pause.")
    ] = False,
) -> None:
    """End the platform that runs on this shared root, and the standbys that wait for it."""
    root = load_config({"home": home}).root
    info = running(root)
    if info is None:
        console.print(f"no platform runs on {root.root}")
        return
    if hand_over and not fetch(info, "/v1/platform")["controller"]["standbys"]:
        raise SetupError(f"no standby waits on {root.root}: start one with `up --standby`")
    if info["pid"] is not None and not hand_over:
        end_for_good(root, info.get("term", 0))
    stop(info["pid"])
    console.print(f"ended the platform on {root.root} (pid {info['pid']})")


def gateway(
    home: HomeOption = None,
    host: Annotated[
        str | None, typer.Option(help="The address it listens on \\[default: 127.0.0.1].")
    ] = None,
    port: Annotated[int | None, typer.Option(help="0 picks a free one \\[default: 8000].")] = None,
    of: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one more gateway on a root whose platform runs, as on another host. Ctrl-C ends it."""
    from cray_agents.server.further_process import serve_further

    serve_further(load_config({"home": home, "host": host, "port": port}), of)


def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Say what runs on this shared root: the platform, its replicas and their versions."""
    root = load_config({"home": home}).root
    info = running(root)
    if info is None:
        if as_json:
            print(json.dumps({"running": False, "home": str(root.root)}))
        else:
            console.print(f"no platform runs on {root.root}")
        raise typer.Exit(1)
    about, pool = fetch(info, "/v1/platform"), fetch(info, "/v1/pool")
    replicas, lease = [*pool["data"], *pool["spares"]], pool["lease"]
    info = {name: value for name, value in info.items() if name not in ("token", "root")}
    info |= {"running": True} | about
    if as_json:
        print(json.dumps(info | {"replicas": replicas, "lease": lease}, indent=2))
        return
    process = f"pid {info['pid']}" if info["pid"] else f"on {info['host']}"
    console.print(
        f"{info['url']}/v1  {process}  engine {info['engine']['name']} "
        f"{info['engine']['version']}  scheduler {info['scheduler']['name']}"
    )
    if "controller" in info:
        console.print(describe_controller(info["controller"]), markup=False)
    rows = [replica | {"versions": ", ".join(replica["versions"])} for replica in replicas]
    columns = ["versions", "state", "in_flight", "restarts", "host", "pid", "job"]
    if not any(replica["job"] for replica in replicas):
        columns = [column for column in columns if column not in ("host", "job")]
    if rows:
        show(rows, columns, as_json=False)
    for replica in replicas:
        if (last := replica["last_restart"]) is not None:
            console.print(f"restarted at {when(last['time'])}: {last['why']}", markup=False)
    if lease is not None:
        console.print(
            f"{', '.join(lease['displaced'])} made room for {lease['version']}, which "
            f"{lease['holder']!r} evaluates",
            markup=False,
        )


def describe_controller(controller: dict[str, Any]) -> str:
    """Say who controls a platform, and who waits to follow."""
    waiting = [f"{standby['host']} (pid {standby['pid']})" for standby in controller["standbys"]]
    return (
        f"controlled by {controller['host']} (pid {controller['pid']}) since "
        f"{when(controller['since'])}, term {controller['term']}; standbys: "
        f"{', '.join(waiting) or 'none'}"
    )
