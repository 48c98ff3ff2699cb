"""Workspace tools: list, read, search, write and edit the files of one folder.

    agent = Agent(name="clerk", tools=Workspace("notes").tools)

Read next: safe_paths.py, which never leaves the folder.
"""

import fnmatch
import io
import threading
from pathlib import Path

from cray_agents.agent.tool import Tool, as_tool, tool
from cray_agents.errors import BadInput, ToolError
from cray_agents.tools import safe_paths

MAX_BYTES = 2**20  # size of a file
MAX_LISTED = 500  # files
MAX_MATCHES = 100  # lines
LINE = 300  # characters of a matching line


class Workspace:
    """A folder whose files a model may read and, unless `read_only`, write.

    Paths are relative to the folder, and symbolic links are never followed. Files are UTF-8 text of
    at most `max_bytes`. A write replaces a file as a whole or not at all. If runs must not see each
    other's files, make a workspace for each, in an Environment.

    Raises BadInput if there is no such folder.
    """

    def __init__(
        self, folder: str | Path, *, read_only: bool = False, max_bytes: int = MAX_BYTES
    ) -> None:
        self.folder = Path(folder).resolve()
        if not self.folder.is_dir():
            raise BadInput(f"{folder} is not a folder", param="folder")
        self.max_bytes = max_bytes
        reading = (self.list_files, self.read_file, self.search_text)
        writing = () if read_only else (self.write_file, self.edit)
        self.tools: tuple[Tool, ...] = tuple(as_tool(method) for method in (*reading, *writing))
        self._write_lock = threading.Lock()  # calls of one turn run concurrently

    @tool
    def list_files(self, path: str = ".", pattern: str = "*") -> str:
        """List the files below a folder of the workspace, with their sizes in bytes.

        Args:
            path: the folder, such as 'src'.
            pattern: what paths must fit, such as '*.py'; * also fits slashes.
        """
        matches: list[str] = []
        for name, _, _, about in safe_paths.walk(self.folder, path):
            if fnmatch.fnmatchcase(name, pattern):
                if len(matches) == MAX_LISTED:
                    matches.append(f"[and more: only {MAX_LISTED} are shown; narrow it down]")
                    break
                matches.append(f"{name} ({about.st_size})")
        return "\n".join(matches) or "[no files]"

    @tool
    def read_file(self, path: str, first_line: int = 1, lines: int = 400) -> str:
        """Read a text file, or some of its lines.

        Args:
            path: such as 'src/main.py'.
            first_line: the line to begin with, from 1.
            lines: how many lines at most.
        """
        if first_line < 1 or lines < 1:
            raise ToolError("first_line and lines begin at 1")
        every = _lines(self._text(path))
        some = every[first_line - 1 : first_line - 1 + lines]
        if len(some) == len(every):
            return "".join(some)
        if not some:
            raise ToolError(f"{path!r} has {len(every)} lines: there is no line {first_line}")
        last = first_line + len(some) - 1
        text = "".join(some)
        gap = "" if text.endswith("\n") else "\n"
        return f"{text}{gap}[lines {first_line} to {last} of {len(every)}]"

    @tool
    def search_text(
        self, text: str, path: str = ".", pattern: str = "*", ignore_case: bool = False
    ) -> str:
        """Find the lines that contain a text, as 'path:line: text'.

        Args:
            text: what to look for, as it is: no regular expression.
            path: the folder to look in.
            pattern: what paths must fit, such as '*.py'; * also fits slashes.
            ignore_case: whether upper and lower case are the same.
        """
        if not text or "\n" in text:
            raise ToolError("text must be some characters of one line")
        wanted = text.casefold() if ignore_case else text
        matches: list[str] = []
        for name, folder, entry, about in safe_paths.walk(self.folder, path):
            if about.st_size > self.max_bytes or not fnmatch.fnmatchcase(name, pattern):
                continue
            try:
                contents = self._decode(
                    name, safe_paths.read_at(folder, entry, name, self.max_bytes)
                )
            except ToolError:  # not text, or removed meanwhile
                continue
            for number, line in enumerate(_lines(contents), 1):
                if wanted in (line.casefold() if ignore_case else line):
                    if len(matches) == MAX_MATCHES:
                        return "\n".join([*matches, f"[and more: only {MAX_MATCHES} are shown]"])
                    matches.append(f"{name}:{number}: {line.strip()[:LINE]}")
        return "\n".join(matches) or "[not found]"

    @tool
    def write_file(self, path: str, text: str) -> str:
        """Write a text file, with all its contents; missing folders are made.

        Args:
            path: such as 'src/main.py'.
            text: what the file is to hold.
        """
        with self._write_lock:
            return self._write(path, text)

    @tool
    def edit(self, path: str, old: str, new: str, every: bool = False) -> str:
        """Replace a passage of a text file.

        Args:
            path: such as 'src/main.py'.
            old: the passage, exactly as it stands there, with enough around it to be the only one.
            new: what takes its place.
            every: replace it wherever it stands.
        """
        with self._write_lock:
            before = self._text(path)
            count = before.count(old) if old else 0
            if not count:
                raise ToolError(f"{path!r} does not contain that text: read it again, copy exactly")
            if count > 1 and not every:
                raise ToolError(
                    f"{path!r} contains it {count} times: give more of what stands around it, or "
                    "every=true"
                )
            self._write(path, before.replace(old, new))
        return f"replaced {count} in {path}"

    def _write(self, path: str, text: str) -> str:
        data = text.encode("utf-8", "replace")
        if len(data) > self.max_bytes:
            raise ToolError(f"{len(data)} bytes are more than {self.max_bytes}, which is the limit")
        safe_paths.replace(self.folder, path, data)
        return f"wrote {len(data)} bytes to {path}"

    def _text(self, path: str) -> str:
        return self._decode(path, safe_paths.read(self.folder, path, self.max_bytes))

    @staticmethod
    def _decode(path: str, data: bytes) -> str:
        if b"\0" in data:
            raise ToolError(f"{path!r} is not text")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ToolError(f"{path!r} is not UTF-8 text") from error


def _lines(text: str) -> list[str]:
    """Split into lines as editors do. str.splitlines also splits at form feeds and the like."""
    return list(io.StringIO(text, newline="\n"))
