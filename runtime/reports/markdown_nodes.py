"""Markdown nodes: the text of a report as a tree of nodes, in which nothing is markup any more.

CommonMark (https://spec.commonmark.org) with tables, read by markdown-it-py. HTML in it is text,
and a link of another scheme than http, https and mailto stays the text that it is.
"""

from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

from cray_agents.runtime.reports.report_records import ReportNode

#: Nodes whose content is their text.
TEXTS = {"text": "text", "code_inline": "code", "fence": "code_block", "code_block": "code_block"}
SCHEMES = ("http", "https", "mailto")
BREAKS = {"softbreak": "space", "hardbreak": "break", "hr": "rule"}


def nodes_of(text: str) -> list[ReportNode]:
    """Return the nodes of a text. Links have their target in `href` and their title in `info`."""
    tree = SyntaxTreeNode(_reader().parse(text))
    return list(_nodes(tree))


def title_of(nodes: list[ReportNode]) -> str:
    """Return the text of the first heading; "" without one."""
    return next((plain(node) for node in nodes if node.kind == "heading"), "")


def plain(node: ReportNode) -> str:
    """Return the text of a node and those within it."""
    if node.kind in ("space", "break"):
        return " "
    return node.text + "".join(map(plain, node.children))


def links_in(nodes: list[ReportNode]) -> Iterator[ReportNode]:
    """Yield the links, in their order."""
    for node in nodes:
        if node.kind == "link":
            yield node
        yield from links_in(node.children)


def _reader() -> MarkdownIt:
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.validateLink = _is_safe  # type: ignore[method-assign]
    return reader


def _is_safe(url: str) -> bool:
    scheme, colon, _ = url.strip().partition(":")
    return not colon or "/" in scheme or "#" in scheme or scheme.lower() in SCHEMES


def _nodes(node: SyntaxTreeNode) -> Iterator[ReportNode]:
    for child in node.children:
        if child.type == "inline":  # a holder of text, which has no node of its own
            yield from _nodes(child)
        elif child.type != "text" or child.content:
            yield _node_of(child)


def _node_of(node: SyntaxTreeNode) -> ReportNode:
    kind = node.type
    if kind in BREAKS:
        return ReportNode(kind=BREAKS[kind])
    if kind in TEXTS:
        return ReportNode(kind=TEXTS[kind], text=node.content, info=node.info.strip())
    if kind == "image":  # nothing elsewhere is loaded: its text stands for it
        return ReportNode(kind="text", text=node.content)
    level = int(node.tag[1:]) if kind == "heading" else 0
    return ReportNode(
        kind=kind,
        level=level,
        start=int(node.attrs.get("start", 1)) if kind == "ordered_list" else 0,
        href=str(node.attrs.get("href", "")),
        info=str(node.attrs.get("title", "")) if kind == "link" else "",
        children=list(_nodes(node)),
    )
