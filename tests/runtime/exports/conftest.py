"""The recorded runs, once for all tests of exports."""

from pathlib import Path

import pytest

from cray_agents.records import Run
from tests.support.exports.example_runs import nasty, recorded


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Recorded ones by the name of their script, made-up ones by what is odd in them."""
    home: Path = tmp_path_factory.mktemp("exports") / "home"
    return recorded(home) | nasty()
