"""Import server: forks vLLM servers from a process that has imported vLLM once; and jobs likewise.

    python import_server.py vllm|jobs SOCKET OWNER    it ends with the process OWNER

`forking` starts it. forked_starts/sitecustomize.py asks it, and stands for what was
forked. Arguments, environment, folder and output are those that the product gave; only the import
is shared.
"""

import contextlib
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from cray_agents.processes import die_with_parent, exit_at_once, importing_much
from cray_agents.runtime.vllm_plugins.wire import SOCKET

STARTER = Path(__file__).with_name("forked_starts")
STARTED = STARTER / "sitecustomize.py"
OF_JOBS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SERVER = "cray_agents.runtime.vllm_plugins.server"


@contextlib.contextmanager
def forking(factory: Any, kind: str = "vllm") -> Iterator[None]:
    """Fork the vLLM servers that are started meanwhile, from one process for all workers of a run.

    Of the kind "jobs": launchers of training jobs and sessions. `factory`: pytest's
    tmp_path_factory.
    """
    folder, owner = factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder, owner = folder.parent, os.getppid()
    variables = _environment(folder, owner, kind)
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def _environment(folder: Path, owner: int, kind: str) -> dict[str, str]:
    """Return variables by which all that a test starts forks its vLLM servers, or its jobs.

    The first to ask starts the import server, for all who name the same folder.
    """
    starter, path = STARTER, folder / "import_server"
    if kind == "jobs":  # a job inherits no other variable
        starter = folder / "forked_jobs"
        path = starter / f"{STARTED.name}.jobs"
    with (folder / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _start(path, owner, kind)
    paths = dict.fromkeys([str(starter), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    variables = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return variables if kind == "jobs" else {**variables, "FORKED_STARTS": str(path)}


def process_of(pid: int) -> int:
    """Return the process that another one stands for; itself, if it stands for none."""
    note = Path(f"{os.environ.get('FORKED_STARTS')}-{pid}")
    return int(note.read_text()) if note.exists() else pid


def _start(path: Path, owner: int, kind: str) -> None:
    """Start the import server of a socket."""
    from cray_agents.runtime.pool.vllm_process import EngineSettings, environment

    path.parent.mkdir(exist_ok=True)
    if kind == "jobs":
        (path.parent / STARTED.name).symlink_to(STARTED)
    log = path.with_name(f"{kind}.log")
    # torch reads some of the environment when it is imported
    variables = environment(EngineSettings()) if kind == "vllm" else {**os.environ, **OF_JOBS}
    with log.open("wb") as errors:
        started = subprocess.Popen(
            [sys.executable, __file__, kind, str(path), str(owner)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
            start_new_session=True,
        )
    assert started.stdout is not None
    with started.stdout as ready:
        assert ready.read(1), log.read_text()


def main(kind: str, path: str, owner: int) -> NoReturn:
    """Import what is forked, then fork one for each request, until the owner ends."""
    watched = os.pidfd_open(owner)
    with os.fdopen(os.dup(1), "wb", 0) as ready:
        os.dup2(2, 1)
        IMPORTS[kind]()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(64)
        ready.write(b"+")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        readable, _, _ = select.select([listener.fileno(), watched], [], [])
        if watched in readable:
            os._exit(0)
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(watched)
            keep(link)
        link.close()


def import_jobs() -> None:
    """Import what the launcher of a job or a session imports."""
    with importing_much():
        from cray_agents.trainers.job import job  # noqa: F401
        from cray_agents.trainers.models.megatron_fixes import load_megatron
        from cray_agents.trainers.session import session_process  # noqa: F401

        load_megatron()
        from cray_agents.trainers.session import resident  # noqa: F401


def import_vllm() -> None:
    """Import what a replica's server and its engine core import."""
    with importing_much():
        from vllm.entrypoints.launchers.api_server import entry  # noqa: F401
        from vllm.model_executor.models import registry
        from vllm.v1.engine import core  # noqa: F401
        from vllm.v1.worker import cpu_worker  # noqa: F401

        from cray_agents.runtime.vllm_plugins import server  # noqa: F401
    registry._run_in_subprocess = lambda work: work()  # on CPUs nothing forbids it here


IMPORTS = {"vllm": import_vllm, "jobs": import_jobs}


def keep(link: socket.socket) -> NoReturn:
    """Fork what is asked for, tell its pid and its end; kill it if the asking process is gone."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, handles, _, _ = socket.recv_fds(link, 4, 4, socket.MSG_WAITALL)
    body = link.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    asking = int.from_bytes(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little")
    keeper, pid = os.getpid(), os.fork()
    if pid == 0:
        Path(f"{link.getsockname()}-{asking}").write_text(str(os.getpid()))
        link.close()
        run(keeper, handles, *json.loads(body))
    for handle in handles:
        os.close(handle)
    link.sendall(pid.to_bytes(4, "little"))
    readable, _, _ = select.select([link.fileno(), os.pidfd_open(pid)], [], [])
    for kill in (os.kill, os.killpg) if link.fileno() in readable else ():
        with contextlib.suppress(ProcessLookupError):  # it may not lead its group yet
            kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        link.sendall(status.to_bytes(4, "little"))
    os._exit(0)


def run(
    keeper: int,
    handles: list[int],
    argv: list[str],
    environment: dict[str, str],
    folder: str,
    umask: int,
    mask: list[int],
) -> NoReturn:
    """Run a module as `python -m` does, in this fork."""
    os.setsid()
    die_with_parent(keeper)
    for number, handle in zip((0, 1, 2, int(environment.get(SOCKET) or -1)), handles, strict=False):
        if handle != number:
            os.dup2(handle, number)
            os.close(handle)
    tempfile.tempdir = None  # what was imported may have looked at another environment
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.umask(umask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, handle, buffering in (("stdout", 1, -1), ("stderr", 2, 1)):
        setattr(sys, name, os.fdopen(handle, "w", buffering, closefd=False))
    module, *arguments = argv
    if module == SERVER:
        arguments[0] = str(keeper)  # its parent
    if threads := environment.get("OMP_NUM_THREADS"):  # read when torch was imported
        import torch

        torch.set_num_threads(int(threads))
    sys.argv = [module, *arguments]
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        exit_at_once(code)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
