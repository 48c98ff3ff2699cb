"""Local scheduler: run commands as processes of this machine, where there is no Slurm.

`MegatronTrainer` calls this through `ports.Scheduler`; `choose.py` opens it. A command starts at
once, unless it takes GPUs: it then waits until enough of them are free, behind those that were
submitted before it. CUDA_VISIBLE_DEVICES names the GPUs that it got. Whoever asks this scheduler
anything starts the commands whose turn has come; the platform asks every few seconds. GPUs that
replicas use by turns are given out by `start_turn` alone.

The state is in the files `<directory>/local/<name>/<n>.command.json`, `<n>.<time>.waiting` and
`<n>.ended.json`, so that a restarted platform knows which commands wait, and how each ended. A
command that does not wait, without an end and without a supervisor, died with its platform. So its
GPUs are free again, and a new scheduler has none to remember. Read next: supervisor.py.
"""

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cray_agents.config.job_section import JobSettings
from cray_agents.errors import Corrupt, SchedulerError
from cray_agents.ports import Command, CommandStatus
from cray_agents.runtime.controller_lease import Guard, unguarded
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.scheduler.gpu_placement import VISIBLE, count_gpus
from cray_agents.runtime.scheduler.site_environment import (
    clean_environment,
    command_variables,
    preparation,
    task_argv,
)
from cray_agents.runtime.scheduler.supervised import Supervised
from cray_agents.runtime.scheduler.supervisor import publish

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class LocalProcesses:
    """A Scheduler over processes that end with this one.

    Args:
        directory: the folder for records of commands.
        grace: seconds between a cancelled command's SIGTERM and SIGKILL.
        gpus: ids of the GPUs that commands may use, each one by one command at a time. Without any,
            nothing waits, and a command sees what there is.
        turns: replicas use these GPUs, too. A command gets some only within `start_turn`.
        settings: the site's `[job]`. Modules and prolog are done by a bash before the command.
    """

    name = "local"
    on_this_host = True  # all commands run here

    def __init__(
        self,
        directory: Path,
        *,
        grace: float = 10.0,
        reason: str = "",
        gpus: Sequence[str] = (),
        turns: bool = False,
        settings: JobSettings | None = None,
    ) -> None:
        self.reason = reason
        self.guard: Guard = unguarded
        self._settings = settings or JobSettings()
        self.gpus = tuple(gpus)
        self.turns = turns
        self.grace = grace
        self._directory = directory.resolve() / "local"
        self._lock = threading.RLock()
        # the GPUs and the process group of each command started here
        self._running: dict[str, tuple[tuple[str, ...], int]] = {}
        self._supervised = Supervised(self._directory)  # ends what a killed predecessor left
        self._waiting = waiting_commands(self._directory)
        self._closed = False
        self._starts_waiting = not turns

    def __enter__(self) -> "LocalProcesses":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        return self._supervised.pid

    def close(self) -> None:
        """End all commands and wait for them. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._supervised.close()

    def submit(self, command: Command) -> str:
        """Start a command, or let it wait for GPUs, or find its live one; return an id.

        Raises SchedulerError.
        """
        if not NAME.fullmatch(command.name):
            raise SchedulerError(f"{command.name!r} is no command's name: use {NAME.pattern}")
        if command.nodes != 1:
            raise SchedulerError(f"{command.name}: this machine is 1 node, not {command.nodes}")
        if command.slurm_options:
            raise SchedulerError(
                f"{command.name}: {' '.join(command.slurm_options)} are options for Slurm, and here"
                " jobs are local processes: leave slurm_options out"
            )
        with self._lock:
            self._revive_supervisor()
            now = self.status(command.name)
            if now.state in ("queued", "running"):
                return now.id
            needs = command.ranks if command.gpus and self.gpus else 0
            if needs > len(self.gpus):
                raise SchedulerError(f"{command.name}: {self._too_few(needs)}")
            self.guard()
            number = self._newest_number(command.name) + 1
            folder = self._directory / command.name
            folder.mkdir(exist_ok=True)
            command_id = f"{command.name}.{number}"
            marker = folder / f"{number}.{time.time_ns()}.waiting"
            if needs:  # before the record: a command with a record and no marker has started
                marker.touch()
            publish(folder / f"{number}.command.json", command.model_dump(mode="json"))
            if needs:
                self._waiting[command_id] = marker
                self._start_waiting()
            else:
                self._start(command_id, command)
            return command_id

    def status(self, name: str) -> CommandStatus:
        """Return the status of the name's newest command."""
        with self._lock:
            self._start_waiting()
            number = self._newest_number(name)
            if not number:
                return CommandStatus(state="unknown", reason="no command of this name was started")
            command_id = f"{name}.{number}"
            if command_id in self._waiting:
                free = f"{len(self._free_gpus())} of {count_gpus(len(self.gpus))} are free"
                after = ", and replicas use them first" if self.turns else ""
                return CommandStatus(state="queued", id=command_id, reason=f"waits: {free}{after}")
            living = self._lives(command_id)
        ended = self._file(command_id, "ended")
        if not ended.exists():
            if living:
                return CommandStatus(state="running", id=command_id)
            return CommandStatus(state="failed", id=command_id, reason="it died with its platform")
        end = checksums.read_json(ended)
        code, reason = end["exit"], end["reason"]
        code = 128 - code if code is not None and code < 0 else code
        if reason == "cancelled":
            return CommandStatus(state="cancelled", id=command_id, exit_code=code, reason=reason)
        state = "failed" if code or reason else "succeeded"
        return CommandStatus.model_validate(
            {"state": state, "id": command_id, "exit_code": code, "reason": reason}
        )

    def cancel(self, name: str) -> None:
        """Send SIGTERM to the command's process group, and SIGKILL after the grace period.

        A command that waits is ended at once.
        """
        with self._lock:
            status = self.status(name)
            if status.state == "queued":
                self._end_waiting(status.id, "cancelled")
            elif status.state == "running":
                self._supervised.stop(status.id, self.grace)

    # ---- turns on GPUs that replicas use, too
    def turn_wanted(self) -> bool:
        """Return True if `start_turn` would start a command."""
        with self._lock:
            waiting = next(iter(self._waiting), None)
            if waiting is None or self._closed:
                return False
            try:
                command = checksums.read_record(Command, self._file(waiting, "command"))
            except Corrupt:
                return True  # `start_turn` ends it
            ranks = command.ranks
            return ranks <= len(self._free_gpus()) or ranks > len(self.gpus)

    def start_turn(self) -> None:
        """Give the free GPUs to the commands that wait, as far as they suffice."""
        with self._lock:
            self._starts_waiting = True
            try:
                self._start_waiting()
            finally:
                self._starts_waiting = False

    def on_gpus(self) -> dict[str, int]:
        """Return the process groups of the living commands that were given GPUs, by name."""
        with self._lock:
            return {
                command_id.rpartition(".")[0]: group
                for command_id, (gpus, group) in self._running.items()
                if gpus and self._lives(command_id)
            }

    def _start(self, command_id: str, command: Command, gpus: tuple[str, ...] = ()) -> None:
        """Start a command on its GPUs; without any it sees what there is."""
        environment = command_variables(self._settings, command)
        environment |= {VISIBLE: ",".join(gpus)} if gpus else {}
        argv = task_argv(self._settings, command)
        if before := preparation(self._settings):
            prepared = f'end() {{ exit "$1"; }}\n{before}exec "$@"'
            argv = ["/bin/bash", "-c", prepared, "task", *argv]
        group = self._supervised.start(
            command_id,
            argv,
            env=clean_environment(environment),
            cwd=command.directory,
            log=command.log,
            ended=str(self._file(command_id, "ended")),
            minutes=command.minutes,
        )
        self._running[command_id] = (gpus, group)

    def _start_waiting(self) -> None:
        """Start the commands whose turn has come. None overtakes one that waits for more GPUs."""
        while self._waiting and self._starts_waiting and not self._closed:
            self._revive_supervisor()
            command_id, marker = next(iter(self._waiting.items()))
            try:
                command = checksums.read_record(Command, self._file(command_id, "command"))
            except Corrupt as error:
                self._end_waiting(command_id, str(error))
                continue
            if command.ranks > len(self.gpus):  # a restarted platform may have fewer
                self._end_waiting(command_id, self._too_few(command.ranks))
                continue
            free = self._free_gpus()
            if command.ranks > len(free):
                return
            try:
                self._start(command_id, command, free[: command.ranks])
            except SchedulerError:
                if self._supervised.alive:
                    raise
                continue  # the supervisor died a moment ago, and what it began with it
            del self._waiting[command_id]
            marker.unlink()  # last: one that a kill leaves lets the command begin again

    def _end_waiting(self, command_id: str, reason: str) -> None:
        """Record the end of a command that has not started."""
        publish(self._file(command_id, "ended"), {"exit": None, "reason": reason})
        self._waiting.pop(command_id).unlink()

    def _free_gpus(self) -> tuple[str, ...]:
        living = [gpus for each, (gpus, _) in self._running.items() if self._lives(each)]
        return tuple(gpu for gpu in self.gpus if not any(gpu in gpus for gpus in living))

    def _lives(self, command_id: str) -> bool:
        """Tell whether a command runs. The supervisor records its end before it is gone."""
        started = self._supervised.alive and command_id in self._running
        return started and not self._file(command_id, "ended").exists()

    def _too_few(self, needs: int) -> str:
        return (
            f"it takes {count_gpus(needs)}, one a rank, and jobs of this host may use"
            f" {len(self.gpus)}: submit it with a layout of fewer ranks"
        )

    def _file(self, command_id: str, kind: Literal["command", "ended"]) -> Path:
        name, _, number = command_id.rpartition(".")
        return self._directory / name / f"{number}.{kind}.json"

    def _newest_number(self, name: str) -> int:
        """Return the number of the name's newest command, or 0."""
        files = (self._directory / name).glob("*.command.json")
        return max((int(file.name.split(".")[0]) for file in files), default=0)

    def _revive_supervisor(self) -> None:
        """Start another supervisor if it was killed; end the processes that it left.

        Raises SchedulerError if this scheduler is closed.
        """
        if self._closed:
            raise SchedulerError(f"the scheduler of {self._directory} is closed")
        if not self._supervised.alive:
            self._supervised.close()
            self._running.clear()
            self._supervised = Supervised(self._directory)


def waiting_commands(directory: Path) -> dict[str, Path]:
    """Return the markers of the commands that wait, by command id, the oldest first."""
    waiting = {}
    for marker in sorted(directory.glob("*/*.waiting"), key=lambda path: path.name.split(".")[1]):
        number = marker.name.split(".")[0]
        recorded = marker.with_name(f"{number}.command.json").exists()
        if recorded and not marker.with_name(f"{number}.ended.json").exists():
            waiting[f"{marker.parent.name}.{number}"] = marker
        else:
            marker.unlink()  # of a submission or a cancellation that a kill cut short
    return waiting
