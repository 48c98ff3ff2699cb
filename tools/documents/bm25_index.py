"""BM25 index: rank passages by the words that they share with a query, by the bm25s library.

Robertson & Zaragoza 2009, in Lucene's variant. Words are not stemmed, so that any language works.
Called by documents/__init__.py.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

from cray_agents.errors import SetupError
from cray_agents.tools.documents.passages import Passage

WORD = r"(?u)\b\w+\b"


class Bm25Index:
    """An index in memory. Raises SetupError if bm25s is missing."""

    def __init__(self) -> None:
        if importlib.util.find_spec("bm25s") is None:
            raise SetupError("documents are searched with bm25s: pip install 'cray-agents[tools]'")
        self._numbers: list[int] = []
        self._scorer: Any = None

    def __len__(self) -> int:
        return len(self._numbers)

    def index(self, passages: Sequence[tuple[int, Passage]]) -> None:
        """Replace the index by these (number, passage). The words of their paths count, too."""
        import bm25s

        self._numbers, self._scorer = [number for number, _ in passages], None
        if passages:
            self._scorer = bm25s.BM25()
            words = _words([f"{one.path} {one.text}" for _, one in passages])
            self._scorer.index(words, show_progress=False)

    def rank(self, query: str, depth: int) -> list[tuple[int, float]]:
        """Return the best numbers with their scores, best first, if they share a word."""
        (wanted,) = _words([query])
        if self._scorer is None or not wanted:
            return []
        scores = self._scorer.get_scores(wanted)
        best = (-scores).argsort(kind="stable")[:depth]
        return [(self._numbers[at], float(scores[at])) for at in best if scores[at] > 0]


def _words(texts: list[str]) -> list[list[str]]:
    import bm25s

    words: list[list[str]] = bm25s.tokenize(
        texts, stopwords=None, token_pattern=WORD, return_ids=False, show_progress=False
    )
    return words
