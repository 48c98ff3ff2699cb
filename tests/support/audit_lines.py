"""Audit lines: those of a root's log, oldest first."""

from pathlib import Path

from cray_agents.runtime.disk import journal
from cray_agents.runtime.telemetry.audit_log import AuditLine


def read_audit(folder: Path) -> list[AuditLine]:
    """Return all lines. Raises Corrupt."""
    files = (journal.read(path, AuditLine) for path in folder.glob("*.jsonl"))
    return sorted((line for lines in files for line in lines), key=lambda line: line.time)
