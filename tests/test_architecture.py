"""ARCHITECTURE.md is complete: each file stands in its tree, with its first line as the caption."""

import re

import pytest

from tests.support import architecture


@pytest.mark.slow
def test_the_tree_is_that_of_the_files() -> None:
    assert architecture.written() == architecture.tree(), "run python -m tests.support.architecture"


def test_files_that_are_named_are_there() -> None:
    """Files that the text names by a path, such as `runtime/pool/pool.py`."""
    text = architecture.DOCUMENT.read_text().replace(architecture.written(), "")
    paths = re.findall(r"\b(?:[a-z_]+/)+[a-z_]+\.py\b", text)
    assert [path for path in paths if not (architecture.ROOT / path).exists()] == []
    assert len(paths) > 10
