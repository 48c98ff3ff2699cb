"""Hub metadata: croissant.json of a folder of Parquet files, and its size category.

croissant.json is MLCommons' Croissant 1.1, as mlcroissant reads it. License, author and date are
unknown here; the publisher of the files adds them. Called by card.py for a dataset and by
exports/formats/huggingface.py for an exported folder.
"""

from collections.abc import Sequence
from typing import Any

import orjson

CROISSANT = "croissant.json"
PARQUET = "application/x-parquet"
SIZES = (  # size categories of the Hugging Face hub, by upper bound
    (1e3, "n<1K"),
    (1e4, "1K<n<10K"),
    (1e5, "10K<n<100K"),
    (1e6, "100K<n<1M"),
    (1e7, "1M<n<10M"),
    (1e8, "10M<n<100M"),
    (1e9, "100M<n<1B"),
    (1e12, "1B<n<1T"),
)
CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "arrayShape": "cr:arrayShape",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "containedIn": "cr:containedIn",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isArray": "cr:isArray",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "name": {"@container": "@language"},
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}


def size_category(rows: int) -> str:
    """Return the hub's category of a dataset of so many rows."""
    return next((name for most, name in SIZES if rows < most), "n>1T")


def croissant(
    name: str,
    description: str,
    distribution: Sequence[dict[str, Any]],
    record_sets: Sequence[dict[str, Any]],
) -> bytes:
    """Return the JSON-LD of a folder: its files and sets of files, and the records in them."""
    document = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": name,
        "version": "1.0.0",  # the files never change: other files are another folder
        "description": description,
        "distribution": distribution,
        "recordSet": record_sets,
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def file_object(path: str, size: int, sha256: str, name: str | None = None) -> dict[str, Any]:
    """Return the node of a Parquet file. `path` is relative to the folder."""
    return _node(
        "FileObject",
        path,
        name=name,
        contentUrl=path,
        contentSize=f"{size} B",
        encodingFormat=PARQUET,
        sha256=sha256,
    )


def file_set(node_id: str, includes: str, name: str | None = None) -> dict[str, Any]:
    """Return the node of all Parquet files whose paths match the pattern `includes`."""
    return _node("FileSet", node_id, name=name, encodingFormat=PARQUET, includes=includes)


def record_set(
    name: str, fields: Sequence[dict[str, Any]], description: str | None = None
) -> dict[str, Any]:
    """Return the node of a table. With a description it has a name, too."""
    label = None if description is None else name
    return _node("RecordSet", name, name=label, description=description, field=fields)


def column_field(
    record_set_name: str,
    column: str,
    data_type: str,
    source: dict[str, Any],
    *,
    is_list: bool = False,
    description: str | None = None,
) -> dict[str, Any]:
    """Return the node of a column. `source` is {"fileSet": ...} or {"fileObject": ...}."""
    return _node(
        "Field",
        f"{record_set_name}/{column}",
        name=None if description is None else column,
        description=description,
        dataType=data_type,
        source={**source, "extract": {"column": column}},
        isArray=is_list or None,
        arrayShape="-1" if is_list else None,
    )


def _node(kind: str, node_id: str, **fields: Any) -> dict[str, Any]:
    given = {name: value for name, value in fields.items() if value is not None}
    return {"@type": f"cr:{kind}", "@id": node_id, **given}
