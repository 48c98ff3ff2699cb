"""Dataset card: write README.md for people, the Hugging Face hub and `datasets`.

Its front matter names the shards of each split, so `datasets.load_dataset(directory)` loads the
directory without changes. croissant.json (croissant.py) is the same for mlcroissant. The card
depends on its arguments only, so a dataset has the same card on every machine. Called by counts.py
before the manifest is written. Read next: histogram.py, the page of figures.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.croissant import croissant
from cray_agents.runtime.datasets.reader import CARD
from cray_agents.runtime.datasets.recipe_checks import DEMONSTRATIONS
from cray_agents.runtime.disk import durable

CROISSANT = "croissant.json"
EXAMPLES = 5
HEAD = 160  # characters shown of a text
LONG = (*DEMONSTRATIONS, "tools", "rewards")
SPECIAL = re.compile(r"[\\`*_\[\]#~$]")  # characters with a meaning in Markdown
SIZES = (  # size categories of the Hugging Face hub, by upper bound
    (1e3, "n<1K"),
    (1e4, "1K<n<10K"),
    (1e5, "10K<n<100K"),
    (1e6, "100K<n<1M"),
    (1e7, "1M<n<10M"),
    (1e8, "10M<n<100M"),
    (1e9, "100M<n<1B"),
    (1e12, "1B<n<1T"),
)
METHODS = {
    "sft": "supervised fine-tuning (what was said is imitated)",
    "grpo": "GRPO (runs of a task are compared with each other)",
    "dpo": "DPO (pairs of a better and a worse run)",
    "kto": "KTO (runs that are desirable or not, each alone)",
}
REASONS = {
    "alone": "the only scored run of its group",
    "ambiguous_choices": "it has several answers to one request, and none is known as its turn",
    "broken_prefix": "the chat template breaks it into several samples, and DPO needs one",
    "contaminated": "its input is one that is held out, or nearly",
    "corrupt": "its record is damaged",
    "duplicate": "its tokens are those of an earlier sample",
    "empty": "nothing was sampled",
    "held_out": "its task is kept to judge by",
    "imported": "it was not recorded here, has no tokens, and was not to be rendered",
    "infrastructure_error": "the platform failed it, not the model",
    "low_reward": "its reward is below `min_reward`",
    "missing_call": "a model call of it was not recorded",
    "near_duplicate": "its tokens are nearly those of an earlier sample",
    "no_logprobs": "its log-probabilities were not recorded",
    "no_pair": "no run of its task was enough better or worse",
    "no_reward": "nobody judged it",
    "no_such_turn": "a reward is for a turn that it has not",
    "no_tokens": "its tokens were not recorded",
    "not_best": "others of its task were better (`best_of`)",
    "not_renderable": "the chat template cannot render it",
    "over_max_per_task": "its task had enough runs already",
    "redacted": "something was removed from it before it was stored",
    "reward_error": "one of its rewards failed",
    "too_long": "it has more than `max_tokens`",
    "used_up": "earlier training sets of the loop used it often enough",
    "zero_variance": "all runs of its group have the same reward",
}
LOADING = """## Loading

```python
from datasets import load_dataset

samples = load_dataset("path/to/this/directory", split="{split}")  # the directory as it is
runs = load_dataset("path/to/this/directory", "runs", split="train")  # each run: in or out, and why
```

```python
import pyarrow.dataset

samples = pyarrow.dataset.dataset("path/to/{split}-00000.parquet").to_table()
```

A row is a sample. Parallel lists over its tokens: `input_ids`; `loss_mask` (1: trained on);
`logprobs` and `advantages` (0 off the mask); `version_index` (into `versions`; -1: not sampled).

Built again, with the same runs in the store, it gets the same name:

```
cray-agents dataset build --recipe recipe.json
```
"""


class Removed(NamedTuple):
    """An example of a removed run or demonstration. Similarity 1.0 means equal.

    `run_id` is "" for a demonstration. `source` is the run of the earlier sample, or the name of
    the held text. `text` and `matched` may be only heads of texts; `matched` may be "".
    """

    run_id: str
    text: str
    source: str
    matched: str
    similarity: float


@dataclass(frozen=True)
class CardFacts:
    """The facts on a card. Counts cover runs and demonstrations, unless named after one of them.

    `shards`: file names by split (`train`, and perhaps `validation`), in order. `rows`: samples by
    split. `rejected`: counts by reason. `versions`: trained tokens by `name@N`. `rewards`: the
    distribution as (label, count), from `Histograms.rewards()`. `files`: the manifest's entries of
    the shards and of runs.parquet ({"sha256", "bytes"}).
    """

    id: str
    recipe: DatasetRecipe
    shards: Mapping[str, Sequence[str]]
    rows: Mapping[str, int]
    tokens: int
    trained_tokens: int
    considered_runs: int
    accepted_runs: int
    demonstrations: int  # accepted ones
    rejected: Mapping[str, int]
    files: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, int] = field(default_factory=dict)
    rewards: Sequence[tuple[str, int]] = ()
    duplicates: Sequence[Removed] = ()  # at most five are shown
    contaminated: Sequence[Removed] = ()


def write_card(directory: Path, facts: CardFacts) -> None:
    """Write README.md and croissant.json into a draft directory that already has the shards."""
    durable.write_file(directory / CARD, card(facts).encode())
    metadata = croissant(facts.id, _summary(facts), facts.shards, facts.files)
    durable.write_file(directory / CROISSANT, metadata)


def card(facts: CardFacts) -> str:
    """Return the Markdown of README.md."""
    sections = [
        f"---\n{_front_matter(facts)}---\n",
        f"# {facts.id}\n\n{_summary(facts)}\n",
        _recipe(facts.recipe),
        _counts(facts),
        _rejections(facts),
        _distribution("Rewards of the accepted runs", "Reward", "Runs", facts.rewards),
        _distribution(
            "Versions that sampled what is trained on",
            "Version",
            "Trained tokens",
            list(facts.versions.items()),
        ),
        _examples("Duplicates that were removed", "repeats", facts.duplicates),
        _examples("Contamination that was removed", "matches", facts.contaminated),
        _loading(facts),
    ]
    return "\n".join(section for section in sections if section)


def _front_matter(facts: CardFacts) -> str:
    """Return the YAML front matter for the hub and `datasets`. JSON strings are valid YAML."""
    total = sum(facts.rows.values())
    size = next((name for most, name in SIZES if total < most), "n>1T")
    lines = [
        f"pretty_name: {json.dumps(facts.id)}",
        "tags:",
        *(f"- {tag}" for tag in ("cray-agents", facts.recipe.method, "token-ids", "croissant")),
        "size_categories:",
        f"- {size}",
        "configs:",
        "- config_name: default",
        "  default: true",
        "  data_files:",
    ]
    for split in facts.shards:
        lines += [f"  - split: {split}", f'    path: "{split}-*.parquet"']
    lines += ["- config_name: runs", "  data_files:", "  - split: train", "    path: runs.parquet"]
    return "\n".join(lines) + "\n"


def _summary(facts: CardFacts) -> str:
    rows = sum(facts.rows.values())
    return (
        f"A training set of {_plural(rows, 'token sample')} for {METHODS[facts.recipe.method]}, "
        f"built by cray-agents from {_plural(facts.accepted_runs, 'run')} of "
        f"{facts.considered_runs:,} considered and "
        f"{_plural(facts.demonstrations, 'demonstration')}. "
        "Its name is the hash of its content: the same recipe over the same runs gives it again."
    )


def _recipe(recipe: DatasetRecipe) -> str:
    fields = recipe.model_dump(mode="json", exclude_defaults=True)
    fields["method"] = recipe.method
    if recipe.tokenizer:  # paths differ between machines
        fields["tokenizer"] = Path(recipe.tokenizer).name
    if recipe.decontamination.files:
        names = [Path(name).name for name in recipe.decontamination.files]
        fields["decontamination"]["files"] = names
    for name in LONG:
        if name in fields:
            fields[name] = f"{len(fields[name]):,} given"
    lines = [f"| `{name}` | {_cell(json.dumps(fields[name]))} |" for name in sorted(fields)]
    text = "What was asked for, but for defaults; `recipe.json` has all of it."
    return "\n".join(["## Recipe", "", text, "", "| Field | Value |", "|---|---|", *lines, ""])


def _counts(facts: CardFacts) -> str:
    rows = [(f"Samples ({split})", count) for split, count in facts.rows.items()]
    rows += [
        ("Tokens", facts.tokens),
        ("Trained tokens", facts.trained_tokens),
        ("Runs considered", facts.considered_runs),
        ("Runs accepted", facts.accepted_runs),
        ("Demonstrations accepted", facts.demonstrations),
    ]
    return _distribution("Counts", "What", "Count", rows)


def _rejections(facts: CardFacts) -> str:
    if not facts.rejected:
        return "## Left out\n\nNothing that was considered was left out.\n"
    lines = [
        f"| `{_code(reason)}` | {REASONS.get(reason, '')} | {count:,} |"
        for reason, count in sorted(facts.rejected.items(), key=lambda item: (-item[1], item[0]))
    ]
    head = ["## Left out", "", "`runs.parquet` says it of each run.", ""]
    return "\n".join([*head, "| Reason | That is | Count |", "|---|---|---:|", *lines, ""])


def _distribution(
    title: str, label_name: str, count_name: str, rows: Sequence[tuple[str, int]]
) -> str:
    if not rows:
        return ""
    lines = [f"| {_cell(label)} | {n:,} |" for label, n in rows]
    return "\n".join(
        [f"## {title}", "", f"| {label_name} | {count_name} |", "|---|---:|", *lines, ""]
    )


def _examples(title: str, verb: str, removed: Sequence[Removed]) -> str:
    if not removed:
        return ""
    lines = []
    for example in removed[:EXAMPLES]:
        pair = f"`{_code(example.run_id or 'a demonstration')}` {verb} `{_code(example.source)}`"
        lines.append(f"- {pair} (similarity {example.similarity:.2f})")
        lines += [f"  - {_quote(text)}" for text in (example.text, example.matched) if text]
    return "\n".join([f"## {title}", "", f"Up to {EXAMPLES} of them:", "", *lines, ""])


def _loading(facts: CardFacts) -> str:
    return LOADING.format(split=next(iter(facts.shards), "train"))


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _head(text: str) -> str:
    line = " ".join(text[: 4 * HEAD].split())
    return line if len(line) <= HEAD else line[: HEAD - 1] + "…"


def _cell(text: str) -> str:
    """Escape a text for a cell of a table."""
    return _plain(text).replace("|", "\\|")


def _code(text: str) -> str:
    """Shorten and escape a text for a code span."""
    return _head(text).replace("`", "'").replace("|", "¦")


def _quote(text: str) -> str:
    return f"“{_plain(_head(text))}”"


def _plain(text: str) -> str:
    """Escape a text for Markdown and HTML."""
    return SPECIAL.sub(r"\\\g<0>", escape(text, quote=False)).replace("\n", " ")
