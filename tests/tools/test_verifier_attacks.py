"""The default kind of verifier pays none of the attacks; a checker pays 0 to 1, and never errs.

CRAY_TEST_ATTACKS=all runs every attack on every kind in every layer, as the table in BENCHMARKS.md;
else each is run in one layer.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from cray_agents.tools.sandbox import backends
from tests.support.tools.verifier_attacks import ATTACKS
from tests.support.tools.verifier_campaign import (
    CHECKERS,
    DEFAULT,
    HONEST,
    LAYERS,
    earned,
    kinds,
    of,
    run_of,
)
from tests.tools.test_sandbox import PYTHON, ordinary_user

pytestmark = pytest.mark.slow

ALL = os.environ.get("CRAY_TEST_ATTACKS") == "all"
# what a checker does not promise is left to the campaign
PROMISED = of("rewards out of bounds", "errors on purpose")


def some(names: Iterable[str], layer: backends.Layer) -> list[str]:
    """Each attack in one layer, to be quick."""
    return list(ATTACKS) if ALL else list(names)[LAYERS.index(layer) :: len(LAYERS)]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", DEFAULT)
async def test_the_default_kind_pays_none(kind: str, layer: backends.Layer) -> None:
    verify = kinds(layer)[kind]
    assert await verify(run_of(HONEST)) == 1.0
    assert len(ATTACKS) > 120
    values = await earned(verify, some(ATTACKS, layer))
    assert {name: value for name, value in values.items() if value} == {}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", CHECKERS)
async def test_a_checker_pays_no_more_than_1_and_never_errs(
    kind: str, layer: backends.Layer
) -> None:
    verify = kinds(layer)[kind]
    assert await verify(run_of(HONEST)) == 1.0
    values = await earned(verify, [*some(PROMISED, layer), "equality: equals everything"])
    assert all(0 <= value <= 1 for value in values.values()), values
    assert values["equality: equals everything"] == 1.0  # so that they are attacks


if os.getuid() == 0 and "bubblewrap" in LAYERS:

    def test_judge_and_code_of_one_user() -> None:
        """As an ordinary user, only the sandbox stands between the code and the judge's memory."""
        with tempfile.TemporaryDirectory() as home:
            Path(home).chmod(0o777)
            campaign = [PYTHON, "-m", "tests.support.tools.verifier_campaign", "parents' memory"]
            done = subprocess.run(
                ordinary_user(campaign, Path(home)),
                text=True, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        assert done.stdout.endswith("10 attacks, of which earn: []\n"), done.stdout[-4000:]
