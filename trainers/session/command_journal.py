"""TrainingCommand journal: the commands of a client and their results, in the folder of their job.

    commands/<sequence>   a command, created exclusively: two clients cannot both write one
    results/<sequence>    its result, created exclusively by rank 0 of the newest attempt

A command is done when it has a result. After a death the commands since the last resume point are
done again, in memory alone. Written by the trainer that a client asks, read by command_run.py.
"""

from pathlib import Path

from pydantic import ValidationError

from cray_agents.errors import BadInput, Corrupt
from cray_agents.runtime.disk import checksums, durable
from cray_agents.training_commands import COMMAND, CommandResult, End, TrainingCommand


class CommandJournal:
    """The commands and results in a job's folder. Cheap to make, and without state of its own."""

    def __init__(self, folder: Path) -> None:
        self._commands, self._results = folder / "commands", folder / "results"

    def prepare(self) -> None:
        """Make both folders, before a host that looks into them could believe in their absence."""
        for folder in (self._commands, self._results):
            folder.mkdir(parents=True, exist_ok=True)

    def append(self, sequence: int, command: TrainingCommand) -> None:
        """Add the next command; adding the same one again changes nothing. Raises BadInput."""
        last = self.last
        path = self._commands / str(sequence)
        if sequence > last + 1 or sequence < 1:
            raise BadInput(
                f"command {sequence} is out of order: the next one is {last + 1}", param="sequence"
            )
        if last and sequence > last and isinstance(self.command(last), End):
            result = self.result(last)
            if result is None or result.error is None:
                raise BadInput(f"command {last} has ended this training run", param="sequence")
        content = checksums.with_crc(COMMAND.dump_json(command))
        if not durable.create_file(path, content) and path.read_bytes() != content:
            raise BadInput(
                f"command {sequence} is another one already: two clients write to this training"
                " run; let each have a run of its own",
                param="sequence",
            )

    @property
    def last(self) -> int:
        """The number of the newest command; 0 without one."""
        return _newest(self._commands)

    def exists(self, sequence: int) -> bool:
        """Return True if a command was added."""
        return str(sequence) in durable.names_in(self._commands)

    @property
    def done(self) -> int:
        """The number of the newest command that has a result; 0 without one."""
        return _newest(self._results)

    @property
    def idle(self) -> bool:
        """True if every command has a result."""
        return self.last == self.done

    def command(self, sequence: int) -> TrainingCommand | None:
        """Return a command; None if there is none yet. Raises Corrupt."""
        path = self._commands / str(sequence)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return COMMAND.validate_json(checksums.verify_crc(text, path))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise Corrupt(f"{path} cannot be read: {first['msg']}") from error

    def result(self, sequence: int) -> CommandResult | None:
        """Return a command's result; None if it has none yet. Raises Corrupt."""
        path = self._results / str(sequence)
        listed = path.name in durable.names_in(self._results)
        return checksums.read_record(CommandResult, path) if listed else None

    def write_result(self, result: CommandResult) -> None:
        """Record a result, unless the command has one."""
        content = checksums.with_crc(result.model_dump_json().encode())
        durable.create_file(self._results / str(result.sequence), content)


def _newest(folder: Path) -> int:
    return max((int(name) for name in durable.names_in(folder) if name.isdigit()), default=0)
