"""ARCHITECTURE.md is complete: each file stands in its tree, with its first line as the caption."""

import ast
import re

import pytest

from tests.support import architecture
from tests.test_layers import modules


@pytest.mark.slow
def test_the_tree_is_that_of_the_files() -> None:
    assert architecture.written() == architecture.tree(), "run python -m tests.support.architecture"


def test_files_that_are_named_are_there() -> None:
    """Files that the text names by a path, such as `runtime/pool/pool.py`."""
    text = architecture.DOCUMENT.read_text().replace(architecture.written(), "")
    paths = re.findall(r"\b(?:[a-z_]+/)+[a-z_]+\.py\b", text)
    assert [path for path in paths if not (architecture.ROOT / path).exists()] == []
    assert len(paths) > 10


def test_files_that_docstrings_point_to_are_there() -> None:
    """Those after "Called by", "Read next:" and the like, by the end of their path."""
    files = [f"/{file.relative_to(architecture.ROOT)}" for file in modules()]
    pointed, missing = 0, []
    for file in modules():
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        for pointers in re.findall(r"(?:Read next:|(?:Call|Us|Mad|Start)ed? by)([^:;]*)", text):
            for name in re.findall(r"\w[\w/]*\.py\b", pointers):
                pointed += 1
                if name != "FILE.py" and not any(known.endswith(f"/{name}") for known in files):
                    missing.append(f"{file.name}: {name}")
    assert missing == [] and pointed > 100
