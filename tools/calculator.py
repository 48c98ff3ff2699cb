"""Calculator tool: evaluate arithmetic expressions of a model safely.

The expression is parsed, never run. Sizes are limited, so that no expression takes long. Numbers
are Python's: ints stay ints and are exact.
"""

import ast
import math
import operator
import warnings
from collections.abc import Callable

from cray_agents.agent.tool import tool
from cray_agents.errors import ToolError

MAX_LENGTH = 1000  # characters of an expression
#: Name of the parsed source. Python's warnings for it, as of `1if 2`, are not for the user.
SOURCE = "<calculator>"
warnings.filterwarnings("ignore", category=SyntaxWarning, module=SOURCE)
MAX_DEPTH = 100  # operators inside operators
MAX_BITS = 4096  # size of an integer, about 1,200 digits


def _power(base: float, exponent: float) -> float:
    """Refuse a large power before its computation, as 9**9**9 would take for ever."""
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and exponent > 0:
        bits = (abs(base).bit_length() - 1) * exponent
        if bits > MAX_BITS:
            raise OverflowError(f"{bits} bits")
    result: float = base**exponent
    return result


_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_HINTS: dict[type[ast.AST], str] = {
    ast.BitXor: "write ** for powers",
    ast.Tuple: "write numbers without commas",
    ast.Name: "there are no names or variables",
    ast.Call: "there are no functions",
    ast.Compare: "do not write = or compare",
}


@tool(timeout=20)
def calculator(expression: str) -> float:
    """Evaluate an arithmetic expression.

    Args:
        expression: such as '47+385'.
    """
    return evaluate(expression)


def evaluate(expression: str) -> float:
    """Return the value of an expression of numbers, + - * / // % ** and parentheses.

    Raises ToolError, in words for a model, for anything else and for results out of range.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), SOURCE, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        excerpt = expression if len(expression) <= 80 else f"{expression[:80]}..."
        raise ToolError(f"{excerpt!r} is not an arithmetic expression such as '47+385'") from error
    try:
        return _value(tree.body, 0)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the result is too large") from error


def _value(node: ast.expr, depth: int) -> float:
    if depth > MAX_DEPTH:
        raise ToolError(f"the expression is nested more than {MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check_result(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
            first, second = _value(left, depth + 1), _value(right, depth + 1)
            return _check_result(_OPERATORS[type(symbol)](first, second))
    kind = type(node.op) if isinstance(node, ast.BinOp) else type(node)
    hint = _HINTS.get(kind, "use numbers")
    raise ToolError(f"only + - * / // % ** and parentheses are allowed: {hint}")


def _check_result(number: float | complex) -> float:
    if isinstance(number, complex):
        raise ToolError("the result is not a real number")
    if isinstance(number, int):
        if number.bit_length() > MAX_BITS:
            raise OverflowError(f"{number.bit_length()} bits")
    elif not math.isfinite(number):
        raise OverflowError("infinite")
    return number
