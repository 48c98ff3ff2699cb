"""vLLM servers forked from one process that has imported vLLM: for campaigns of many starts.

    python vllm_forks.py SOCKET          imports vLLM once, and forks a server for each request
    SHIM -m MODULE PID FLAGS...          what `sys.executable` is meanwhile: asks for a server

The replica's own command line, environment and log are used; only the import is shared.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

SHIM = """#!{python} -SE
import array, json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
told = json.dumps([sys.argv[4:], dict(os.environ)]).encode()
handles = array.array("i", [1, 2])
link.sendmsg([len(told).to_bytes(4, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
link.sendall(told)
server = int.from_bytes(link.recv(4), "little")
def end(number, frame):
    os.killpg(server, signal.SIGKILL)
signal.signal(signal.SIGTERM, end)
sys.exit(int.from_bytes(link.recv(1) or b"\\1", "little"))
"""


def main(path: str) -> None:
    """Fork servers until the parent ends."""
    from vllm.entrypoints.launchers.api_server import entry  # noqa: F401
    from vllm.model_executor.models import registry
    from vllm.v1.engine import core  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401

    from cray_agents.processes import die_with_parent
    from cray_agents.runtime.vllm_plugins import server

    die_with_parent(os.getppid())
    zygote = os.getpid()
    registry._run_in_subprocess = lambda work: work()  # on CPUs nothing forbids it here
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        link, _ = listener.accept()
        size, handles, _, _ = socket.recv_fds(link, 4, 2)
        told = b""
        while len(told) < int.from_bytes(size, "little"):
            told += link.recv(1 << 20)
        if os.fork():  # one process for each, which waits for its server
            link.close()
            for handle in handles:
                os.close(handle)
            continue
        die_with_parent(zygote)
        waiting, pid = os.getpid(), os.fork()
        if pid:
            link.sendall(pid.to_bytes(4, "little"))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                link.sendall((code & 0xFF).to_bytes(1, "little"))
            os._exit(0)
        os.setsid()
        os.dup2(handles[0], 1)
        os.dup2(handles[1], 2)
        arguments, environment = json.loads(told)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [server.__file__, str(waiting), *arguments]
        try:
            server.main()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


@contextlib.contextmanager
def forked_servers(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Yield a program that takes the place of Python in a replica's command line."""
    path, shim = folder / "forks", folder / "shim"
    shim.write_text(SHIM.format(python=sys.executable, path=str(path)))
    shim.chmod(0o755)
    with (folder / "forks.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(path)], env=environment, stdout=log, stderr=log
        )
        try:
            while not path.exists():
                assert process.poll() is None, (folder / "forks.log").read_text()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            yield str(shim)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    main(sys.argv[1])
