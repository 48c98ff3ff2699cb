"""Operations on files, uploads and batches, in OpenAI's shapes."""

from cray_agents.runtime.files.files import CLIENT_PURPOSES, PURPOSES
from cray_agents.runtime.files.files import MOST as MOST_FILES
from cray_agents.runtime.gateway.openapi.operation import Operation, Schema, header, query, ref
from cray_agents.runtime.gateway.openapi.schemas import listed, record
from cray_agents.runtime.gateway.routes.batches import MOST as MOST_BATCHES

TEXT: Schema = {"type": "string"}
BINARY: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
AFTER = query("after", TEXT, "The last id of the page before.")
NOT_A_FORM = ("400 invalid_multipart", "400 invalid_content_type", "413 body_too_large")

FILES = (
    Operation(
        "post",
        "/v1/files",
        "createFile",
        "Files",
        "Send a file",
        ref("File"),
        form=record(
            {"file": BINARY, "purpose": {"enum": list(CLIENT_PURPOSES)}},
            {
                "expires_after[anchor]": {"const": "created_at"},
                "expires_after[seconds]": {
                    "type": "integer",
                    "minimum": 3600,
                    "maximum": 2592000,
                },
            },
        ),
        more="Streamed to the disk. Larger files: POST /v1/uploads.",
        fails=(*NOT_A_FORM, "400 missing_file", "400 missing_field"),
    ),
    Operation(
        "get",
        "/v1/files",
        "listFiles",
        "Files",
        "The files, by time of creation",
        listed(ref("File")),
        query=(
            AFTER,
            query("limit", {"type": "integer", "minimum": 0, "maximum": MOST_FILES}),
            query("order", {"enum": ["asc", "desc"]}),
            query("purpose", {"enum": list(PURPOSES)}),
        ),
    ),
    Operation(
        "get",
        "/v1/files/{file_id}",
        "retrieveFile",
        "Files",
        "One file",
        ref("File"),
        fails=("404 not_found",),
    ),
    Operation(
        "delete",
        "/v1/files/{file_id}",
        "deleteFile",
        "Files",
        "Delete a file",
        record({"id": TEXT, "object": {"const": "file"}, "deleted": {"const": True}}),
        fails=("404 not_found",),
    ),
    Operation(
        "get",
        "/v1/files/{file_id}/content",
        "downloadFile",
        "Files",
        "A file's bytes",
        {"application/octet-stream": {}},
        headers=(header("Range", TEXT, "One range, such as `bytes=0-99`: answered with 206."),),
        fails=("404 not_found", "416 range_not_satisfiable"),
    ),
)
UPLOADS = (
    Operation(
        "post",
        "/v1/uploads",
        "createUpload",
        "Files",
        "Begin to send a file in parts",
        ref("Upload"),
        takes=ref("UploadRequest"),
        more="With `sha256` an upload can be gone on with: asking again finds it and its parts.",
        fails=("413 body_too_large",),
    ),
    Operation(
        "get",
        "/v1/uploads/{upload_id}",
        "retrieveUpload",
        "Files",
        "An upload and its parts",
        ref("Upload"),
        fails=("404 not_found",),
    ),
    Operation(
        "post",
        "/v1/uploads/{upload_id}/parts",
        "addUploadPart",
        "Files",
        "Send a part of at most 64 MiB, or name one that is here",
        ref("UploadPart"),
        form={
            **record({}, {"data": BINARY, "sha256": ref("Sha256")}),
            "anyOf": [{"required": ["data"]}, {"required": ["sha256"]}],
        },
        fails=(*NOT_A_FORM, "404 not_found", "404 content_unknown", "400 part_too_large"),
    ),
    Operation(
        "post",
        "/v1/uploads/{upload_id}/complete",
        "completeUpload",
        "Files",
        "Put an upload's parts together to a file",
        ref("Upload"),
        takes=record(
            {"part_ids": {"type": "array", "items": TEXT}}, {"md5": {"type": ["string", "null"]}}
        ),
        fails=("404 not_found", "400 part_not_found", "400 bytes_mismatch", "400 sha256_mismatch"),
    ),
    Operation(
        "post",
        "/v1/uploads/{upload_id}/cancel",
        "cancelUpload",
        "Files",
        "Give an upload up",
        ref("Upload"),
        fails=("404 not_found", "400 upload_completed"),
    ),
)
BATCHES = (
    Operation(
        "post",
        "/v1/batches",
        "createBatch",
        "Files",
        "Have a file of requests answered",
        ref("Batch"),
        takes=ref("BatchInput"),
        headers=(header("Idempotency-Key", TEXT, "Again under the same key: the same batch."),),
        fails=(
            "404 not_found",
            "400 invalid_value",
            "400 unknown_parameter",
            "400 idempotency_key_reused",
        ),
    ),
    Operation(
        "get",
        "/v1/batches",
        "listBatches",
        "Files",
        "The batches, newest first",
        listed(ref("Batch")),
        query=(
            AFTER,
            query("limit", {"type": "integer", "minimum": 1, "maximum": MOST_BATCHES}),
        ),
    ),
    Operation(
        "get",
        "/v1/batches/{batch_id}",
        "retrieveBatch",
        "Files",
        "One batch: how far it is, and its output",
        ref("Batch"),
        fails=("404 not_found",),
    ),
    Operation(
        "post",
        "/v1/batches/{batch_id}/cancel",
        "cancelBatch",
        "Files",
        "Stop a batch; what was answered stays",
        ref("Batch"),
        fails=("404 not_found", "400 invalid_status"),
    ),
)
OPERATIONS = (*FILES, *UPLOADS, *BATCHES)
