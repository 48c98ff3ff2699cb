"""Report files: the reports of a root, one file each, replaced as a whole."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.reports.report_records import ReportSummary, StoredReport
from cray_agents.runtime.reports.verified_report import summary_of

END = ".json"


class Reports:
    """The reports under a home. The controller alone writes them."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def put(self, report_id: str, text: str, author: str) -> StoredReport:
        """Write a report, or replace it, even a damaged one. It is durable on return."""
        created = now = time.time()
        with suppress(NotFound, Corrupt):
            created = self.get(report_id).created
        report = StoredReport(id=report_id, text=text, author=author, created=created, updated=now)
        content = checksums.with_crc(report.model_dump_json().encode())
        durable.replace_file(self._path(report_id), content)
        return report

    def get(self, report_id: str) -> StoredReport:
        """Return a report. Raises NotFound, Corrupt."""
        try:
            return checksums.read_record(StoredReport, self._path(report_id))
        except FileNotFoundError:
            raise NotFound(f"no report {report_id!r}", param="report") from None

    def list(self, after: str | None, limit: int) -> tuple[list[ReportSummary], bool]:
        """Return a page of reports, the last written first, and whether there are more.

        Raises BadInput where `after` is no report's id.
        """
        reports = sorted(self._all(), key=lambda one: (-one.updated, one.id))
        if after is not None:
            ids = [one.id for one in reports]
            if after not in ids:
                raise BadInput(f"after: no report {after[:200]!r} is listed here", param="after")
            reports = reports[ids.index(after) + 1 :]
        return reports[:limit], len(reports) > limit

    def delete(self, report_id: str) -> None:
        """Delete a report for good. Raises NotFound."""
        try:
            self._path(report_id).unlink()
        except FileNotFoundError:
            raise NotFound(f"no report {report_id!r}", param="report") from None
        durable.sync(self._home.reports)

    def _all(self) -> Iterator[ReportSummary]:
        try:
            with os.scandir(self._home.reports) as entries:
                names = [entry.name for entry in entries]
        except FileNotFoundError:
            return
        for name in names:
            if name.endswith(END) and name[:1] != ".":
                with suppress(NotFound, FileNotFoundError):  # deleted just now
                    yield self._summary(name.removesuffix(END))

    def _summary(self, report_id: str) -> ReportSummary:
        try:
            return summary_of(self.get(report_id))
        except Corrupt:
            status = self._path(report_id).stat()
            return ReportSummary(
                id=report_id,
                title=report_id,
                damaged=True,
                author="",
                created=status.st_mtime,
                updated=status.st_mtime,
                bytes=status.st_size,
            )

    def _path(self, report_id: str) -> Path:
        return self._home.reports / f"{report_id}{END}"
