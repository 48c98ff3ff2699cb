"""Sessions: messages of earlier runs of a conversation, for the next run to go on from.

    session = FileSession("ada.jsonl")
    await agent.run("My name is Ada.", session=session)
    await agent.run("What is my name?", session=session)

A run without an answer (an error, a timeout) leaves its session as it was: servers refuse a
conversation that breaks off between a tool call and its result. Called by conversation.py.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import orjson

from cray_agents.errors import Corrupt, StoreError
from cray_agents.records import Message, Run, new_id

if TYPE_CHECKING:  # it imports the openai client, which not every agent needs
    from cray_agents.platform.client import Platform


class Session(Protocol):
    """Memory of a conversation. Its runs carry the tag `session:<id>`."""

    id: str

    async def history(self) -> list[Message]:
        """Return all messages so far, without system messages. Raises StoreError and its kinds."""
        ...

    async def extend(self, run: Run, added: Sequence[Message]) -> None:
        """Add a run's messages, from its input to its answer. Raises StoreError."""
        ...


class MemorySession:
    """A conversation that is gone with the process."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.id = new_id("session")
        self.messages = list(messages)

    async def history(self) -> list[Message]:
        """See Session."""
        return [*self.messages]

    async def extend(self, run: Run, added: Sequence[Message]) -> None:
        """See Session."""
        self.messages += added


class FileSession:
    """A conversation in a JSONL file, a line for each run: `{"run": id, "messages": [...]}`.

    The file has one writer. A line that a crash left unfinished counts as not written. `id`
    defaults to the file's name without its ending.
    """

    def __init__(self, path: str | Path, id: str = "") -> None:  # noqa: A002
        self.path = Path(path)
        self.id = id or self.path.stem

    async def history(self) -> list[Message]:
        """See Session. Raises Corrupt for a line that is none of its own."""
        return await asyncio.to_thread(self._read)

    async def extend(self, run: Run, added: Sequence[Message]) -> None:
        """See Session; durable when this returns."""
        line = orjson.dumps({"run": run.id, "messages": [*added]}) + b"\n"
        await asyncio.to_thread(self._append, line)

    def _read(self) -> list[Message]:
        try:
            whole = self.path.read_bytes() if self.path.exists() else b""
            lines = whole[: whole.rfind(b"\n") + 1].splitlines()
            return [message for line in lines for message in orjson.loads(line)["messages"]]
        except OSError as error:
            raise StoreError(f"session {self.path} cannot be read: {error}") from error
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise Corrupt(
                f"session {self.path} has a line that is no session's: {error}"
            ) from error

    def _append(self, line: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)  # what a crash left unfinished
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"session {self.path} cannot be written: {error}") from error


class PlatformSession:
    """A conversation in the store of a platform: that of the newest answered run."""

    def __init__(self, id: str, platform: "Platform") -> None:  # noqa: A002
        self.id = id
        self._platform = platform

    async def history(self) -> list[Message]:
        """See Session. Raises what the platform raises."""
        async for run in self._platform.runs(tag=f"session:{self.id}", order="newest", page=10):
            if is_answered(run):
                return without_system(run.trajectory.messages)
        return []

    async def extend(self, run: Run, added: Sequence[Message]) -> None:
        """See Session. Records the run; a run that its agent recorded already stays the same."""
        await self._platform.record([run])


def is_answered(run: Run) -> bool:
    """Tell whether a run came to an answer, so that a user may speak next."""
    last = run.trajectory.messages[-1] if run.trajectory.messages else {}
    asks = bool(last.get("tool_calls"))
    return run.error is None and last.get("role") == "assistant" and not asks


def without_system(messages: Sequence[Message]) -> list[Message]:
    """The messages without system messages: each run has its agent's own."""
    return [message for message in messages if message.get("role") != "system"]
