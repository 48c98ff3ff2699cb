"""croissant.json: describe a dataset in MLCommons' Croissant 1.1, as mlcroissant reads it.

It has a record set for each split, and `runs`, with the decision on each run. License, author and
date are unknown here; the publisher of a dataset adds them. Written by card.py beside the card.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from cray_agents.runtime.datasets.reader import RUNS

FORMAT = "application/x-parquet"
TOKEN_COLUMNS = {
    "input_ids": "cr:Int32",
    "loss_mask": "cr:Int8",
    "logprobs": "cr:Float32",
    "advantages": "cr:Float32",
    "version_index": "cr:Int16",
}
SAMPLE_COLUMNS = {
    "weight": "cr:Float64",
    "reward": "cr:Float64",
    "advantage": "cr:Float64",
    "run_id": "sc:Text",
    "task_id": "sc:Text",
    "group": "sc:Text",
}
RUN_COLUMNS = {"run": "sc:Text", "accepted": "sc:Boolean", "samples": "cr:Int64"}
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


def croissant(
    name: str,
    description: str,
    splits: Mapping[str, Sequence[str]],
    files: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """Return the JSON-LD of a dataset: the shards of its splits, and checksums of the `files`."""
    sets = [_file_set(split) for split in splits]
    objects = [_file_object(file, files[file]) for file in sorted(files)]
    records = [_samples(split) for split in splits]
    if RUNS in files:
        records.append(_record_set("runs", {"fileObject": {"@id": RUNS}}, RUN_COLUMNS, {}))
    return orjson.dumps(
        {
            "@context": CONTEXT,
            "@type": "sc:Dataset",
            "conformsTo": "http://mlcommons.org/croissant/1.1",
            "name": name,
            "version": "1.0.0",  # a dataset never changes: another one has another name
            "description": description,
            "distribution": [*sets, *objects],
            "recordSet": records,
        },
        option=orjson.OPT_INDENT_2,
    )


def _file_set(split: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileSet",
        "@id": f"{split}-shards",
        "encodingFormat": FORMAT,
        "includes": f"{split}-*.parquet",
    }


def _file_object(name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "contentUrl": name,
        "contentSize": f"{about['bytes']} B",
        "encodingFormat": FORMAT,
        "sha256": about["sha256"],
    }


def _samples(split: str) -> dict[str, Any]:
    return _record_set(
        split, {"fileSet": {"@id": f"{split}-shards"}}, SAMPLE_COLUMNS, TOKEN_COLUMNS
    )


def _record_set(
    name: str, source: dict[str, Any], single: Mapping[str, str], lists: Mapping[str, str]
) -> dict[str, Any]:
    fields = [_field(name, source, column, data_type) for column, data_type in single.items()]
    for column, data_type in lists.items():
        fields.append(
            {**_field(name, source, column, data_type), "isArray": True, "arrayShape": "-1"}
        )
    return {"@type": "cr:RecordSet", "@id": name, "field": fields}


def _field(name: str, source: dict[str, Any], column: str, data_type: str) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": f"{name}/{column}",
        "dataType": data_type,
        "source": {**source, "extract": {"column": column}},
    }
