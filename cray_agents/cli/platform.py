"""`up`, `down`, `status`, and the one way in which other commands get a platform to talk to.

`up` composes gateway, pool, store, scheduler and trainer in one process (compose.py). A command
that needs a platform uses the one that runs on its shared root, or starts one while it lasts.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from cray_agents.cli.screen import HomeOption, JsonOption, console, errors, show
from cray_agents.config import Config, load_config
from cray_agents.errors import SetupError
from cray_agents.lifeline import alive, die_with_parent
from cray_agents.paths import Home
from cray_agents.platform import Platform

START_SECONDS = 30.0  # until the gateway answers; the engine behind it may take longer
STOP_SECONDS = 20.0


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(up)
    app.command()(down)
    app.command()(status)


def up(
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face checkpoint directory. Default: what the root promotes."),
    ] = None,
    name: Annotated[str, typer.Option(help="The name people ask for.")] = "default",
    port: Annotated[int | None, typer.Option(help="0 picks a free one [default: 8000].")] = None,
    home: HomeOption = None,
    replicas: Annotated[int, typer.Option(min=1, help="vLLM servers behind the gateway.")] = 1,
    detach: Annotated[
        bool, typer.Option(help="Return when it is ready; end it with down.")
    ] = False,
    scheduler: Annotated[
        str | None, typer.Option(help="auto, slurm or local [default: auto].")
    ] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the platform: gateway, vLLM, store, scheduler and trainer. Ctrl-C ends it."""
    flags = {"home": home, "port": port, "scheduler": scheduler}
    config = load_config(flags)
    if detach:
        process = start(config, model, name, replicas, with_parent=False)
        info = wait_until_ready(config.root, process)
        console.print(f"{name} is served at {info['url']}/v1 (end it: cray-agents down)")
        return
    if parent is not None:
        die_with_parent(parent)
    from cray_agents.cli.compose import serve

    serve(config, model, name, replicas)


def down(home: HomeOption = None) -> None:
    """End the platform that runs on this shared root."""
    root = load_config({"home": home}).root
    info = running(root)
    if info is None:
        console.print(f"no platform runs on {root.root}")
        return
    stop(info["pid"])
    console.print(f"ended the platform on {root.root} (pid {info['pid']})")


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
    info |= {"running": True} | fetch(f"{info['url']}/v1/platform")
    replicas = fetch(f"{info['url']}/v1/pool")["data"]
    if as_json:
        print(json.dumps(info | {"replicas": replicas}, indent=2))
        return
    console.print(
        f"{info['url']}/v1  pid {info['pid']}  engine {info['engine']['name']} "
        f"{info['engine']['version']}  scheduler {info['scheduler']['name']}"
    )
    show(replicas, ["version", "state", "in_flight", "restarts", "pid"], as_json=False)


def owner(home: Home) -> dict[str, Any] | None:
    """The living process that claimed this root: its url, pid and name. It may be starting."""
    try:
        info: dict[str, Any] = json.loads(home.platform.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if not alive(info["pid"]) or info["pid"] == os.getpid():
        return None
    command = Path(f"/proc/{info['pid']}/cmdline")  # the pid may have gone to another program
    if command.exists() and b"cray" not in command.read_bytes():
        return None
    return info


def running(home: Home) -> dict[str, Any] | None:
    """The platform on this root, if it answers."""
    info = owner(home)
    if info is None:
        return None
    try:
        fetch(f"{info['url']}/health/live")
    except OSError:
        return None
    return info


def fetch(url: str, timeout: float = 5.0) -> dict[str, Any]:
    """GET some JSON from the platform. Raises OSError."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        body: dict[str, Any] = json.load(answer)
        return body


def start(
    config: Config, model: Path | None, name: str, replicas: int, *, with_parent: bool
) -> subprocess.Popen[bytes]:
    """Start `up` as a child. With `with_parent` it dies when this process does."""
    home = config.root
    home.logs.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "cray_agents", "up", "--name", name, "--home", str(home.root)]
    argv += ["--port", str(config.port), "--replicas", str(replicas)]
    argv += ["--scheduler", config.scheduler]
    argv += ["--model", str(model)] if model else []
    argv += ["--parent", str(os.getpid())] if with_parent else []
    with (home.logs / "platform.log").open("ab") as log:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                start_new_session=True)  # fmt: skip


def wait_until_live(home: Home, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait until the child's gateway answers. Raises SetupError with its log's tail."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        info = running(home)
        if info is not None and info["pid"] == process.pid:
            return info
        if process.poll() is not None:
            break
        time.sleep(0.1)
    if process.poll() is None:
        stop(process.pid)
    tail = (home.logs / "platform.log").read_text(errors="replace").splitlines()[-15:]
    raise SetupError("the platform did not start; its log ends:\n" + "\n".join(tail))


def wait_until_ready(home: Home, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait until the child's replicas serve, too. Raises SetupError."""
    info = wait_until_live(home, process)
    with errors.status("waiting for the engine (a vLLM server starts in about half a minute)"):
        while process.poll() is None:
            try:
                fetch(f"{info['url']}/health/ready")
                return info
            except urllib.error.HTTPError:
                time.sleep(0.3)
    return wait_until_live(home, process)


@contextmanager
def serving(
    config: Config, *, model: Path | None = None, name: str = "default", ready: bool = True
) -> Iterator[dict[str, Any]]:
    """A platform on the configured root: the one that runs, or one that ends with this block."""
    info = running(config.root)
    if info is not None:
        yield info
        return
    free = config.model_copy(update={"port": 0})
    process = start(free, model, name, 1, with_parent=True)
    try:
        yield (wait_until_ready if ready else wait_until_live)(config.root, process)
    finally:
        stop(process.pid)
        process.wait()


@contextmanager
def local_platform(
    home: Path, *, model: Path | None = None, name: str = "default", ready: bool = True
) -> Iterator[Platform]:
    """A platform on a shared root for as long as the block lasts, or the one that runs there.

    model: the checkpoint that `name` begins with, if the root promotes none yet. With `ready`,
    wait until its replicas serve; otherwise only until it answers. Raises SetupError.
    """
    with serving(load_config({"home": home}), model=model, name=name, ready=ready) as info:
        yield Platform(info["url"])


def stop(pid: int) -> None:
    """Ask a platform to end, then make it."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_SECONDS
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not alive(pid):
            return
