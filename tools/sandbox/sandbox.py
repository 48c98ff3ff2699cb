"""Sandbox: run a program with limits, and say how it ended. The promises stand in __init__.py.

Called by tools/python.py, tools/shell.py and tools/verifier/. Read next: layers.py, what confines
the program; confined.py, the process while it runs.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cray_agents.errors import BadInput, SetupError
from cray_agents.tools.sandbox import backends
from cray_agents.tools.sandbox.folders import remove, write_files
from cray_agents.tools.sandbox.process import (
    TOO_MUCH,
    Limit,
    SandboxedProcess,
    SandboxLost,
    collect,
    feed,
    start,
)

_NAMES = {"PATH": backends.PATH, "LANG": "C.UTF-8", "USER": "sandbox"}
_ONE_THREAD = dict.fromkeys(  # libraries that start a thread per core would meet the limit
    ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"], "1"
)


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    `returncode` is None if a limit ended the program (`limit` says which), 128 + n for a signal n.
    Long output keeps its beginning and its end, with a note between; `truncated` says so.
    """

    stdout: str
    stderr: str
    returncode: int | None
    seconds: float
    limit: Limit | None = None
    truncated: bool = False

    @property
    def timed_out(self) -> bool:
        """Whether it took longer than the sandbox's seconds."""
        return self.limit == "seconds"

    @property
    def shown(self) -> str:
        """All of it as text for a model: what was written, and how it ended if not well."""
        parts = [text.rstrip("\n") for text in (self.stdout, self.stderr) if text.strip()]
        if self.limit is not None:
            parts.append(f"[ended: {TOO_MUCH[self.limit]}]")
        elif self.returncode:
            parts.append(f"[exit status {self.returncode}]")
        return "\n".join(parts) or "[no output]"


@dataclass(frozen=True)
class Sandbox:
    """Where programs run, and what they may use.

    Args:
        seconds: how long a program may run, by the clock; its start does not count.
        memory_mb: megabytes, of each process and of all together.
        processes: how many processes and threads it may have at a time.
        disk_mb: megabytes of a file, and of the run's own folders.
        output_chars: how much of stdout, and of stderr, is kept. Far more ends the program.
        network: whether it may use the host's network, loopback included.
        readable: files and folders it may read, beside the system's and this Python's.
        writable: folders it may also write to.
        unsandboxed: where the system offers no sandbox, run programs without one: they can then do
            whatever this process can. Otherwise that is a SetupError.
        layer: "bubblewrap" or "landlock"; default: the better one that works here.
        cpu_seconds: how much processor time a program may use, all its processes together; default:
            any. On a busy machine this is the fair limit, with several times as many `seconds`.
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
        """The layer that programs will run in; tried out the first time (a few milliseconds).

        Raises SetupError, which says what is missing, if there is none.
        """
        layer = self.layer
        if layer is None:
            try:
                return backends.best()
            except SetupError:
                if not self.unsandboxed:
                    raise
                layer = "none"
        if (problem := backends.problem(layer)) is not None:
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
        """Run a program to its end; all its processes are gone when this returns.

        Args:
            argv: the program and its arguments; names are looked up in the system's folders.
            stdin: what it reads.
            files: name (may have folders in it): content; written to the work folder first.
            workdir: an existing folder to work in and to write to; default: a new one, removed
                afterwards.
            env: variables, beside PATH, HOME, LANG and a few; none of this process's go along.

        Raises SetupError if the sandbox cannot be had; SandboxLost, a SetupError, if it failed once
        the program had begun.
        Raises BadInput for a file name that leads out of the work folder, or no workdir.
        """
        async with self.start(argv, files=files, workdir=workdir, env=env) as confined:
            begun = time.monotonic()
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
            seconds = time.monotonic() - begun
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
        """A program that has begun, for as long as the block lasts: for talking to it.

        `seconds`, `cpu_seconds` (Confined.allow) and `output_chars` are the caller's to hold; the
        other limits are held. Arguments and errors are those of `run`.
        """
        layer = await asyncio.to_thread(self.check)
        for name, path in self._missing():  # it was there when this sandbox was made
            raise SetupError(f"the sandbox did not start: {name}: there is no {path}")
        base = Path(tempfile.mkdtemp(prefix="cray-sandbox-")).resolve()
        try:
            cell = self._cell(base, workdir)
            write_files(cell.work, files or {}, cell.user if workdir is None else None)
            temp = "/tmp" if layer == "bubblewrap" else str(cell.temp)
            own = {"HOME": str(cell.work), "TMPDIR": temp}
            variables = {**_NAMES, **_ONE_THREAD, **own, **(env or {})}
            disk = self.disk_mb * backends.MEGABYTE
            async with start(layer, cell, list(argv), variables, base, disk) as confined:
                yield confined
        finally:
            await asyncio.shield(remove(base))

    def _missing(self) -> list[tuple[str, str | Path]]:
        given = {"readable": self.readable, "writable": self.writable}
        return [
            (name, at) for name, paths in given.items() for at in paths if not Path(at).exists()
        ]

    def _cell(self, base: Path, workdir: str | Path | None) -> backends.SandboxSpec:
        temp = base / "temp"
        work = base / "work" if workdir is None else Path(workdir).resolve()
        if workdir is not None and not work.is_dir():
            raise BadInput(f"workdir={str(workdir)!r} is no folder", param="workdir")
        cell = backends.SandboxSpec(
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
                os.chown(folder, cell.user, cell.user)
        return cell
