"""Status: docs/status.md is that of the table, and the table's tests run where it says."""

import json
from pathlib import Path

import pytest

from tests.soak import RESULTS, SOAKS, Soak, read_results, run
from tests.status import FEATURES, PAGE, TESTS, marks, page, path


@pytest.mark.parametrize("feature", FEATURES)
def test_named_tests_run_where_the_table_says(feature: str) -> None:
    cpu, slurm, gpu = FEATURES[feature]
    stages = (TESTS / "gpu" / "__main__.py").read_text()
    assert cpu or slurm
    for test in cpu.split():
        every = path(test).read_text().partition("\npytestmark =")[2].partition("\n\n")[0]
        assert "mark.slurm" not in every, test
    assert [test for test in slurm.split() if "slurm" not in marks(test)] == []
    assert [stage for stage in gpu.split() if f'    "{stage}": ' not in stages] == []


def test_campaigns_name_tests_that_exist() -> None:
    words = [word for soak in SOAKS for word in (*soak.tests.split(), *soak.follows.split())]
    named = [word for word in words if "/" in word]
    assert [file for file in named if not [*TESTS.parent.glob(file)]] == []


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(read_results(RESULTS)), "run python -m tests.status"


@pytest.mark.parametrize("soak", [one for one in SOAKS if one.follows], ids=lambda one: one.name)
def test_what_a_campaign_follows_is_as_it_was(soak: Soak) -> None:
    last = read_results(RESULTS)["soak"].get(soak.name, {})
    again = f"make soak ARGS={soak.name}"
    assert last.get("result", "").partition(", ")[0].endswith(" passed"), again
    assert last.get("code") == soak.code(), f"{soak.follows} or its tests changed: {again}"


@pytest.mark.slow
def test_a_campaign_records_its_last_result(tmp_path: Path) -> None:
    results, test = tmp_path / "results.json", tmp_path / "test_one.py"
    results.write_text('{"gpu": {}, "soak": {}}')
    skips = "def test_two() -> None:\n    pytest.skip()\n"
    for body, counted in (("pass", "1 passed, 1 skipped"), ("assert 0", "failed, 1 skipped")):
        test.write_text(f"import pytest\ndef test_one() -> None:\n    {body}\n{skips}")
        assert run(Soak("jobs", str(test)), results) == (body == "pass")
        kept = json.loads(results.read_bytes())["soak"]["jobs"]
        assert kept["result"].startswith(f"{counted}, ")
        assert kept["date"] in page(read_results(results))
