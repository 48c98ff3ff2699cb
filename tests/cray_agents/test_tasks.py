"""TaskSet: files, splits that hold still, leaks refused."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from cray_agents import Task, TaskSet
from cray_agents.errors import BadInput


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_from_jsonl(tmp_path):
    lines = [{"input": f"What is {n}?", "target": n, "metadata": {"level": 1}} for n in range(1000)]
    tasks = TaskSet.from_jsonl(write(tmp_path / "t.jsonl", *lines, "", "  "), holdout=0.2, test=0.1)
    assert len(tasks) == 1000 and tasks[3].target == 3 and tasks[3].metadata == {"level": 1}
    assert [task.input for task in tasks] == [line["input"] for line in lines]
    assert len(tasks.train) + len(tasks.holdout) + len(tasks.test) == 1000
    assert 160 < len(tasks.holdout) < 240 and 70 < len(tasks.test) < 130
    assert {task.split for task in tasks.holdout} == {"holdout"}
    assert repr(tasks).startswith("TaskSet(train=")


def test_splits_hold_still_when_the_set_grows():
    small = TaskSet.from_list([f"q{n}" for n in range(50)])
    large = TaskSet.from_list([f"q{n}" for n in reversed(range(500))])
    where = {task.input: (task.id, task.split) for task in large}
    assert all(where[task.input] == (task.id, task.split) for task in small)


def test_sequence():
    tasks = TaskSet.from_list(["a", "b", "c"], holdout=0)
    assert tasks[0].input == "a" and tasks[-1].input == "c" and tasks[1] in tasks
    assert isinstance(tasks[1:], TaskSet) and [t.input for t in tasks[1:]] == ["b", "c"]
    assert [t.input for t in reversed(tasks)] == ["c", "b", "a"]
    assert not TaskSet([]) and len(tasks.holdout) == 0


def test_a_named_split_stays_and_draws_its_like():
    tasks = TaskSet.from_list(
        [{"input": "What is  1+1?", "id": "a"}, Task(input="what is 1+1?", split="test")],
        holdout=1.0,
    )
    assert [task.split for task in tasks] == ["test", "test"]
    assert tasks[0].id == "a"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"t\.jsonl:2: not valid JSON"),
        ("[1]", r"t\.jsonl:2: not a JSON object"),
        ("NaN", r"t\.jsonl:2: not valid JSON"),
        ({"target": 1}, r"t\.jsonl:2: input: Field required \(fields: input, target"),
        ({"input": 5}, r"t\.jsonl:2: input: it is of type int: give a text or a list"),
        ({"input": "x", "answer": 5}, r"t\.jsonl:2: answer: Extra inputs"),
        ({"input": "x", "split": "dev"}, r"t\.jsonl:2: split: Input should be 'train', "),
        ({"input": "first"}, r"t\.jsonl:2: the same task id '\w+' as .*t\.jsonl:1"),
        ({"input": "other", "id": "one"}, r"t\.jsonl:3: the same task id 'one' as .*t\.jsonl:2"),
        ({"input": "FIRST ", "split": "train"}, "x"),
    ],
)
def test_bad_lines(tmp_path, line, message):
    first = {"input": "first", "split": "holdout"}
    if message == "x":
        message = (
            r"t\.jsonl:2: the input 'FIRST ' is in split 'train' here and in 'holdout' at .*:1\."
        )
    more = [{"input": "third", "id": "one"}] if "one" in str(line) else []
    path = write(tmp_path / "t.jsonl", first, line, *more)
    with pytest.raises(BadInput, match=message):
        TaskSet.from_jsonl(path)


def test_bad_files(tmp_path):
    with pytest.raises(BadInput, match=r"cannot read .*none"):
        TaskSet.from_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(BadInput, match="holds no tasks"):
        TaskSet.from_jsonl(write(tmp_path / "empty.jsonl", "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"input": "a"}\n{"input": "\xe9"}\n')
    with pytest.raises(BadInput, match=r"latin\.jsonl:2: not valid JSON"):
        TaskSet.from_jsonl(tmp_path / "latin.jsonl")
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n{"input": "b"}\r\n')
    assert len(TaskSet.from_jsonl(tmp_path / "bom.jsonl")) == 2


def test_bad_arguments():
    with pytest.raises(BadInput, match="together at most 1"):
        TaskSet.from_list(["a"], holdout=0.7, test=0.4)
    with pytest.raises(BadInput, match="no split 'dev'"):
        TaskSet.from_list(["a"]).split("dev")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="task 1: the same task id"):
        TaskSet([Task(input="a"), Task(input="a")])
    with pytest.raises(
        BadInput, match="no option 'holdot'; there are holdout, test, on_leak, ident"
    ):
        TaskSet.from_list(["a"], holdot=0.1)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match="on_leak='ignore'"):
        TaskSet([], on_leak="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("tasks", [["x"], "x", [{"input": "x"}], [None]])
def test_only_tasks_make_a_set(tasks: Any) -> None:
    with pytest.raises(BadInput, match=r"TaskSet\.from_list"):
        TaskSet(tasks)


@pytest.mark.parametrize("field", ["metadata", "target"])
def test_what_json_cannot_hold_is_no_part_of_a_task(field: str) -> None:
    with pytest.raises(ValidationError, match="JSON cannot hold it"):
        Task(input="x", **{field: {"f": object()}})
