"""Report records: the stored report, and what the routes answer. Times are unix seconds."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from cray_agents.records import Record, StrictRecord

#: What a citation names, by the first word of its link.
CitedKind = Literal["run", "dataset", "job", "generation", "pair", "model"]


class StoredReport(Record):
    """A report as it is on the shared root. `author`: the key that wrote it last; "" for none."""

    id: str
    text: str
    author: str
    created: float
    updated: float


class ReportSummary(Record):
    """A report in a list. `title`: its first heading, else its id.

    `damaged`: its file is not what its checksum says, so only its id and its time are known.
    """

    id: str
    title: str
    damaged: bool = False
    author: str
    created: float
    updated: float
    bytes: int


class Citation(Record):
    """A link of a report to what the platform recorded, as it was verified just now.

    href: the link, as `#/run/RUN?t=4`. quote: the link's title; None: it names a thing and quotes
    nothing. at: the turn of a run, the number of a generation's pair. tokens: the first and the
    last of a turn, from 0. kind: None where the link names nothing that can be. `error` says why it
    is broken; "" for one that holds.
    """

    href: str
    label: str
    kind: CitedKind | None
    id: str
    at: int | None = None
    tokens: tuple[int, int] | None = None
    quote: str | None = None
    ok: bool
    error: str = ""


class ReportNode(Record):
    """A part of a report's text, as Markdown has it; a field that says nothing is absent.

    kind: heading, paragraph, text, strong, link and so on. level: of a heading. info: the language
    of code. start: the first number of a list. citation: the place of a link in `citations`.
    """

    kind: str
    text: str = ""
    level: int = 0
    info: str = ""
    start: int = 0
    href: str = ""
    citation: int | None = None
    children: list["ReportNode"] = Field(default_factory=list)


class Report(ReportSummary):
    """A report with its text, the nodes of its text, and its citations in their order."""

    text: str
    broken: int
    citations: list[Citation]
    nodes: list[ReportNode]


class Highlight(StrictRecord):
    """Words of a turn (from 0) to be marked on a page, and why."""

    turn: Annotated[int, Field(ge=0, lt=10**9)]
    quote: Annotated[str, StringConstraints(min_length=1, max_length=10_000)]
    reason: Annotated[str, StringConstraints(max_length=1000)] = ""


class View(StrictRecord):
    """A page to be shown. `url`: of its address what begins with `#/`."""

    url: Annotated[str, StringConstraints(pattern=r"^/?#/", max_length=2000)]
    highlight: Annotated[list[Highlight], Field(max_length=100)] = Field(default_factory=list)
