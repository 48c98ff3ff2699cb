"""@tool: schemas from signatures and docstrings, validated calls, retries, results."""

import asyncio
import enum
import functools
import sys
import threading
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Literal, NotRequired

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from cray_agents import RunContext, tool
from cray_agents.agent.signatures import read_docstring
from cray_agents.agent.tool import Tool, as_tool, model_text, perform
from cray_agents.errors import BadInput, ToolError
from cray_agents.records import ToolCall


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
    assert call.error is None and call.result == result and model_text(call) == text


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
        (lambda: as_tool(7), "7 is not a tool"),  # type: ignore[arg-type]
    ],
)
def test_bad_tools(make, message):
    with pytest.raises(BadInput, match=message):
        make()


async def test_a_default_of_pydantic_is_its_value_with_its_bounds():
    @tool
    def search(
        query: str,
        limit: int = Field(10, ge=1, le=50, description="how many"),
        words: list[str] = Field(default_factory=list),  # noqa: B008
        depth: int = Field(gt=0),
    ) -> str:
        return f"{query} {limit} {words} {depth}"

    made = as_tool(search)
    about = made.schema["function"]["parameters"]
    assert about["required"] == ["query", "depth"]
    assert about["properties"]["limit"] == {
        "type": "integer", "default": 10, "minimum": 1, "maximum": 50, "description": "how many",
    }  # fmt: skip
    assert await made.call('{"query": "x", "depth": 2}') == "x 10 [] 2"
    for wrong in ('"limit": 99, "depth": 2', '"depth": 0', '"limit": 5'):
        with pytest.raises(ToolError, match="bad arguments for search"):
            await made.call(f'{{"query": "x", {wrong}}}')


# ---- the run's context


def a_context(**fields: Any) -> RunContext:
    return RunContext(run_id="run_1", agent="a", input="go", **fields)


async def performed(function: Any, arguments: str = "{}", context: RunContext | None = None) -> Any:
    made = as_tool(function)
    asked = {"id": "c", "function": {"name": made.name, "arguments": arguments}}
    return await perform({made.name: made}, asked, context)


class Desk:
    """An object whose methods are tools."""

    def __init__(self) -> None:
        self.sold: list[Any] = []

    @tool(name="sell", timeout=50)
    def sell_some(self, count: int, context: RunContext) -> int:
        """Sell.

        Args:
            count: how many.
            context: the model does not read this.
        """
        self.sold.append((count, context.deps))
        context.reward(0.5)
        return count

    @tool(name="open")
    @staticmethod
    def opened(context: RunContext) -> str:
        return context.run_id

    @tool(name="close")
    @classmethod
    async def closed(cls, hour: int, context: RunContext | None = None) -> str:
        return f"{cls.__name__} {hour} {context and context.agent}"


async def test_a_method_is_given_the_context_that_the_model_does_not_see():
    desk, context = Desk(), a_context(deps="till")
    shape = parameters(desk.sell_some)
    assert list(shape["properties"]) == shape["required"] == ["count"]
    call = await performed(desk.sell_some, '{"count": 2}', context)
    assert (call.name, call.result, desk.sold) == ("sell", 2, [(2, "till")])
    assert [(reward.value, reward.turn) for reward in context.rewards] == [(0.5, 0)]
    assert as_tool(desk.sell_some).timeout == 50
    sneaky = await performed(desk.sell_some, '{"count": 2, "context": {}}', context)
    assert "context: Extra inputs are not permitted" in sneaky.error
    assert (await performed(desk.opened, context=context)).result == "run_1"
    assert (await performed(desk.closed, '{"hour": 3}', context)).result == "Desk 3 a"
    assert (as_tool(Desk.opened).name, as_tool(Desk.closed).name) == ("open", "close")


async def test_a_context_may_be_annotated_or_optional_and_is_needed_where_it_is_asked_for():
    async def marked(context: Annotated[RunContext, "ours"], *, n: int = 1) -> str:
        return context.agent * n

    def free(context: RunContext | None = None) -> str:
        return "none" if context is None else context.agent

    assert list(parameters(marked)["properties"]) == ["n"] and parameters(free)["properties"] == {}
    assert (await performed(marked, '{"n": 2}', a_context())).result == "aa"
    assert (await performed(free, context=a_context())).result == "a"
    assert (await performed(free)).result == "none"
    assert (await performed(marked)).error == "marked works only within an agent's run"


# ---- approval


async def test_only_what_is_approved_is_carried_out():
    done, asked = [], []

    def approve(call: ToolCall, context: RunContext) -> bool | str:
        asked.append((call.id, call.name, call.arguments, context.agent))
        return True if "1" in call.arguments else "too much at once"

    @tool(approve=approve)
    def pay(amount: int) -> str:
        done.append(amount)
        return "paid"

    assert (await performed(pay, '{"amount": 1}', a_context())).result == "paid"
    refused = await performed(pay, '{"amount": 900}', a_context())
    assert model_text(refused) == "Error: pay was refused: too much at once"
    assert refused.result is None and done == [1]
    assert asked[0] == ("c", "pay", '{"amount": 1}', "a")
    invalid = await performed(pay, '{"amount": "x1"}', a_context())
    assert "bad arguments for pay" in invalid.error and len(asked) == 2
    assert (await performed(pay, '{"amount": 1}')).error == "pay works only within an agent's run"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (False, "pay was refused"),
        (None, "pay was refused"),
        (1, "pay was refused"),
        ("", "pay was refused"),
        (KeyError("who"), "pay was not carried out: asking for approval failed: KeyError: 'who'"),
    ],
)
async def test_whatever_is_not_true_refuses(answer, message):
    async def approve(call: ToolCall, context: RunContext) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    @tool(approve=approve)
    def pay() -> None:
        raise AssertionError("it was called")

    assert (await performed(pay, context=a_context())).error == message


# ---- large results, and what hangs


async def test_a_large_result_is_recorded_whole_and_shown_shortened():
    @tool(max_chars=11)
    def read(kind: str) -> Any:
        if kind == "bad":
            raise ToolError("abcdefghijklmnop")
        return {"str": "0123456789abcdef", "short": "0123456789a", "list": [1, 2, 3, 4, 5, 6, 7]}[
            kind
        ]

    call = await performed(read, '{"kind": "str"}')
    assert call.result == "0123456789abcdef"
    assert model_text(call) == call.shown == "012345\n[... 5 characters left out ...]\nbcdef"
    short = await performed(read, '{"kind": "short"}')
    assert (short.shown, model_text(short)) == (None, "0123456789a")
    numbers = await performed(read, '{"kind": "list"}')
    assert numbers.result == [1, 2, 3, 4, 5, 6, 7] and model_text(numbers).startswith(
        "[1,2,3\n[..."
    )
    failed = await performed(read, '{"kind": "bad"}')
    assert failed.error == "abcdefghijklmnop" and model_text(failed).startswith(
        "Error:\n[... 12 char"
    )


async def test_twenty_thousand_characters_unless_told_otherwise():
    def plain() -> str:
        return "x" * 20_001

    @tool(max_chars=None)
    def whole() -> str:
        return "x" * 20_001

    assert "\n[... 1 characters left out ...]\n" in model_text(await performed(plain))
    assert model_text(await performed(whole)) == "x" * 20_001
    unknown = await perform({}, {"id": "c", "function": {"name": "y" * 30_000, "arguments": ""}})
    assert unknown.shown is not None and len(unknown.shown) < 20_100


async def test_hung_threads_hold_up_neither_the_call_nor_others():
    never = threading.Event()

    @tool(timeout=0.05, retries=3)
    def hang() -> None:
        never.wait(60)

    def quick() -> str:
        return "there"

    results = await asyncio.gather(*(performed(hang) for _ in range(5)), performed(quick))
    assert [call.error for call in results[:5]] == ["hang did not answer within 0.05 s"] * 5
    assert results[5].result == "there"
    never.set()


async def test_data_nested_too_deeply_is_no_data():
    def deep() -> Any:
        value: list[Any] = []
        for _ in range(240):
            value = [value]
        return value

    assert (await performed(deep)).error == "deep returned no JSON data but 'list'"


def test_what_cannot_be_a_tool_is_said():
    def lock(key: threading.Lock) -> None: ...

    def two(a: RunContext, b: RunContext) -> None: ...

    def apply(function: Callable[[int], int]) -> None: ...

    def unread(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    things: list[tuple[Any, str]] = [
        (Desk.sell_some, "is a class's method"),
        (lock, "no model can fill in"),
        (apply, r"tool 'apply': .*Callable"),
        (two, "two RunContext parameters"),
        (unread, "Nowhere"),
    ]
    for thing, message in things:
        with pytest.raises(BadInput, match=message):
            as_tool(thing)
    with pytest.raises(BadInput, match="mark the method in its class"):
        tool(name="x")(Desk().sell_some)
    with pytest.raises(BadInput, match="max_chars=0"):
        tool(max_chars=0)
    with pytest.raises(BadInput, match="approve='yes'"):
        tool(approve="yes")  # type: ignore[call-overload]


def counted(n: int, by: int = 1) -> Iterator[int]:
    """Count."""
    yield from range(0, n, by)


async def counted_slowly(n: int) -> AsyncIterator[int]:
    """Count."""
    for number in range(n):
        await asyncio.sleep(0)
        yield number


class Place(TypedDict):
    name: str
    floor: NotRequired[int]


def where(place: Place) -> str:
    """Say it."""
    return f"{place['name']} {place.get('floor', 0)}"


@pytest.mark.parametrize("function", [counted, counted_slowly])
async def test_the_result_of_a_generator_is_what_it_yields(function):
    assert await as_tool(function).call('{"n": 3}') == [0, 1, 2]


async def test_of_a_partial_the_model_gives_what_is_left():
    made = as_tool(functools.partial(counted, by=2))
    assert made.name == "counted" and made.description == "Count."
    assert list(made.schema["function"]["parameters"]["properties"]) == ["n"]
    assert await made.call('{"n": 5}') == [0, 2, 4]
    assert await as_tool(functools.partial(counted, 5)).call('{"by": 2}') == [0, 2, 4]
    with pytest.raises(ToolError, match="by"):
        await made.call('{"n": 5, "by": 1}')


async def test_typed_dicts_are_objects():
    made = as_tool(where)
    assert await made.call('{"place": {"name": "attic", "floor": 3}}') == "attic 3"
    with pytest.raises(ToolError, match="place: floor"):
        await made.call('{"place": {"name": "attic", "floor": "up"}}')


def test_an_annotation_that_pydantic_refuses_is_a_clear_error():
    old = typing.TypedDict("old", {"x": int})  # noqa: UP013

    def show(place: old) -> str:
        return "x"

    if sys.version_info >= (3, 12):
        assert parameters(show)["required"] == ["place"]
        return
    with pytest.raises(BadInput, match=r"tool 'show'.*typing_extensions"):
        as_tool(show)
