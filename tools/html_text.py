"""HTML text: extract the text of an HTML page, for a model.

It uses lxml, whose parser takes linear time. The standard library's takes minutes for some pages of
100 KB (CPython 3.11). Called by fetch.py and documents.py.
"""

import codecs
import importlib.util
import re
from urllib.parse import urljoin

from cray_agents.errors import SetupError

_SILENT = {"script", "style", "template", "noscript", "svg", "iframe", "object"}
_BLOCKS = frozenset(
    ["address", "article", "aside", "blockquote", "body", "dd", "details", "dialog", "div", "dl",
     "dt", "fieldset", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header",
     "hr", "html", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "title",
     "tr", "ul"]
)  # fmt: skip


def check_installed() -> None:
    """Raise SetupError if lxml is missing."""
    if importlib.util.find_spec("lxml") is None:
        raise SetupError("HTML is read with lxml: pip install 'cray-agents[tools]'")


def html_text(body: bytes, charset: str | None = None, url: str = "") -> str:
    """Return a line for each block; headings as `# text`, links as `text <address>`.

    `charset` is the server's; without it, UTF-8 if the page is valid UTF-8, else the page's own.
    `url` makes links absolute. Raises SetupError if lxml is missing.
    """
    check_installed()
    from lxml import etree, html

    parser = html.HTMLParser(encoding=_encoding(body, charset), remove_comments=True)
    try:
        tree = html.document_fromstring(body, parser=parser)
    except etree.ParserError:  # the page is empty
        return ""
    pieces: list[str] = []
    silent = 0
    for event, element in etree.iterwalk(tree, events=("start", "end")):
        tag = element.tag if isinstance(element.tag, str) else ""
        if event == "start":
            silent += tag in _SILENT
            if not silent:
                pieces += [_before(tag), _collapse_spaces(element.text)]
        else:
            if not silent:
                pieces.append(_after(tag, element, url))
            silent -= tag in _SILENT
            if not silent:
                pieces.append(_collapse_spaces(element.tail))
    lines = (" ".join(line.split()) for line in "".join(pieces).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _before(tag: str) -> str:
    if re.fullmatch("h[1-6]", tag):
        return f"\n\n{'#' * int(tag[1])} "
    if tag in ("br", "li"):
        return "\n- " if tag == "li" else "\n"
    return "\n" if tag in _BLOCKS else ""


def _after(tag: str, element: object, url: str) -> str:
    if tag == "a" and (link := getattr(element, "get")("href")):  # noqa: B009 - lxml has no types
        try:
            address = urljoin(url, link)
        except ValueError:  # such as http://[your-host]/
            return ""
        return f" <{address}>" if address.startswith(("http://", "https://")) else ""
    if tag in ("td", "th"):
        return " | "
    return "\n" if tag in _BLOCKS else ""


def _collapse_spaces(text: str | None) -> str:
    """Replace runs of blanks, line breaks included, by one space."""
    return re.sub(r"\s+", " ", text) if text else ""


def _encoding(body: bytes, charset: str | None) -> str | None:
    try:
        if charset is not None:
            return codecs.lookup(charset).name
        codecs.getincrementaldecoder("utf-8")().decode(body)  # may end within a character
    except (LookupError, UnicodeDecodeError):
        return None
    return "utf-8"
