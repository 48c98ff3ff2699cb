"""Scheduler for tests of what a trainer submits, whose commands never begin by themselves."""

from cray_agents.ports import Command, CommandStatus


class WaitingScheduler:
    """A Scheduler of `commands` that were submitted.

    Each waits for `reason` until a test sets `end`, which is how the newest one stands. `always`:
    how every command stands instead.
    """

    name = "waiting"

    def __init__(self, always: CommandStatus | None = None) -> None:
        self.commands: list[Command] = []
        self.end: CommandStatus | None = None
        self.reason = ""
        self._always = always

    def submit(self, command: Command) -> str:
        self.commands.append(command)
        self.end = None
        return str(len(self.commands))

    def status(self, name: str) -> CommandStatus:
        waits = CommandStatus(state="queued", reason=self.reason)
        known = self.end or self._always or waits
        return known.model_copy(update={"id": str(len(self.commands))})

    def cancel(self, name: str) -> None: ...
