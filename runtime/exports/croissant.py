"""croissant.json of an exported folder: describe it in MLCommons' Croissant 1.1.

mlcroissant validates and reads it. Conversations are lists of structs, for which Croissant has no
type, so only the card describes them. License, author and date are unknown here. Written by
huggingface.py; runtime/datasets/croissant.py describes a dataset.
"""

from collections.abc import Mapping
from typing import Any

from cray_agents.runtime.datasets.croissant import CONTEXT, FORMAT
from cray_agents.runtime.disk import durable
from cray_agents.runtime.exports.parquet_files import FolderContents

SHARDS = "shards"


def croissant(
    name: str, description: str, folder: FolderContents, fields: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Return the description of a folder.

    `fields` maps each column that Croissant can describe to its data type and its meaning.
    """
    files: list[dict[str, Any]] = [
        {
            "@type": "cr:FileObject",
            "@id": path.relative_to(folder.path).as_posix(),
            "name": path.name,
            "contentUrl": path.relative_to(folder.path).as_posix(),
            "contentSize": f"{path.stat().st_size} B",
            "encodingFormat": FORMAT,
            "sha256": durable.sha256_file(path),
        }
        for path in folder.shards
    ]
    file_set = {
        "@type": "cr:FileSet",
        "@id": SHARDS,
        "name": SHARDS,
        "encodingFormat": FORMAT,
        "includes": f"data/{folder.split}-*.parquet",
    }
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": name,
        "version": "1.0.0",  # constant: another export is another folder
        "description": description,
        "distribution": [*files, file_set],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "runs",
                "name": "runs",
                "description": "A record per run.",
                "field": [_field(column, kind, about) for column, (kind, about) in fields.items()],
            }
        ],
    }


def _field(column: str, kind: str, about: str) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": f"runs/{column}",
        "name": column,
        "description": about,
        "dataType": kind,
        "source": {"fileSet": {"@id": SHARDS}, "extract": {"column": column}},
    }
