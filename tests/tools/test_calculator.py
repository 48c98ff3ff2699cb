"""The calculator against Python's own arithmetic, and against what it must refuse."""

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cray_agents.errors import ToolError
from cray_agents.tools.calculator import MAX_BITS, calculator

numbers = st.one_of(st.integers(0, 10**6).map(str), st.floats(0, 1e6, allow_nan=False).map(repr))
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        st.tuples(inner, st.integers(-3, 4)).map(lambda parts: f"({parts[0]})**({parts[1]})"),
        inner.map(lambda text: f"-{text}"),
        inner.map(lambda text: f"+{text}"),
    ),
    max_leaves=8,
)


@given(expressions)
@settings(max_examples=200)
def test_equal_to_python(expression):
    try:
        expected = eval(expression)  # our own text: digits and operators
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            calculator(expression)
        return
    except OverflowError:
        expected = float("inf")
    too_large = isinstance(expected, int) and expected.bit_length() > MAX_BITS
    if isinstance(expected, complex) or too_large or expected in (float("inf"), float("-inf")):
        with pytest.raises(ToolError):
            calculator(expression)
        return
    try:
        value = calculator(expression)
    except ToolError as error:  # a part of it is out of range, though the whole is not
        assert "too large" in str(error)
        return
    assert value == expected or expected != expected
    assert type(value) is type(expected)


@pytest.mark.slow
@given(st.text(max_size=20))
@settings(max_examples=100)
def test_any_text_gives_a_number_or_a_tool_error(text):
    try:
        assert isinstance(calculator(text), int | float)
    except ToolError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "'' is not an arithmetic expression such as"),
        ("47+", "is not an arithmetic expression"),
        ("a\x00b", "is not an arithmetic expression"),
        ("1\ud800", "is not an arithmetic expression"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("2**5000", "too large"),
        ("10.0**400", "too large"),
        ("1e308*10", "too large"),
        ("1e999", "too large"),
        ("(-8)**0.5", "not a real number"),
        ("2^3", "write ** for powers"),
        ("1,000+1", "without commas"),
        ("x+1", "no names"),
        ("__import__('os')", "no functions"),
        ("47+385=432", "is not an arithmetic expression"),
        ("1 < 2", "do not write = or compare"),
        ("True+1", "use numbers"),
        ("'a'*9", "use numbers"),
        ("1j", "use numbers"),
        ("1+" * 600 + "1", "more than 1000 characters"),
        ("-" * 300 + "1", "nested more than 100 deep"),
        ("(" * 400 + "1" + ")" * 400, "is not an arithmetic expression"),
        ("9" * 990 + "**9", "too large"),
    ],
)
def test_refusals(expression, message):
    began = time.thread_time()
    with pytest.raises(ToolError) as caught:
        calculator(expression)
    assert message in str(caught.value) and len(str(caught.value)) < 200
    assert time.thread_time() - began < 2


def test_python_does_not_warn_of_what_a_model_wrote():
    program = "from cray_agents.tools.calculator import calculator as c; print(c('1if 2else 3'))"
    ran = subprocess.run(
        [sys.executable, "-W", "default::SyntaxWarning", "-c", program],
        capture_output=True,
        text=True,
    )
    assert "ToolError" in ran.stderr
    assert "Warning" not in ran.stderr
