"""Dataset card: write README.md for people, the Hugging Face hub and `datasets`.

Its front matter names the shards of each split, so `datasets.load_dataset(directory)` loads the
directory without changes. The card depends on its arguments only, so a dataset has the same card on
every machine. Called by build.py before the manifest is written.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.considered_runs import REASONS, BuildCounts
from cray_agents.runtime.datasets.recipe import DEMONSTRATIONS

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
        _rejections(counts.rejected + counts.rejected_demonstrations),
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
