"""Dataset build: one pass over the runs a recipe considers, in constant memory, then one rename.

The store's index lists the runs in the order of their tasks. selection.py and methods.py accept or
refuse them, group by group. Samples go into shards (token_shards.py), and every run into
runs.parquet (considered_runs.py). All files go into a hidden draft, which is renamed to the dataset
when it is complete. A step of a loop is built once (uses.py). Called by build_process.py,
fine_tuning and the command line.
"""

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import BadInput, Corrupt, CrayError, StoreError
from cray_agents.messages import first_question
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import canonical, new_id
from cray_agents.runtime.datasets.considered_runs import (
    REASONS,
    BuildCounts,
    ConsideredRun,
    LineWriter,
)
from cray_agents.runtime.datasets.decontamination import BlockedTexts, Match, inputs_of_messages
from cray_agents.runtime.datasets.demonstrations import Renderer, renderer_of
from cray_agents.runtime.datasets.documents import considered_documents
from cray_agents.runtime.datasets.methods import settle_groups
from cray_agents.runtime.datasets.near_duplicates import KeptSamples, Repeat
from cray_agents.runtime.datasets.reader import (
    CARD,
    DATASET_FORMAT,
    MANIFEST,
    RECIPE,
    read_dataset,
    verify,
)
from cray_agents.runtime.datasets.recipe import DEMONSTRATIONS, Naming, check, query_of
from cray_agents.runtime.datasets.run_samples import TokenSample, losses_of
from cray_agents.runtime.datasets.selection import CandidateRun, Selection, is_too_long
from cray_agents.runtime.datasets.token_shards import BATCH_ROWS, Balance, SampleRow, ShardWriter
from cray_agents.runtime.datasets.uses import Ledger, Uses
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.disk.checksums import FORMAT
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.registry.checkpoints import verify_settings
from cray_agents.runtime.store import Store

DRAFT = "building"
ABANDONED_SECONDS = 86_400.0  # a draft without writes for so long has lost its builder

log = logging.getLogger(__name__)
OnProgress = Callable[[int, int, str], None]
OnLine = Callable[[ConsideredRun], None]

REPORT_EVERY = 256  # runs between reports of progress
GROUP_TOKENS = 1 << 22  # of a row group of documents, which is kept in memory


def _ignore_progress(done: int, total: int, stage: str) -> None:
    """Ignore the progress."""


def build_dataset(
    store: Store, home: Home, recipe: DatasetRecipe, on_progress: OnProgress = _ignore_progress
) -> dict[str, Any]:
    """Build a dataset, unless it exists. Return its manifest. `recipe.tokenizer` is a directory.

    `on_progress(done, total, stage)` counts runs and demonstrations. Raises BadInput with the code
    `empty_dataset` if nothing was accepted, or `step_taken` if the step has another recipe's
    dataset. Raises StoreError if the shared root cannot be read or written.
    """
    check(recipe)
    ledger = Ledger.of(home, recipe)
    make = partial(_build, store, home, recipe, on_progress)
    try:
        return read_dataset(home, make() if ledger is None else _build_step(make, ledger))
    except OSError as error:
        if isinstance(error, CrayError):
            raise
        raise StoreError(f"cannot build in {home.datasets}: {error}") from error


def _build_step(make: Callable[..., str], ledger: Ledger) -> str:
    """Return the dataset of a step; build and commit it if there is none (uses.py)."""
    while True:
        dataset = ledger.find_or_resume()
        counted = ledger.count() if dataset is None else None
        if counted is not None:
            seen, uses = counted
            built = make(uses, partial(ledger.prepare, seen=seen))
            dataset = ledger.commit(built, seen)
        if dataset is not None:
            return dataset


def plan_dataset(
    store: Store,
    home: Home,
    recipe: DatasetRecipe,
    on_progress: OnProgress = _ignore_progress,
    on_line: OnLine = lambda line: None,
) -> dict[str, Any]:
    """Return the counts of the manifest that `build_dataset` would write. Writes nothing.

    `on_line` is called for each run. If the step already has a dataset, `step_taken` names it;
    building the step again returns that one. Raises BadInput, but not for an empty dataset.
    """
    check(recipe)
    ledger = Ledger.of(home, recipe)
    existing, uses = ledger.read() if ledger is not None else (None, Uses())
    build_pass = BuildPass(store, home, recipe, uses, on_progress, None, on_line)
    counts = build_pass.run()
    name = build_pass.naming.name if counts.total("samples") else None
    plan = {"id": name, **counts.manifest_fields()}
    return plan if existing is None else {**plan, "step_taken": existing}


def _build(
    store: Store,
    home: Home,
    recipe: DatasetRecipe,
    on_progress: OnProgress,
    uses: Uses | None = None,
    prepare: Callable[[str], None] = lambda name: None,
) -> str:
    """Build a dataset and publish it, unless it exists. Return its id. Raises BadInput.

    `prepare` is called with the id right before the dataset is published.
    """
    draft = durable.draft_directory(home.dataset(DRAFT))
    try:
        _remove_abandoned(draft)
        build_pass = BuildPass(store, home, recipe, uses or Uses(), on_progress, draft)
        _check_filled(build_pass.run())
        name = build_pass.naming.name
        if not _is_intact(home.dataset(name)):
            build_pass.finish(name)
            prepare(name)
            durable.publish_directory(draft, home.dataset(name))
        return name
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _is_intact(directory: Path) -> bool:
    """Tell whether a dataset exists undamaged. A damaged one is renamed, to be built anew."""
    if not (directory / MANIFEST).is_file():
        return False
    try:
        verify(directory)
    except Corrupt as error:
        aside = directory.with_name(f".{directory.name}.{new_id('damaged')}")
        log.error("%s; it is made anew, the damaged one is kept as %s", error, aside)
        directory.rename(aside)
        return False
    return True


def _check_filled(counts: BuildCounts) -> None:
    if "train" in counts.splits:
        return
    reasons = counts.rejected + counts.rejected_demonstrations + counts.rejected_documents
    cause = ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))
    if counts.splits:
        cause = f"all {counts.total('samples')} samples fell to the validation split"
    what, considered = "run", counts.considered
    if counts.recipe.documents:
        what, considered = "document", counts.documents + counts.rejected_documents.total()
    hint, most = "", reasons.most_common(1)[0][0] if reasons else None
    if most == "reward_error":
        hint = f": `cray-agents runs show {counts.failed_reward}` has the error of one"
    if most == "contaminated" and what == "run":
        hint = (
            ": most are taken for held-out tasks; where all tasks share a long text, put it into "
            "the agent's instructions, or raise decontamination.threshold"
        )
    raise BadInput(
        f"no {what} can be trained on: {considered} considered ({cause or 'none match'}){hint}",
        code="empty_dataset",
    )


def _remove_abandoned(draft: Path) -> None:
    """Remove drafts of dead builders on any host. Ages use the clock of the file system."""
    now = draft.stat().st_mtime
    for other in draft.parent.glob(f".{DRAFT}.draft_*"):
        try:
            written = max(path.stat().st_mtime for path in (other, *other.iterdir()))
        except FileNotFoundError:  # published or removed meanwhile
            continue
        if now - written > ABANDONED_SECONDS:
            shutil.rmtree(other, ignore_errors=True)


@dataclass
class BuildPass:
    """One pass over a recipe's inputs. `naming` and `counts` are complete once `run` returns."""

    store: Store
    home: Home
    recipe: DatasetRecipe
    uses: Uses
    on_progress: OnProgress
    draft: Path | None
    on_line: OnLine = lambda line: None
    naming: Naming = field(init=False)
    counts: BuildCounts = field(init=False)
    selection: Selection = field(init=False)

    def run(self) -> BuildCounts:
        """Accept or refuse every demonstration and run. Raises BadInput."""
        recipe = self.recipe
        self.naming, self.counts = Naming(recipe), BuildCounts(recipe)
        self._writers: dict[str, ShardWriter] = {}
        self._lines = LineWriter(self.draft) if self.draft is not None else None
        self._done = 0
        query = query_of(recipe)
        self._total = len(recipe.demonstrations)
        self._total += self.store.count(query) if query is not None else 0
        self.on_progress(0, self._total, "reading what is held out")
        self.selection = Selection(
            self.store,
            recipe,
            BlockedTexts.of(self.store, self.home, recipe),
            self.uses,
            self._renderer(),
            KeptSamples(recipe.near_duplicates),
            Balance(recipe.balance_by, recipe.balance_power),
        )
        try:
            self._add_documents()
            self._add_demonstrations()
            if query is not None:
                judged = map(self.selection.judge, self.store.facts(query))
                for group in settle_groups(judged, self.selection):
                    self._add_group(group)
        finally:
            self.selection.seen.close()
        self.on_progress(self._total, self._total, "writing")
        return self.counts

    def finish(self, name: str) -> None:
        """Write the remaining files of the draft, the manifest last. Raises BadInput."""
        assert self.draft is not None and self._lines is not None
        rows = self._lines.finish()
        for split, writer in self._writers.items():
            shards = writer.finish()
            self.selection.balance.apply(self.draft, split, shards)
            rows |= shards
        recipe = self.recipe.model_dump(mode="json")
        durable.write_file(self.draft / RECIPE, canonical(recipe))
        files = {file: self._file_entry(file, rows) for file in sorted([*rows, RECIPE])}
        durable.write_file(self.draft / CARD, card(name, self.counts, files).encode())
        for path in self.draft.iterdir():
            if path.name not in files:
                durable.sync(path)
                files[path.name] = self._file_entry(path.name, rows)
        manifest = {
            "id": name,
            FORMAT: DATASET_FORMAT,
            **self.counts.manifest_fields(),
            "loop": self.recipe.loop,
            "step": self.recipe.step,
            "files": dict(sorted(files.items())),
            "created": time.time(),
        }
        durable.write_file(self.draft / MANIFEST, checksums.with_crc(orjson.dumps(manifest)))

    def _file_entry(self, file: str, rows: dict[str, int]) -> dict[str, Any]:
        assert self.draft is not None
        path = self.draft / file
        entry = {"sha256": durable.sha256_file(path), "bytes": path.stat().st_size}
        return {**entry, "rows": rows[file]} if file in rows else entry

    def _renderer(self) -> Renderer | None:
        renders = self.recipe.demonstrations or self.recipe.render
        return renderer_of(self._tokenizer()) if renders and self.recipe.tokenizer else None

    def _tokenizer(self) -> Path:
        tokenizer = Path(self.recipe.tokenizer or "")
        verify_settings(tokenizer)
        return tokenizer

    def _add_group(self, group: Sequence[CandidateRun]) -> None:
        """Write the rows of a group side by side, and a line for each of its runs."""
        by_split: dict[str, list[SampleRow]] = {}
        for candidate in group:
            if candidate.gone:
                continue
            line = candidate.line()
            self._write_line(line)
            self.counts.add_run(line)
            if candidate.rows:
                facts = candidate.facts
                split = self._split_of(facts.task or facts.input)
                by_split.setdefault(split, []).extend(candidate.rows)
        for split, rows in by_split.items():
            self._write(split, rows)
        self._count(len(group))

    def _add_documents(self) -> None:
        if self.recipe.documents:
            tokenizer = self._tokenizer()
            files, chosen = Files(self.home), self.selection
            blocked, seen = chosen.blocked, chosen.seen
            for line, split, rows in considered_documents(
                files, self.recipe, tokenizer, blocked, seen, self._split_of
            ):
                self._write(split, rows)
                self._write_line(line)
                self.counts.add_document(line)
                self._count(1)

    def _add_demonstrations(self) -> None:
        recipe, count = self.recipe, len(self.recipe.demonstrations)
        metadata = recipe.demonstrations_metadata or [{}] * count
        tools = recipe.demonstrations_tools or [recipe.tools] * count
        renderer = self.selection.renderer
        for number, messages in enumerate(recipe.demonstrations):
            assert renderer is not None  # recipe.check requires a tokenizer
            if recipe.method == "dpo":
                worse = [*messages[:-1], recipe.demonstrations_rejected[number]]
                samples = [renderer.answer(each, tools[number]) for each in (messages, worse)]
            else:
                samples = renderer.samples(messages, tools[number])
            named = recipe.demonstrations_splits[number] if recipe.demonstrations_splits else None
            match = self.selection.blocked.match_any(inputs_of_messages(messages))
            split = named or self._split_of(first_question(messages))
            self._add_demonstration(number, match, samples, metadata[number], split)
            self._count(1)

    def _add_demonstration(
        self,
        number: int,
        match: Match | None,
        samples: list[TokenSample],
        metadata: dict[str, Any],
        split: str,
    ) -> None:
        """Decide on a demonstration and write its rows."""
        name = f"demonstration/{number}"  # run ids have no slash
        longest = max(len(sample.input_ids) for sample in samples)
        reason, detail, repeat = None, None, None
        if match is not None:
            reason, detail = "contaminated", match.description
        elif is_too_long(longest, self.recipe):
            reason, detail = "too_long", f"{longest} tokens"
        elif self.recipe.method == "dpo" and samples[0].input_ids == samples[1].input_ids:
            reason, detail = "no_pair", "both answers are the same"
        else:
            samples, repeat = self._drop_repeats(name, samples)
            if repeat is not None and not samples:
                reason, detail = repeat.reason, repeat.detail
        if reason is not None:
            line = ConsideredRun(name, reason=reason, detail=detail)
        else:
            losses = losses_of(samples)
            line = ConsideredRun(name, accepted=True, detail=losses, samples=len(samples))
            balance = self.selection.balance.group_of(metadata)
            self._write(split, self._rows(name, samples, balance))
        self._write_line(line)
        self.counts.add_demonstration(line)

    def _drop_repeats(
        self, name: str, samples: list[TokenSample]
    ) -> tuple[list[TokenSample], Repeat | None]:
        """Return the samples that repeat no earlier sample; both or none of a pair."""
        if self.recipe.method != "dpo":
            return self.selection.seen.drop_repeats(name, samples)
        better, worse = samples
        repeat = self.selection.seen.repeat(name, better.input_ids + worse.input_ids)
        return ([], repeat) if repeat is not None else (samples, None)

    def _rows(self, name: str, samples: list[TokenSample], balance: int) -> list[SampleRow]:
        if self.recipe.method != "dpo":
            return [SampleRow(sample, name, "", 0.0, balance=balance) for sample in samples]
        pair: dict[str, Any] = {"group": name, "pair": name, "balance": balance}
        better, worse = samples
        return [
            SampleRow(better, name, "", 0.0, chosen=True, **pair),
            SampleRow(worse, f"{name}/rejected", "", 0.0, chosen=False, **pair),
        ]

    def _write(self, split: str, rows: list[SampleRow]) -> None:
        for row in rows:
            self.naming.add(split, row)
            self.counts.add_row(split, row)
            self.selection.balance.add(split, row.balance)
        if self.draft is not None:
            if split not in self._writers:
                group = BATCH_ROWS
                if self.recipe.documents:  # whose rows may be far longer than those of runs
                    group = max(1, min(group, GROUP_TOKENS // (self.recipe.max_tokens or 1)))
                self._writers[split] = ShardWriter(
                    self.draft, split, batch_rows=group, routes=self.recipe.router_replay
                )
            self._writers[split].add(rows)

    def _write_line(self, line: ConsideredRun) -> None:
        if self._lines is not None:
            self._lines.add(line)
        self.on_line(line)

    def _split_of(self, task: str) -> str:
        """Return the split of a task, by the hash of its id (or of its input)."""
        if not self.recipe.validation:
            return "train"
        fraction = int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big") / 2**64
        return "validation" if fraction < self.recipe.validation else "train"

    def _count(self, items: int) -> None:
        before, self._done = self._done, self._done + items
        if before // REPORT_EVERY != self._done // REPORT_EVERY:
            self.on_progress(self._done, self._total, "settling runs")


# ---- Dataset card: write README.md for people, the Hugging Face hub and `datasets`
# Its front matter names the shards of each split, so `datasets.load_dataset(directory)` loads the
# directory without changes. The card depends on its arguments only, so a dataset has the same card
# on every machine.
LONG = (*DEMONSTRATIONS, "tools", "rewards")
SPECIAL = re.compile(r"[\\`*_\[\]#~$]")  # characters with a meaning in Markdown
METHODS = {
    "sft": "supervised fine-tuning (what was said is imitated)",
    "grpo": "GRPO (runs of a task are compared with each other)",
    "dpo": "DPO (pairs of a better and a worse run)",
    "kto": "KTO (runs that are desirable or not, each alone)",
    "distill": "on-policy distillation (a teacher judges each token of the runs)",
}
LOADING = """## Loading

```python
from datasets import load_dataset

samples = load_dataset("path/to/this/directory", split="{split}")  # the directory as it is
runs = load_dataset("path/to/this/directory", "runs", split="train")  # each run: in or out, and why
```

A row is a sample. Parallel lists over its tokens: `input_ids`; `loss_mask` (1: trained on);
`logprobs` and `advantages` (0 off the mask); `version_index` (into `versions`; -1: not sampled).

Built again, with the same runs in the store, it gets the same name:

```
cray-agents dataset build --recipe recipe.json
```
"""


SPLIT_RUNS = (
    "... that are several sequences: the chat template renders earlier turns differently than they"
    " were sampled, or another agent went on"
)


def card(name: str, counts: BuildCounts, files: Iterable[str]) -> str:
    """Return the Markdown of README.md."""
    versions = sorted(counts.versions.items())
    sections = [
        f"---\n{_front_matter(name, counts, files)}---\n",
        f"# {name}\n\n{_summary(counts)}\n",
        _recipe(counts.recipe),
        _counts(counts),
        _rejections(counts.rejected + counts.rejected_demonstrations + counts.rejected_documents),
        _distribution(
            "Versions that sampled what is trained on", "Version", "Trained tokens", versions
        ),
        LOADING.format(split=next(iter(_splits(files)), "train")),
    ]
    return "\n".join(section for section in sections if section)


def _splits(files: Iterable[str]) -> list[str]:
    """Return the splits that have shards, such as train-00000.parquet."""
    return sorted({file.partition("-")[0] for file in files if "-" in file})


def _front_matter(name: str, counts: BuildCounts, files: Iterable[str]) -> str:
    """Return the YAML front matter for the hub and `datasets`. JSON strings are valid YAML."""
    lines = [
        f"pretty_name: {json.dumps(name)}",
        "tags:",
        *(f"- {tag}" for tag in ("cray-agents", counts.recipe.method, "token-ids")),
        "configs:",
        "- config_name: default",
        "  default: true",
        "  data_files:",
    ]
    for split in _splits(files):
        lines += [f"  - split: {split}", f'    path: "{split}-*.parquet"']
    lines += ["- config_name: runs", "  data_files:", "  - split: train", "    path: runs.parquet"]
    return "\n".join(lines) + "\n"


def _summary(counts: BuildCounts) -> str:
    return (
        f"A training set of {_plural(counts.total('samples'), 'token sample')} for "
        f"{METHODS[counts.recipe.method]}, built by cray-agents from "
        f"{_plural(counts.accepted, 'run')} of {counts.considered:,} considered and "
        f"{_plural(counts.demonstrations, 'demonstration')}. "
        "Its name is the hash of its content: the same recipe over the same runs gives it again."
    )


def _recipe(recipe: DatasetRecipe) -> str:
    fields = recipe.model_dump(mode="json", exclude_defaults=True)
    fields["method"] = recipe.method
    if recipe.tokenizer:  # paths differ between machines
        fields["tokenizer"] = Path(recipe.tokenizer).name
    if recipe.documents:
        fields["documents"] = [Path(name).name for name in recipe.documents]
    if recipe.decontamination.files:
        names = [Path(name).name for name in recipe.decontamination.files]
        fields["decontamination"]["files"] = names
    for name in LONG:
        if name in fields:
            fields[name] = f"{len(fields[name]):,} given"
    lines = [f"| `{name}` | {_cell(json.dumps(fields[name]))} |" for name in sorted(fields)]
    text = "What was asked for, but for defaults; `recipe.json` has all of it."
    return "\n".join(["## Recipe", "", text, "", "| Field | Value |", "|---|---|", *lines, ""])


def _counts(counts: BuildCounts) -> str:
    rows = [(f"Samples ({split})", each["samples"]) for split, each in counts.splits.items()]
    rows += [
        ("Tokens", counts.total("tokens")),
        ("Trained tokens", counts.total("trained_tokens")),
        ("Runs considered", counts.considered),
        ("Runs accepted", counts.accepted),
        (SPLIT_RUNS, counts.split_runs),
        ("Demonstrations accepted", counts.demonstrations),
        *([("Documents accepted", counts.documents)] if counts.recipe.documents else []),
        *((f"Samples that lack {loss}", count) for loss, count in sorted(counts.losses.items())),
    ]
    return _distribution("Counts", "What", "Count", rows)


def _rejections(rejected: Mapping[str, int]) -> str:
    if not rejected:
        return "## Left out\n\nNothing that was considered was left out.\n"
    lines = [
        f"| `{reason}` | {REASONS.get(reason, '')} | {count:,} |"
        for reason, count in sorted(rejected.items(), key=lambda item: (-item[1], item[0]))
    ]
    top = ["## Left out", "", "`runs.parquet` says it of each run.", ""]
    return "\n".join([*top, "| Reason | That is | Count |", "|---|---|---:|", *lines, ""])


def _distribution(
    title: str, label_name: str, count_name: str, rows: Sequence[tuple[str, int]]
) -> str:
    if not rows:
        return ""
    lines = [f"| {_cell(label)} | {n:,} |" for label, n in rows]
    return "\n".join(
        [f"## {title}", "", f"| {label_name} | {count_name} |", "|---|---:|", *lines, ""]
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _cell(text: str) -> str:
    """Escape a text for a cell of a table."""
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Escape a text for Markdown and HTML."""
    return SPECIAL.sub(r"\\\g<0>", escape(text, quote=False)).replace("\n", " ")
