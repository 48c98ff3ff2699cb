"""Blocked files: read the texts that a recipe must not train on, such as a benchmark's.

Files are JSONL or plain text. The text of a JSON object is its `input`, `prompt`, `question`,
`text` or last user message. Any other line is a text itself. Called by decontamination.py.
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
    """Yield (`file.jsonl:17`, text) for each line of a file, named by upload id or path.

    Raises BadInput if the file does not exist or is not readable as UTF-8.
    """
    path, title = _resolve_file(files, name)
    line = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for line, content in enumerate(lines, 1):
                text = text_in(content)
                if text:
                    yield f"{title}:{line}", text
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{name} is not UTF-8 after line {line}: {error.reason}", param=PARAM
        ) from error
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror or error}", param=PARAM) from error


def text_in(line: str) -> str:
    """Return the text of a line; "" for an empty line."""
    line = line.strip()
    if line.startswith("{"):
        try:
            return _text_of_record(orjson.loads(line)) or line
        except ValueError:
            return line
    return line


def _text_of_record(record: dict[str, Any]) -> str:
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


def _resolve_file(files: Files, name: str) -> tuple[Path, str]:
    """Return the path of a file and its title. Raises BadInput."""
    with contextlib.suppress(NotFound):
        return files.path(name), files.get(name).filename
    path = Path(name)
    try:
        exists = path.is_file()
    except OSError:  # for example, a name that is too long
        exists = False
    if not exists:
        raise BadInput(
            f"{name!r} is neither an uploaded file's id nor a file on this host", param=PARAM
        )
    return path, path.name
