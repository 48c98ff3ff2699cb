"""Local scheduler: run commands as processes of this machine, where there is no Slurm.

`MegatronTrainer` calls this through `ports.Scheduler`; `choose.py` opens it. There is no queue: a
command starts at once. The state is in the files `<directory>/local/<name>/<n>.command.json` and
`<n>.ended.json`, so that a restarted platform knows the end of each command. A command without an
end and without a supervisor died with its platform. Read next: supervisor.py.
"""

import re
import threading
from pathlib import Path

from cray_agents.errors import SchedulerError
from cray_agents.ports import Command, CommandStatus
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.scheduler.programs import clean_environment
from cray_agents.runtime.scheduler.supervised import Supervised

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class LocalProcesses:
    """A Scheduler over processes that end with this one.

    Args:
        directory: the folder for records of commands.
        grace: seconds between a cancelled command's SIGTERM and SIGKILL.
    """

    name = "local"
    on_this_host = True  # all commands run here

    def __init__(self, directory: Path, *, grace: float = 10.0, reason: str = "") -> None:
        self.reason = reason
        self.grace = grace
        self._directory = directory.resolve() / "local"
        self._lock = threading.RLock()
        self._running: set[str] = set()
        self._supervised = Supervised(self._directory)
        self._closed = False

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
        """Start a command, or find its running one; return an id. Raises SchedulerError."""
        if not NAME.fullmatch(command.name):
            raise SchedulerError(f"{command.name!r} is no command's name: use {NAME.pattern}")
        if command.nodes != 1:
            raise SchedulerError(f"{command.name}: this machine is 1 node, not {command.nodes}")
        with self._lock:
            self._revive_supervisor()
            now = self.status(command.name)
            if now.state == "running":
                return now.id
            number = self._newest_number(command.name) + 1
            folder = self._directory / command.name
            folder.mkdir(exist_ok=True)
            record = folder / f"{number}.command.json"
            draft = record.with_suffix(".tmp")
            draft.write_text(command.model_dump_json())
            draft.rename(record)
            command_id = f"{command.name}.{number}"
            self._supervised.start(
                command_id,
                command.argv,
                env=clean_environment(command.environment),
                cwd=command.directory,
                log=command.log,
                ended=str(folder / f"{number}.ended.json"),
                minutes=command.minutes,
            )
            self._running.add(command_id)
            return command_id

    def status(self, name: str) -> CommandStatus:
        """Return the status of the name's newest command."""
        with self._lock:
            number = self._newest_number(name)
            if not number:
                return CommandStatus(state="unknown", reason="no command of this name was started")
            command_id = f"{name}.{number}"
            living = self._supervised.alive and command_id in self._running
        ended = self._directory / name / f"{number}.ended.json"
        if not ended.exists():
            if living:
                return CommandStatus(state="running", id=command_id)
            return CommandStatus(state="failed", id=command_id, reason="it died with its platform")
        end = checksums.read_json(ended)
        code, reason = end["exit"], end["reason"]
        code = 128 - code if code < 0 else code
        if reason == "cancelled":
            return CommandStatus(state="cancelled", id=command_id, exit_code=code, reason=reason)
        state = "failed" if code or reason else "succeeded"
        return CommandStatus.model_validate(
            {"state": state, "id": command_id, "exit_code": code, "reason": reason}
        )

    def cancel(self, name: str) -> None:
        """Send SIGTERM to the command's process group, and SIGKILL after the grace period."""
        status = self.status(name)
        if status.state == "running":
            self._supervised.stop(status.id, self.grace)

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
