"""Held-out texts are recognised in training data: equal, nearly equal, or whole in another text."""

import json
import random
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from cray_agents import Task, TaskSet
from cray_agents.errors import BadInput, Corrupt
from cray_agents.loop.evaluator import hold_out
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, Decontamination
from cray_agents.records import Event, Run
from cray_agents.runtime.datasets.decontamination import (
    BlockedTexts,
    HeldText,
    input_of,
    inputs_of,
    text_in,
)
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.store import Store
from cray_agents.text_words import words_of
from tests.support.datasets.dataset_runs import details, made, reasons, run_events, stored, task

LONG = (
    "A farmer keeps chickens and rabbits in one yard and counts thirty heads and "
    "eighty feet, so how many rabbits are there if none of them is missing a leg today"
)
VOCABULARY = [a + b for a in ("ba", "ko", "mi", "ne", "ru", "ta") for b in ("lan", "tor", "ken")]


def held(*texts: str, threshold: float = 0.8) -> BlockedTexts:
    return BlockedTexts(
        [HeldText(f"f.txt:{n}", text) for n, text in enumerate(texts, 1)], threshold
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2+3?", "what is  2 + 3"),
        ("What's the capital of France?", "WHATS THE CAPITAL OF FRANCE"),
        ("Don’t “quote” me – please…", "don't quote me please"),
        ("a well-known, and/or \n\n famous one", "A well known and or famous one."),
        ("x − 5 × 3 ÷ 2", "x-5*3/2"),
        ("ＡＢＣ １２", "abc 12"),
        ("Straße", "STRASSE"),
        ("caf\u00e9", "cafe\u0301"),
        ("1,000,000 people", "1000000 people"),
        ("[1, 2, 3]", "1,2,3"),
        ("**Bold** `code` # heading", "bold code heading"),
        ("10 km", "10km"),
        ("x ≠ y, x ≤ z", "x != y, x <= z"),
        ("zero\u200bwidth soft\u00adhyphen", "zerowidth softhyphen"),
        ("你好 吗？", "你好吗"),
    ],
)
def test_case_spaces_and_punctuation_make_no_difference(one: str, other: str) -> None:
    match = held(one).match(other)
    assert match is not None and match.how == "equal" and match.similarity == 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2+3", "23"),
        ("2+3", "2-3"),
        ("2+3", "2 3"),
        ("-5", "5"),
        ("What is -x?", "What is x?"),
        ("2 - -3", "2 - 3"),
        ("2 * -3", "2 -3"),
        ("3.5", "35"),
        ("3.5", "3 5"),
        (".5", "5"),
        ("1,000", "1,00"),
        ("2**3", "2*3"),
        ("2^3", "23"),
        ("5²", "52"),
        ("2½", "21/2"),
        ("(2+3)*4", "2+3*4"),
        ("x != y", "x = y"),
        ("x < y", "x > y"),
        ("x/y", "x*y"),
        ("5!", "5"),
        ("50%", "50"),
        ("$5", "€5"),
        ("C", "C++"),
        ("C", "C#"),
        ("3:45", "345"),
        ("कि", "की"),
        ("x ∈ A", "x ∉ A"),
        ("to be", "tobe"),
    ],
)
def test_numbers_and_operators_make_another_text(one: str, other: str) -> None:
    assert words_of(one) != words_of(other)
    assert held(one).match(other) is None and held(other).match(one) is None


def test_a_text_of_nothing_but_punctuation_is_no_text() -> None:
    assert len(held("?!", "  ", "...")) == 0
    assert held("?!", LONG).match("...") is None
    assert held().match("") is None


def jaccard(one: str, two: str) -> float:
    sets = [{tuple(w[i : i + 5]) for i in range(len(w) - 4)} for w in map(words_of, (one, two))]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_a_nearly_equal_long_text_is_recognised_with_its_exact_similarity() -> None:
    other = LONG.replace("today", "tonight")
    match = held("unrelated", LONG).match(other)
    assert match is not None
    assert (match.source, match.how) == ("f.txt:2", "near")
    assert match.similarity == pytest.approx(jaccard(LONG, other)) and 0.8 <= match.similarity < 1
    assert held(LONG, threshold=match.similarity + 0.01).match(other) is None


def test_in_a_short_text_one_word_makes_another() -> None:
    nine = "one two three four five six seven eight nine"
    assert held(nine, threshold=0.1).match(f"{nine} ten") is None
    sums = " + ".join(map(str, range(30)))  # numbers and signs are no words
    assert held(sums, threshold=0.1).match(f"{sums} + 1") is None


def test_a_long_text_that_holds_another_whole_is_recognised() -> None:
    match = held("x", LONG).match(
        f"Here is a task somebody solved. {LONG.upper()}. Now explain it."
    )
    assert match is not None and (match.source, match.how) == ("f.txt:2", "contained")
    assert match.description == "holds all of f.txt:2"
    half = " ".join(LONG.split()[:15])
    assert held(LONG).match(f"{half} and then everything goes quite another way in the end") is None


@pytest.mark.slow
@pytest.mark.parametrize("template", [0, 30])
def test_it_finds_what_comparing_with_each_would_find(template: int) -> None:
    """Also where all texts share most of their words, so that the index has long lists."""
    rng = random.Random(4)
    common = [rng.choice(VOCABULARY) for _ in range(template)]

    def text() -> str:
        return " ".join([*common, *(rng.choice(VOCABULARY) for _ in range(25))])

    texts = [text() for _ in range(300)]
    index = held(*texts, threshold=0.6)
    near = 0
    for number in range(0, 300, 3):
        words = texts[number].split()
        for _ in range(rng.randrange(4)):
            words[rng.randrange(len(words))] = rng.choice(VOCABULARY)
        other = " ".join(words)
        best = max(jaccard(one, other) for one in texts)
        match = index.match(other)
        if best < 0.6:
            assert match is None
        else:
            assert match is not None and match.similarity == pytest.approx(best)
            near += match.how == "near"
    assert near > 20


def test_a_word_that_no_held_text_has_counts_as_one_of_its_own() -> None:
    others = " ".join(f"new{n}" for n in range(20))
    assert held(LONG, threshold=0.5).match(f"{LONG} {others}") is not None  # contained
    assert held(f"{LONG} and more", threshold=0.7).match(f"{LONG} {others}") is None


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("plain text ", "plain text"),
        ('{"input": "a", "text": "b"}', "a"),
        ('{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}', "b"),
        ('{"question": "q", "answer": "x"}', "q"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}]}]}', "t"),
        ('{"input": {"messages": [{"role": "user", "content": "u"}]}}', "u"),
        ('{"input": null, "text": "t"}', "t"),
        ('{"other": 1}', '{"other": 1}'),
        ("{not json", "{not json"),
        ("[1, 2]", "[1, 2]"),
        ("", ""),
    ],
)
def test_what_a_line_of_a_file_holds(line: str, text: str) -> None:
    assert text_in(line) == text


async def ended(store: Store, run_id: str, task: dict[str, Any] | None, **more: Any) -> None:
    body = {
        "id": run_id,
        "agent": "calc",
        "model": "calc@1",
        "input": task["input"] if task else "free",
        "stop_reason": "completed",
        "task": task,
        "loop": "calc",
        **more,
    }
    await store.append([Event(id=f"{run_id}.run", run_id=run_id, kind="run", body=body)])


def recipe_of(loop: str | None = "calc", **decontamination: Any) -> DatasetRecipe:
    return DatasetRecipe(loop=loop, decontamination=Decontamination(**decontamination))


async def test_the_inputs_of_held_out_tasks_are_held(tmp_path: Path) -> None:
    home = Home(tmp_path)
    store = Store(home)
    body = " ".join(f"word{n}" for n in range(200))  # longer than what the index keeps of it
    for attempt in range(3):
        await ended(store, f"run_h{attempt}", {"id": "h", "input": body, "split": "holdout"})
    await ended(store, "run_t", {"id": "t", "input": "7 + 8", "split": "test"})
    await ended(store, "run_train", {"id": "n", "input": "1 + 1", "split": "train"})
    await ended(store, "run_free", None)
    other = {"id": "o", "input": "9 + 9", "split": "holdout"}
    await ended(store, "run_other", other, loop="other")

    texts = BlockedTexts.of(store, home, recipe_of())
    assert len(texts) == 2
    match = texts.match(body.upper())
    assert match is not None and match.source == "holdout task h"
    assert texts.match(f"{body} end") is not None and texts.match(body[:150]) is None
    assert texts.match("7+8") == ("test task t", 1.0, "equal")
    assert [texts.match(text) for text in ("1 + 1", "free", "9 + 9")] == [None] * 3
    assert BlockedTexts.of(store, home, recipe_of(loop=None)).match("9+9") is not None
    assert len(BlockedTexts.of(store, home, recipe_of(holdout=False))) == 0
    await store.close()


async def test_a_world_is_held_and_not_its_input(tmp_path: Path) -> None:
    home = Home(tmp_path)
    store = Store(home)
    text = "Find the way out of the maze, one step at a time, and mind the dog in the yard."

    def maze(number: int, split: Any) -> Task:
        return Task(input=text, metadata={"maze": number}, identity=["maze"], split=split)

    class Journal:
        entries: ClassVar[dict[str, Any]] = {}

        async def remember(self, loop: str, name: str, record: dict[str, Any]) -> None:
            self.entries[name] = record

    await hold_out(cast(Any, Journal()), "calc", TaskSet([maze(1, "train"), maze(2, "holdout")]))
    folder = home.loop("calc") / "journal"
    folder.mkdir(parents=True)
    for name, record in Journal.entries.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    await ended(store, "run_3", maze(3, "test").model_dump(mode="json"))
    for number, split in ((1, "train"), (2, "train"), (3, "train")):
        await ended(store, f"run_t{number}", maze(number, split).model_dump(mode="json"))
    held = BlockedTexts.of(store, home, recipe_of())
    found = [held.match_run(store.run(f"run_t{number}")) for number in (1, 2, 3)]
    assert [match and match.source for match in found] == [
        None,
        f"holdout task {maze(2, 'holdout').id}",
        f"test task {maze(3, 'test').id}",
    ]
    assert len(held) == 2 and held.match(text) is None
    await store.close()


async def test_what_a_loop_wrote_down_is_held(tmp_path: Path) -> None:
    home = Home(tmp_path)
    store = Store(home)
    for loop, text in (("calc", "7 + 8"), ("other", "9 + 9")):
        journal = home.loop(loop) / "journal"
        journal.mkdir(parents=True)
        (journal / "settings-1.json").write_text("{}")
        entry = {"inputs": [["test task t", text]]}
        (journal / "held-0123.json").write_text(json.dumps(entry))
    assert BlockedTexts.of(store, home, recipe_of()).match("7+8") == ("test task t", 1.0, "equal")
    assert BlockedTexts.of(store, home, recipe_of()).match("9+9") is None
    assert BlockedTexts.of(store, home, recipe_of(loop=None)).match("9+9") is not None
    assert len(BlockedTexts.of(store, home, recipe_of(holdout=False))) == 0
    assert len(BlockedTexts.of(store, home, recipe_of(loop="../loops/calc"))) == 0
    (home.loop("calc") / "journal" / "held-4567.json").write_text('{"inputs": [["lost"')
    with pytest.raises(Corrupt, match="held-4567"):
        BlockedTexts.of(store, home, recipe_of())
    await store.close()


async def test_files_are_held_by_id_and_by_path(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    store = Store(home)
    path = tmp_path / "bench.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"question": "One?"}).encode() + b"\n\nTwo!\r\n")
    files = Files(home)
    with files.blobs.draft() as draft:
        draft.write(b"Three")
        blob = draft.publish()
    uploaded = files.publish(blob, filename="mine.txt", purpose="user_data")
    texts = BlockedTexts.of(store, home, recipe_of(files=[str(path), uploaded.id]))
    found = [texts.match(text) for text in ("one", "two", "three")]
    assert [match and match.source for match in found] == [
        "bench.jsonl:1",
        "bench.jsonl:3",
        "mine.txt:1",
    ]
    await store.close()


@pytest.mark.parametrize("what", ["missing", "directory", "long name", "bytes"])
async def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, what: str) -> None:
    home = Home(tmp_path / "home")
    store = Store(home)
    path = tmp_path / ("x" * 300 if what == "long name" else "given.txt")
    if what == "directory":
        path.mkdir()
    elif what == "bytes":
        path.write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(BadInput, match=r"given\.txt|xxx") as raised:
        BlockedTexts.of(store, home, recipe_of(files=[str(path)]))
    assert raised.value.param == "decontamination.files"
    await store.close()


def test_what_of_a_run_or_demonstration_is_compared() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "first"}]},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "second"},
    ]
    about: dict[str, Any] = {"id": "r", "agent": "", "model": "m", "stop_reason": "completed"}
    told = {"trajectory": {"messages": messages}}
    assert input_of(Run.model_validate({**about, "input": "asked", **told})) == "asked"
    assert input_of(Run.model_validate({**about, "input": "", **told})) == "first"
    asked = Run.model_validate({**about, "input": "asked", **told})
    assert inputs_of(asked) == ["asked", "first", "second"]


def test_the_first_text_that_is_held_is_told() -> None:
    texts = held("2+3", "7 + 8")
    assert texts.match_any(["Hi", "7+8", "2 + 3"]) == ("f.txt:2", 1.0, "equal")
    assert texts.match_any(["Hi", "2 + 3"]) == ("f.txt:1", 1.0, "equal")
    assert texts.match_any(["Hi", "thanks"]) is None
    assert texts.match_any([]) is None


async def test_a_held_conversation_is_recognised_in_a_chat(tmp_path: Path) -> None:
    def said(*texts: str) -> list[dict[str, Any]]:
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]

    chats = {
        "same": said("Hi", "Hello!", "What is 2+3?", "5"),
        "later": said("Good day", "Yes?", "What is 2 + 3", "5", "thanks", "Gladly."),
        "greets": said("Hi", "Hello!", "What is 2+4?", "6"),
        "answers": said("Hi", "What is 2+3?", "5"),
    }
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"messages": chats["same"]}))
    events = [
        event
        for run_id, messages in chats.items()
        for event in run_events(
            run_id, [len(messages), len(run_id)], input="Hi", trajectory=of_call(run_id, messages)
        )
    ]
    events += run_events("input", [9], task={**task("t"), "input": "what is 2+3"})
    home = await stored(tmp_path / "home", events)
    manifest, _ = made(home, decontamination={"files": [str(file)]})
    assert reasons(home, manifest["id"]) == {
        "same": "contaminated",
        "later": "contaminated",
        "greets": None,
        "answers": None,
        "input": "contaminated",
    }
    assert details(home, manifest["id"])["later"] == "equal to held.jsonl:1"


def of_call(run_id: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": messages, "turns": [{"call_id": f"{run_id}-c"}]}
