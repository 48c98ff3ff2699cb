"""Documents: a tool that searches a folder of documents.

    agent = Agent(name="clerk", tools=[Documents("handbook").tool])

Passages (passages.py) of text and HTML files are ranked by BM25 (bm25_index.py). With a model's
embeddings (embedding_index.py) they are also ranked by meaning, and the two rankings are fused. The
index is in a file on this host (passage_store.py), never in the folder.
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

__all__ = ["Documents", "Embeddings", "FoundPassage", "fuse_rankings"]

MAX_BYTES = 8 * 2**20  # size of a file; larger ones are left out
MAX_PASSAGES = 20
FUSION = 60  # k of reciprocal rank fusion
DEPTH = 100  # passages of each ranking to fuse


@dataclass(frozen=True)
class FoundPassage:
    """A passage in a search result. `lines` are its first and last line in the file, from 1."""

    path: str
    lines: tuple[int, int]
    score: float
    text: str


class Documents:
    """The searchable text files below a folder.

    Each search first looks for new, changed and removed files. Hidden files, symbolic links, files
    above 8 MiB and those that are not UTF-8 text are left out; `left_out` gives them with reasons.

    Args:
        folder: the folder of the documents.
        include: patterns that paths must match, such as '*.md'.
        embeddings: source of the vectors; None: BM25 alone.
        name: the tool's name for models.
        timeout: seconds that a search may take. The first search of many files takes longer, unless
            `refresh()` did its work before.

    Raises BadInput if there is no such folder, SetupError if bm25s or lxml are missing.
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
        self._store = PassageStore(self.folder, include, MAX_BYTES)
        self._bm25 = Bm25Index()
        self._embedding_index = EmbeddingIndex(embeddings, self._store) if embeddings else None
        self._search_lock = threading.Lock()
        self._indexed = False
        self.tool: Tool = as_tool(tool(name=name, timeout=timeout)(self._search_tool()))

    @property
    def left_out(self) -> dict[str, str]:
        """The files left out of the last search or `refresh`, with the reasons."""
        return self._store.left_out()

    def refresh(self) -> int:
        """Read new files, and request their vectors; return the number of passages.

        Raises EngineError and its subclasses when the embeddings fail.
        """
        with self._search_lock:
            self._index()
            if self._embedding_index is not None:
                self._embedding_index.prepare()
            return len(self._bm25)

    def search(self, query: str, limit: int = 5) -> list[FoundPassage]:
        """Return the best passages for a query, best first.

        `score` is BM25's, or with embeddings that of reciprocal rank fusion. Raises as `refresh`.
        """
        with self._search_lock:
            self._index()
            ranking = self._bm25.rank(query, DEPTH)
            if self._embedding_index is not None:
                nearest = self._embedding_index.rank(query, DEPTH)
                ranking = fuse_rankings([number for number, _ in ranking], nearest)
            return [
                FoundPassage(one.path, (one.first, one.last), round(score, 4), one.text)
                for one, score in self._store.passages(ranking[:limit])
            ]

    def _index(self) -> None:
        """Bring the rankings up to date with the folder."""
        if self._store.refresh() or not self._indexed:
            passages = list(self._store.all())
            self._bm25.index(passages)
            if self._embedding_index is not None:
                self._embedding_index.index(passages)
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
            if not 1 <= limit <= MAX_PASSAGES:
                raise ToolError(f"limit={limit}: must be 1 to {MAX_PASSAGES}")
            return self.search(query, limit)

        return search_documents


def fuse_rankings(*rankings: Sequence[int]) -> list[tuple[int, float]]:
    """Fuse rankings by reciprocal rank: the score is the sum of 1 / (60 + rank), best first.

    Cormack, Clarke & Büttcher 2009.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, 1):
            scores[number] = scores.get(number, 0.0) + 1 / (FUSION + rank)
    return sorted(scores.items(), key=lambda pair: -pair[1])
