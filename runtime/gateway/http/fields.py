"""Fields: the types of path and query parameters, of request bodies and of lists in answers.

pydantic checks and documents by them (routing.py). What a path names and no file can be is 404, as
what is not there.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from fastapi import Query
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from cray_agents.errors import BadInput, NotFound
from cray_agents.records import Record, StrictRecord

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")  # also safe as a header and a folder
ID_PATTERN = f"^{ID.pattern}$"
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}  # seconds
LARGEST = 10**18 - 1  # of a number in a query: nothing here counts further

T = TypeVar("T")


def named(noun: str, param: str) -> Any:
    """Return the marks of an id. Raises NotFound for text that never names a file."""

    def check(value: str) -> str:
        if not ID.fullmatch(value):
            raise NotFound(f"no {noun} {value[:200]!r}", param=param)
        return value

    return AfterValidator(check)


def numbered(noun: str, param: str = "number") -> Any:
    """Return the marks of a number in a path. Raises NotFound, also for one that is too large."""

    def check(value: str) -> int:
        if not NUMBER.fullmatch(value):
            raise NotFound(f"no {noun} {value[:200]!r}", param=param)
        return int(value)

    return BeforeValidator(check)


_ID = WithJsonSchema({"type": "string", "pattern": ID_PATTERN})
_NUMBER = WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})

BatchId = Annotated[str, named("batch", "batch_id"), _ID]
DatasetId = Annotated[str, named("dataset", "dataset_id"), _ID]
FileId = Annotated[str, named("file", "file_id"), _ID]
JobId = Annotated[str, named("job", "job_id"), _ID]
LoopId = Annotated[str, named("loop", "loop"), _ID]
ModelName = Annotated[str, named("model", "name"), _ID]
RunId = Annotated[str, named("run", "run_id"), _ID]
UploadId = Annotated[str, named("upload", "upload_id"), _ID]
IterationNumber = Annotated[int, numbered("iteration"), _NUMBER]
TurnNumber = Annotated[int, numbered("turn"), _NUMBER]
ReplicaNumber = Annotated[int, numbered("replica", "replica"), _NUMBER]

After: TypeAlias = Annotated[str | None, Query(description="The last id of the page before.")]
Limit: TypeAlias = Annotated[int, Query(ge=0, le=1000)]
Count: TypeAlias = Annotated[int, Query(ge=0, le=LARGEST)]
Real: TypeAlias = Annotated[float, Query(allow_inf_nan=False)]
MaybeReal: TypeAlias = Annotated[float | None, Query(allow_inf_nan=False)]


def bucket_seconds(text: str | None) -> float | None:
    """Return the seconds of a bucket such as 1h; None without it. Raises BadInput."""
    if text is None:
        return None
    amount, unit = text[:-1], text[-1:]
    if not (amount.isascii() and amount.isdecimal() and len(amount) < 7) or unit not in UNITS:
        raise BadInput(
            f"bucket must be a number and a unit, as 30m, 1h, 1d or 1w, not {text[:50]!r}",
            param="bucket",
        )
    if not int(amount):
        raise BadInput("bucket must be longer than 0", param="bucket")
    return float(int(amount) * UNITS[unit])


Bucket: TypeAlias = Annotated[
    float | None,
    BeforeValidator(bucket_seconds),
    WithJsonSchema({"type": "string"}),
    Query(description="Groups by time, too: `30m`, `1h`, `1d`, `1w`."),
]


def names_in(text: str) -> list[str]:
    """Return the names in a query parameter, separated by commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part))


# ---- bodies and answers
@dataclass(frozen=True, eq=False)
class RecordSchema:
    """A mark of plain JSON that the document describes as a record, and the handler checks.

    required: the fields that must be there, if these are not the record's own. also: schemas of
    fields that are added.
    """

    record: type[BaseModel]
    required: Collection[str] | None = None
    also: Mapping[str, Any] = field(default_factory=dict)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Return a reference to the record's schema, as edited."""
        made: dict[str, Any] = handler(self.record.__pydantic_core_schema__)
        edited = handler.resolve_ref_schema(made)
        if self.required is not None:
            edited["required"] = sorted(self.required)
        edited["properties"] = {**edited["properties"], **self.also}
        return made


class Fields(Record):
    """Fields of a JSON body, of exactly these types. Others have no effect."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class ErrorFields(StrictRecord):
    """A failure. Clients decide by `code`; `param` names the field that is to blame."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Record):
    """The answer to a request that failed."""

    error: ErrorFields


class Damaged(Record):
    """A record that a list leaves out, since it cannot be read."""

    id: str
    reason: str


class DataList(Record, Generic[T]):
    """A list, without the records that are `damaged`."""

    data: list[T]
    damaged: list[Damaged] = Field(default_factory=list)


class ListPage(DataList[T], Generic[T]):
    """A page of a list, as OpenAI has it."""

    object: Literal["list"]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Deleted(Record):
    """The answer to a deletion."""

    id: str
    object: str
    deleted: Literal[True]


class Trace(Record):
    """Chrome's trace format: `otherData.begin` is the unix time that the times count from."""

    traceEvents: list[dict[str, Any]]  # noqa: N815
    displayTimeUnit: Literal["ms"]  # noqa: N815
    otherData: dict[str, Any]  # noqa: N815
