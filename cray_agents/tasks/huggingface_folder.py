"""A folder as Hugging Face's `datasets` lays it out: which of its files are which split.

The README.md says it, in the field `configs` of its front matter; without that the names of the
files do (`data/train-00000-of-00001.parquet`, `test.jsonl`). Nothing is fetched, and no script of
such a folder is ever run. Called by tasks.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, SetupError
from cray_agents.records import Split
from cray_agents.tasks.readers import Row, rows_of_file

#: What the splits of such folders are to us; None: tasks to be distributed.
SPLITS: Mapping[str, Split | None] = {"train": None, "validation": "holdout", "test": "test"}

_KINDS = {".parquet", ".jsonl", ".json", ".csv", ".tsv"}
_KEYWORDS = {  # as `datasets` knows them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "state.json", "croissant.json"}
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)


def rows_by_split(folder: Path, config: str | None = None) -> Iterator[tuple[str, Row]]:
    """(the folder's name of a split, row), split by split. Raises BadInput, SetupError.

    `config`: which of the configurations of its README; default: its default, or the only one.
    """
    if not folder.is_dir():
        raise BadInput(f"no folder {folder} to read tasks from", param="path")
    configs = _configs(folder)
    if config is None and not configs:
        named = _by_name(folder)
    else:
        named = _by_config(folder, _chosen(folder, configs, config))
    if not any(named.values()):
        raise BadInput(f"{folder} holds no {', '.join(sorted(_KINDS))} files", param="path")
    for split, files in named.items():
        for file in files:
            for row in rows_of_file(file):
                yield split, row


def _configs(folder: Path) -> list[dict[str, Any]]:
    """The entries of the README's field `configs`."""
    readme = folder / "README.md"
    found = _FRONT_MATTER.match(readme.read_text("utf-8-sig")) if readme.is_file() else None
    if found is None:
        return []
    try:
        import yaml
    except ImportError as error:
        raise SetupError(
            "the README of a dataset folder is read with PyYAML: pip install pyyaml"
        ) from error
    try:
        about = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        raise BadInput(f"{readme}: its front matter is not YAML: {error}", param="path") from error
    configs = about.get("configs") if isinstance(about, dict) else None
    entries = configs if isinstance(configs, list) else [configs] if configs else []
    return [entry for entry in entries if isinstance(entry, dict)]


def _chosen(folder: Path, configs: list[dict[str, Any]], config: str | None) -> dict[str, Any]:
    names = [str(entry.get("config_name", "default")) for entry in configs]
    if config is None:
        defaults = [n for n, entry in enumerate(configs) if entry.get("default") is True]
        defaults += [n for n, name in enumerate(names) if name == "default"]
        if defaults or len(configs) == 1:
            return configs[defaults[0] if defaults else 0]
        raise BadInput(
            f"{folder} has the configurations {', '.join(names)}: name one of them", param="config"
        )
    if config not in names:
        raise BadInput(
            f"{folder} has no configuration {config!r}; there are {', '.join(names) or 'none'}",
            param="config",
        )
    return configs[names.index(config)]


def _by_config(folder: Path, config: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The files of each split, as a configuration tells them: one pattern, a list, or by split."""
    base = folder / str(config.get("data_dir") or "")
    told = config.get("data_files")
    if told is None:
        return _by_name(base)
    entries = told if isinstance(told, list) else [told]
    found: dict[str, list[Path]] = {}
    for entry in entries:
        by_split = isinstance(entry, dict)
        split = str(entry.get("split", "train")) if by_split else "train"
        patterns = entry.get("path", []) if by_split else entry
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            files = _matching(base, str(pattern))
            if not files:
                raise BadInput(f"{folder}: its README names {pattern!r}, and no file is that",
                               param="path")  # fmt: skip
            found.setdefault(split, []).extend(files)
    return found


def _matching(base: Path, pattern: str) -> list[Path]:
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise BadInput(f"{pattern!r} leads out of the folder {base}", param="path")
    return sorted(path for path in base.glob(pattern) if path.is_file())


def _by_name(folder: Path) -> dict[str, list[Path]]:
    """The files of each split, by the words in their names; all are of train if none says so."""
    files = [path for path in sorted(folder.rglob("*")) if _is_data(folder, path)]
    found: dict[str, list[Path]] = {}
    for split, words in _KEYWORDS.items():
        named = [path for path in files if _says(path.relative_to(folder), words)]
        if named:
            found[split] = named
    return found or {"train": files}


def _is_data(folder: Path, path: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    return path.suffix in _KINDS and path.name not in _NOT_DATA and not hidden and path.is_file()


def _says(path: Path, words: Iterable[str]) -> bool:
    parts = re.split(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9])", path.as_posix().lower())
    return any(word in parts for word in words)
