"""Formats on disk: refuse a file that a newer version of this package wrote.

A format has a whole number, in the key FORMAT of its record or in its file's name. It is raised by
each change that older code would misread; fields that are only added leave it as it is. Files from
before the numbers are of version 1. Readers call this module before they look at any other field.
"""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from cray_agents.errors import Corrupt, NewerFormat
from cray_agents.runtime.disk import checksums

FORMAT = "format"

Kind = TypeVar("Kind", bound=BaseModel)


def check_version(version: Any, known: int, what: object) -> int:
    """Return the version of a format, 1 for None.

    `known` is the newest that the caller reads; `what` names the file. Raises NewerFormat, or
    Corrupt if it is no version.
    """
    if version is None:
        return 1
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise Corrupt(f"{what} is damaged: {version!r} is no version of a format")
    if version > known:
        raise NewerFormat(
            f"{what} has format {version}, and this version of cray-agents reads formats up to "
            f"{known}: read it with a version that knows format {version}"
        )
    return version


def read_record(kind: type[Kind], path: Path, known: int) -> Kind:
    """Read a file of one pydantic record with a FORMAT.

    Raises FileNotFoundError, Corrupt, NewerFormat.
    """
    record = checksums.read_json(path)
    check_version(record.get(FORMAT) if isinstance(record, dict) else None, known, path)
    return checksums.read_record(kind, path)
