"""Promises of the sandbox (tools/sandbox/__init__.py), attacked, in each layer that works here.

Where the file is run as root, its last test runs most of it again as an ordinary user.
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput, SetupError
from cray_agents.processes import alive
from cray_agents.tools.sandbox import Sandbox, backends
from cray_agents.tools.sandbox.process import process_tree
from cray_agents.tools.sandbox.sandbox import remove
from tests.support.tools.shared_resources import Shared

ATTACKS = Path(__file__).parents[1] / "support/tools/sandbox_attacks.py"
ROOT = Path(__file__).parents[2]
LAYERS = [layer for layer in backends.CONFINING if backends.layer_problem(layer) is None]
PYTHON = sys.executable


@pytest.fixture(params=LAYERS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return Sandbox(layer=request.param, seconds=60)


@dataclass
class Site:
    """What an attacker goes for, outside of the sandbox."""

    folder: Path
    victim: subprocess.Popen[bytes]
    shared: Shared
    words: dict[str, Any]

    def state(self) -> dict[str, Any]:
        secret = self.folder / "secret"
        at = secret.stat()
        readable = Path(self.words["readable"]).stat()
        pid = self.victim.pid
        return {
            "names": sorted(path.name for path in self.folder.iterdir()),
            "text": secret.read_text(),
            "open": os.listxattr(self.words["open"]),
            "secret": (at.st_mode, at.st_uid, at.st_mtime_ns, os.listxattr(secret)),
            "readable": (readable.st_mode, readable.st_uid, readable.st_mtime_ns),
            "shared": self.shared.state(),
            "limits": Path(f"/proc/{pid}/limits").read_text(),
            "affinity": os.sched_getaffinity(pid),
            "priority": os.getpriority(os.PRIO_PROCESS, pid),
            "alive": self.victim.poll() is None,
        }


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        words: dict[str, Any] = {"abstract": uuid.uuid4().hex}
        shown = tmp_path / "shown"
        shown.mkdir()
        folder = tmp_path / "hidden"
        folder.mkdir()
        for file in (folder / "secret", shown / "file"):
            file.write_text("secret")
            file.chmod(0o600)
        ssh = folder / "id_rsa"
        ssh.write_text("secret")
        for name, family_, address in (
            ("socket", socket.AF_UNIX, str(folder / "s")),
            ("abstract", socket.AF_UNIX, "\0" + words["abstract"]),
            ("tcp", socket.AF_INET, ("127.0.0.1", 0)),
        ):
            server = stack.enter_context(socket.socket(family_))
            server.bind(address)
            server.listen()
            threading.Thread(target=_greet, args=(server,), daemon=True).start()
            words.setdefault(name, server.getsockname())
        (folder / "s").chmod(0o777)
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        victim = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(victim.kill)
        shared = Shared()
        stack.callback(shared.remove)
        common = stack.enter_context(tempfile.NamedTemporaryFile(dir="/tmp"))
        Path(common.name).chmod(0o666)
        words |= {
            "open": common.name,
            "victim": victim.pid,
            "secret": str(folder / "secret"),
            "ssh": str(ssh),
            "tmp": f"/tmp/{uuid.uuid4().hex}",
            "tcp": words["tcp"][1],
            "udp": udp.getsockname()[1],
            "readable": str(shown / "file"),
            "memory": shared.memory,
            "semaphore": shared.semaphore,
            "messages": shared.messages,
            "queue": shared.queue,
        }
        yield Site(folder, victim, shared, words)


def _greet(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = server.accept()
            with client:
                client.sendall(b"hi")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - other processes cannot set an Event
            await asyncio.sleep(0.01)


async def attack(sandbox: Sandbox, site: Site, **options: Any) -> dict[str, bool | str]:
    outcome = await sandbox.run(
        [PYTHON, "attacks.py", json.dumps(site.words)],
        files={"attacks.py": ATTACKS.read_text()},
        **options,
    )
    assert outcome.returncode == 0, outcome
    results: dict[str, bool | str] = json.loads(outcome.stdout)
    return results


def worked(results: dict[str, bool | str]) -> set[str]:
    return {name for name, result in results.items() if result is True}


async def test_no_attack_works(
    sandbox: Sandbox, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "sk-1")
    before = site.state()
    readable = replace(sandbox, readable=[site.words["readable"]])
    results = await attack(readable, site)
    harmless = set()
    if sandbox.layer == "bubblewrap":  # they reach the sandbox's own, and nothing else
        harmless = {"make a file in /tmp", "send over UDP"}
    if os.getuid() == 0:  # what is given is root's own: to be read, it takes one
        harmless.add("hold a capability")
    assert worked(results) <= harmless, results
    assert site.state() == before
    assert not Path(site.words["tmp"]).exists()


async def test_no_attack_works_beside_a_folder_that_is_given(
    sandbox: Sandbox, site: Site, tmp_path: Path
) -> None:
    before = site.state()
    given = tmp_path / "given"
    given.mkdir()
    readable = replace(sandbox, readable=[site.words["readable"]])
    results = await attack(readable, site, workdir=given)
    harmless = {"make a file in /tmp", "send over UDP"}
    if os.getuid() == 0:
        harmless.add("hold a capability")
    assert worked(results) <= harmless
    assert site.state() == before


async def test_without_a_sandbox_they_work(site: Site) -> None:
    """So each of them is real: it is the sandbox that holds it off."""
    none = Sandbox(layer="none", unsandboxed=True, seconds=60)
    results = await attack(none, site, env={"SECRET_KEY": "sk-1"})
    real = {"read a file", "read a key of root", "read a process's arguments", "make hidden memory",
            "make shared memory", "connect to a unix socket", "connect to an abstract socket",
            "connect over TCP", "send over UDP", "make a file in /tmp",
            "write to memory that others share", "set a semaphore of others",
            "take a message of others", "read an environment variable",
            "lease a file", "take the host's asynchronous operations", "take a terminal",
            "pin pages in a pipe", "pin pages in a socket", "pin pages of a file in a socket",
            "reserve disk"}  # fmt: skip
    with contextlib.suppress(OSError):  # where the system keeps xattrs
        os.setxattr(site.words["open"], "user.y", b"1")
        real.add("set a shared file's xattr")
    if os.getuid() != 0:  # as root, the program has a user of its own: another guard of these
        real |= {"signal a process", "limit a process", "pin a process", "slow a process",
                 "trace a process", "read a process's environment",
                 "remove a message queue"}  # fmt: skip
    assert real <= worked(results), results
    Path(site.words["tmp"]).unlink()


async def test_network_when_it_is_allowed(sandbox: Sandbox, site: Site) -> None:
    results = await attack(replace(sandbox, network=True), site)
    assert {"connect over TCP", "send over UDP"} <= worked(results)
    assert "connect to a unix socket" not in worked(results)
    assert "connect to an abstract socket" not in worked(results)


async def test_a_program_runs(sandbox: Sandbox) -> None:
    code = "import sys; print(sys.stdin.read(), open('a/b').read()); sys.exit(3)"
    outcome = await sandbox.run([PYTHON, "-c", code], stdin="in", files={"a/b": "file"})
    assert (outcome.stdout, outcome.returncode, outcome.limit) == ("in file\n", 3, None)
    assert (await sandbox.run(["bash", "-c", "kill -9 $$"])).returncode == 137
    assert (await sandbox.run(["no-such-program"])).returncode == 127


async def test_ordinary_programs_work(sandbox: Sandbox) -> None:
    script = "touch a && mv a b && ln -s b c && cat c && sort <<< x && mktemp && python -c 'pass'"
    outcome = await sandbox.run(["bash", "-c", script + " && echo done"])
    assert outcome.stdout.endswith("done\n"), outcome
    threads = "import asyncio, threading, subprocess\nasyncio.run(asyncio.sleep(0))\n"
    threads += "t = threading.Thread(target=print, args=(1,)); t.start(); t.join()\n"
    threads += "subprocess.run(['true'], check=True); print(open('/dev/urandom', 'rb').read(1))"
    outcome = await sandbox.run([PYTHON, "-c", threads])
    assert outcome.returncode == 0, outcome


async def test_no_file_of_the_platform_is_open(sandbox: Sandbox) -> None:
    code = "import os\nfor n in range(3, 256):\n try: print(n, os.fstat(n))\n except OSError: 0"
    assert (await sandbox.run([PYTHON, "-c", code])).text == "[no output]"


async def test_what_is_refused_is_done_in_another_way(sandbox: Sandbox) -> None:
    code = (
        "import os, shutil, tempfile\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
        "with open('a', 'wb') as file: os.posix_fallocate(file.fileno(), 0, 9000)\n"
        "shutil.copyfile('a', 'b'); print(os.path.getsize('b'))\n"
    )
    shell = "cat a | tee c | cat > d; cmp a d && cp a e"
    if sandbox.layer == "bubblewrap":  # Landlock has no /proc
        shell += " && ls /dev/fd >/dev/null && ls /dev"
    outcome = await sandbox.run(["bash", "-c", f"python -c {shlex.quote(code)} && {shell}"])
    assert outcome.stdout.startswith("9000\n") and outcome.returncode == 0, outcome
    assert "pts" not in outcome.stdout and "ptmx" not in outcome.stdout


async def test_no_privileges(sandbox: Sandbox) -> None:
    code = "import ctypes, os; print(os.getuid(), ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))"
    outcome = await sandbox.run([PYTHON, "-c", code + "; os.setuid(0)"])
    user, no_new_privileges = outcome.stdout.split()
    assert int(user) != 0 and no_new_privileges == "1" and "Error: [Errno" in outcome.stderr


async def test_no_capability_unless_something_needs_it(sandbox: Sandbox, site: Site) -> None:
    held = "hold a capability" in worked(await attack(sandbox, site))
    needed = os.getuid() == 0 and sandbox.layer == "landlock" and any(
        not folder.stat().st_mode & 1 for folder in Path(sys.base_prefix).resolve().parents
    )  # fmt: skip
    assert held == needed


@pytest.mark.slow
async def test_a_removal_that_takes_long_is_not_waited_for(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    for number in range(300):
        (bomb / str(number) / "in").mkdir(parents=True)
    (bomb / "1" / "in").chmod(0)
    await remove(bomb, patience=0)
    await until(lambda: not bomb.exists())


async def test_time(sandbox: Sandbox) -> None:
    for seconds in (0.3, 3, 30):  # on a busy machine even `echo a` may take longer
        brief = replace(sandbox, seconds=seconds)
        outcome = await brief.run(["bash", "-c", "echo a; sleep 60 & sleep 60"])
        assert outcome.limit == "seconds" and outcome.returncode is None
        if outcome.stdout:
            break
    assert outcome.text == "a\n[ended: it took too long]"


@pytest.mark.slow
async def test_processor_time(sandbox: Sandbox) -> None:
    fair = replace(sandbox, seconds=60, cpu_seconds=0.3)
    outcome = await fair.run(["bash", "-c", "sleep 0.6; echo a"])
    assert (outcome.stdout, outcome.limit) == ("a\n", None)
    outcome = await fair.run(["bash", "-c", "(while :; do :; done) & (while :; do :; done) & wait"])
    assert outcome.limit == "processor"
    assert outcome.text == "[ended: it took too much processor time]"
    with pytest.raises(BadInput, match="cpu_seconds=0: must be above 0"):
        replace(sandbox, cpu_seconds=0)


async def test_memory_of_one_process(sandbox: Sandbox) -> None:
    code = "b = bytearray(300 << 20); print('got it')"
    outcome = await replace(sandbox, memory_mb=200).run([PYTHON, "-c", code])
    assert outcome.stdout == "" and "MemoryError" in outcome.stderr


@pytest.mark.slow
async def test_memory_of_all_processes(sandbox: Sandbox) -> None:
    """Each is within the limit; what they share is counted once."""
    alone = "import os, time, mmap\n"
    code = "for _ in range(6):\n  if not os.fork(): b = b'x' * (60 << 20); time.sleep(60)\n"
    outcome = await replace(sandbox, memory_mb=200).run(
        [PYTHON, "-c", alone + code + "time.sleep(60)"]
    )
    assert outcome.limit == "memory"
    code = "m = mmap.mmap(-1, 60 << 20); m.write(b'x' * (60 << 20))\n"
    code += "for _ in range(6):\n  if not os.fork(): sum(m[::4096]); time.sleep(0.3); os._exit(0)\n"
    code += "for _ in range(6): os.wait()\nprint('done')"
    outcome = await replace(sandbox, memory_mb=200).run([PYTHON, "-c", alone + code])
    assert outcome.stdout == "done\n", outcome


async def test_processes(sandbox: Sandbox) -> None:
    code = (
        "import os, time\nn = 0\ntry:\n  while True:\n    os.fork() or time.sleep(60)\n    n += 1\n"
    )
    outcome = await replace(sandbox, processes=8).run(
        [PYTHON, "-c", code + "except BlockingIOError: print(n)"]
    )
    exact = os.getuid() == 0 or sandbox.layer == "bubblewrap"  # else of the whole user's, then
    assert int(outcome.stdout) == 7 if exact else 0 < int(outcome.stdout) < 12
    async with sandbox.start(["bash", "-c", "f() { f | f & }; f; read"]) as bomb:
        await until(lambda: len(process_tree(bomb.pid)) > sandbox.processes / 2)
        # those that live after the listing have lived at the same time
        most = max(sum(map(alive, process_tree(bomb.pid))) for _ in range(50))
        pids = process_tree(bomb.pid)
    assert most <= sandbox.processes + 8  # with the sandbox's own
    assert not [pid for pid in pids if alive(pid)]


PAGE_TABLES = """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
SIZE = 1 << 30
def one():  # a page read in each 2 MB: a page of tables, and none of memory
    at = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if at == ctypes.c_void_p(-1).value:
        return False
    for page in range(at, at + SIZE, 1 << 21):
        ctypes.c_char.from_address(page).value
    return True
"""
FULL_SOCKETS = """
import socket, sys, time
held = []
for _ in range(int(sys.argv[1])):
    held += socket.socketpair()
    for end in held[-2:]:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        end.setblocking(False)
        try:
            while True: end.send(bytes(1 << 16))
        except BlockingIOError: pass
print("done", flush=True)
time.sleep(float(sys.argv[2]))
"""
TCP_QUEUE = """
import socket, time
server = socket.create_server(("127.0.0.1", 0), backlog=100)
held = []
for _ in range(60):  # none of them is ever accepted
    held.append(socket.create_connection(server.getsockname()))
    held[-1].setblocking(False)
    for _ in range(20):
        try:
            while True: held[-1].send(bytes(1 << 16))
        except BlockingIOError: time.sleep(0.002)
time.sleep(60)
"""


async def test_memory_of_page_tables(sandbox: Sandbox) -> None:
    """Of one process, by a limit on addresses; of all together, as they are counted."""
    code = PAGE_TABLES + "print(sum(iter(one, False)))"
    one = await replace(sandbox, memory_mb=40).run([PYTHON, "-c", code])
    assert one.returncode == 0 and 0 < int(one.stdout) <= 5, one
    code = PAGE_TABLES + "[os.fork() for _ in range(3)]\nwhile one(): pass\ntime.sleep(60)"
    assert (await replace(sandbox, memory_mb=40).run([PYTHON, "-c", code])).limit == "memory"


@pytest.mark.slow
async def test_memory_of_sockets(sandbox: Sandbox) -> None:
    some = await replace(sandbox, memory_mb=64).run([PYTHON, "-c", FULL_SOCKETS, "30", "0.2"])
    assert some.stdout == "done\n", some
    many = await replace(sandbox, memory_mb=64).run([PYTHON, "-c", FULL_SOCKETS, "120", "60"])
    assert many.limit == "memory"


@pytest.mark.parametrize(
    "sandbox", [each for each in LAYERS if each == "bubblewrap"], indirect=True
)
async def test_memory_of_tcp(sandbox: Sandbox) -> None:
    outcome = await replace(sandbox, memory_mb=64).run([PYTHON, "-c", TCP_QUEUE])
    assert outcome.limit == "memory"


@pytest.mark.parametrize(
    "sandbox", [each for each in LAYERS if each == "bubblewrap"], indirect=True
)
async def test_shared_memory_of_its_own(sandbox: Sandbox) -> None:
    code = "import multiprocessing as m\nwith m.Lock(): print(open('/dev/shm/x', 'w').write('x'))"
    assert (await sandbox.run([PYTHON, "-c", code])).stdout == "1\n"
    names = "import os, time\nfor n in range(1 << 30): os.close(os.open(f'/dev/shm/{n}', 64))"
    assert (await replace(sandbox, memory_mb=30).run([PYTHON, "-c", names])).limit == "memory"


async def test_output(sandbox: Sandbox) -> None:
    some = replace(sandbox, output_chars=100)
    outcome = await some.run(["bash", "-c", "echo first; yes | head -c 100000; echo last; false"])
    assert outcome.truncated and outcome.returncode == 1
    assert outcome.stdout.startswith("first\n") and outcome.stdout.endswith("last\n")
    assert "bytes left out" in outcome.stdout and len(outcome.stdout) < 200
    flood = await some.run(["yes"])
    assert flood.limit == "output" and len(flood.stdout) < 200
    whole = await some.run([PYTHON, "-c", "print('é' * 99)"])
    assert whole.stdout == "é" * 99 + "\n" and not whole.truncated


@pytest.mark.slow
async def test_disk(sandbox: Sandbox) -> None:
    little = replace(sandbox, disk_mb=5)
    one = await little.run(["bash", "-c", "head -c 9000000 /dev/zero > a; stat -c %s a"])
    assert one.stdout == f"{5 << 20}\n" or one.limit == "disk"  # whichever looks first
    many = "for i in 1 2 3; do head -c 3000000 /dev/zero > $i; done; sleep 60"
    assert (await little.run(["bash", "-c", many])).limit == "disk"
    hidden = f"mkdir a; cd a; {many.replace('sleep', 'cd ..; mv a b; sleep')}"
    assert (await little.run(["bash", "-c", hidden])).limit == "disk"
    deleted = 'for i in 5 6 7; do eval "exec $i>a; rm a; head -c 3000000 /dev/zero >&$i"; done'
    assert (await little.run(["bash", "-c", f"{deleted}; sleep 60"])).limit == "disk"


@pytest.mark.slow
async def test_nothing_is_left_behind(sandbox: Sandbox, tmp_path: Path) -> None:
    """Of a program that ends, one that is ended, and one whose run is cancelled."""
    mark = f"6{uuid.uuid4().int % 10**9}"
    detach = f"(setsid sleep {mark} &); (trap '' TERM HUP; setsid sleep {mark} & disown)"
    (tmp_path / "deep.py").write_text(
        "import os\nos.makedirs('locked/in')\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\n"
        "try: os.chmod(os.environ['HOME'] + '/locked', 0)\nexcept OSError: pass"
    )
    outcome = await replace(sandbox, readable=[tmp_path]).run(
        ["bash", "-c", f"pwd; exec >/dev/null; {detach}; python {tmp_path}/deep.py; exit 5"]
    )
    # a look at the disk while it is still at work finds folders that hide something
    assert outcome.returncode == 5 or outcome.limit == "disk"
    folder = Path(outcome.stdout.strip()).parent
    await until(lambda: not folder.exists())  # on a busy machine its removal may go on for a while
    outcome = await replace(sandbox, seconds=0.3).run(["bash", "-c", f"{detach}; sleep {mark}"])
    assert outcome.limit == "seconds"
    async with sandbox.start(["bash", "-c", f"{detach}; echo; sleep {mark}"]) as confined:
        await confined.stdout.readline()
        pids = process_tree(confined.pid)
        assert len(pids) > 3
    assert not [pid for pid in pids if alive(pid)]
    begun = asyncio.create_task(
        sandbox.run(["bash", "-c", f"{detach}; touch begun; sleep {mark}"], workdir=tmp_path)
    )
    await until((tmp_path / "begun").exists)
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    assert mark not in _arguments_of_all()


def test_what_was_forking_while_the_keeper_looked_is_ended_too() -> None:
    """A child that its first rounds do not see, as its parent was stopped within fork()."""
    code = (
        "import os, sys\nfrom cray_agents.tools.sandbox import keeper\n"
        "whole, rounds = keeper.descendants, iter(range(2))\n"
        "def late(pid): return whole(pid)[: -1 if next(rounds, None) is not None else None]\n"
        "keeper.descendants = late\n"
        "sys.argv[1:] = [f'{{\"parent\": {os.getppid()}}}', 'bash', '-c', 'sleep 600 & exit 5']\n"
        "sys.exit(keeper.main())"
    )
    assert subprocess.run([PYTHON, "-c", code]).returncode == 5


def _arguments_of_all() -> str:
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit():
                found.append((process / "cmdline").read_bytes().decode(errors="replace"))
    return "\n".join(found)


async def test_nothing_outlives_the_platform(sandbox: Sandbox, tmp_path: Path) -> None:
    """A process that runs programs in sandboxes is killed with no time to clean up."""
    mark = f"6{uuid.uuid4().int % 10**9}"
    code = (
        "import asyncio\nfrom cray_agents.tools.sandbox import Sandbox\n"
        "async def main():\n"
        f"  async with Sandbox(layer={sandbox.layer!r}).start(['bash', '-c',"
        f" '(setsid sleep {mark} &); echo; sleep {mark}']) as confined:\n"
        "    await confined.stdout.readline(); print(confined.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # what it leaves there
    platform = await asyncio.create_subprocess_exec(
        PYTHON, "-c", code, stdout=subprocess.PIPE, env=env
    )
    assert platform.stdout
    holder = int(await platform.stdout.readline())
    pids = process_tree(holder)
    platform.kill()
    await platform.wait()
    await until(lambda: not any(alive(pid) for pid in pids))


async def test_kill_everything(sandbox: Sandbox, site: Site) -> None:
    outcome = await sandbox.run([PYTHON, "-c", "import os; os.kill(-1, 9)"])
    assert outcome.limit is None
    assert site.victim.poll() is None


async def test_many_run_at_the_same_time(sandbox: Sandbox, tmp_path: Path) -> None:
    """From one event loop: each waits until all have begun."""
    wait = "touch $0; until [ -e a -a -e b -a -e c -a -e d ]; do sleep 0.01; done"
    tasks = [sandbox.run(["bash", "-c", wait, name], workdir=tmp_path) for name in "abcd"]
    assert [outcome.returncode for outcome in await asyncio.gather(*tasks)] == [0] * 4


@pytest.mark.slow
async def test_a_folder_that_is_given(sandbox: Sandbox, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "theirs").write_text("before")
    run = ["bash", "-c", "cat theirs; echo after > theirs; echo new > ours"]
    for _ in range(2):
        outcome = await sandbox.run(run, workdir=work)
        assert outcome.returncode == 0, outcome
    assert outcome.stdout == "after\n"
    assert (work / "ours").read_text() == "new\n"
    shared = tmp_path / "shared"
    shared.mkdir()
    writable = replace(sandbox, writable=[shared])
    assert (await writable.run(["bash", "-c", f"echo x > {shared}/x"])).returncode == 0
    seen = await replace(sandbox, readable=[shared]).run(["bash", "-c", f"cat {shared}/x >&2"])
    assert seen.stderr == "x\n"
    refused = await replace(sandbox, readable=[shared]).run(
        ["bash", "-c", f"echo y > {shared}/x"], workdir=work
    )
    assert refused.returncode == 1 and (shared / "x").read_text() == "x\n"


async def test_files_stay_in_the_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    outside, work = tmp_path / "outside", tmp_path / "work"
    outside.mkdir()
    work.mkdir()
    (work / "link").symlink_to(outside)
    (work / "file").symlink_to(outside / "file")
    os.mkfifo(work / "pipe")
    for name in ("link/x", "file", "pipe", "../x", "/tmp/x", "", "a/../../x", "a\0b"):
        with pytest.raises(BadInput, match="file"):
            await sandbox.run(["true"], files={name: "x"}, workdir=work)
    assert not list(outside.iterdir())


def test_what_cannot_be_meant(tmp_path: Path) -> None:
    for options in ({"seconds": 0}, {"memory_mb": -1}, {"readable": ["/no/such"]}):
        with pytest.raises(BadInput):
            Sandbox(**options)
    with pytest.raises(BadInput, match="unsandboxed"):
        Sandbox(layer="none")


async def test_no_such_folder(sandbox: Sandbox) -> None:
    with pytest.raises(BadInput, match="is no folder"):
        await sandbox.run(["true"], workdir="/no/such")


async def test_a_sandbox_that_is_killed_is_no_outcome(sandbox: Sandbox) -> None:
    """Who kills it is not the program: not a result that may be rewarded with 0."""
    run = asyncio.create_task(sandbox.run(["sleep", "60"]))
    held: list[int] = []

    def found() -> bool:
        held[:] = filter(_holds_sandbox, process_tree(os.getpid()))
        return bool(held) and _is_sandbox(held[0])  # bubblewrap's own child holds one too

    await until(found)
    os.kill(held[0], 9)
    with pytest.raises(SetupError, match="killed"):
        await run


def test_a_killed_keeper_leaves_no_program_behind() -> None:
    """Not even where nobody has looked yet which processes it holds."""
    spec = json.dumps({"parent": os.getpid()})
    with subprocess.Popen([PYTHON, "-I", "-S", backends.KEEPER, spec, "sleep", "600"]) as keeper:
        asyncio.run(until(lambda: _is_sandbox(keeper.pid)))
        program = process_tree(keeper.pid)[-1]
        keeper.kill()
    asyncio.run(until(lambda: not alive(program)))


def _holds_sandbox(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"bwrap" in words or b"keeper" in words
    return False


def _is_sandbox(pid: int) -> bool:
    """Whether it is the holder of a sandbox whose program has begun."""
    with contextlib.suppress(OSError):
        program = Path(f"/proc/{process_tree(pid)[-1]}/cmdline").read_bytes()
        return _holds_sandbox(pid) and program.startswith(b"sleep\x00")
    return False


LOOK = """
import asyncio
from cray_agents.tools.sandbox import Sandbox, backends
from cray_agents.errors import SetupError
print(backends.layer_problem("bubblewrap"))
try:
    print(Sandbox().check(), asyncio.run(Sandbox().run(["echo", "hi"])).stdout)
except SetupError as error:
    print("refused:", error)
"""
# As before Linux 5.13: a filter answers the call for a Landlock ruleset with ENOSYS.
NO_LANDLOCK = """
import ctypes, struct
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (6, 0, 0, 0x50026), (6, 0, 0, 0x7fff0000)]
filter = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("@HP", 4, ctypes.addressof(filter)), 0, 0) == 0
"""
ANYWAY = """
print(asyncio.run(Sandbox(unsandboxed=True).run(["echo", "anyway"])).stdout)
"""


def without_bubblewrap(code: str, tmp_path: Path, *others: str) -> str:
    for name in ("sh", "rm", *others):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    env = {"PATH": str(tmp_path)}
    return subprocess.run([PYTHON, "-c", code], env=env, cwd=ROOT, text=True, check=True,
                          stdout=subprocess.PIPE).stdout  # fmt: skip


def test_where_bubblewrap_is_not_installed(tmp_path: Path) -> None:
    said = without_bubblewrap(LOOK, tmp_path, "setpriv", "prlimit")
    assert "the program bwrap is not installed" in said
    if "landlock" in LAYERS:
        assert "landlock hi" in said


def test_where_there_is_neither(tmp_path: Path) -> None:
    code = NO_LANDLOCK + LOOK + ANYWAY
    said = without_bubblewrap(code, tmp_path, "setpriv", "prlimit")
    assert "refused: this machine cannot run programs in a sandbox, so they are not run" in said
    assert (
        "bubblewrap: the program bwrap is not installed. landlock: the kernel has Landlock 0"
        in said
    )
    assert "apt-get install bubblewrap" in said and "Sandbox(unsandboxed=True)" in said
    assert said.endswith("anyway\n\n")


def test_where_limits_cannot_be_set(tmp_path: Path) -> None:
    said = without_bubblewrap(LOOK, tmp_path)
    assert "refused: " in said and "the program setpriv is not installed" in said


@pytest.mark.slow
@pytest.mark.parametrize("outer", LAYERS)
async def test_where_namespaces_are_forbidden(outer: backends.Layer) -> None:
    """As in most containers; here, inside a sandbox: what it holds off, bubblewrap needs."""
    around = Sandbox(layer=outer, readable=[ROOT], seconds=60)
    outcome = await around.run([PYTHON, "-c", LOOK], env={"PYTHONPATH": str(ROOT)})
    assert outcome.returncode == 0, outcome
    problem, _, rest = outcome.stdout.partition("\n")
    assert problem != "None"
    assert rest.startswith("landlock hi") or "refused: " in rest, outcome


def ordinary_user(command: list[str], home: Path) -> list[str]:
    """The command as an ordinary user, to whom this Python and this checkout are made visible.

    The user has no other processes: they would count in Landlock's limit on processes.
    """
    user = 20_000 + os.getpid() % 40_000
    shown = [sys.base_prefix, str(ROOT)]
    hidden = {
        above for path in shown for above in Path(path).parents if not above.stat().st_mode & 1
    }
    made = ["bwrap", "--dev-bind", "/", "/", "--cap-add", "ALL"]
    for folder in sorted(hidden, key=lambda folder: len(folder.parts)):
        kind = "--dir" if hidden & set(folder.parents) else "--tmpfs"
        made += ["--perms", "0755", kind, str(folder)]
    for path in shown:
        for folder in reversed(Path(path).parents):
            if hidden & set(folder.parents):
                made += ["--perms", "0755", "--dir", str(folder)]
        made += ["--ro-bind", path, path]
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all"]
    become += ["--ambient-caps=-all", "--bounding-set=-all", "env", f"HOME={home}"]
    return [*made, "--chdir", str(ROOT), "--", *become, "PYTHONDONTWRITEBYTECODE=1", *command]


# Tests of limits that are checked alike for every user, and of machines that lack something.
ALIKE = ("test_time", "processor_time", "memory_of_one_process", "page_tables", "test_output",
         "cannot_be_meant", "no_such_folder", "where")  # fmt: skip

if os.getuid() == 0 and "bubblewrap" in LAYERS:

    @pytest.mark.slow
    def test_the_promises_hold_for_an_ordinary_user() -> None:
        with tempfile.TemporaryDirectory() as home:
            Path(home).chmod(0o777)
            tests = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", f"{home}/t",
                     "--tb=short", "-k", f"not ({' or '.join(ALIKE)})", __file__]  # fmt: skip
            done = subprocess.run(
                ordinary_user(tests, Path(home)),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert done.returncode == 0, done.stdout[-8000:]
