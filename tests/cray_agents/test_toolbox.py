"""@tool: schemas from signatures and docstrings, validated calls, retries, results."""

import enum
import functools
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from cray_agents import tool
from cray_agents.errors import BadInput, ToolError
from cray_agents.toolbox import Tool, as_tool, perform, read_docstring, told


class Unit(enum.Enum):
    metre = "m"
    mile = "mi"


class Point(BaseModel):
    x: float
    y: float = 0.0


def parameters(function: Any) -> dict[str, Any]:
    return as_tool(function).schema["function"]["parameters"]


async def result_of(function: Any, arguments: str = "{}") -> Any:
    name = as_tool(function).name
    call = {"id": "c", "function": {"name": name, "arguments": arguments}}
    return await perform({name: as_tool(function)}, call)


def test_the_function_stays_an_ordinary_function():
    @tool(timeout=20, retries=1, name="sum")
    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    assert add(2, b=3) == 5 and add(2) == 3
    assert add.__name__ == "add" and add.__doc__ == "Add."
    made = as_tool(add)
    assert isinstance(made, Tool) and made(1, 1) == 2
    assert (made.name, made.timeout, made.retries) == ("sum", 20, 1)
    assert as_tool(made) is made


def test_schema():
    def travel(
        start: Point,
        unit: Unit,
        mode: Literal["car", "train"] = "car",
        stops: list[str] | None = None,
        limit: Annotated[int, Field(ge=1, description="how many")] = 3,
        title: str = "x",
    ) -> str:
        """Plan a journey.

        It may take long.

        Args:
            start: where to begin,
                in plane coordinates.
            unit (Unit): of all lengths.
            title: of the page: short.

        Returns:
            the plan.
        """
        return ""

    function = as_tool(travel).schema["function"]
    assert as_tool(travel).schema["type"] == "function"
    assert function["name"] == "travel"
    assert function["description"] == "Plan a journey.\n\nIt may take long."
    shape = function["parameters"]
    assert shape["type"] == "object" and shape["required"] == ["start", "unit"]
    assert shape["additionalProperties"] is False
    properties = shape["properties"]
    assert list(properties) == ["start", "unit", "mode", "stops", "limit", "title"]
    assert properties["start"]["description"] == "where to begin, in plane coordinates."
    assert properties["unit"]["description"] == "of all lengths."
    assert properties["title"] == {
        "default": "x", "description": "of the page: short.", "type": "string",
    }  # fmt: skip
    assert properties["mode"]["enum"] == ["car", "train"]
    assert properties["limit"] == {
        "default": 3, "description": "how many", "minimum": 1, "type": "integer",
    }  # fmt: skip
    assert shape["$defs"]["Unit"]["enum"] == ["m", "mi"]


def test_schema_of_the_design():
    @tool(timeout=20)
    def calculator(expression: str) -> float:
        """Evaluate an arithmetic expression.

        Args:
            expression: such as '47+385'.
        """
        return 0.0

    assert as_tool(calculator).schema == {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {"type": "string", "description": "such as '47+385'."}
                },
                "required": ["expression"],
                "additionalProperties": False,
            },
        },
    }


def test_no_parameters_no_docstring():
    def now():
        return 1

    assert as_tool(now).schema["function"]["description"] == ""
    assert parameters(now)["properties"] == {}


@pytest.mark.parametrize(
    ("text", "description", "described"),
    [
        ("", "", {}),
        ("One line.", "One line.", {}),
        ("A.\n\nArgs:\n  a: b.\n\nNote: see c.", "A.", {"a": "b."}),
        ("A.\n\nArguments:\n    x (int, optional): y\n      z\nMore.", "A.\n\nMore.", {"x": "y z"}),
        ("Returns: what it is.", "", {}),
    ],
)
def test_docstrings(text, description, described):
    assert read_docstring(text) == (description, described)


async def test_names_that_pydantic_keeps_for_itself():
    def odd(schema: str, json: int, model_config: bool = False, _x: int = 1, copy: int = 2) -> str:
        return f"{schema} {json} {model_config} {_x} {copy}"

    assert list(parameters(odd)["properties"]) == ["schema", "json", "model_config", "_x", "copy"]
    call = await result_of(odd, '{"schema": "a", "json": 2, "_x": 7}')
    assert call.result == "a 2 False 7 2"


async def test_arguments_arrive_typed():
    def takes(point: Point, unit: Unit, times: int) -> list[Any]:
        assert isinstance(point, Point) and isinstance(unit, Unit)
        return [point, unit, times]

    call = await result_of(takes, '{"point": {"x": 1}, "unit": "mi", "times": "3"}')
    assert call.error is None and call.result == [{"x": 1.0, "y": 0.0}, "mi", 3]


async def test_methods_partials_and_callable_objects():
    class Shop:
        stock = 3

        @tool(name="sell")
        def sell_some(self, count: int) -> int:
            return self.stock - count

    class Adder:
        async def __call__(self, a: int) -> int:
            return a + 1

    assert list(parameters(Shop().sell_some)["properties"]) == ["count"]
    assert as_tool(Shop().sell_some).name == "sell"
    assert (await result_of(Shop().sell_some, '{"count": 1}')).result == 2
    assert (await result_of(Adder(), '{"a": 1}')).result == 2

    async def later(a: int) -> int:
        return a * 2

    @functools.wraps(later)
    def wrapped(a: int) -> Any:
        return later(a)

    assert (await result_of(wrapped, '{"a": 4}')).result == 8


async def test_retries_but_not_of_tool_errors():
    attempts = []

    @tool(retries=2)
    def flaky(stubborn: bool = False) -> str:
        attempts.append(1)
        if stubborn:
            raise ToolError("no")
        if len(attempts) < 3:
            raise ConnectionError("again")
        return "at last"

    assert (await result_of(flaky)).result == "at last"
    assert len(attempts) == 3
    attempts.clear()
    assert (await result_of(flaky, '{"stubborn": true}')).error == "no"
    assert len(attempts) == 1


@pytest.mark.parametrize(
    ("value", "result", "text"),
    [
        ("as 'it' is", "as 'it' is", "as 'it' is"),
        (432, 432, "432"),
        (2.5, 2.5, "2.5"),
        (None, None, "null"),
        (True, True, "true"),
        ({"a": [1, "é"]}, {"a": [1, "é"]}, '{"a":[1,"é"]}'),
        (Point(x=1), {"x": 1.0, "y": 0.0}, '{"x":1.0,"y":0.0}'),
        (float("inf"), "Infinity", "Infinity"),
        (10**30, str(10**30), str(10**30)),
        ("bad \udc80 name", "bad ? name", "bad ? name"),
    ],
)
async def test_results(value, result, text):
    def give():
        return value

    call = await result_of(give)
    assert call.error is None and call.result == result and told(call) == text


async def test_a_result_that_is_no_data():
    def give() -> Any:
        return object()

    assert (await result_of(give)).error == "give returned no JSON data but 'object'"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tool(timeout=0), "timeout=0"),
        (lambda: tool(retries=-1), "retries=-1"),
        (lambda: as_tool(lambda x: x), "cannot be called '<lambda>'"),
        (lambda: as_tool(print), "cannot be given by name"),
        (lambda: as_tool(7), "7 is not a tool"),
    ],
)
def test_bad_tools(make, message):
    with pytest.raises(BadInput, match=message):
        make()
