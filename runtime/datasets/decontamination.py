"""Decontamination: find texts that equal, resemble or contain a text held out from training.

`BlockedTexts.of` collects the texts that a queries.Decontamination names. They are inputs of
held-out tasks, from the journals of loops (cray_agents/loop/evaluator.py) and from runs, and
texts of given files. cray_agents/tasks/text_index.py compares them. Called by build.py and
selection.py.

Files are JSONL or plain text. The text of a JSON object is its `input`, `prompt`, `question`,
`text` or last user message. Any other line is a text itself.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cray_agents.errors import BadInput, NotFound
from cray_agents.exact_json import DEEPEST_FOREIGN, parse_json
from cray_agents.messages import asked_text, first_question, text_of
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunQuery
from cray_agents.records import Message, Run
from cray_agents.runtime.datasets.recipe import LOOP
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.store import Store
from cray_agents.tasks.leakage import HELD_OUT_ENTRY, HeldOut, task_key
from cray_agents.tasks.record_source import TooLong, lines_of
from cray_agents.tasks.text_index import TextIndex
from cray_agents.text_words import SIMILAR, words_of

FILES = "decontamination.files"
FIELDS = ("input", "prompt", "question", "text", "messages")


class HeldText(NamedTuple):
    """A text held out from training, and its source: `holdout task 3f2a`, `f.jsonl:17`.

    With `world`, the text is the key of a task with a world (leakage.task_key). Then only the task
    is held out, not its input.
    """

    source: str
    text: str
    world: bool = False


class Match(NamedTuple):
    """A match with a held text: its source, and the Jaccard similarity of word 5-grams.

    `how` is `equal` up to case, spaces and punctuation (similarity 1.0), `near`, or `contained`. A
    contained text occurs word for word in the other text, however long that one is.
    """

    source: str
    similarity: float
    how: Literal["equal", "near", "contained"]

    @property
    def description(self) -> str:
        """The match in words: `similar (0.913) to holdout task 3f2a`."""
        if self.how == "near":
            return f"similar ({self.similarity:.3f}) to {self.source}"
        return f"{'equal to' if self.how == 'equal' else 'holds all of'} {self.source}"


class BlockedTexts:
    """The held texts of a recipe, in an index."""

    def __init__(self, texts: Iterable[HeldText], threshold: float = SIMILAR) -> None:
        self._blocked: dict[str, str] = {}  # by key: the source of the first of equal texts
        for each in texts:
            key = each.text if each.world else _key(each.text)
            if key:
                self._blocked.setdefault(key, each.source)
        self._sources = list(self._blocked.values())
        self._index = TextIndex(self._blocked, threshold)
        self._known: dict[str, Match | None] = {}  # results of the last match_any call

    def __len__(self) -> int:
        """Return the number of different texts and worlds."""
        return len(self._blocked)

    @classmethod
    def of(cls, store: Store, home: Home, recipe: DatasetRecipe) -> "BlockedTexts":
        """Collect the texts that a recipe excludes. Raises BadInput for an unreadable file."""
        return cls(_collect(store, home, recipe), recipe.decontamination.threshold)

    def match(self, text: str) -> Match | None:
        """Return the match with an equal text, else with the most similar one, else None."""
        return self.match_any([text])

    def match_run(self, run: Run) -> Match | None:
        """Return the match of a run: of its task's world, or of a text of its user."""
        if run.task is not None and run.task.world is not None:
            source = self._blocked.get(task_key(run.task))
            if source is not None:
                return Match(source, 1.0, "equal")
        return self.match_any(inputs_of(run))

    def match_any(self, texts: Iterable[str]) -> Match | None:
        """Return the match of the first of these texts that has one."""
        if not self._blocked:
            return None
        before, self._known = self._known, {}  # consecutive runs are attempts at one task
        for text in texts:
            if text not in self._known:
                self._known[text] = before[text] if text in before else self._match(text)
            if (match := self._known[text]) is not None:
                return match
        return None

    def _match(self, text: str) -> Match | None:
        match = self._index.match(_key(text))
        if match is None:
            return None
        return Match(self._sources[match.number], match.similarity, match.how)


def _key(text: str) -> str:
    """Return the words of a text; "" for a text without words, which is not held."""
    return " ".join(words_of(text))


def inputs_of(run: Run) -> list[str]:
    """Return the texts of a run to compare: its input, and all messages of its user.

    Messages of its model calls are included, since a client could report a different trajectory.
    """
    calls = run.calls
    texts = [input_of(run), run.input, *(asked_text(call.messages) for call in calls[:1])]
    texts += (
        _texts_of_user(run.trajectory.messages)
        if calls
        else inputs_of_messages(run.trajectory.messages)
    )
    texts += (text for call in calls for text in _texts_of_user(call.messages))
    return list(dict.fromkeys(texts))


def inputs_of_messages(messages: Iterable[Message]) -> list[str]:
    """Return the texts of a demonstration to compare: each message of its user, no answers.

    What stands before an answer may be the input of a held-out task, and is compared as a whole.
    """
    given = [*messages]
    answers = [place for place, m in enumerate(given) if m.get("role") == "assistant"]
    return [*_texts_of_user(given), *(asked_text(given[:place]) for place in answers)]


def _texts_of_user(messages: Iterable[Message]) -> list[str]:
    return [text_of(m) for m in messages if m.get("role") == "user"]


def input_of(run: Run) -> str:
    """Return the text to hold out for a run: its input, or the first message of its user."""
    if run.task is not None and not isinstance(run.task.input, str):
        return asked_text(run.task.input)
    return run.input or first_question(run.trajectory.messages)


def _collect(store: Store, home: Home, recipe: DatasetRecipe) -> Iterator[HeldText]:
    options = recipe.decontamination
    if options.holdout:
        yield from _journal_texts(home, recipe.loop)
        for split in ("holdout", "test"):
            yield from _split_texts(store, recipe.loop, split)
    files = Files(home)
    for name in options.files:
        yield from texts_of_file(files, name)


def _journal_texts(home: Home, loop: str | None) -> Iterator[HeldText]:
    """Yield the held-out tasks of a loop, or of all loops, even if they were not run yet."""
    if loop is not None and not LOOP.fullmatch(loop):
        return
    for path in sorted(home.loop("").glob(f"{loop or '*'}/journal/{HELD_OUT_ENTRY}*.json")):
        entry = checksums.read_record(HeldOut, path)
        yield from (HeldText(source, text) for source, text in entry.inputs)
        yield from (HeldText(source, key, world=True) for source, key in entry.worlds)


def _split_texts(store: Store, loop: str | None, split: str) -> Iterator[HeldText]:
    """Yield the input of one run of each task, since all attempts share it."""
    run_ids: dict[tuple[str | None, str | None, str], str] = {}
    for facts in store.facts(RunQuery(loop=loop, split=split)):
        run_ids.setdefault((facts.loop, facts.task, facts.input), facts.run_id)
    for run in store.runs_by_id(list(run_ids.values())):
        source = f"{split} task {run.task.id if run.task else ''}"
        if run.task is not None and run.task.world is not None:
            yield HeldText(source, task_key(run.task), world=True)
        else:
            yield HeldText(source, input_of(run))


def texts_of_file(files: Files, name: str) -> Iterator[HeldText]:
    """Yield the text of each line of a file, named by upload id or path.

    Raises BadInput if the file does not exist or is not readable as UTF-8.
    """
    path, title = _resolve_file(files, name)
    line = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for line, content in lines_of(lines):
                text = text_in(content)
                if text:
                    yield HeldText(f"{title}:{line}", text)
    except TooLong as error:
        raise BadInput(f"{name}: line {line + 1} is {error}", param=FILES) from error
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{name} is not UTF-8 after line {line}: {error.reason}", param=FILES
        ) from error
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror or error}", param=FILES) from error


def text_in(line: str) -> str:
    """Return the text of a line; "" for an empty line."""
    line = line.strip().removeprefix("\ufeff")  # a byte order mark
    if line.startswith("{"):
        try:
            return _text_of_record(parse_json(line, DEEPEST_FOREIGN)) or line
        except ValueError:
            return line
    return line


def _text_of_record(record: dict[str, Any]) -> str:
    for field in FIELDS:
        value = record.get(field)
        if isinstance(value, dict):  # OpenAI's preferences: {"input": {"messages": [...]}}
            value = value.get("messages")
        if isinstance(value, list):
            users = [m for m in value if isinstance(m, dict) and m.get("role") == "user"]
            value = text_of(users[-1]) if users else ""
        if isinstance(value, str) and value.strip():
            return value
    return ""


def _resolve_file(files: Files, name: str) -> tuple[Path, str]:
    """Return the path of a file and its title. Raises BadInput."""
    with contextlib.suppress(NotFound):
        return files.path(name), files.get(name).filename
    path = Path(name)
    try:
        exists = path.is_file()
    except OSError:  # for example, a name that is too long
        exists = False
    if not exists:
        raise BadInput(
            f"{name!r} is neither an uploaded file's id nor a file on this host", param=FILES
        )
    return path, path.name
