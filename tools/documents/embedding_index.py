"""Embedding index: rank passages by meaning, the cosines of a model's embeddings.

The passage store keeps the vectors by model and version. A newly promoted version makes them anew.
Called by documents/__init__.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cray_agents.agent import user_code
from cray_agents.errors import EngineError
from cray_agents.tools.documents.passage_store import PassageStore, digest_of
from cray_agents.tools.documents.passages import Passage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Embeddings:
    """The source of vectors: `/v1/embeddings` of a gateway or other OpenAI-compatible server.

    `base_url` and `api_key` default as an agent's do. `batch` is the number of texts in a request.
    """

    model: str
    base_url: str | None = None
    api_key: str | None = None
    batch: int = 64


class EmbeddingIndex:
    """The vectors of the indexed passages, requested on demand."""

    def __init__(self, embeddings: Embeddings, store: PassageStore) -> None:
        from cray_agents.engines.openai_engine import (
            OpenAIEngine,  # late: it imports the openai client
        )

        self._embeddings, self._store = embeddings, store
        self._engine = OpenAIEngine(embeddings.base_url, api_key=embeddings.api_key)
        self._numbers: list[int] = []
        self._digests: list[str] = []
        self._known: tuple[str, Vectors] | None = None

    def index(self, passages: Sequence[tuple[int, Passage]]) -> None:
        """Replace the index by these (number, passage)."""
        self._numbers = [number for number, _ in passages]
        self._digests = [digest_of(passage.text) for _, passage in passages]
        self._known = None

    def prepare(self) -> None:
        """Request all missing vectors. Raises EngineError and its subclasses."""
        self.rank("anything", 1)

    def rank(self, query: str, depth: int) -> list[int]:
        """Return the numbers of the passages nearest to the query. Raises EngineError."""
        model, query_vectors = self._vectors([query])
        if self._known is None or self._known[0] != model:
            self._known = (model, self._all_vectors(model))
        nearness = self._known[1] @ query_vectors[0]
        return [self._numbers[at] for at in (-nearness).argsort(kind="stable")[:depth]]

    def _all_vectors(self, model: str) -> "Vectors":
        """Return all passages' vectors, [passages, dimensions], by this version of a model."""
        import numpy as np

        kept = self._store.vectors(model)
        missing = {
            digest: number
            for digest, number in zip(self._digests, self._numbers, strict=True)
            if digest not in kept
        }
        for batch in _batches(list(missing.items()), self._embeddings.batch):
            numbers = [(at, 0.0) for _, at in batch]
            texts = [passage.text for passage, _ in self._store.passages(numbers)]
            if len(texts) < len(batch):
                raise EngineError("the documents changed while they were read: search again")
            answered, vectors = self._vectors(texts)
            if answered != model:
                raise EngineError(
                    f"{model} became {answered} while vectors were made: search again"
                )
            made = {
                digest: vector.tobytes() for (digest, _), vector in zip(batch, vectors, strict=True)
            }
            self._store.keep_vectors(model, made)
            kept |= made
        if not self._digests:
            return np.zeros((0, 1), np.float32)
        return np.stack([np.frombuffer(kept[digest], np.float32) for digest in self._digests])

    def _vectors(self, texts: list[str]) -> tuple[str, "Vectors"]:
        """Return the version that answered, and a vector of length 1 for each text."""
        import numpy as np

        model, rows = user_code.wait_for(self._request_embeddings(texts))
        vectors = np.asarray(rows, np.float32)
        return model, vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    async def _request_embeddings(self, texts: list[str]) -> tuple[str, list[list[float]]]:
        import openai

        try:
            with self._engine.connections.borrow() as client:
                answer = await client.embeddings.create(model=self._embeddings.model, input=texts)
        except openai.OpenAIError as error:
            raise EngineError(
                f"{self._engine.base_url} gave no embeddings of {self._embeddings.model!r}: {error}"
            ) from error
        return answer.model, [item.embedding for item in sorted(answer.data, key=lambda d: d.index)]


def _batches(items: list[tuple[str, int]], size: int) -> Iterator[list[tuple[str, int]]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]
