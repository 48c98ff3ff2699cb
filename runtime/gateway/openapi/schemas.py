"""What the JSON of the OpenAPI document looks like: our records, and OpenAI's shapes by hand.

Of a request that goes on to the engine only what the gateway itself checks is written down; other
fields are the engine's to judge.
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from cray_agents.queries import DatasetRecipe
from cray_agents.records import ModelVersion, ProbeReport, Run, Usage
from cray_agents.runtime.batches.batch_records import ENDPOINTS, Batch
from cray_agents.runtime.files.files import INTERNAL, FileObject
from cray_agents.runtime.files.uploads import UploadRequest
from cray_agents.runtime.fine_tuning.request import CreateJob
from cray_agents.runtime.gateway.openapi.operation import Schema, ref
from cray_agents.runtime.registry.canary import CanaryTest
from cray_agents.runtime.registry.lineage import Ancestry
from cray_agents.runtime.registry.registry import ModelEvent
from cray_agents.runtime.store.feedback import Feedback
from cray_agents.training_jobs import JobSpec, JobStatus

TEXT: Schema = {"type": "string"}
TEXT_OR_NONE: Schema = {"type": ["string", "null"]}
WHOLE: Schema = {"type": "integer"}
WHOLE_OR_NONE: Schema = {"type": ["integer", "null"]}
ANY: Schema = {"type": "object"}
_ID = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}$"  # bodies.ID

_RECORDS: tuple[type[BaseModel], ...] = (
    Ancestry,
    Batch,
    CanaryTest,
    CreateJob,
    DatasetRecipe,
    Feedback,
    FileObject,
    JobSpec,
    JobStatus,
    ModelEvent,
    ModelVersion,
    ProbeReport,
    Run,
    UploadRequest,
    Usage,
)


def record(required: Schema, optional: Schema | None = None) -> Schema:
    """An object with these fields, and perhaps others."""
    found: Schema = {"type": "object", "properties": {**required, **(optional or {})}}
    return {**found, "required": list(required)} if required else found


def some(items: Schema, least: int = 0) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def data(items: Schema) -> Schema:
    """Our own lists."""
    return record({"data": some(items)})


def listed(items: Schema) -> Schema:
    """OpenAI's pages."""
    return record(
        {
            "object": {"const": "list"},
            "data": some(items),
            "has_more": {"type": "boolean"},
            "first_id": TEXT_OR_NONE,
            "last_id": TEXT_OR_NONE,
        }
    )


def components() -> Schema:
    """All that the operations refer to."""
    return {
        "schemas": {**_records(), **_SMALL, **_ASKED, **_ANSWERED, **_STORED, **_TRAINED},
        "headers": {"RequestId": {"schema": TEXT, "description": "Names the request in the log."}},
        "responses": {
            "Refused": _failure("The request cannot be served as it is; `code` tells why."),
            "Failed": _failure("The request may be good, and could not be served."),
        },
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }


def _failure(description: str) -> Schema:
    return {
        "description": description,
        "headers": {"x-request-id": {"$ref": "#/components/headers/RequestId"}},
        "content": {"application/json": {"schema": ref("Error")}},
    }


def _records() -> Schema:
    """Our records, and those within them."""
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]]
    wanted = [(model, "validation") for model in _RECORDS]
    _, found = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = found["$defs"]
    file = schemas.pop("FileObject")
    shown = {name: field for name, field in file["properties"].items() if name not in INTERNAL}
    optional = {"expires_at", "status_details"}  # left out where there is none
    schemas["File"] = {**file, "properties": shown, "required": sorted(shown.keys() - optional)}
    canary = schemas.pop("CanaryTest")
    said = {"version": WHOLE, "who": TEXT, "reason": TEXT}
    schemas["CanaryRequest"] = {
        **canary,
        "properties": {**said, **canary["properties"]},
        "required": ["version"],
    }
    schemas["JobSpec"]["required"] = ["dataset", "parent", "hyperparameters"]  # the rest is known
    return schemas


_SMALL: Schema = {
    "Id": {"type": "string", "pattern": _ID},
    "Number": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "Sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "Error": record(
        {
            "error": {
                **record(
                    {"message": TEXT, "type": TEXT, "param": TEXT_OR_NONE, "code": TEXT},
                ),
                "additionalProperties": False,
            }
        }
    ),
}
_COMMON: Schema = {
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {"type": ["object", "null"]},
    "tools": {"type": ["array", "null"], "items": ANY},
}
_ASKED: Schema = {
    "ChatRequest": record({"model": TEXT, "messages": some(ANY, 1)}, _COMMON),
    "CompletionRequest": record(
        {
            "model": TEXT,
            "prompt": {
                "anyOf": [TEXT, some({"anyOf": [TEXT, WHOLE, some(WHOLE)]}, 1)],
                "description": "A text, token ids, or a list of these.",
            },
        },
        _COMMON,
    ),
    "ResponseRequest": record(
        {"model": TEXT, "input": {"anyOf": [TEXT, some(ANY, 1)]}},
        {"instructions": TEXT_OR_NONE, **_COMMON},
    ),
    "MessageRequest": record(
        {"model": TEXT, "messages": some(ANY, 1)},
        {
            "max_tokens": WHOLE,
            "system": {"anyOf": [TEXT, some(ANY), {"type": "null"}]},
            **_COMMON,
        },
    ),
    "EmbeddingRequest": record(
        {"model": TEXT, "input": {"anyOf": [TEXT, some({"anyOf": [TEXT, WHOLE, some(WHOLE)]})]}}
    ),
    "Asked": record(
        {"model": TEXT},
        {
            "prompt": {"description": "The text to tokenize."},
            "messages": {"description": "Or the conversation."},
            "tokens": {"description": "The token ids to detokenize."},
        },
    ),
}
_NAMED: Schema = {"id": TEXT, "model": TEXT}
_CHOICE = record({"index": WHOLE, "finish_reason": TEXT_OR_NONE})
_ANSWERED: Schema = {
    "ChatCompletion": record(
        {
            **_NAMED,
            "object": {"const": "chat.completion"},
            "choices": some(record({"index": WHOLE, "message": ANY, "finish_reason": TEXT})),
            "usage": ANY,
        }
    ),
    "Completion": record({**_NAMED, "choices": some({**_CHOICE}), "usage": ANY}),
    "Response": record({**_NAMED, "object": {"const": "response"}, "output": some(ANY)}),
    "AnthropicMessage": record({**_NAMED, "role": {"const": "assistant"}, "content": some(ANY)}),
    "EmbeddingList": record({"object": {"const": "list"}, "model": TEXT, "data": some(ANY)}),
    "TokenCount": record({"input_tokens": WHOLE}),
    "Tokens": record({"count": WHOLE, "tokens": some(WHOLE)}),
    "Prompt": record({"prompt": TEXT}),
    "Model": record(
        {"id": TEXT, "object": {"const": "model"}, "created": WHOLE, "owned_by": TEXT},
    ),
    "ModelList": record({"object": {"const": "list"}, "data": some(ref("Model"))}),
}
_STORED: Schema = {
    "UploadPart": record(
        {
            "id": TEXT,
            "object": {"const": "upload.part"},
            "created_at": WHOLE,
            "upload_id": TEXT,
            "bytes": WHOLE,
            "sha256": ref("Sha256"),
        }
    ),
    "Upload": record(
        {
            "id": TEXT,
            "object": {"const": "upload"},
            "bytes": WHOLE,
            "created_at": WHOLE,
            "expires_at": WHOLE,
            "filename": TEXT,
            "purpose": TEXT,
            "status": {"enum": ["pending", "completed", "cancelled", "expired"]},
            "file": {"anyOf": [ref("File"), {"type": "null"}]},
            "sha256": TEXT_OR_NONE,
            "parts": some(ref("UploadPart")),
        }
    ),
    "BatchInput": {
        **record(
            {"input_file_id": ref("Id"), "endpoint": {"enum": list(ENDPOINTS)}},
            {
                "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,3}[hd]$"},
                "metadata": {
                    "type": ["object", "null"],
                    "maxProperties": 16,
                    "propertyNames": {"maxLength": 64},
                    "additionalProperties": {"type": "string", "maxLength": 512},
                },
                "output_expires_after": {"anyOf": [ref("ExpiresAfter"), {"type": "null"}]},
            },
        ),
        "additionalProperties": False,
    },
}
_TRAINED: Schema = {
    "Event": record(
        {"kind": {"enum": ["run", "reward"]}, "body": ANY},
        {"id": TEXT_OR_NONE, "time": {"type": ["number", "null"]}},
    ),
    "ShownRun": {
        "allOf": [
            ref("Run"),
            record({"reward": {"type": ["number", "null"]}, "usage": ref("Usage")}),
        ]
    },
    "DatasetSummary": record(
        {
            "id": TEXT,
            "method": TEXT,
            "samples": WHOLE,
            "trained_tokens": WHOLE,
            "accepted_runs": WHOLE,
            "considered_runs": WHOLE,
            "rejected": ANY,
        }
    ),
    "ConsideredRun": record(
        {
            "run": TEXT,
            "task": TEXT_OR_NONE,
            "generation": WHOLE_OR_NONE,
            "attempt": WHOLE_OR_NONE,
            "reward": {"type": ["number", "null"]},
            "accepted": {"type": "boolean"},
            "reason": TEXT_OR_NONE,
            "detail": TEXT_OR_NONE,
            "samples": WHOLE,
        }
    ),
    "ShownVersion": {"allOf": [ref("ModelVersion"), record({"id": TEXT})]},
    "FineTuningJob": record(
        {
            "id": TEXT,
            "object": {"const": "fine_tuning.job"},
            "created_at": WHOLE,
            "finished_at": WHOLE_OR_NONE,
            "model": TEXT,
            "fine_tuned_model": TEXT_OR_NONE,
            "status": {
                "enum": [
                    "validating_files",
                    "queued",
                    "running",
                    "succeeded",
                    "failed",
                    "cancelled",
                ]
            },
            "training_file": TEXT,
            "validation_file": TEXT_OR_NONE,
            "hyperparameters": ANY,
            "method": ANY,
            "trained_tokens": WHOLE_OR_NONE,
            "result_files": some(TEXT),
            "error": {"type": ["object", "null"]},
            "seed": WHOLE,
            "metadata": ANY,
        }
    ),
    "FineTuningEvent": record(
        {
            "id": TEXT,
            "object": {"const": "fine_tuning.job.event"},
            "created_at": WHOLE,
            "level": {"enum": ["info", "warn", "error"]},
            "message": TEXT,
        }
    ),
    "FineTuningCheckpoint": record(
        {"id": TEXT, "object": {"const": "fine_tuning.job.checkpoint"}, "step_number": WHOLE}
    ),
}
