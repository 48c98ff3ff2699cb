"""Starter: asks an import server for vLLM's server, a job or a session, in place of this Python.

Python imports `sitecustomize` when it starts. FORKED_STARTS is the socket of the import server of
vLLM; that of jobs lies beside this file. Every other program runs as usual.

This process then stands for the one that was forked: it passes signals on, ends as that one does,
and when it is killed, so is the other.
"""

import os
import sys

SOCKETS = {
    "cray_agents.runtime.vllm_plugins.server": os.environ.get("FORKED_STARTS"),
    "cray_agents.trainers.job.job": f"{__file__}.jobs",
    "cray_agents.trainers.session.session_process": f"{__file__}.jobs",
}


def main() -> None:
    """Stand for a forked process if this one is to be such."""
    path = SOCKETS.get(sys.orig_argv[3]) if sys.orig_argv[1:3] == ["-P", "-m"] else None
    if path is None or not os.path.exists(path):  # noqa: PTH110
        return
    import array
    import contextlib
    import ctypes
    import json
    import signal
    import socket

    if path == os.environ.get("FORKED_STARTS"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the parent, as the server
        if os.getppid() != int(sys.orig_argv[4]):
            os._exit(1)
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    umask = os.umask(0)
    os.umask(umask)
    passed = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
    mask = [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, passed)]  # until it passes on
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes longer to import than all of this
    request = [sys.orig_argv[3:], dict(os.environ), folder, umask, mask]
    body = json.dumps(request).encode()
    handles = array.array("i", [0, 1, 2])
    if listener := os.environ.get("CRAY_AGENTS_REPLICA_SOCKET"):
        handles.append(int(listener))
    link.sendmsg(
        [len(body).to_bytes(4, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)]
    )
    link.sendall(body)
    pid = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little")

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended, and it is told how
            os.kill(pid, number)

    for number in passed:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ended = link.recv(4, socket.MSG_WAITALL)
    code = os.waitstatus_to_exitcode(int.from_bytes(ended, "little")) if ended else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
