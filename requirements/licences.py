"""Lists what licence each pinned package is under, by what the installed packages say themselves.

    .venv/bin/python requirements/licences.py [cpu dev]

The names are of files in this folder, and the packages those of the environment it runs in: for
`foreign` and `litellm` use the Python of `.venv-foreign` and `.venv-litellm`. Copyleft, proprietary
and unknown ones come first. Exit code 1 if a licence is unknown, or a package is not installed.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
COPYLEFT = re.compile(r"\bA?L?GPL|GNU|MPL|Mozilla|EUPL|CDDL|\bEPL|Eclipse", re.IGNORECASE)
PROPRIETARY = re.compile(r"proprietary|end user|EULA|NVIDIA", re.IGNORECASE)
#: What a licence's own text begins with, where a package names none in its metadata.
TEXTS = {
    "MIT License": "MIT",
    "Permission is hereby granted, free of charge": "MIT",
    "Apache License": "Apache-2.0",
    "Redistribution and use in source and binary forms": "BSD",
    "GNU LESSER GENERAL PUBLIC LICENSE": "LGPL",
    "GNU GENERAL PUBLIC LICENSE": "GPL",
    "Mozilla Public License": "MPL-2.0",
}
KINDS = ("proprietary", "copyleft", "unknown", "permissive")


def pinned(names: list[str]) -> list[str]:
    """The packages that requirement files name."""
    lines = [line for name in names for line in (HERE / f"{name}.txt").read_text().splitlines()]
    found = [line.partition("==")[0] for line in lines if re.match(r"[A-Za-z0-9]", line)]
    return sorted({re.sub(r"\[.*", "", name) for name in found}, key=str.lower)


def licence(package: str) -> str:
    """As its metadata says: the expression, the classifiers, the field, or the text it ships."""
    found = importlib.metadata.distribution(package)
    about = found.metadata
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or []
        if line.startswith("License ::") and not line.endswith("OSI Approved")
    ]
    if classifiers:
        return ", ".join(classifiers)
    said = (about.get("License") or "").strip().partition("\n")[0]
    return said[:60] or next(_by_text(found), "")


def _by_text(found: importlib.metadata.Distribution) -> Iterator[str]:
    for file in found.files or []:
        if re.search(r"LICEN[SC]E|COPYING", file.name, re.IGNORECASE) and ".dist-info" in str(file):
            text = Path(str(file.locate())).read_text(errors="replace")[:2000]
            yield from (name for start, name in TEXTS.items() if start in text)


def kind(told: str) -> str:
    """One of KINDS."""
    if PROPRIETARY.search(told):
        return "proprietary"
    if COPYLEFT.search(told):
        return "copyleft"
    return "permissive" if told else "unknown"


def main(names: list[str]) -> int:
    """Print the table."""
    rows, missing = [], []
    for package in pinned(names):
        try:
            told = licence(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
            continue
        rows.append((kind(told), package, importlib.metadata.version(package), told))
    for row in sorted(rows, key=lambda row: (KINDS.index(row[0]), row[1].lower())):
        print(f"{row[0]:12} {row[1]:34} {row[2]:18} {row[3] or '-'}")
    if missing:
        print(f"not installed here: {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing) or any(row[0] == "unknown" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["cpu", "dev"]))
