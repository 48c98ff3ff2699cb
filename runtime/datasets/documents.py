"""Documents: read texts from files, and cut their tokens to fill contexts.

A document is a line of a text file, the `text` of a JSON object, or a row of a Parquet file's
column `text`. Its tokens end with the tokenizer's end token. A document that does not fit into what
is left of a context is cut there, and goes on in the next one: the last token before the cut stands
again, as the first of the next piece. So every token but a document's first is learnt once, and
every context but the last has exactly `max_tokens` inputs. No piece attends to another.

Called by build.py, and by `cray-agents import`. Read next: trainers/data/stored_tokens.py, by which
jobs train on them.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.errors import BadInput, NotFound
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.chat_template import read_tokenizer
from cray_agents.runtime.datasets.considered_runs import ConsideredRun
from cray_agents.runtime.datasets.decontamination import BlockedTexts
from cray_agents.runtime.datasets.near_duplicates import KeptSamples
from cray_agents.runtime.datasets.run_samples import Span, TokenSample
from cray_agents.runtime.datasets.token_shards import SampleRow
from cray_agents.runtime.files.files import FileObject, Files
from cray_agents.tasks.readers import rows_of_parquet
from cray_agents.tasks.record_source import LONGEST, RecordSource

DOCUMENTS = "documents"  # the field of a recipe that names files
TEXT = "text"  # the field, or column, of a document
SUFFIXES = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")
TOGETHER = 256  # documents given to the tokenizer at once, which has several threads
TOGETHER_CHARACTERS = 1 << 22
COPIED_TOGETHER = 1 << 20  # bytes
PURPOSE = "user_data"  # of uploaded documents


class Document(NamedTuple):
    """A text and its place: `corpus.jsonl:17`, or `corpus.parquet: row 16`.

    `replaced`: it holds half a character (a lone surrogate), which became "?".
    """

    name: str
    text: str
    replaced: bool = False


def read_documents(path: Path, title: str = "") -> Iterator[Document]:
    """Yield the documents of a file, some of which may be blank. `title` is its name for people.

    Its kind follows from the title: see SUFFIXES. Raises BadInput, which names the line, for a file
    of another kind, that cannot be read, is not UTF-8, has no `text`, holds a document of more than
    LONGEST bytes, or no document at all.
    """
    title = title or path.name
    name = title.removesuffix(".gz").removesuffix(".zst")
    kind = next((kind for kind in SUFFIXES if name.lower().endswith(kind)), None)
    if kind is None:
        raise BadInput(
            f"{title}: documents are read from files ending in {', '.join(SUFFIXES)}; all but the"
            " last also compressed, as .gz or .zst",
            param=DOCUMENTS,
        )
    documents = (
        _of_parquet(path, title) if kind == ".parquet" else _of_records(path, title, kind == ".txt")
    )
    found = False
    for document in documents:
        found = found or bool(document.text.strip())
        yield document
    if not found:
        raise BadInput(f"{title} holds no documents: there is no text in it", param=DOCUMENTS)


def locate(files: Files, name: str) -> list[tuple[Path, str]]:
    """Return paths and titles: of an uploaded file by its id, a file, or all files in a folder.

    Raises BadInput.
    """
    try:
        return [(files.path(name), files.get(name).filename)]
    except NotFound:
        path = Path(name)
    try:
        if path.is_file():
            return [(path, path.name)]
        below = sorted(each for each in path.rglob("*") if each.is_file() and each.name[0] != ".")
    except OSError as error:  # for example, a name that is too long
        message = f"cannot read {name[:200]!r}: {error.strerror or error}"
        raise BadInput(message, param=DOCUMENTS) from error
    if not below or not name:  # Path("") is the working directory
        raise BadInput(
            f"{name[:200]!r} is neither an uploaded file's id nor a file, or folder with files, on"
            " this host",
            param=DOCUMENTS,
        )
    return [(each, str(each.relative_to(path))) for each in below]


def _of_parquet(path: Path, title: str) -> Iterator[Document]:
    try:
        for number, (_, row) in enumerate(rows_of_parquet(path, TEXT)):
            yield _document(f"{title}: row {number}", row[TEXT])
    except BadInput as error:  # its parameter is a task set's
        raise BadInput(str(error).replace(str(path), title), param=DOCUMENTS) from error


def _of_records(path: Path, title: str, plain: bool) -> Iterator[Document]:
    source, replaced = RecordSource(path, DOCUMENTS, title), 0
    for record in source.texts() if plain else source.records():
        place = f"{title}:{record.number}"
        if source.word != "line":
            place = f"{title}: {source.word} {record.number}"
        if record.problem is not None:
            raise BadInput(f"{place}: {record.problem}", param=DOCUMENTS)
        value = record.value
        if not plain:
            if not isinstance(value, dict) or TEXT not in value:
                names = ", ".join(map(repr, islice(value, 10))) if isinstance(value, dict) else ""
                raise BadInput(
                    f"{place}: not an object with {TEXT!r}, which holds the document; its fields:"
                    f" {names or 'none'}",
                    param=DOCUMENTS,
                )
            value = value[TEXT]
        yield _document(place, value)._replace(replaced=source.replaced > replaced)
        replaced = source.replaced


def _document(place: str, text: Any) -> Document:
    if not isinstance(text, str):
        raise BadInput(f"{place}: {TEXT!r} is no text, but {str(text)[:80]}", param=DOCUMENTS)
    if len(text) > LONGEST:
        raise BadInput(
            f"{place}: a document of {len(text) >> 20} MiB, and {LONGEST >> 20} MiB is the most"
            " that is read: cut it",
            param=DOCUMENTS,
        )
    return Document(place, text)


class DocumentTokenizer:
    """A checkpoint's tokenizer for whole texts. Raises BadInput if there is none, or no end."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = read_tokenizer(checkpoint)
        self._end = self._tokenizer.eos_token_id
        if self._end is None:
            raise BadInput(
                f"the tokenizer in {checkpoint} has no end token (eos_token), which stands behind"
                " every document",
                param="tokenizer",
            )

    def tokens(self, documents: Iterable[Document]) -> Iterator[tuple[Document, "array[int]"]]:
        """Yield each document with its tokens, none for a text of blanks alone."""
        for group in _groups(documents):
            rows = self._tokenizer([each.text for each in group], verbose=False)["input_ids"]
            for document, ids in zip(group, rows, strict=True):
                tokens = array("i", ids if document.text.strip() else ())
                if tokens and tokens[-1] != self._end:
                    tokens.append(self._end)
                yield document, tokens


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if len(group) == TOGETHER or size >= TOGETHER_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


class Cutter:
    """Cuts the documents of a split, one after the other, into pieces that fill contexts."""

    def __init__(self, context: int) -> None:
        self._context = self._left = context

    def samples(self, tokens: Sequence[int]) -> Iterator[TokenSample]:
        """Yield a document's pieces. The first token of each is only read."""
        last = len(tokens) - 1
        start = 0
        while start < last:
            count = min(last - start, self._left)
            yield TokenSample(
                array("i", tokens[start : start + count + 1]),
                array("f", bytes(4 * (count + 1))),
                [Span(1, 0), Span(count, 1)],
            )
            start += count
            self._left = self._left - count or self._context


def considered_documents(
    files: Files,
    recipe: DatasetRecipe,
    tokenizer: Path,
    blocked: BlockedTexts,
    seen: KeptSamples,
    split_of: Callable[[str], str],
) -> Iterator[tuple[ConsideredRun, str, list[SampleRow]]]:
    """Decide on the documents of a recipe, in the order of its files; `seen` keeps those accepted.

    Yields each one's line, its split and its rows, none if it is left out. Of several files with
    one title, the documents of the second are named `title (2):1`. Raises BadInput.
    """
    located = [locate(files, name) for name in recipe.documents]  # before the first is read
    tokenize = DocumentTokenizer(tokenizer)
    cutters: dict[str, Cutter] = {}
    titles = Counter[str]()
    for path, title in chain.from_iterable(located):
        titles[title] += 1
        label = title if titles[title] == 1 else f"{title} ({titles[title]})"
        for document, tokens in tokenize.tokens(read_documents(path, title)):
            name, reason, detail = label + document.name.removeprefix(title), None, None
            rows: list[SampleRow] = []
            split = split_of(document.text)
            if len(tokens) < 2:
                reason = "empty"
            elif (match := blocked.match(document.text)) is not None:
                reason, detail = "contaminated", match.description
            elif (repeat := seen.repeat(name, tokens)) is not None:
                reason, detail = repeat.reason, repeat.detail
            else:
                cutter = cutters.setdefault(split, Cutter(recipe.max_tokens or 1))
                samples = list(cutter.samples(tokens))
                if document.replaced:
                    samples[0].losses.add('half a character (a lone surrogate), which became "?"')
                rows = [SampleRow(one, name, "", 0.0) for one in samples]
            line = ConsideredRun(
                name, accepted=reason is None, reason=reason, detail=detail, samples=len(rows)
            )
            yield line, split, rows


def store_documents(files: Files, path: Path) -> tuple[FileObject, int]:
    """Check a file of documents, and keep it as an uploaded file; also return how many it holds.

    A file that is kept already, with this name, is not kept twice. Raises BadInput, StoreError.
    """
    count = sum(1 for document in read_documents(path) if document.text.strip())
    with files.blobs.draft() as draft:
        with path.open("rb") as source:
            while block := source.read(COPIED_TOGETHER):
                draft.write(block)
        blob = draft.publish()
    for file in files.list(purpose=PURPOSE).rows:
        if (file.sha256, file.filename) == (blob.sha256, path.name):
            return file, count
    return files.publish(blob, filename=path.name, purpose=PURPOSE), count
