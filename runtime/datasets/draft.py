"""Dataset draft: decide on all demonstrations and runs in one pass, and write the samples.

Called by build.py, which publishes the draft. Without a draft directory nothing is written.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import canonical
from cray_agents.runtime.datasets.content_name import Naming
from cray_agents.runtime.datasets.description.card import write_card
from cray_agents.runtime.datasets.description.counts import BuildCounts
from cray_agents.runtime.datasets.description.histogram import PAGE
from cray_agents.runtime.datasets.exclusion.decontamination import (
    BlockedTexts,
    Match,
    input_of_messages,
    inputs_of_messages,
)
from cray_agents.runtime.datasets.exclusion.near_duplicates import KeptSamples, Repeat
from cray_agents.runtime.datasets.reader import MANIFEST, RECIPE
from cray_agents.runtime.datasets.recipe_checks import query_of
from cray_agents.runtime.datasets.samples.demonstrations import Renderer, renderer_of
from cray_agents.runtime.datasets.samples.run_samples import TokenSample, losses_of
from cray_agents.runtime.datasets.samples.sample_weights import Balance
from cray_agents.runtime.datasets.samples.token_shards import SampleRow, ShardWriter
from cray_agents.runtime.datasets.selection.considered_runs import ConsideredRun, LineWriter
from cray_agents.runtime.datasets.selection.methods import settle_groups
from cray_agents.runtime.datasets.selection.selection import CandidateRun, Selection, is_too_long
from cray_agents.runtime.datasets.uses import Uses
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry.checkpoints import verify_settings
from cray_agents.runtime.store import Store

OnProgress = Callable[[int, int, str], None]
OnLine = Callable[[ConsideredRun], None]

REPORT_EVERY = 256  # runs between reports of progress


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
        self.counts.histograms.write(self.draft / PAGE, title=name)
        write_card(self.draft, name, self.counts, files)
        for path in self.draft.iterdir():
            if path.name not in files:
                durable.sync(path)
                files[path.name] = self._file_entry(path.name, rows)
        manifest = {
            "id": name,
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
        if not renders or self.recipe.tokenizer is None:
            return None
        tokenizer = Path(self.recipe.tokenizer)
        verify_settings(tokenizer)
        return renderer_of(tokenizer)

    def _add_group(self, group: Sequence[CandidateRun]) -> None:
        """Write the rows of a group side by side, and a line for each of its runs."""
        by_split: dict[str, list[SampleRow]] = {}
        for candidate in group:
            if candidate.gone:
                continue
            line = candidate.line()
            self._write_line(line)
            self.counts.add_run(candidate, line)
            if candidate.rows:
                facts = candidate.facts
                split = self._split_of(facts.task or facts.input)
                by_split.setdefault(split, []).extend(candidate.rows)
        for split, rows in by_split.items():
            self._write(split, rows)
        self._count(len(group))

    def _add_demonstrations(self) -> None:
        recipe, count = self.recipe, len(self.recipe.demonstrations)
        metadata = recipe.demonstrations_metadata or [{}] * count
        tools = recipe.demonstrations_tools or [recipe.tools] * count
        renderer = self.selection.renderer
        for number, messages in enumerate(recipe.demonstrations):
            assert renderer is not None  # recipe_checks requires a tokenizer
            text = input_of_messages(messages)
            if recipe.method == "dpo":
                worse = [*messages[:-1], recipe.demonstrations_rejected[number]]
                samples = [renderer.answer(each, tools[number]) for each in (messages, worse)]
            else:
                samples = renderer.samples(messages, tools[number])
            named = recipe.demonstrations_splits[number] if recipe.demonstrations_splits else None
            match = self.selection.blocked.match_any(inputs_of_messages(messages))
            split = named or self._split_of(text)
            self._add_demonstration(number, text, match, samples, metadata[number], split)
            self._count(1)

    def _add_demonstration(
        self,
        number: int,
        text: str,
        match: Match | None,
        samples: list[TokenSample],
        metadata: dict[str, Any],
        split: str,
    ) -> None:
        """Decide on a demonstration and write its rows. `text`: the first message of the user."""
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
        self.counts.add_demonstration(line, text, match, repeat)

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
                self._writers[split] = ShardWriter(self.draft, split)
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
