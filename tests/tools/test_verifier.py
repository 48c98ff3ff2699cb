"""The agent's code as a reward: what earns what, how tests are written, and what is no reward."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput, RewardError
from cray_agents.records import Run, StopReason, Task
from cray_agents.rewards.reward import Verdict, score, score_run
from cray_agents.tools.sandbox import Sandbox
from cray_agents.tools.verifier import Case, checker, code_of, verifier
from cray_agents.tools.verifier.call_worker import DEPTH, plain
from cray_agents.tools.verifier.cases import (
    Malformed,
    cases_of,
    check_answer,
    outputs_equal,
    values_equal,
)

TESTS = "from solution import add\nassert add(2, 3) == 5\nassert add(-1, 1) == 0, 'no'\n"
RIGHT = "def add(a, b):\n    return a + b\n"


def run_of(output: Any, **metadata: Any) -> Run:
    task = Task(input="add", metadata=metadata) if metadata else None
    return Run(id="r", agent="a", model="m", input="add", output=output, task=task,
               stop_reason=StopReason.completed)  # fmt: skip


def solution(run: Run) -> dict[str, str]:
    return {"solution.py": code_of(run.output)}


async def value(tests: Any, output: Any = "", **options: Any) -> Verdict:
    return await verifier(tests, **options)(run_of(output))  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (RIGHT, 1.0),
        (f"Here it is:\n```python\n{RIGHT}```\nGood luck!", 1.0),
        (RIGHT + "print('{}')\ninput = 1\nimport sys; sys.stdout.close()", 1.0),
        ("def add(a, b):\n    return a - b\n", 0.0),
        ("def add(a, b):\n    return 5\n", 0.0),
        ("def add(a, b:", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        (None, 0.0),
        ({"a": 1}, 0.0),
    ],
)
async def test_code(code: Any, expected: float) -> None:
    given = await value(TESTS, code)
    assert given == expected and not given.suspect


async def test_what_no_honest_code_does_is_suspect() -> None:
    # The second code writes as soon as it is imported: the judge may read that with the greeting.
    for code, *reasons in (
        ("import os; os._exit(0)", "it ended without an answer"),
        ("import os\nfor i in range(9):\n try: os.write(i, b'1\\n')\n except OSError: pass\n"
         + RIGHT, "it wrote an answer that it was not asked for", "it wrote before it was asked"),
        (RIGHT.replace("return", "import os; os.write(4, b'[\\n'); return"), "it wrote what is"),
    ):  # fmt: skip
        given = await value(TESTS, code)
        assert given == 0.0 and given.suspect, given
        assert given.comment.startswith(tuple(f"suspect: {why}" for why in reasons)), given.comment
    run = run_of("import os; os._exit(0)").model_copy(update={"tags": ["a"]})
    done = await score_run(run, [verifier(TESTS, name="passes")])
    assert done.tags == ["a", "suspect"] and done.error is None and done.reward == 0
    assert done.rewards[0].comment == "suspect: it ended without an answer"
    again = await score_run(done.model_copy(update={"output": RIGHT}), [verifier(TESTS)])
    assert again.tags == ["a"] and again.rewards[-1].comment == "2 of 2 tests passed"


async def test_tests_of_the_task() -> None:
    tests: list[Any] = [
        "total([1, 2]) == 3",
        "assert 0 == total([])",
        {"call": "total", "args": [[2, 2]], "expected": 4},
        {"call": "Adder(3).add", "kwargs": {"to": (1, 2)}, "expected": [4, 5]},
        {"call": "total('a')", "raises": "TypeError"},
        {"call": "total", "args": [None], "raises": "LookupError"},
        Case(call="total([.1, .2])", expected=0.3),
    ]
    code = (
        "class Mine(KeyError): pass\nclass Adder:\n  def __init__(self, by): self.by = by\n"
        "  def add(self, to): assert type(to) is tuple; return tuple(self.by + n for n in to)\n"
        "def total(of):\n  if of is None: raise KeyError\n  return sum(of)"
    )
    run = run_of(code, tests=tests[:-1])
    assert await verifier()(run) == 1.0
    assert await verifier(tests)(run) == 1.0

    async def unfit(run: Run) -> list[str]:
        return ["total([1]) == 2"]

    assert await verifier(unfit)(run) == 0.0
    wrong = run_of(code.replace("KeyError\n", "ValueError\n"), tests=tests[:-1])
    given = await verifier(partial=True)(wrong)
    assert given == pytest.approx(5 / 6)
    assert given.comment == "5 of 6 tests passed; test 6: it raised ValueError"  # type: ignore[attr-defined]
    assert await verifier()(wrong) == 0.0
    for broken, why in ((run_of(code), "no tests"), (run_of(code, tests=["x"]), "does not compare"),
                        (run_of(code, tests=[]), "empty")):  # fmt: skip
        with pytest.raises(RewardError, match=why):
            await verifier()(broken)


@pytest.mark.slow
async def test_programs() -> None:
    tests = [{"stdin": "2 3\n", "expected": "5\n0.3"}, {"stdin": "1 1", "expected": "2\n0.3\n\n"}]
    code = "a, b = map(int, input().split())\nprint(a + b, .1 + .2, sep='\\n')"
    assert await value(tests, code) == 1.0
    assert await value(tests, code.replace("a + b", "5"), partial=True) == 0.5
    failed = await value(tests, code + "\nraise SystemExit(3)")
    assert failed == 0.0 and failed.comment == "0 of 2 tests passed; test 1: exit status 3"
    shell = {"files": lambda run: {"add.sh": run.output}, "command": ["bash", "add.sh"]}
    assert await value(tests, "read a b; echo $((a + b)); echo 3.0e-1", **shell) == 1.0
    with pytest.raises(RewardError, match="no program 'no-such-program'"):
        await value(tests, "", command=["no-such-program"])
    lost = await value(tests, "exit 127", **shell)
    assert lost == 0.0


@pytest.mark.slow
async def test_time_is_the_processors() -> None:
    """What a busy machine takes from a program is not held against it."""
    fair = Sandbox(seconds=60, cpu_seconds=0.5)
    begun = time.monotonic()
    waits = "import time\ndef add(a, b):\n  time.sleep(0.6); return a + b"
    assert await value(TESTS, waits, sandbox=fair) == 1.0
    assert time.monotonic() - begun > 1
    spins = "def add(a, b):\n  while a < 0: pass\n  return a + b"
    for limit in (fair, Sandbox(seconds=1)):  # twenty times as many by the clock
        given = await value(TESTS, spins, sandbox=limit, partial=True)
        assert given == 0.5 and not given.suspect
        assert given.comment.endswith("test 2: it took too much processor time")
    forks = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    given = await value([{"stdin": "", "expected": ""}], forks, sandbox=fair)
    assert given.comment.endswith("it took too much processor time")
    sleeps = "import time; time.sleep(60)"
    given = await value(TESTS, sleeps, sandbox=Sandbox(seconds=1, cpu_seconds=60))
    assert given == 0.0 and given.comment.endswith("it took too long") and not given.suspect


EQUAL: list[tuple[Any, Any]] = [
    (1, 1.0), ([1, (2, 3)], (1, [2, 3])), (0.1 + 0.2, 0.3), (3, 3.0000000001), (math.inf, math.inf),
    (math.nan, math.nan), ({1, "a", (2.0, None)}, {"a", 1, (2, None)}), ({"b": 0.3, 1: {2}},
    {1: {2}, "b": 0.1 + 0.2}), (b"a", b"a"), (None, None), (True, True),
    ("\ud800", "\ud800"), ({frozenset({1}): 2}, {frozenset({1}): 2}), ([], ()),
]  # fmt: skip
UNEQUAL: list[tuple[Any, Any]] = [
    (1, True), (True, 1), (0, False), (None, 0), ("1", 1), (b"a", "a"), ([1], {1}), ({}, []),
    ([1, 2], [2, 1]), ([1], [1, 1]), ({1: 2}, {1: 3}), ({1: 2}, {True: 2}), (10**4000, 1.0),
    (10**5000, 10**5000),
    (10**400, math.inf), (math.nan, 1.0), (1.0, math.nan), (math.inf, 1e308), (-math.inf, math.inf),
    (1.1, 1), (10**15 + 1, 10**15), ({0.1 + 0.2}, {0.3}), (object(), object()), (ValueError, 1),
    ({"int": "1"}, 1), ([object()], [None]),
]  # fmt: skip


def test_what_equals_what() -> None:
    def alike(got: Any, expected: Any) -> bool:
        answers = [json.loads(json.dumps(plain(each))) for each in (got, expected)]
        for answer in answers:
            check_answer(answer)
        return values_equal(answers[0], answers[1], 1e-9)

    assert [pair for pair in EQUAL if not alike(*pair)] == []
    assert [pair for pair in UNEQUAL if alike(*pair)] == []
    nested: Any = frozenset()
    for _ in range(DEPTH):
        nested = frozenset([nested])
    assert alike(nested, nested)
    texts = [("1  2\n3", "1 2 \n3\n\n", False), ("1 2\n3", "1 2 \n3\n\n", True),
             ("1.50", "1.5", True), ("1", "1.0", True), ("1.0", "1", False),
             ("1_0.0", "10.0", False), ("nan", "1.0", False),
             ("1e999", "1e998", False), ("a", "b", False), ("1\n2", "1 2", False),
             ("1\r\n2\r\n", "1\n2", True),
             *((f"1{end}2", "1\n2", False) for end in "\x0c\x1c\x85\u2028")]  # fmt: skip
    for got, expected, same in texts:
        assert outputs_equal(got, expected, 1e-9) is same, (got, expected)


@pytest.mark.parametrize("text", [
    '{"set": 1}', '{"a": 1}', '{"int": "0x"}', '{"dict": [[1]]}', '{"bytes": "x"}', "[{}]",
    '{"tuple": ' * 60 + "[]" + "}" * 60, "[" * 60 + "]" * 60, '{"tuple": [1], "set": [1]}',
])  # fmt: skip
def test_what_is_no_answer(text: str) -> None:
    with pytest.raises(Malformed):
        check_answer(json.loads(text))


@pytest.mark.parametrize(("tests", "problem"), [
    ("assert add(2, 3)", "line 1: `assert add.2, 3.` does not compare"),
    (TESTS + "for _ in range(3): assert add(1, 1) == 2", "(?s)line 4: .*or give the whole prog"),
    ("import os", "does not compare"),
    ("add(1) == 2 == 3", "does not compare"),
    ("f(1) == g(1)", "does not compare"),
    ("def", "is not Python"),
    ("", "the tests are empty"),
    (["bash", "check.sh"], "test 1: line 1: `bash` does not compare"),
    (["f() == 1; f() == 2"], "test 1: .* makes 2 comparisons: give one"),
    ([{"call": "f()"}], "test 1: give one of `expected` and `raises`"),
    ([{"expected": 1}], "test 1: give one of `call` and `stdin`"),
    ([{"call": "f()", "expects": 1}], "test 1: no 'expects' is known: 'expected'"),
    ([{"call": "f(", "expected": 1}], "is no expression"),
    ([{"call": "f", "args": "ab", "expected": 1}], "args='ab': give a list"),
    ([{"call": "f()", "expected": object}], "expected=.* a type is not plain data"),
    ([{"call": "f()", "expected": "x" * (1 << 20)}], "takes 1048578 bytes"),
    ([{"call": "f()", "expected": 1}, {"stdin": "", "expected": ""}], "give two verifiers"),
    ([{"stdin": "1", "expected": 1}], "a program's output is a text"),
    ([{"stdin": "1", "raises": "E"}], "and no more"),
    ([3], "test 1: 3: give a text, a dict or a Case"),
    (3, "give a list of them, or Python source"),
])  # fmt: skip
def test_tests_that_are_none(tests: Any, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        cases_of(tests)


def test_settings_that_are_none() -> None:
    for options, param in (({"tolerance": -1}, "tolerance"), ({"command": "a b"}, "command")):
        with pytest.raises(BadInput) as raised:
            verifier("f() == 1", **options)
        assert raised.value.param == param
    with pytest.raises(BadInput, match="empty"):
        checker("")


@pytest.mark.slow
async def test_a_checker_may_say_how_much() -> None:
    async def said(program: Any, output: Any = "", **options: Any) -> Verdict:
        return await checker(program, **options)(run_of(output))  # type: ignore[return-value]

    assert await said("import json\nreward = json.load(open('run.json'))['output'] / 4", 1) == 0.25
    assert await said("reward = len(open('output.txt').read()) == 4", "four") == 1.0
    assert await said("assert 0") == 0.0 and not (await said("assert 0")).suspect
    assert await said(TESTS, RIGHT, files=solution) == 1.0
    for wrong in ("'much'", "float('nan')", "None", "-1", "10**999"):
        given = await said(f"reward = {wrong}")
        assert given == 0.0 and given.suspect, wrong
    given = await said("raise SystemExit")
    assert given == 0.0 and given.comment == "suspect: it ended before the tests' end"
    grep = ["bash", "-c", "grep -q right output.txt"]
    assert await said(grep, "right") == 1.0 and await said(grep, "wrong") == 0.0
    told = ["bash", "-c", "cat > in; echo so; cat output.txt; grep -q add in"]
    assert await said(told, '{"reward": 0.25}') == 0.25
    assert await said(told, '{"rewards": 0.25}') == 1.0
    assert (await said(told, '{"reward": "much"}')).suspect
    assert await said(["bash", "-c", "echo '{\"reward\": 1}'; exit 1"]) == 0.0
    given = await said(["bash", "-c", "exit 127"])
    assert given == 0.0 and given.suspect
    assert (await said("1", "\ud800")).suspect


async def test_what_could_not_be_run_is_no_zero(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no program 'no-such-program' in the sandbox"):
        await checker(["no-such-program"])(run_of(""))
    library = tmp_path / "library"
    library.mkdir()
    broken = Sandbox(readable=[library])
    program = [{"stdin": "", "expected": ""}]
    verifiers = [verifier(TESTS, sandbox=broken), verifier(program, sandbox=broken, name="program")]
    verifiers.append(checker(["true"], sandbox=broken))
    library.rmdir()
    for verify in verifiers:
        with pytest.raises(RewardError, match="could not be run: the sandbox did not start"):
            await verify(run_of(""))
    with pytest.raises(RewardError, match="Python did not start"):
        await verifier(TESTS, sandbox=Sandbox(memory_mb=1))(run_of(RIGHT))
    rewards, error = await score(run_of(""), verifiers)
    assert not rewards and error is not None and "could not be run" in error.message


async def test_files_that_a_run_names() -> None:
    for name in ("../solution.py", "/solution.py", "", "a\0b", "\ud800", "x" * 300, 3):
        given = await value(TESTS, RIGHT, files=lambda run, name=name: {name: RIGHT})
        assert given == 0.0 and given.suspect, name
    given = await value(TESTS, "{", files=lambda run: {"solution.py": run.output["x"]})
    assert given == 0.0 and given.comment.startswith("suspect: `files` failed: TypeError")


async def test_weight_and_name() -> None:
    rewards, error = await score(run_of(RIGHT), [verifier(TESTS, weight=0.5, name="tests")])
    assert error is None and [(r.name, r.value) for r in rewards] == [("tests", 0.5)]
    assert code_of(None) == ""
