"""HTML: one page that shows runs in a browser without a platform, by the dashboard's own viewer.

The page is `viewer.html` of a build of the dashboard: it has its script and styles within it, and a
policy that lets nothing else run or be loaded. Behind it stand the runs, as scripts of types that
no browser runs. They are ASCII without `<` or base64, so no text of a run can end its script:

    <script type="application/json" data-run>    the facts of a run
    <script type="text/plain" id="RUN/outline">  the marks of its turns: JSON, gzip, base64
    <script type="text/plain" id="RUN/0">        the first WINDOW turns with their tokens; RUN/1 ...
    <script type="text/plain" id="RUN/tokens">   the texts of its tokens

The page unpacks a part when it is shown. What it shows are the answers of the gateway's routes.
Read next: ui/src/viewer/file_answers.ts, the reader. Listed in exporter.py.
"""

import base64
import gzip
import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cray_agents.errors import BadInput, NotFound, StoreError
from cray_agents.records import Run
from cray_agents.runtime.dashboard import static_files
from cray_agents.runtime.exports.export_format import (
    Json,
    LineFormat,
    OnePage,
    Written,
    unsupported,
)
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.views.run_pages import RunPages
from cray_agents.runtime.views.token_text import Vocabularies, Vocabulary

WINDOW = 20  # turns in a part: ui/src/lib/turn_windows.ts asks for so many
RUN_BYTES = 64 << 20  # of a run's turns in the file, at most
FILE_BYTES = 256 << 20  # after which no further run begins: a browser reads the file whole
LEVEL = 6  # gzip's own default


class RunPacker:
    """Runs of a store, packed for the page."""

    def __init__(self, store: Store) -> None:
        self._pages = RunPages(store)
        self._registry = Registry(store.home)
        self._vocabularies = Vocabularies()

    def write(self, run: Run) -> Written:
        """Return a run as the text of its scripts. Raises BadInput for a run that never ran."""
        if run.imported == "demonstration":
            raise unsupported(run, "id", "is a demonstration, of which the store has no run")
        outline = self._pages.outline(run.id, 0, len(run.trajectory.turns))
        losses = set()
        texts = TextTable(self._vocabulary)
        packed: list[str] = []
        size = included = 0
        while True:
            window = self._pages.window(run.id, included, WINDOW)
            part = _pack(
                {
                    "turns": window["data"],
                    "closing": window["closing"],
                    "tokens": self._tokens(run.id, window["data"], texts),
                }
            )
            if packed and size + len(part) > RUN_BYTES:
                losses.add("later_turns")
                break
            packed.append(part)
            size += len(part)
            included += len(window["data"])
            if window["next"] is None:
                break
        if texts.missing:
            losses.add("token_texts")
        if {call.id for call in run.calls} - {mark["call_id"] for mark in outline["data"]}:
            losses.add("other_calls")
        about = {
            **{key: outline[key] for key in outline if key not in ("run", "data", "has_more")},
            "run": {**outline["run"], "id": run.id},
            "included": included,
            "window": WINDOW,
        }
        scripts = [
            f'<script type="application/json" data-run>{_plain(about)}</script>',
            _script(run.id, "outline", _pack({"data": outline["data"][:included]})),
            *(_script(run.id, str(number), part) for number, part in enumerate(packed)),
            _script(run.id, "tokens", _pack(texts.as_json())),
        ]
        return Written([{"page": "\n".join(scripts)}], tuple(sorted(losses)))

    def _tokens(self, run_id: str, turns: Sequence[Json], texts: "TextTable") -> list[Json | None]:
        """Return the tokens of turns that follow each other, without the prompts' repetitions."""
        packed: list[Json | None] = []
        before: list[int] = []
        for turn in turns:
            if turn["model"] is None:  # its call is not recorded
                packed.append(None)
                before = []
                continue
            call = self._pages.call(run_id, turn["n"])
            prompt, sampled = call["prompt_token_ids"] or [], call["token_ids"] or []
            same = _common(before, prompt)
            packed.append(
                {
                    "model": call["model"],
                    "same": same,
                    "prompt": prompt[same:],
                    "ids": sampled,
                    "logprobs": call["logprobs"] or [],
                    "seams": call.get("seams") or [],
                }
            )
            texts.add(call["model"], prompt[same:], sampled)
            before = [*prompt, *sampled]
        return packed

    def _vocabulary(self, model: str) -> Vocabulary:
        """Return the vocabulary of a version. Raises NotFound, BadInput, StoreError."""
        checkpoint = self._registry.resolve(model).checkpoint
        return self._vocabularies.of(self._registry.home.checkpoint(checkpoint))


@dataclass
class TextTable:
    """The texts of a run's tokens, by vocabulary and id."""

    vocabulary_of: Callable[[str], Vocabulary]
    models: dict[str, int | str] = field(default_factory=dict)  # an index, or why there is none
    vocabularies: list[Vocabulary] = field(default_factory=list)
    ids: list[set[int]] = field(default_factory=list)

    def add(self, model: str, *tokens: Sequence[int]) -> None:
        """Add tokens that a version read or sampled."""
        if not any(tokens):
            return
        if model not in self.models:
            self.models[model] = self._index(model)
        index = self.models[model]
        if isinstance(index, int):
            self.ids[index].update(*tokens)

    def _index(self, model: str) -> int | str:
        try:
            vocabulary = self.vocabulary_of(model)
        except (BadInput, NotFound, StoreError) as error:
            return str(error)
        for index, known in enumerate(self.vocabularies):
            if known is vocabulary:
                return index
        self.vocabularies.append(vocabulary)
        self.ids.append(set())
        return len(self.vocabularies) - 1

    @property
    def missing(self) -> bool:
        """Tell whether tokens of a version have no text."""
        return any(isinstance(index, str) for index in self.models.values())

    def as_json(self) -> Json:
        """Return the texts as the page reads them."""
        tables = []
        for vocabulary, ids in zip(self.vocabularies, self.ids, strict=True):
            ordered = sorted(ids)
            decoded = vocabulary.texts_of(ordered)
            tables.append(
                {
                    "exact": vocabulary.exact,
                    "texts": dict(zip(map(str, ordered), decoded.texts, strict=True)),
                    "bytes": {str(ordered[int(at)]): one for at, one in decoded.bytes.items()},
                }
            )
        return {"models": self.models, "vocabularies": tables}


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many items two lists begin with alike."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(at for at in range(most) if one[at] != other[at])


def _plain(value: Any) -> str:
    """Return JSON that can stand in a script: no `<`, nothing beyond ASCII."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _pack(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), LEVEL, mtime=0)).decode()


def _script(run_id: str, part: str, packed: str) -> str:
    name = html.escape(f"{run_id}/{part}")
    return f'<script type="text/plain" id="{name}">{packed}</script>'


HTML = LineFormat(
    "html",
    "HTML",
    "one page with a viewer that shows runs in a browser, without a platform",
    with_store=lambda store: RunPacker(store).write,
    suffix=".html",
    page=OnePage(
        head=static_files.viewer,
        encode=lambda run, record: str(record["page"]).encode(),
        most_bytes=FILE_BYTES,
        full=b'<script type="text/plain" data-full></script>\n',
    ),
)
