"""Hugging Face folders: find the files of each split in a folder laid out for `datasets`.

The field `configs` in the front matter of README.md names the splits. Without it the names of the
files do (`data/train-00000-of-00001.parquet`, `test.jsonl`). Nothing is fetched, no script of such
a folder is ever run, and nothing outside of it is read. Called by task_set.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, SetupError
from cray_agents.records import Split
from cray_agents.tasks.readers import Row, RowBound, inside, rows_of_file

#: Our split for each split of such folders; None: tasks to be distributed.
SPLITS: Mapping[str, Split | None] = {"train": None, "validation": "holdout", "test": "test"}

_KINDS = {".parquet", ".jsonl", ".json", ".csv", ".tsv"}
_KEYWORDS = {  # as `datasets` knows them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "state.json", "croissant.json"}
MOST_FRONT_MATTER = 2**20  # characters
DEEPEST = 50  # brackets within each other in a README's front matter
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)


def rows_by_split(folder: Path, config: str | None = None) -> Iterator[tuple[str, Row]]:
    """Yield (the folder's name of a split, row), split by split. Raises BadInput, SetupError.

    `config` names a configuration of its README; default: the README's default, or the only one.
    """
    if not folder.is_dir():
        raise BadInput(f"no folder {folder} to read tasks from", param="path")
    configs = _configs(folder)
    if config is None and not configs:
        by_split = _files_by_name(folder, folder)
    else:
        by_split = _files_by_config(folder, _choose_config(folder, configs, config))
    if not any(by_split.values()):
        raise BadInput(f"{folder} holds no {', '.join(sorted(_KINDS))} files", param="path")
    bound = RowBound([file for files in by_split.values() for file in files])
    for split, files in by_split.items():
        for file in files:
            for row in bound.checked(rows_of_file(file)):
                yield split, row


def _configs(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of the README's field `configs`."""
    readme = folder / "README.md"
    if not readme.is_file():
        return []
    with inside(folder, readme).open("rb") as file:
        text = file.read(MOST_FRONT_MATTER).decode("utf-8-sig", "replace")
    if (header := _FRONT_MATTER.match(text)) is None:
        if text.startswith("---") and len(text) > MOST_FRONT_MATTER // 2:
            raise BadInput(f"{readme}: its front matter is longer than 1 MiB", param="path")
        return []
    try:
        import yaml
    except ImportError as error:
        raise SetupError(
            "the README of a dataset folder is read with PyYAML: pip install pyyaml"
        ) from error
    try:
        depths = accumulate((mark in "[{") - (mark in "]}") for mark in header[1])
        if max(depths, default=0) > DEEPEST:  # PyYAML's time grows by the square of it
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(header[1])):
            raise ValueError("it has aliases (*name), of which gigabytes can be made")
        about = yaml.safe_load(header[1])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{readme}: its front matter is unusable: {error}", param="path") from error
    configs = about.get("configs") if isinstance(about, dict) else None
    entries = configs if isinstance(configs, list) else [configs] if configs else []
    return [entry for entry in entries if isinstance(entry, dict)]


def _choose_config(
    folder: Path, configs: list[dict[str, Any]], config: str | None
) -> dict[str, Any]:
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


def _files_by_config(folder: Path, config: Mapping[str, Any]) -> dict[str, list[Path]]:
    """Return the files of each split of a configuration: one pattern, a list, or by split."""
    base = inside(folder, folder / str(config.get("data_dir") or ""))
    data_files = config.get("data_files")
    if data_files is None:
        return _files_by_name(folder, base)
    entries = data_files if isinstance(data_files, list) else [data_files]
    files_by_split: dict[str, list[Path]] = {}
    for entry in entries:
        has_split = isinstance(entry, dict)
        split = str(entry.get("split", "train")) if has_split else "train"
        patterns = entry.get("path", []) if has_split else entry
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            files = _matching(folder, base, str(pattern))
            if not files:
                raise BadInput(f"{folder}: its README names {pattern!r}, and no file is that",
                               param="path")  # fmt: skip
            files_by_split.setdefault(split, []).extend(files)
    return files_by_split


def _matching(folder: Path, base: Path, pattern: str) -> list[Path]:
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise BadInput(f"{pattern!r} leads out of the folder {base}", param="path")
    try:
        paths = sorted(base.glob(pattern))
    except ValueError as error:
        raise BadInput(f"{folder}: its README names {pattern!r}: {error}", param="path") from error
    return [inside(folder, path) for path in paths if path.is_file()]


def _files_by_name(folder: Path, base: Path) -> dict[str, list[Path]]:
    """Return the files of each split, by the words in their names; all are train if none match."""
    paths = [path for path in sorted(base.rglob("*")) if _is_data(base, path)]
    files = [inside(folder, path) for path in paths]
    files_by_split: dict[str, list[Path]] = {}
    for split, words in _KEYWORDS.items():
        matches = [path for path in files if _name_contains(path.relative_to(base), words)]
        if matches:
            files_by_split[split] = matches
    return files_by_split or {"train": files}


def _is_data(folder: Path, path: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    return path.suffix in _KINDS and path.name not in _NOT_DATA and not hidden and path.is_file()


def _name_contains(path: Path, words: Iterable[str]) -> bool:
    path_words = re.split(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9])", path.as_posix().lower())
    return any(word in path_words for word in words)
