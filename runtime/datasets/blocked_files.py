"""The texts of a file that a recipe must not train on: a benchmark, say. JSONL, or plain text.

A line that is a JSON object is its `input`, `prompt`, `question`, `text` or last user message; any
other line is a text as it is. Lines are read one by one. Called by decontamination.py.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import BadInput, NotFound
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.store.segments.facts import text_of

PARAM = "decontamination.files"
FIELDS = ("input", "prompt", "question", "text", "messages")


def texts_of_file(files: Files, name: str) -> Iterator[tuple[str, str]]:
    """(`file.jsonl:17`, text) for each line of an uploaded file's id or of a path.

    Raises BadInput where there is no such file, or it cannot be read as UTF-8.
    """
    path, shown = _resolved(files, name)
    line = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for line, content in enumerate(lines, 1):
                text = text_in(content)
                if text:
                    yield f"{shown}:{line}", text
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{name} is not UTF-8 after line {line}: {error.reason}", param=PARAM
        ) from error
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror or error}", param=PARAM) from error


def text_in(line: str) -> str:
    """The text that a line holds; "" for an empty one."""
    line = line.strip()
    if line.startswith("{"):
        try:
            return _told(orjson.loads(line)) or line
        except ValueError:
            return line
    return line


def _told(record: dict[str, Any]) -> str:
    for field in FIELDS:
        value = record.get(field)
        if isinstance(value, dict):  # OpenAI's preferences: {"input": {"messages": [...]}}
            value = value.get("messages")
        if isinstance(value, list):
            users = [m for m in value if isinstance(m, dict) and m.get("role") == "user"]
            value = text_of(users[-1]) if users else ""
        if isinstance(value, str) and value.strip():
            return value
    return ""


def _resolved(files: Files, name: str) -> tuple[Path, str]:
    """Where it lies, and what to call it."""
    with contextlib.suppress(NotFound):
        return files.path(name), files.get(name).filename
    path = Path(name)
    try:
        there = path.is_file()
    except OSError:  # a name too long to be one
        there = False
    if not there:
        raise BadInput(
            f"{name!r} is neither an uploaded file's id nor a file on this host", param=PARAM
        )
    return path, path.name
