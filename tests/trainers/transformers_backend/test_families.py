"""Families in the transformers backend, beside a plain loop of transformers and torch's AdamW.

`make test` takes one family of each packing through everything, and others through losses and
export. CRAY_TEST_FAMILIES: `all` (`make soak`), `missing` from docs/families.json, or families
joined by commas; their results go into docs/families.json and the table of docs/models.md.
"""

import json
import os
from pathlib import Path

import pytest

from tests.support.trainers.family_table import (
    EVERY,
    NOTES,
    PAGE,
    RESULTS,
    note_result,
    read_results,
    read_serving,
    with_table,
)
from tests.support.trainers.family_trial import measure, problems

OWN = "packed: attention within each sequence"
SPLIT = f"{OWN}, mixers once per sequence"
WHOLE = {
    "qwen3": OWN,  # tied embeddings
    "gpt_oss": OWN,  # experts, windows, sinks
    "qwen3_next": SPLIT,
    "deepseek_v4": "rows padded on the right",
}
#: toy is a kind that transformers does not have
BRIEF = {"llama": OWN, "gemma3_text": OWN, "qwen3_moe": OWN, "lfm2": SPLIT, "toy": SPLIT}
ASKED = os.environ.get("CRAY_TEST_FAMILIES", "")
CAMPAIGN = {
    "": [],
    "all": list(EVERY),
    "missing": [name for name in EVERY if name not in read_results()],
}.get(ASKED, ASKED.split(","))


@pytest.mark.megatron
@pytest.mark.parametrize("family", [*WHOLE, *BRIEF])
def test_a_family_trains_as_transformers_alone_does(family: str, tmp_path: Path) -> None:
    brief = family in BRIEF
    result = measure(family, tmp_path, brief=brief)
    found = problems(result, brief=brief)
    if family == "deepseek_v4":  # as transformers alone: its norms' float32 meets bfloat16
        assert "cannot compute in bfloat16" in found.pop("bfloat16")
        assert found.pop("bfloat16_export") == "not tried"
    assert found == {}, result
    assert result["packing"] == (WHOLE | BRIEF)[family]


@pytest.mark.megatron
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", CAMPAIGN)
def test_every_family(family: str, tmp_path: Path) -> None:
    result = measure(family, tmp_path)
    note_result(family, result)
    found = problems(result)
    print(f"{family}: {result.get('packing')}; {found or 'right'}", flush=True)
    assert not found or family in NOTES, found


def test_the_table_of_the_page_is_made_of_the_results() -> None:
    """`python -m tests.support.trainers.family_table` writes it anew."""
    page = PAGE.read_text()
    assert with_table(page, read_results(), read_serving()) == page


def test_the_results_are_of_families_that_exist_and_what_is_wrong_is_explained() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    results = json.loads(RESULTS.read_text())
    assert results.keys() <= EVERY.keys()
    for family, result in results.items():
        assert result["kind"] == EVERY[family]().model_type in CONFIG_MAPPING
    assert NOTES.keys() == {family for family, result in results.items() if problems(result)}
