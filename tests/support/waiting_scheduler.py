"""Scheduler for tests of what a trainer submits: its commands never begin."""

from cray_agents.ports import Command, CommandStatus


class WaitingScheduler:
    """A Scheduler whose commands wait for ever; `commands` are those that were submitted."""

    name = "waiting"

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def submit(self, command: Command) -> str:
        self.commands.append(command)
        return str(len(self.commands))

    def status(self, name: str) -> CommandStatus:
        return CommandStatus(state="queued", id=str(len(self.commands)))

    def cancel(self, name: str) -> None: ...
