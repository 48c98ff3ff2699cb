"""Documents: a tool that searches a folder of documents.

    agent = Agent(name="clerk", tools=[Documents("handbook").tool])

Passages of text and HTML files are ranked by the words that they share with a query: BM25 in
Lucene's variant (Robertson & Zaragoza 2009), by the bm25s library. Words are not stemmed, so that
any language works. With a model's embeddings passages are also ranked by meaning, the cosines of
their vectors, and the two rankings are fused.
"""

import fnmatch
import hashlib
import importlib.util
import io
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cray_agents.agent import user_code
from cray_agents.agent.tool import Tool, as_tool, tool
from cray_agents.errors import BadInput, EngineError, SetupError, StoreError, ToolError
from cray_agents.paths import host_cache
from cray_agents.records import digest
from cray_agents.tools import safe_paths
from cray_agents.tools.fetch import check_installed, html_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

# ---- passages: documents cut at blank lines, or by size, and the vectors of their texts on disk
# $CRAY_AGENTS_CACHE or /var/tmp
#   cray-agents-<uid>/documents/<digest of folder and patterns>-<FORMAT>.sqlite
# A deleted file is made anew. Several processes may use it.
SIZE = 1500  # characters in a passage, about 350 tokens
HTML = (".html", ".htm", ".xhtml")
FORMAT = 1  # of the file of vectors
FRESH = 2.0  # seconds; so new a file may change again without a change of its time
_SCHEMA = """
create table if not exists vectors(
    digest text not null, model text not null, vector blob not null, primary key(digest, model));
"""


class Unreadable(ValueError):
    """A file is not text; the message gives the reason."""


@dataclass(frozen=True)
class Passage:
    """Lines `first` to `last` of a file, from 1. For HTML they are lines of its text."""

    path: str
    first: int
    last: int
    text: str


class FolderPassages:
    """The passages of a folder's files that match `include`, in memory.

    `left_out` has the files that could not be read, with the reasons.
    """

    def __init__(self, folder: Path, include: Sequence[str], max_bytes: int) -> None:
        self._folder, self._include, self._max_bytes = folder, tuple(include), max_bytes
        self._files: dict[str, tuple[str, list[Passage]]] = {}  # stamp and passages by path
        self.left_out: dict[str, str] = {}

    def refresh(self) -> bool:
        """Read new and changed files, forget removed ones; return True if any file changed."""
        current = dict(self._scan())
        gone = self._files.keys() - current.keys()
        new = [path for path, stamp in current.items() if self._files.get(path, [""])[0] != stamp]
        for path in gone:
            del self._files[path]
            self.left_out.pop(path, None)
        for path in new:
            self._files[path] = (current[path], self._read(path))
        return bool(gone or new)

    def all(self) -> list[Passage]:
        """Return every passage, file by file."""
        return [passage for _, passages in self._files.values() for passage in passages]

    def _scan(self) -> Iterator[tuple[str, str]]:
        """Yield each file with a stamp that changes when the file does."""
        for path, _, _, about in safe_paths.walk(self._folder, "."):
            if not path.isprintable() or any(part.startswith(".") for part in path.split("/")):
                continue
            if not any(fnmatch.fnmatchcase(path, pattern) for pattern in self._include):
                continue
            fresh = "" if abs(time.time() - about.st_mtime) > FRESH else f" {time.time_ns()}"
            yield path, f"{about.st_mtime_ns} {about.st_size} {about.st_ino}{fresh}"

    def _read(self, path: str) -> list[Passage]:
        self.left_out.pop(path, None)
        try:
            data = safe_paths.read(self._folder, path, self._max_bytes)
            return list(passages_of(path, read_document(path, data)))
        except (ToolError, Unreadable) as error:
            self.left_out[path] = str(error)
            return []


class VectorFile:
    """The vectors of texts, by model and digest, for the documents of a folder."""

    def __init__(self, folder: Path, include: Sequence[str]) -> None:
        place = host_cache() / "documents"
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            self._base = sqlite3.connect(
                place / f"{digest([os.fsdecode(folder), *include])}-{FORMAT}.sqlite",
                timeout=60, check_same_thread=False, isolation_level=None,
            )  # fmt: skip
            self._base.execute("pragma journal_mode = wal")
            self._base.execute("pragma synchronous = off")  # lost vectors are made again
            self._base.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot keep vectors of {folder} in {place}: {error}") from error

    def read(self, model: str) -> dict[str, bytes]:
        """Return the stored vectors of a model, by the digest of their text."""
        rows = self._base.execute("select digest, vector from vectors where model = ?", (model,))
        return dict(rows)

    def keep(self, model: str, vectors: Mapping[str, bytes]) -> None:
        """Store vectors, by the digest of their text."""
        rows = [(digest, model, vector) for digest, vector in vectors.items()]
        self._base.executemany("insert or replace into vectors values (?, ?, ?)", rows)


def digest_of(text: str) -> str:
    """Return a hash of a text, so that equal passages share a vector."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_document(path: str, data: bytes) -> str:
    """Return a file's text. Raises Unreadable."""
    if path.lower().endswith(HTML):
        return html_text(data)
    if b"\0" in data:
        raise Unreadable("not text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("not UTF-8 text") from error


def passages_of(path: str, text: str) -> Iterator[Passage]:
    """Cut a text into passages of about SIZE characters, none empty. Very long lines are cut."""
    pieces: list[str] = []
    first = 1
    for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
        size = sum(map(len, pieces))
        # a paragraph or a section begins with this line
        starts = line.startswith("#") or (pieces and not pieces[-1].strip() and line.strip())
        if pieces and (size + len(line) > SIZE or (size > SIZE // 2 and starts)):
            yield from _make_passages(path, first, number - 1, "".join(pieces))
            pieces, first = [], number
        pieces.append(line)
    if pieces:
        yield from _make_passages(path, first, first + len(pieces) - 1, "".join(pieces))


def _make_passages(path: str, first: int, last: int, text: str) -> Iterator[Passage]:
    for at in range(0, len(text), SIZE):
        if (piece := text[at : at + SIZE].strip("\n")).strip():
            yield Passage(path, first, last, piece)


WORD = r"(?u)\b\w+\b"
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


@dataclass(frozen=True)
class Embeddings:
    """The source of vectors: `/v1/embeddings` of a gateway or other OpenAI-compatible server.

    `base_url` and `api_key` default as an agent's do. `batch` is the number of texts in a request.
    """

    model: str
    base_url: str | None = None
    api_key: str | None = None
    batch: int = 64


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
            `refresh()` did its work before. A process reads all files once; vectors stay on disk.

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
        self._files = FolderPassages(self.folder, include, MAX_BYTES)
        self._passages: list[Passage] = []
        self._bm25 = Bm25Index()
        self._meanings: MeaningIndex | None = None
        if embeddings:
            self._meanings = MeaningIndex(embeddings, VectorFile(self.folder, include))
        self._search_lock = threading.Lock()
        self.tool: Tool = as_tool(tool(name=name, timeout=timeout)(self._search_tool()))

    @property
    def left_out(self) -> dict[str, str]:
        """The files left out of the last search or `refresh`, with the reasons."""
        return dict(self._files.left_out)

    def refresh(self) -> int:
        """Read new files, and request their vectors; return the number of passages.

        Raises EngineError and its subclasses when the embeddings fail.
        """
        with self._search_lock:
            self._index()
            if self._meanings is not None:
                self._meanings.rank("anything", 1)  # requests all missing vectors
            return len(self._passages)

    def search(self, query: str, limit: int = 5) -> list[FoundPassage]:
        """Return the best passages for a query, best first.

        `score` is BM25's, or with embeddings that of reciprocal rank fusion. Raises as `refresh`.
        """
        with self._search_lock:
            self._index()
            ranking = self._bm25.rank(query, DEPTH)
            if self._meanings is not None:
                nearest = self._meanings.rank(query, DEPTH)
                ranking = fuse_rankings([number for number, _ in ranking], nearest)
            best = [(self._passages[number], score) for number, score in ranking[:limit]]
            return [
                FoundPassage(one.path, (one.first, one.last), round(score, 4), one.text)
                for one, score in best
            ]

    def _index(self) -> None:
        """Bring the rankings up to date with the folder."""
        if self._files.refresh():
            self._passages = self._files.all()
            self._bm25.index(self._passages)
            if self._meanings is not None:
                self._meanings.index(self._passages)

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


class Bm25Index:
    """An index in memory. Raises SetupError if bm25s is missing."""

    def __init__(self) -> None:
        if importlib.util.find_spec("bm25s") is None:
            raise SetupError("documents are searched with bm25s: pip install 'cray-agents[tools]'")
        self._scorer: Any = None

    def index(self, passages: Sequence[Passage]) -> None:
        """Replace the index by these passages. The words of their paths count, too."""
        import bm25s

        self._scorer = None
        if passages:
            self._scorer = bm25s.BM25()
            words = _words([f"{one.path} {one.text}" for one in passages])
            self._scorer.index(words, show_progress=False)

    def rank(self, query: str, depth: int) -> list[tuple[int, float]]:
        """Return the best passages' numbers with their scores, if they share a word."""
        (wanted,) = _words([query])
        if self._scorer is None or not wanted:
            return []
        scores = self._scorer.get_scores(wanted)
        best = (-scores).argsort(kind="stable")[:depth]
        return [(int(at), float(scores[at])) for at in best if scores[at] > 0]


class MeaningIndex:
    """The vectors of the indexed passages, requested on demand.

    The file keeps them by model and version: a newly promoted version makes them anew.
    """

    def __init__(self, embeddings: Embeddings, file: VectorFile) -> None:
        # late: it imports the openai client
        from cray_agents.engines.openai_engine import OpenAIEngine

        self._embeddings, self._file = embeddings, file
        self._engine = OpenAIEngine(embeddings.base_url, api_key=embeddings.api_key)
        self._texts: list[tuple[str, str]] = []  # digest, text
        self._known: tuple[str, Vectors] | None = None

    def index(self, passages: Sequence[Passage]) -> None:
        """Replace the index by these passages."""
        self._texts = [(digest_of(passage.text), passage.text) for passage in passages]
        self._known = None

    def rank(self, query: str, depth: int) -> list[int]:
        """Return the numbers of the passages nearest to the query. Raises EngineError."""
        model, query_vectors = self._vectors([query])
        if self._known is None or self._known[0] != model:
            self._known = (model, self._all_vectors(model))
        nearness = self._known[1] @ query_vectors[0]
        return [int(at) for at in (-nearness).argsort(kind="stable")[:depth]]

    def _all_vectors(self, model: str) -> "Vectors":
        """Return all passages' vectors, [passages, dimensions], by this version of a model."""
        import numpy as np

        kept = self._file.read(model)
        missing = {digest: text for digest, text in self._texts if digest not in kept}
        wanted, size = list(missing.items()), self._embeddings.batch
        for begin in range(0, len(wanted), size):
            batch = wanted[begin : begin + size]
            answered, vectors = self._vectors([text for _, text in batch])
            if answered != model:
                changed = f"{model} became {answered} while vectors were made: search again"
                raise EngineError(changed)
            digests = (digest for digest, _ in batch)
            made = dict(zip(digests, (vector.tobytes() for vector in vectors), strict=True))
            self._file.keep(model, made)
            kept |= made
        if not self._texts:
            return np.zeros((0, 1), np.float32)
        return np.stack([np.frombuffer(kept[digest], np.float32) for digest, _ in self._texts])

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


def _words(texts: list[str]) -> list[list[str]]:
    import bm25s

    words: list[list[str]] = bm25s.tokenize(
        texts, stopwords=None, token_pattern=WORD, return_ids=False, show_progress=False
    )
    return words
