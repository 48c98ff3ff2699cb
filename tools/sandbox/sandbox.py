"""Sandbox: run a program with limits, and report its end. __init__.py states the guarantees.

Called by tools/python.py, tools/shell.py and tools/verifier/. Read next: backends.py, the layers
that confine the program; process.py, the running program.
"""

import asyncio
import contextlib
import errno
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cray_agents.errors import BadInput, SetupError
from cray_agents.tools.sandbox import backends
from cray_agents.tools.sandbox.process import (
    TOO_MUCH,
    Limit,
    SandboxedProcess,
    SandboxLost,
    collect,
    feed,
    start,
)

_VARIABLES = {"PATH": backends.PATH, "LANG": "C.UTF-8", "USER": "sandbox"}
_ONE_THREAD = dict.fromkeys(  # a thread per core would exceed the limit on processes
    ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"], "1"
)
# errors of this machine, not of a file's name
_MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)
log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that a run waits for the removal of its folders
_REMOVAL = 'rm -rf -- "$0" || { chmod -R u+rwX -- "$0"; rm -rf -- "$0"; }'
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Outcome:
    """The end of a program and its output.

    `returncode` is None if the limit named by `limit` ended the program, 128 + n for a signal n.
    Long output keeps its beginning and its end, with a note between; `truncated` is then true.
    """

    stdout: str
    stderr: str
    returncode: int | None
    seconds: float
    limit: Limit | None = None
    truncated: bool = False

    @property
    def text(self) -> str:
        """The outcome as text for a model: the output, and the end if it was not a success."""
        lines = [output.rstrip("\n") for output in (self.stdout, self.stderr) if output.strip()]
        if self.limit is not None:
            lines.append(f"[ended: {TOO_MUCH[self.limit]}]")
        elif self.returncode:
            lines.append(f"[exit status {self.returncode}]")
        return "\n".join(lines) or "[no output]"


@dataclass(frozen=True)
class Sandbox:
    """A sandbox for programs, with its limits.

    Args:
        seconds: seconds that a program may run, by the clock; its start does not count.
        memory_mb: megabytes, of each process and of all together.
        processes: processes and threads that a program may have at a time.
        disk_mb: megabytes of a file, and of the run's own folders.
        output_chars: characters of stdout, and of stderr, to keep. Far more ends the program.
        network: True to allow the host's network, loopback included.
        readable: files and folders to read, beside the system's and this Python's.
        writable: folders to write to, too.
        unsandboxed: True to run programs without a sandbox if the system offers none. They then
            have all rights of this process. Otherwise that is a SetupError.
        layer: "bubblewrap" or "landlock"; default: the better one that works on this machine.
        cpu_seconds: processor time of a program, all its processes together; default: no limit. On
            a busy machine this is the fair limit, with several times as many `seconds`.
    """

    seconds: float = 10
    memory_mb: int = 512
    processes: int = 32
    disk_mb: int = 256
    output_chars: int = 20_000
    network: bool = False
    readable: Sequence[str | Path] = ()
    writable: Sequence[str | Path] = ()
    unsandboxed: bool = False
    layer: backends.Layer | None = None
    cpu_seconds: float | None = None

    def __post_init__(self) -> None:
        limits = ("seconds", "memory_mb", "processes", "disk_mb", "output_chars")
        for name in (*limits, *(["cpu_seconds"] if self.cpu_seconds is not None else [])):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name}={getattr(self, name)!r}: must be above 0", param=name)
        for name, path in self._missing():
            raise BadInput(f"{name}: there is no {path}", param=name)
        if self.layer == "none" and not self.unsandboxed:
            raise BadInput("layer='none' needs unsandboxed=True", param="layer")

    def check(self) -> backends.Layer:
        """Return the layer for programs, which is tried the first time (a few milliseconds).

        Raises SetupError, naming the missing prerequisites, if no layer works.
        """
        layer = self.layer
        if layer is None:
            try:
                return backends.best_layer()
            except SetupError:
                if not self.unsandboxed:
                    raise
                layer = "none"
        if (problem := backends.layer_problem(layer)) is not None:
            raise SetupError(f"programs cannot be run with layer {layer!r} here: {problem}")
        return layer

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        workdir: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Run a program to its end. All its processes are gone when this returns.

        Args:
            argv: the program and its arguments; names are looked up in the system's folders.
            stdin: the program's input.
            files: name (which may contain folders): content; written to the work folder first.
            workdir: an existing folder to work in and to write to; default: a new one, removed
                afterwards.
            env: variables, beside PATH, HOME, LANG and a few; none of this process's variables.

        Raises SetupError if the sandbox does not work, and SandboxLost, a SetupError, if it failed
        after the program had begun.
        Raises BadInput for a file name that leads out of the work folder, or a missing workdir.
        """
        async with self.start(argv, files=files, workdir=workdir, env=env) as confined:
            began = time.monotonic()
            if self.cpu_seconds is not None:
                confined.allow(self.cpu_seconds)
            data = stdin.encode() if isinstance(stdin, str) else stdin
            async with asyncio.TaskGroup() as tasks:
                reads = [
                    tasks.create_task(collect(stream, self.output_chars, confined))
                    for stream in (confined.stdout, confined.stderr)
                ]
                tasks.create_task(feed(confined.stdin, data))
                try:
                    async with asyncio.timeout(self.seconds):
                        returncode = await confined.wait()
                except TimeoutError:
                    confined.kill("seconds")
                    returncode = await confined.wait()
            seconds = time.monotonic() - began
            (out, cut), (err, cut_too) = (read.result() for read in reads)
        if confined.limit is None and returncode < 0:
            raise SandboxLost(
                f"the sandbox itself was killed (signal {-returncode}): is this machine out of "
                f"memory? {err.strip()[-300:]}"
            )
        ended = None if confined.limit else returncode
        return Outcome(out, err, ended, seconds, confined.limit, cut or cut_too)

    @contextlib.asynccontextmanager
    async def start(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        workdir: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> AsyncIterator[SandboxedProcess]:
        """Start a program and yield it, to communicate with it during the block.

        The caller enforces `seconds`, `cpu_seconds` (SandboxedProcess.allow) and `output_chars`;
        the other limits are enforced here. Arguments and errors are those of `run`.
        """
        layer = await asyncio.to_thread(self.check)
        for name, path in self._missing():  # the path existed when this sandbox was made
            raise SetupError(f"the sandbox did not start: {name}: there is no {path}")
        base = Path(tempfile.mkdtemp(prefix="cray-sandbox-")).resolve()
        try:
            spec = self._make_spec(base, workdir)
            write_files(spec.work, files or {}, spec.user if workdir is None else None)
            temp = "/tmp" if layer == "bubblewrap" else str(spec.temp)
            own = {"HOME": str(spec.work), "TMPDIR": temp}
            variables = {**_VARIABLES, **_ONE_THREAD, **own, **(env or {})}
            disk = self.disk_mb * backends.MEGABYTE
            async with start(layer, spec, list(argv), variables, base, disk) as confined:
                yield confined
        finally:
            await asyncio.shield(remove(base))

    def _missing(self) -> list[tuple[str, str | Path]]:
        given = {"readable": self.readable, "writable": self.writable}
        return [
            (name, at) for name, paths in given.items() for at in paths if not Path(at).exists()
        ]

    def _make_spec(self, base: Path, workdir: str | Path | None) -> backends.SandboxSpec:
        temp = base / "temp"
        work = base / "work" if workdir is None else Path(workdir).resolve()
        if workdir is not None and not work.is_dir():
            raise BadInput(f"workdir={str(workdir)!r} is no folder", param="workdir")
        spec = backends.SandboxSpec(
            work=work,
            temp=temp,
            readable=tuple(Path(path).resolve() for path in self.readable),
            writable=tuple(Path(path).resolve() for path in self.writable),
            network=self.network,
            memory=self.memory_mb * backends.MEGABYTE,
            file_size=self.disk_mb * backends.MEGABYTE,
            processes=self.processes,
            shared=workdir is not None or bool(self.writable),
        )
        base.chmod(0o711)  # the program's user passes through
        for folder in (temp, *([work] if workdir is None else [])):
            folder.mkdir(mode=0o700)
            if os.getuid() == 0:
                os.chown(folder, spec.user, spec.user)
        return spec


def write_files(folder: Path, files: Mapping[str, str | bytes], user: int | None) -> None:
    """Write files below a folder. If this process is root, give them to `user`, if there is one.

    Raises BadInput for a name that is invalid, or leads out of the folder or through a link.
    Raises SetupError if the disk is full.
    """
    for name, content in files.items():
        names = PurePosixPath(name).parts
        broken = "\0" in name or any(0xD800 <= ord(each) < 0xE000 for each in name)
        if not names or name.startswith("/") or ".." in names or broken:
            raise BadInput(f"file {name!r}: give a name inside the work folder", param="files")
        data = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
        try:
            _write(folder, names, data, user if os.getuid() == 0 else None)
        except OSError as error:
            problem = error.strerror
            if error.errno in _MACHINE_ERRORS:
                raise SetupError(f"the sandbox's folder cannot be written: {problem}") from error
            raise BadInput(f"file {name!r} cannot be written: {problem}", param="files") from error


def _write(folder: Path, names: tuple[str, ...], data: bytes, user: int | None) -> None:
    with contextlib.ExitStack() as opened:

        def open_at(name: str | Path, flags: int, above: int | None = None) -> int:
            handle = os.open(name, flags, 0o600, dir_fd=above)
            opened.callback(os.close, handle)
            if user is not None and above is not None:
                os.fchown(handle, user, user)
            return handle

        at = open_at(folder, _FOLDER)
        for part in names[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=at)
            at = open_at(part, _FOLDER, at)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.dup(open_at(names[-1], flags, at)), "wb")
        with file:
            file.write(data)


async def remove(folder: Path, patience: float = PATIENCE) -> None:
    """Remove a folder with deep, full or forbidden contents. Raises SandboxLost.

    A program can fill a folder so that its removal takes long. After `patience` seconds the removal
    goes on in the background, also after the end of this process.
    """
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", _REMOVAL, str(folder)),
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(patience):
            status = await process.wait()
    except TimeoutError:
        log.warning("%s holds so much that its removal takes longer than %g s", folder, patience)
        return
    if status != 0:
        raise SandboxLost(f"{folder} is left behind: it cannot be removed")
