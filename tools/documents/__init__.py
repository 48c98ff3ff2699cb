"""Search over a folder of documents, as a tool.

    agent = Agent(name="clerk", tools=[Documents("handbook").tool])

Words are ranked by BM25 (words.py), and meanings by a model's embeddings where one is named
(meanings.py); the two rankings are joined. What is found are passages (passages.py) of text and
HTML files. What was read of them lies in a file on this host (shelf.py), never in the folder.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cray_agents.agent.tool import Tool, as_tool, tool
from cray_agents.errors import BadInput, ToolError
from cray_agents.tools.documents.bm25_index import Bm25Index
from cray_agents.tools.documents.embedding_index import EmbeddingIndex, Embeddings
from cray_agents.tools.documents.passage_store import PassageStore
from cray_agents.tools.html_text import check_installed

__all__ = ["Documents", "Embeddings", "Found", "fused"]

MAX_BYTES = 8 * 2**20  # of a file; larger ones are left out
MAX_FOUND = 20
FUSION = 60  # k of reciprocal rank fusion
DEPTH = 100  # of each ranking that is joined


@dataclass(frozen=True)
class FoundPassage:
    """A passage that was found. `lines` are the first and the last, from 1, in its file."""

    path: str
    lines: tuple[int, int]
    score: float
    text: str


class Documents:
    """The text files below a folder, to search in.

    Each search looks first whether files came, changed or went. Hidden files, symbolic links,
    files that are no UTF-8 text and those above 8 MiB are left out: `left_out` says which and why.

    Args:
        folder: where the documents are.
        include: patterns that paths must fit, such as '*.md'.
        embeddings: where vectors come from; None: BM25 alone.
        name: what models call the tool.
        timeout: seconds a search may take. The first of many files takes longer: `refresh()`
            beforehand does that work.

    Raises BadInput for a folder that is none, SetupError where bm25s or lxml are missing.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        include: Sequence[str] = ("*",),
        embeddings: Embeddings | None = None,
        name: str = "search_documents",
        timeout: float = 60.0,
    ) -> None:
        self.folder = Path(folder).resolve()
        if not self.folder.is_dir():
            raise BadInput(f"{folder} is not a folder", param="folder")
        if isinstance(include, str):
            raise BadInput(f"include={include!r}: give a list of patterns", param="include")
        check_installed()
        self._shelf = PassageStore(self.folder, include, MAX_BYTES)
        self._words = Bm25Index()
        self._meanings = EmbeddingIndex(embeddings, self._shelf) if embeddings else None
        self._one_searches = threading.Lock()
        self._indexed = False
        self.tool: Tool = as_tool(tool(name=name, timeout=timeout)(self._search_tool()))

    @property
    def left_out(self) -> dict[str, str]:
        """The files that cannot be searched, and why; after a search or `refresh`."""
        return self._shelf.left_out()

    def refresh(self) -> int:
        """Read what is new, and ask for its vectors; returns the number of passages.

        Raises EngineError and its kinds when the embeddings cannot be had.
        """
        with self._one_searches:
            self._index()
            if self._meanings is not None:
                self._meanings.prepare()
            return len(self._words)

    def search(self, query: str, limit: int = 5) -> list[FoundPassage]:
        """The best passages for a query, best first.

        `score` is BM25's, or with embeddings that of reciprocal rank fusion. Raises as `refresh`.
        """
        with self._one_searches:
            self._index()
            ranked = self._words.ranked(query, DEPTH)
            if self._meanings is not None:
                nearest = self._meanings.ranked(query, DEPTH)
                ranked = fused([number for number, _ in ranked], nearest)
            return [
                FoundPassage(one.path, (one.first, one.last), round(score, 4), one.text)
                for one, score in self._shelf.passages(ranked[:limit])
            ]

    def _index(self) -> None:
        """Bring the rankings up to date with the folder."""
        if self._shelf.refresh() or not self._indexed:
            passages = list(self._shelf.all())
            self._words.index(passages)
            if self._meanings is not None:
                self._meanings.index(passages)
            self._indexed = True

    def _search_tool(self) -> Callable[..., list[FoundPassage]]:
        def search_documents(query: str, limit: int = 5) -> list[FoundPassage]:
            """Search the documents; gives passages with their file and lines, the best first.

            Args:
                query: some words of what is looked for, as they may stand there.
                limit: how many passages at most, up to 20.
            """
            if not query.strip():
                raise ToolError("query is empty: give some words")
            if not 1 <= limit <= MAX_FOUND:
                raise ToolError(f"limit={limit}: must be 1 to {MAX_FOUND}")
            return self.search(query, limit)

        return search_documents


def fused(*rankings: Sequence[int]) -> list[tuple[int, float]]:
    """Reciprocal rank fusion: best first, with the sum of 1 / (60 + rank) as the score.

    Cormack, Clarke & Büttcher 2009.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, 1):
            scores[number] = scores.get(number, 0.0) + 1 / (FUSION + rank)
    return sorted(scores.items(), key=lambda pair: -pair[1])
