"""Cases: questions to the agent's code with the right answers, and the comparison with those given.

    "add(2, 3) == 5"                                          a call, and a literal
    {"call": "add", "args": [2, 3], "expected": 5}            a function, and JSON
    {"call": "divide(1, 0)", "raises": "ZeroDivisionError"}   an exception
    {"stdin": "2 3\\n", "expected": "5\\n"}                     a program, and what it prints

An answer is JSON as call_worker.py writes it: an object of one key stands for a kind that JSON
lacks. Nothing here runs or keeps an object of the code's classes, or hashes a value that the code
chose, and answers are bounded in size and depth. Called by __init__.py and judge.py.
"""

import ast
import builtins
import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.tools.verifier.call_worker import DEPTH, plain

_NONE_GIVEN = object()
MODULE = "solution"  # of solution.py, the agent's code
ANSWER_BYTES = 1 << 20  # bytes of an answer, or of a program's output

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
_LONGEST = 400  # characters of a text that is compared as a number


class Malformed(ValueError):
    """A value is not an answer of call_worker.py."""


def check_answer(value: Any, depth: int = 0) -> None:
    """Raise Malformed for a value that call_worker.py does not write."""
    if depth > DEPTH:
        raise Malformed("too deep")
    kind, of = _kind(value)
    if kind in ("list", "tuple", "set"):
        below = of
    elif kind == "dict":
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in of):
            raise Malformed("a dict of no pairs")
        below = [each for pair in of for each in pair]
    else:
        below = []
    for each in below:
        check_answer(each, depth + 1)


def expected_answer(value: Any) -> Any:
    """Return an author's value as an answer. Raises ValueError if it is not plain, or too large."""
    answer = plain(value)
    text = json.dumps(answer)
    if len(text) > ANSWER_BYTES:
        raise ValueError(f"it takes {len(text)} bytes, and {ANSWER_BYTES} are the most")
    if (other := _first_other(answer)) is not None:
        raise ValueError(f"a {other} is not plain data")
    return answer


def values_equal(got: Any, expected: Any, tolerance: float) -> bool:
    """Return True if an answer is the expected one.

    Numbers may differ by `tolerance`, relative to the larger or absolute. Whole numbers, elements
    of sets, and keys may not. A list equals a tuple, an int a float, but no number equals a bool.
    """
    (kind, wanted), (got_kind, given) = _kind(expected), _kind(got)
    if kind in ("list", "tuple"):
        return (
            got_kind in ("list", "tuple")
            and len(given) == len(wanted)
            and all(values_equal(a, b, tolerance) for a, b in zip(given, wanted, strict=True))
        )
    if kind == "number" and got_kind == "number":
        return _close(given, wanted, tolerance)
    if kind != got_kind or kind == "other":
        return False
    if kind == "set":
        return _sort(given) == _sort(wanted)
    if kind == "dict":
        values = {_key(key): value for key, value in given}
        return len(given) == len(wanted) == len(values) and all(
            _key(key) in values and values_equal(values[_key(key)], value, tolerance)
            for key, value in wanted
        )
    return bool(given == wanted)


def outputs_equal(got: str, expected: str, tolerance: float) -> bool:
    """Return True if a program's output is the expected one, except for trailing blanks.

    A word of the expected text that is a number with a point or an exponent may be written
    differently in the output, and differ by `tolerance`.
    """
    words, expected_words = (
        [line.rstrip().split(" ") for line in text.rstrip().split("\n")] for text in (got, expected)
    )
    return list(map(len, words)) == list(map(len, expected_words)) and all(
        a == b or _same_number(a, b, tolerance)
        for a, b in zip(chain(*words), chain(*expected_words), strict=True)
    )


def _kind(value: Any) -> tuple[str, Any]:
    """Return the kind of an answer and what it holds. Raises Malformed."""
    if isinstance(value, list):
        return "list", value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number", value
    if not isinstance(value, dict):
        return type(value).__name__, value
    if len(value) == 1:
        ((kind, of),) = value.items()
        if kind in ("tuple", "set", "dict") and isinstance(of, list):
            return kind, of
        hexadecimal = isinstance(of, str) and re.fullmatch("([0-9a-f]{2})*", of)
        if isinstance(of, str) and (kind == "other" or (kind == "bytes" and hexadecimal)):
            return kind, of
    raise Malformed(f"an object that is no kind of value: {value!r:.100}")


def _first_other(value: Any) -> str | None:
    """Return the name of the first kind in an author's value that is not plain data, if any."""
    kind, of = _kind(value)
    if kind == "other":
        return str(of)
    below = [each for pair in of for each in pair] if kind == "dict" else of
    elements = below if kind in ("list", "tuple", "set", "dict") else ()
    return next(filter(None, map(_first_other, elements)), None)


def _close(got: float, expected: float, tolerance: float) -> bool:
    if isinstance(got, int) and isinstance(expected, int):
        return got == expected
    if math.isnan(expected):
        return math.isnan(got)
    try:
        return math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an int too large for a float
        return False


def _key(value: Any) -> str:
    """Return a text that is the same for equal values only."""
    return json.dumps(_canonical(value))


def _sort(values: list[Any]) -> list[Any]:
    return sorted(map(_canonical, values), key=json.dumps)


def _canonical(value: Any) -> Any:
    kind, of = _kind(value)
    if kind in ("list", "tuple"):
        return ["list", list(map(_canonical, of))]
    if kind in ("set", "dict"):
        return [kind, _sort(of)]
    if isinstance(of, float) and of.is_integer():
        return ["number", int(of)]
    return [kind, of]


def _same_number(got: str, expected: str, tolerance: float) -> bool:
    numbers = [
        float(word)
        for word in (got, expected)
        if len(word) <= _LONGEST and _NUMBER.fullmatch(word) is not None
    ]
    if len(numbers) < 2 or expected.lstrip("+-").isdigit():
        return False
    return all(map(math.isfinite, numbers)) and _close(numbers[0], numbers[1], tolerance)


@dataclass(frozen=True)
class Case:
    """One question to the code, and the right answer.

    Args:
        call: an expression of the names of solution.py. Its value should be the answer itself, as
            the code would decide the result of a comparison or check in it.
        args, kwargs: arguments to call the value of `call` with, if one is given.
        stdin: the program's input, instead of a call.
        expected: the value as plain data: None, numbers, texts, bytes, lists, tuples, sets, dicts;
            for a program, its output.
        raises: instead of `expected`, the name of the exception that ends the call, or of a
            built-in base class of it.

    Raises BadInput for a case that cannot be asked or compared.
    """

    call: str | None = None
    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    stdin: str | None = None
    expected: Any = _NONE_GIVEN
    raises: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("call", self.call), ("stdin", self.stdin), ("raises", self.raises)):
            if value is not None and not isinstance(value, str):
                raise _bad(f"{name}={value!r:.100}: give a text")
        if (self.call is None) == (self.stdin is None):
            raise _bad("give one of `call` and `stdin`")
        if (self.expected is _NONE_GIVEN) == (self.raises is None):
            raise _bad("give one of `expected` and `raises`")
        if self.stdin is not None:
            if self.args is not None or self.kwargs is not None or self.raises is not None:
                raise _bad("with `stdin`, give `expected`, what the program prints, and no more")
            if not isinstance(self.expected, str):
                raise _bad(f"expected={self.expected!r:.100}: a program's output is a text")
        if self.call is not None:
            self._check_call(self.call)

    def _check_call(self, call: str) -> None:
        try:
            ast.parse(call.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise _bad(f"call={call!r:.100} is no expression: {error}") from error
        if isinstance(self.args, str) or not isinstance(self.args, Sequence | None):
            raise _bad(f"args={self.args!r:.100}: give a list")
        if self.kwargs is not None and not all(isinstance(name, str) for name in self.kwargs):
            raise _bad(f"kwargs={self.kwargs!r:.100}: give a dict of texts and values")
        given = {"args": list(self.args or ()), "kwargs": dict(self.kwargs or {})}
        if self.raises is None:
            given["expected"] = self.expected
        for name, value in given.items():
            try:
                expected_answer(value)
            except ValueError as error:
                raise _bad(f"{name}={value!r:.100} cannot be sent or compared: {error}") from error

    @property
    def question(self) -> dict[str, Any]:
        """The call as a request to call_worker.py, which reveals nothing of the expected value."""
        called = self.args is not None or self.kwargs is not None
        return {
            "call": (self.call or "").strip(),
            "args": plain(list(self.args or ())) if called else None,
            "kwargs": plain(dict(self.kwargs or {})) if called else None,
        }

    def awaits(self, error: str) -> bool:
        """Return True if an exception of this name is the right end of the call."""
        if self.raises is None or error == self.raises:
            return self.raises is not None
        if self.raises in ("Exception", "BaseException"):
            return True
        kinds = getattr(builtins, error, None), getattr(builtins, self.raises, None)
        return all(isinstance(kind, type) for kind in kinds) and issubclass(*kinds)  # type: ignore[arg-type]


Tests = str | Sequence[Case | str | Mapping[str, Any]]


def cases_of(tests: Tests) -> list[Case]:
    """Return the cases of tests in any form. Raises BadInput, with the number or line."""
    if isinstance(tests, str):
        cases = _of_source(tests)
    elif isinstance(tests, Sequence):
        cases = [_of_one(each, number) for number, each in enumerate(tests, 1)]
    else:
        raise _bad(f"tests={tests!r:.100}: give a list of them, or Python source")
    if not cases:
        raise _bad("the tests are empty")
    if len({case.stdin is None for case in cases}) > 1:
        raise _bad("some have `call` and some have `stdin`: give two verifiers")
    return cases


def _of_one(test: Case | str | Mapping[str, Any], number: int) -> Case:
    if isinstance(test, Case):
        return test
    try:
        if isinstance(test, str):
            cases = _of_source(test)
            if len(cases) != 1:
                raise _bad(f"{test!r:.100} makes {len(cases)} comparisons: give one")
            return cases[0]
        if not isinstance(test, Mapping):
            raise _bad(f"{test!r:.100}: give a text, a dict or a Case")
        known = [field.name for field in dataclasses.fields(Case)]
        for name in test:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1) or known
                raise _bad(f"no {name!r} is known: {' or '.join(map(repr, near))}?")
        return Case(**test)
    except ValueError as error:
        raise BadInput(f"test {number}: {error}", param="tests") from error


def _of_source(source: str) -> list[Case]:
    try:
        body = ast.parse(source.strip()).body
    except (SyntaxError, ValueError) as error:
        raise _bad(f"{source!r:.100} is not Python: {error}") from error
    return [_of_statement(each) for each in body if not _is_import(each)]


def _is_import(statement: ast.stmt) -> bool:
    """Return True for `from solution import name`, as tests have all names of solution.py."""
    return (
        isinstance(statement, ast.ImportFrom)
        and statement.module == MODULE
        and all(name.asname is None for name in statement.names)
    )


def _of_statement(statement: ast.stmt) -> Case:
    test: ast.expr | None = None
    if isinstance(statement, ast.Assert):
        test = statement.test
    elif isinstance(statement, ast.Expr):
        test = statement.value
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for call, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                expected = ast.literal_eval(literal)
            except (ValueError, TypeError):
                continue
            return Case(call=ast.unparse(call), expected=expected)
    raise _bad(
        f"line {statement.lineno}: `{ast.unparse(statement):.100}` does not compare a call with a "
        "literal by ==, so that it cannot be judged outside of the code's sandbox. Write it as "
        "`name(arguments) == value`, or as a Case; or give the whole program to `checker`, and "
        "read there what it cannot hold"
    )


def _bad(problem: str) -> BadInput:
    return BadInput(problem, param="tests")
