"""Model code: Python files beside a model, run only where the operator allows their directory.

`auto_map` in the JSON files of a model names classes in such files. A reference leads to the
directory itself (`modeling_x.Model`), or to another one (`/models/x--modeling_x.Model`).
Checkpoints hold no code: an import and an export make references to an allowed directory whole, so
that what runs is always that directory's code. Called by checkpoints.py,
pool/vllm_process.py and trainers/models/universal/text_model.py.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cray_agents.config import load_config
from cray_agents.runtime.registry.model_files import INDEX, names_in, read_json

AUTO_MAP = "auto_map"
VARIABLE = "CRAY_AGENTS_TRUST_REMOTE_CODE"
_APART = "--"  # between a directory and a file of it, as transformers writes it
_PLAIN = re.compile(r"\w+\.\w+")  # a file and a class in it
_NO_CODE = {"tokenizer.json", "vocab.json", "manifest.json", INDEX}  # large, and never asked for it


def allowed_directories() -> list[Path]:
    """Return the directories whose code may run: `trust_remote_code` of the configuration.

    A job's process, which runs elsewhere, has them in its environment. Raises ConfigError.
    """
    if (value := os.environ.get(VARIABLE)) is not None:
        return [Path(each).expanduser() for each in value.split(os.pathsep) if each]
    return load_config().trust_remote_code


def is_allowed(directory: Path) -> bool:
    """Tell whether the code of exactly this directory may run."""
    return directory.resolve() in [each.resolve() for each in allowed_directories()]


def code_place(reference: str, directory: Path) -> tuple[Path, str] | None:
    """Return the allowed directory of a reference, and the file and class; None if it may not run.

    `directory`: of the file that has the reference.
    """
    place, apart, name = reference.rpartition(_APART)
    folder = Path(place) if apart else directory.resolve()
    runs = _PLAIN.fullmatch(name) and folder.is_absolute() and is_allowed(folder)
    return (folder, name) if runs else None


def may_run(directory: Path) -> bool:
    """Tell whether a model refers to code, and all of it may run. Raises BadInput."""
    if not allowed_directories():
        return False
    references = [each for _, content in _settings(directory) for each in _references(content)]
    return bool(references) and all(code_place(each, directory) for each in references)


def changed_settings(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the files of an allowed directory that refer to its code, with whole references.

    Empty for another directory. Raises BadInput.
    """
    if not is_allowed(directory):
        return {}
    both = ((name, content, _whole(content, directory)) for name, content in _settings(directory))
    return {name: whole for name, content, whole in both if whole != content}


def with_whole_references(content: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the content of a file of a directory as `changed_settings` has it."""
    whole: dict[str, Any] = _whole(content, directory) if is_allowed(directory) else content
    return whole


def _settings(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names_in(directory, {".json"}):
        if name not in _NO_CODE:
            yield name, read_json(directory.resolve(), name)


def _references(value: Any, *, within: bool = False) -> Iterator[str]:
    """Yield the texts below any `auto_map`: of classes, or of lists of classes."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _references(inner, within=within or key == AUTO_MAP)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner, within=within)
    elif within and isinstance(value, str):
        yield value


def _whole(value: Any, directory: Path, *, within: bool = False) -> Any:
    if isinstance(value, dict):
        return {k: _whole(v, directory, within=within or k == AUTO_MAP) for k, v in value.items()}
    if isinstance(value, list):
        return [_whole(inner, directory, within=within) for inner in value]
    if within and isinstance(value, str) and _APART not in value:
        return f"{directory.resolve()}{_APART}{value}"
    return value
