"""TaskSets from CSV, Parquet, dataset folders and generators; columns of other names."""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from cray_agents import TaskSet
from cray_agents.errors import BadInput

ROWS = [{"question": f"What is {n} + {n}?", "answer": 2 * n, "level": n % 3} for n in range(60)]


def told(tasks: TaskSet) -> list[tuple[str, Any]]:
    return [(task.text, task.target) for task in tasks]


def test_columns_have_names_or_functions(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    tasks = TaskSet.from_jsonl(path, input="question", target="answer", metadata=["level"])
    assert told(tasks) == [(row["question"], row["answer"]) for row in ROWS]
    assert tasks[4].metadata == {"level": 1}
    tasks = TaskSet.from_jsonl(
        path,
        input=lambda row: row["question"].upper(),
        id=lambda row: f"q{row['answer']}",
        split=lambda row: "test" if row["level"] else "train",
    )
    assert tasks[2].input == "WHAT IS 2 + 2?" and tasks[2].target is None
    assert (tasks[2].id, tasks[2].split, tasks[3].split) == ("q4", "test", "train")
    assert tasks[2].metadata == {}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {},
            r"t\.jsonl:1: input: Field required .*other columns are named as in input=\"question\"",
        ),
        ({"input": "text"}, r"t\.jsonl:1: no column 'text'; there are question, answer, level"),
        ({"input": "answer"}, r"t\.jsonl:1: input: it is of type int: give a text or a list"),
        ({"input": "question", "target": "a"}, r"t\.jsonl:1: no column 'a'"),
        ({"input": lambda row: row["x"]}, r"t\.jsonl:1: the function for input failed: KeyError: "),
        ({"input": "question", "target": lambda row: {1}}, r"jsonl:1: target: .*set is not JSON"),
        ({"input": "question", "split": "level"}, r"t\.jsonl:1: split: Input should be 'train'"),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, columns: Any, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    with pytest.raises(BadInput, match=message):
        TaskSet.from_jsonl(path, **columns)


def test_from_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        b'\xef\xbb\xbfinput,target,split\r\n"What, then,\nis ""it""?",5,test\r\nWhy?,,train\r\n'
    )
    tasks = TaskSet.from_csv(path)
    assert told(tasks) == [('What, then,\nis "it"?', "5"), ("Why?", "")]
    assert [task.split for task in tasks] == ["test", "train"]
    path.write_text("q;a\nhow?;3\n")
    number = TaskSet.from_csv(
        path, delimiter=";", input="q", target=lambda row: int(row["a"]), holdout=0
    )
    assert told(number) == [("how?", 3)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("input,target\na,1\nb\n", r"t\.csv:3: not as many values as there are columns \(2\)"),
        ("input\na,1\n", r"t\.csv:2: not as many values"),
        ("input,input\na,1\n", r"two columns are called 'input'"),
        ('input\n"a\n', r"not a CSV file in UTF-8: unexpected end"),
        ("input\n", "holds no tasks"),
        ("", "holds no tasks"),
        ("question\na\n", r"t\.csv:2: input: Field required"),
    ],
)
def test_bad_tables(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(BadInput, match=message):
        TaskSet.from_csv(path)
    with pytest.raises(BadInput, match=r"cannot read .*none\.csv: No such file"):
        TaskSet.from_csv(tmp_path / "none.csv")


def test_from_parquet(tmp_path: Path) -> None:
    for name, rows in (("b", ROWS[30:]), ("a", ROWS[:30])):
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
    columns: Any = {"input": "question", "target": "answer"}
    whole = TaskSet.from_parquet(tmp_path, **columns)
    assert told(whole) == [(row["question"], row["answer"]) for row in ROWS]
    assert told(TaskSet.from_parquet(tmp_path / "a.parquet", **columns)) == told(whole)[:30]
    again = tmp_path / "again.jsonl"
    again.write_text("\n".join(map(json.dumps, ROWS)))
    assert list(whole) == list(TaskSet.from_jsonl(again, **columns))  # ids and splits, too
    packed = tmp_path / "again.jsonl.gz"
    packed.write_bytes(gzip.compress(again.read_bytes()))
    assert list(whole) == list(TaskSet.from_jsonl(packed, **columns))
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"cannot read .*again\.jsonl\.gz"):
        TaskSet.from_jsonl(packed, **columns)
    with pytest.raises(BadInput, match=r"a\.parquet: row 0: no column 'text'"):
        TaskSet.from_parquet(tmp_path, input="text")
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(BadInput, match=r"a\.parquet: not a Parquet file"):
        TaskSet.from_parquet(tmp_path, **columns)


def folder_of(root: Path, readme: str = "", **files: str) -> Path:
    """A dataset folder: files by their names, each with rows of its own."""
    import datasets

    for number, (name, suffix) in enumerate(files.items()):
        path = root / f"{name.replace('__', '/')}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = datasets.Dataset.from_list(ROWS[20 * number : 20 * (number + 1)])
        {"parquet": data.to_parquet, "csv": data.to_csv, "jsonl": data.to_json}[suffix](path)
    if readme:
        (root / "README.md").write_text(f"---\nlicense: mit\n{readme}---\n# About\n")
    return root


NAMED = """configs:
- config_name: main
  data_files:
  - split: train
    path: data/first*
  - split: test
    path: [data/second.jsonl]
- config_name: other
  data_files: data/third.jsonl
"""


@pytest.mark.parametrize(
    ("readme", "config", "suffix", "names"),
    [
        (NAMED, "main", "jsonl", ["data__first", "data__second", "data__third"]),
        (NAMED, "other", "jsonl", ["data__first", "data__second", "data__third"]),
        ("", None, "parquet", ["data__train-00000-of-00002", "data__train-00001-of-00002",
                               "data__validation-00000-of-00001"]),
        ("", None, "jsonl", ["train", "dev", "test"]),
        ("", None, "csv", ["some", "more"]),
    ],
)  # fmt: skip
def test_a_folder_is_read_as_datasets_reads_it(
    tmp_path: Path, readme: str, config: str | None, suffix: str, names: list[str]
) -> None:
    import datasets

    folder = folder_of(tmp_path / "d", readme, **dict.fromkeys(names, suffix))
    theirs = datasets.load_dataset(str(folder), config, cache_dir=str(tmp_path / "cache"))
    meant = {"train": "train", "validation": "holdout", "test": "test"}
    columns: Any = {"input": "question", "target": lambda row: int(row["answer"])}
    ours = TaskSet.from_huggingface(folder, config=config, splits=meant, **columns)  # type: ignore[arg-type]
    assert len(ours) == sum(map(len, theirs.values()))
    for name, split in theirs.items():
        mine = told(ours.split(meant[name]))  # type: ignore[arg-type]
        assert sorted(mine) == sorted((row["question"], row["answer"]) for row in split)


def test_splits_of_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "two", train="jsonl", test="jsonl")
    tasks = TaskSet.from_huggingface(folder, input="question", holdout=0.5)
    assert len(tasks.test) == 20 and 0 < len(tasks.holdout) < 20  # train is distributed
    folder = folder_of(tmp_path / "three", train="jsonl", validation="jsonl", test="jsonl")
    tasks = TaskSet.from_huggingface(folder, input="question")
    assert [len(tasks.split(s)) for s in ("train", "holdout", "test")] == [20, 20, 20]
    hard = "configs: [{data_files: [{split: hard, path: '*.jsonl'}]}]\n"
    folder = folder_of(tmp_path / "odd", hard, x="jsonl")
    with pytest.raises(BadInput, match="has a split 'hard': say what it is, as in splits="):
        TaskSet.from_huggingface(folder, input="question")
    tasks = TaskSet.from_huggingface(folder, input="question", splits={"hard": "test"})
    assert len(tasks.test) == 20


@pytest.mark.parametrize(
    ("readme", "options", "message"),
    [
        (NAMED, {}, "has the configurations main, other: name one"),
        (NAMED, {"config": "x"}, "no configuration 'x'; there are main, other"),
        ("configs: [{data_files: gone.csv}]\n", {}, "names 'gone.csv', and no file is that"),
        ("configs: [{data_files: ../t.csv}]\n", {}, "leads out of the folder"),
        ("configs: [{data_dir: /etc}]\n", {}, "/etc leads out of the folder"),
        ("configs: [{data_dir: a/../..}]\n", {}, "leads out of the folder"),
        ("configs: [{data_files: 5}]\n", {}, "names 5, and no file is that"),
        ("configs: [{data_files: ''}]\n", {}, "names '': Unacceptable pattern"),
        (f"configs: {'[' * 60}{']' * 60}\n", {}, "nested more than 50 deep"),
        (f"x: {'1' * 5000}\n", {}, "its front matter is unusable"),
        ("x" * 2**20, {}, "its front matter is longer than 1 MiB"),
        ("configs: [\n", {}, "its front matter is unusable"),
        ("", {"config": "x"}, "no configuration 'x'; there are none"),
        ("", {}, "holds no .csv, .json, .jsonl, .parquet, .tsv files"),
    ],
)
def test_bad_folders(tmp_path: Path, readme: str, options: Any, message: str) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    folder_of(folder, readme)
    with pytest.raises(BadInput, match=message):
        TaskSet.from_huggingface(folder, input="question", **options)
    with pytest.raises(BadInput, match="no folder"):
        TaskSet.from_huggingface(tmp_path / "none")


LINE = '{"question": "secret"}\n'


def test_links_out_of_a_folder_are_refused_but_for_those_of_a_cache(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(LINE)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    for name, target in {"train.jsonl": "../t.jsonl", "README.md": "../t.jsonl",
                         "x.parquet": "../t.parquet", "data": "."}.items():  # fmt: skip
        folder = tmp_path / "d"
        folder.mkdir(exist_ok=True)
        (folder / "x.csv").write_text("question\nx\n")
        (folder / name).symlink_to(target if name != "data" else tmp_path)
        if name == "data":
            (folder / "README.md").write_text("---\nconfigs: [{data_dir: data}]\n---\n")
        with pytest.raises(BadInput, match="leads out of the folder"):
            TaskSet.from_huggingface(folder, input="question")
        if name == "x.parquet":
            with pytest.raises(BadInput, match="leads out of the folder"):
                TaskSet.from_parquet(folder, input="question")
        (folder / name).unlink()
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0123"
    (snapshot / "data").mkdir(parents=True)
    (snapshot.parent.parent / "blobs").mkdir()
    (snapshot.parent.parent / "blobs" / "abc").write_text(LINE)
    (snapshot / "data" / "train.jsonl").symlink_to("../../../blobs/abc")
    assert len(TaskSet.from_huggingface(snapshot, input="question", holdout=0)) == 1


def sums(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randrange(40), rng.randrange(40)
    return {"input": f"What is {a} + {b}?", "target": a + b}


def yielding(rng: random.Random) -> Iterator[str]:
    for n in range(5):
        yield f"{n} of {rng.randrange(10**9)}"


@pytest.mark.slow
def test_from_generator() -> None:
    tasks = TaskSet.from_generator(sums, 200, seed=3)
    assert len({task.id for task in tasks}) == 200
    assert 20 < len(tasks.holdout) < 60
    more = TaskSet.from_generator(sums, 300, seed=3)
    assert list(more)[:200] == list(tasks)  # a larger count only adds
    assert list(TaskSet.from_generator(sums, 200, seed=4)) != list(tasks)
    assert len(TaskSet.from_generator(yielding, 5, seed=1)) == 5
    with pytest.raises(BadInput, match=r"yielding made 5 different tasks in 5 draws, and 6 are"):
        TaskSet.from_generator(yielding, 6)
    with pytest.raises(BadInput, match=r"sums made \d+ different tasks in 40000 draws"):
        TaskSet.from_generator(sums, 2000)


def test_from_generator_refuses_two_tasks_of_one_id() -> None:
    def numbered(rng: random.Random) -> Iterator[dict[str, Any]]:
        yield from ({"id": str(n % 2), "input": f"What is {n}?"} for n in range(4))

    with pytest.raises(BadInput, match="has the id '0' of another task that differs"):
        TaskSet.from_generator(numbered, 3)
