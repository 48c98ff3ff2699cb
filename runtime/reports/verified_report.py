"""Verified reports: a stored report with its nodes, and its citations compared with the records."""

from cray_agents.runtime.reports.citations import CitationChecker
from cray_agents.runtime.reports.markdown_nodes import nodes_of, plain, title_of
from cray_agents.runtime.reports.report_records import (
    Citation,
    Report,
    ReportNode,
    ReportSummary,
    StoredReport,
)


def summary_of(stored: StoredReport, nodes: list[ReportNode] | None = None) -> ReportSummary:
    """Return a report as it stands in a list. `nodes`: those of its text, if they are known."""
    title = title_of(nodes_of(stored.text) if nodes is None else nodes)
    return ReportSummary(
        id=stored.id,
        title=title or stored.id,
        author=stored.author,
        created=stored.created,
        updated=stored.updated,
        bytes=len(stored.text.encode("utf-8", "surrogatepass")),
    )


def verified(stored: StoredReport, checker: CitationChecker) -> Report:
    """Return a report with every citation verified now. Raises StoreError."""
    citations: list[Citation] = []

    def take(node: ReportNode) -> ReportNode:
        citation = checker.check(node, plain(node)) if node.kind == "link" else None
        if citation is None:
            return node.model_copy(update={"children": list(map(take, node.children))})
        citations.append(citation)
        return node.model_copy(update={"citation": len(citations) - 1})

    nodes = nodes_of(stored.text)
    return Report(
        **summary_of(stored, nodes).model_dump(),
        text=stored.text,
        nodes=list(map(take, nodes)),
        broken=sum(not one.ok for one in citations),
        citations=citations,
    )
