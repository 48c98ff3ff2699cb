"""Near duplicates: what is planted is found, what is reported is true, everywhere the same."""

import hashlib
import json
import os
import random
import subprocess
import sys

import pytest
import rensa

from cray_agents.runtime.datasets import near_duplicates as near_module
from cray_agents.runtime.datasets.near_duplicates import (
    MOST,
    SEED,
    NearDuplicates,
    banding,
    count_shared,
    shingles,
)

TOKENS = 32_000


def sequence(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(TOKENS) for _ in range(length)]


def changed(rng: random.Random, tokens: list[int], edits: int) -> list[int]:
    """The same with so many stretches of three tokens replaced."""
    new = list(tokens)
    for _ in range(edits):
        place = rng.randrange(len(new) - 3)
        new[place : place + 3] = sequence(rng, 3)
    return new


def jaccard(one: list[int], two: list[int]) -> float:
    """From the definition, with no hash."""
    first, second = ({tuple(s[i : i + 5]) for i in range(len(s) - 4)} for s in (one, two))
    return len(first & second) / len(first | second)


def test_shingles_are_the_distinct_five_grams() -> None:
    assert len(shingles([1, 2, 3, 4])) == 0
    assert len(shingles([1, 2, 3, 4, 5])) == 1
    assert len(shingles([7] * 50)) == 1
    one, two = shingles([1, 2, 3, 4, 5, 6]), shingles([0, 1, 2, 3, 4, 5, 6])
    assert count_shared(one, two) == 2 and count_shared(two, one) == 2
    assert count_shared(one, shingles([])) == 0 == count_shared(shingles([]), one)
    assert count_shared(shingles([5, 4, 3, 2, 1]), shingles([1, 2, 3, 4, 5])) == 0


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9])
def test_planted_near_duplicates_are_found_and_nothing_else(threshold: float) -> None:
    rng = random.Random(7)
    near = NearDuplicates(threshold)
    originals = [sequence(rng, rng.randrange(60, 400)) for _ in range(300)]
    for number, tokens in enumerate(originals):
        assert near.add(f"original-{number}", tokens) is None
    true = found = 0
    for number, tokens in enumerate(originals):
        other = changed(rng, tokens, rng.randrange(1, 8))
        similar = jaccard(tokens, other)
        answer = near.add(f"changed-{number}", other)
        if answer is not None:  # precision is 1: an answer is exact
            assert answer[0] == f"original-{number}"
            assert answer[1] == pytest.approx(similar) and similar >= threshold
        true += similar >= threshold
        found += answer is not None
    assert 40 < true < 300  # the test has both kinds
    assert found >= 0.99 * true


def test_the_banding_keeps_the_stated_recall() -> None:
    for threshold in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0):
        rows, bands = banding(threshold)
        assert rows * bands <= 128
        assert 1 - (1 - threshold**rows) ** bands >= 0.999


def test_those_below_a_threshold_of_one_are_no_duplicates() -> None:
    near = NearDuplicates(1.0)
    tokens = list(range(1000))
    assert near.add("a", tokens) is None
    assert near.add("b", [*tokens[:-1], 5]) is None
    assert near.add("c", tokens) == ("a", 1.0)


def test_short_sequences_are_compared_whole() -> None:
    near = NearDuplicates(0.1)
    assert near.add("a", [1, 2, 3, 4]) is None
    assert near.add("b", [1, 2, 3]) is None
    assert near.add("c", [4, 3, 2, 1]) is None
    assert near.add("d", []) is None
    assert near.add("e", [1, 2, 3, 4]) == ("a", 1.0)
    assert near.add("f", []) == ("d", 1.0)
    assert len(near) == 4


def test_a_dropped_sequence_is_not_remembered() -> None:
    near = NearDuplicates(0.8)
    tokens = list(range(100))
    drift = [*range(1000, 1006), *tokens[6:]]
    further = [*drift[:-6], *range(2000, 2006)]
    assert near.add("first", tokens) is None
    assert near.add("second", drift) is not None
    assert jaccard(drift, further) >= 0.8 > jaccard(tokens, further)
    assert near.add("third", further) is None  # like the second only, which is not there


@pytest.mark.parametrize("first", ["more", "less", "as much"])
def test_the_most_similar_is_named_and_of_equals_the_first(first: str) -> None:
    rng = random.Random(3)
    tokens = sequence(rng, 300)
    ends = {"more": tokens[:200] + sequence(rng, 100), "less": sequence(rng, 120) + tokens[120:]}
    ends["as much"] = sequence(rng, 100) + tokens[100:]
    near = NearDuplicates(0.4)
    for name in sorted(ends, key=lambda name: name != first):
        if name != "less" or first == "less":
            near.add(name, ends[name])
    name, likeness = near.add("new", tokens)
    assert name == ("as much" if first == "as much" else "more")
    assert likeness == pytest.approx(jaccard(tokens, ends["more"]))


def test_sets_may_be_equal_where_sequences_are_not() -> None:
    again = NearDuplicates(1.0)
    looped = [1, 2, 3, 4, 5] * 4
    assert again.add("first", looped) is None
    assert again.add("second", looped[:-1]) == ("first", 1.0)


def test_a_long_common_beginning_neither_hides_nor_makes_duplicates() -> None:
    """Samples of one agent share its system prompt and its tools: here five sixths of each."""
    rng = random.Random(11)
    prompt = sequence(rng, 1000)
    own = [sequence(rng, 200) for _ in range(3 * MOST)]
    near = NearDuplicates(0.9)
    for number, tokens in enumerate(own):
        assert near.add(str(number), prompt + tokens) is None
    found = 0
    for number, tokens in enumerate(own):
        answer = near.add("again", prompt + changed(rng, tokens, 3))
        found += answer is not None and answer[0] == str(number)
    assert found >= 0.98 * len(own)


def test_shingles_that_went_to_a_file_are_still_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_module, "IN_MEMORY", 4096)
    rng = random.Random(5)
    near = NearDuplicates(0.8)
    originals = [sequence(rng, 200) for _ in range(50)]
    for number, tokens in enumerate(originals):
        assert near.add(str(number), tokens) is None
    for number, tokens in enumerate(originals):
        answer = near.add("again", [*tokens[:-2], 1, 2])
        assert answer is not None and answer[0] == str(number)
    near.close()


PROGRAM = """
import random
from cray_agents.runtime.datasets.near_duplicates import NearDuplicates
rng = random.Random(1)
near = NearDuplicates(0.7)
for number in range(200):
    tokens = [rng.randrange(50) for _ in range(rng.randrange(30))]
    print(near.add(str(number), tokens), near.add(str(-number), tokens[:-1]))
print(sorted(near._first)[:50])
"""


@pytest.mark.slow
def test_the_answers_do_not_depend_on_the_process() -> None:
    told = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(told) == 1


def test_a_signature_is_what_it_was_on_every_machine() -> None:
    """Another version of rensa, or of its kernels, would give the same runs another dataset."""
    assert rensa.RMinHash.ALGORITHM_VERSION == 2
    told = hashlib.sha256()
    for length in (6, 40, 600, 9_000):  # rensa treats few and many hashes differently
        hashes = shingles(list(range(length)))
        matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
            hashes, [0, len(hashes)], 125, SEED
        )
        told.update(json.dumps(matrix.to_rows()[0]).encode())
    assert told.hexdigest()[:16] == "6929cc69d95cdbe7"
