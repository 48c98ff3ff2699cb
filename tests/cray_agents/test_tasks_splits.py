"""Leaks between splits: named, or left out, by the rule of decontamination."""

import random

import pytest

from cray_agents import Task, TaskSet
from cray_agents.errors import BadInput
from cray_agents.records import Split
from cray_agents.runtime.datasets.decontamination import BlockedTexts, HeldText
from cray_agents.tasks.leakage import find_leaks
from cray_agents.tasks.text_index import input_key

LONG = (
    "A farmer has seventeen sheep in the north field and four goats in the barn; a storm comes, "
    "half of the sheep run away, and one goat is born: how many animals does the farmer have now?"
)
NEARLY = LONG.replace("farmer have now", "farmer own now")


def task(text: str, split: Split = "train", name: str = "") -> Task:
    return Task(input=text, split=split, id=name)


def test_a_near_duplicate_on_both_sides_is_an_error_that_names_both() -> None:
    with pytest.raises(BadInput) as caught:
        TaskSet([task("first", name="a"), task(NEARLY), task(LONG, "holdout")])
    assert str(caught.value) == (
        "task 1: the input 'A farmer has seventeen sheep in the north field and four goa' is in "
        "split 'train' here and in 'holdout' at task 2 as 'A farmer has seventeen sheep in the "
        "north field and four goa' (similarity 0.89). What a split judges must not be known from "
        'another: give both one split, leave one out, or say on_leak="drop"; what all tasks '
        "share belongs into the agent's instructions or examples"
    )
    assert caught.value.param == "split"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LONG, LONG.upper() + "!!"),
        ("What is 47 + 385?", "what is 47+385"),
        (f"Read this first. {LONG}", LONG),
        (NEARLY, LONG),
        ("???", " ??? "),
    ],
)
def test_what_is_the_same_input(one: str, other: str) -> None:
    for guarded in ("holdout", "test"):
        with pytest.raises(BadInput, match="is in split 'train' here"):
            TaskSet([task(one), task(other, guarded)])  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="is in split 'holdout' here and in 'test'"):
        TaskSet([task(one, "holdout"), task(other, "test")])
    assert len(TaskSet([task(one, name="a"), task(other, name="b")])) == 2  # in one split, it may


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 47 + 385?", "What is 47 + 386?"),
        ("What is 2+3?", "What is 2-3?"),
        ("How many legs has a spider?", "How many legs has a beetle?"),  # too short to be near
        (LONG, LONG.replace("sheep", "hens").replace("goats", "cows")),
        ("!!!", "???"),
    ],
)
def test_what_is_another_input(one: str, other: str) -> None:
    assert len(TaskSet([task(one), task(other, "holdout")])) == 2


def test_many_sums_are_no_leak() -> None:
    sums = [f"What is {a} + {b}?" for a in range(40) for b in range(40)]
    tasks = TaskSet.from_list(sums, holdout=0.3, test=0.1)
    assert len(tasks) == 1600 and len(tasks.holdout) > 400


def test_the_same_id_in_two_splits() -> None:
    both = [task("one thing", name="x"), task("another", "holdout", name="x")]
    with pytest.raises(BadInput, match="the task id 'x' is in split 'train' here and in 'holdout'"):
        TaskSet(both)
    tasks = TaskSet(both, on_leak="drop")
    assert [t.split for t in tasks] == ["holdout"] and tasks.dropped[0].task is both[0]


def test_drop_leaves_out_the_less_guarded() -> None:
    given = [
        task(LONG, "test"),
        task(NEARLY, "train"),
        task(f"{LONG} Why?", "holdout"),
        task("free"),
    ]
    tasks = TaskSet(given, on_leak="drop")
    assert [t.input for t in tasks] == [LONG, "free"]
    assert [d.task.split for d in tasks.dropped] == ["train", "holdout"]
    assert "similarity 0.89" in tasks.dropped[0].reason
    assert tasks.train.dropped == ()
    same = TaskSet.from_list([LONG, {"input": NEARLY, "split": "test"}], holdout=0, on_leak="drop")
    assert [t.split for t in same] == ["test"]


def test_inputs_that_differ_in_signs_alone_are_on_one_side() -> None:
    for n in range(40):
        texts = [f"Q{n}: why, then?", f"q{n} - why then", f"q{n}, WHY then!"]
        tasks = TaskSet.from_list([{"input": x, "id": str(i)} for i, x in enumerate(texts)])
        assert len({t.split for t in tasks}) == 1


WORDS = [a + b for a in ("ba", "do", "ki", "lu", "me", "no") for b in ("ra", "ti", "so", "ve")]


def changed(rng: random.Random, text: str) -> str:
    words = text.split()
    for _ in range(rng.randrange(4)):
        words[rng.randrange(len(words))] = rng.choice([*WORDS, "7", "+"])
    start = rng.choice([0, 0, 0, 1, 5])
    return " ".join([*(WORDS[:3] if rng.random() < 0.2 else []), *words[start:]])


def test_the_rule_is_that_of_decontamination() -> None:
    """Each text that is held out is found in both ways: as a task, and in a training set."""
    rng = random.Random(5)
    shared = " ".join(rng.choices(WORDS, k=30))  # a template makes long lists in the index
    held = [" ".join(rng.choices(WORDS, k=rng.randrange(5, 60))) for _ in range(150)]
    held += [f"{shared} {' '.join(rng.choices(WORDS, k=rng.randrange(3, 30)))}" for _ in range(100)]
    texts = [changed(rng, rng.choice(held)) for _ in range(1500)]
    theirs = BlockedTexts([HeldText(str(n), text) for n, text in enumerate(held)])
    tasks = [task(text, "holdout", f"h{n}") for n, text in enumerate(held)]
    tasks += [task(text, name=f"t{n}") for n, text in enumerate(texts)]
    mine = {leak.one: leak for leak in find_leaks(tasks, [input_key(t.text) for t in tasks])}
    ways = set()
    for number, text in enumerate(texts, len(held)):
        expected, leak = theirs.match(text), mine.get(number)
        assert (expected is None) == (leak is None), text
        if expected is not None and leak is not None:
            assert leak.how == expected.how
            ways.add(leak.how)
            one, two = ({*grams(input_key(t))} for t in (text, tasks[leak.other].text))
            if leak.how != "equal":
                assert leak.similarity == pytest.approx(len(one & two) / len(one | two))
    assert ways == {"equal", "near", "contained"} and 200 < len(mine) < 1300


def grams(key: str) -> list[tuple[str, ...]]:
    words = key.split()
    return [tuple(words[n : n + 5]) for n in range(len(words) - 4)]


MAZE = "Find the way out of the maze. You may go north, east, south or west, one step at a time."


def test_the_same_input_in_different_worlds_is_different_tasks() -> None:
    rows = [{"input": MAZE, "metadata": {"maze": n, "hint": "none"}} for n in range(60)]
    tasks = TaskSet.from_list(rows, identity=["maze"], holdout=0.3)
    assert len({task.id for task in tasks}) == 60
    assert {task.split for task in tasks} == {"train", "holdout"}
    again = TaskSet.from_list(rows[:20], identity=["maze"], holdout=0.3)
    assert [*again] == [*tasks[:20]]  # also its split, which comes from its identity
    other_hint = {**rows[0], "metadata": {"maze": 0, "hint": "left"}}
    with pytest.raises(BadInput, match="the same task id"):
        TaskSet.from_list([rows[0], other_hint], identity=["maze"], holdout=0)
    with pytest.raises(BadInput, match="the same task id"):
        TaskSet.from_list(rows)


def test_a_world_in_two_splits_is_a_leak() -> None:
    def maze(number: int, split: Split, name: str) -> Task:
        metadata = {"maze": number}
        return Task(input=MAZE, metadata=metadata, identity=["maze"], split=split, id=name)

    TaskSet([maze(1, "train", "a"), maze(2, "holdout", "b")])
    with pytest.raises(BadInput, match="is in split 'train' here and in 'holdout'"):
        TaskSet([maze(1, "train", "a"), maze(1, "holdout", "b")])


def test_an_identity_must_be_in_the_metadata() -> None:
    with pytest.raises(BadInput, match=r"task 0: identity: 'maze' is no key .* there is 'seed'"):
        TaskSet.from_list([{"input": "x", "metadata": {"seed": 1}}], identity=["maze"])
    with pytest.raises(BadInput, match="give a list of keys"):
        TaskSet.from_list([{"input": "x", "metadata": {"maze": 1}}], identity="maze")
