"""Our environments as TRL takes them: an episode as its trainer plays it, and the schemas."""

import inspect
from typing import Any

import pytest

from cray_agents import Environment, RunContext, Task, ToolError, tool
from cray_agents.agent import as_trl
from cray_agents.errors import BadInput


class Number(Environment):
    """A secret number."""

    def reset(self, task: Task, context: RunContext) -> str:
        self.secret = task.metadata["secret"]
        return f"It is below {task.target}."

    @tool
    def guess(self, number: int, context: RunContext) -> str:
        """Guess the number.

        Args:
            number: a whole one.
        """
        if number < 0:
            raise ToolError("it is not negative")
        context.reward(float(number == self.secret))
        return "right" if number == self.secret else "wrong"

    @tool
    async def hint(self) -> dict[str, int]:
        """Ask for a hint."""
        return {"parity": self.secret % 2}


ROW = {"prompt": [{"role": "user", "content": "Guess."}], "secret": 3, "target": 10}


def test_an_episode_as_trl_plays_it() -> None:
    made = as_trl(Number)()
    assert made.reset(**ROW) == "\n\nIt is below 10."
    names = [name for name, _ in inspect.getmembers(type(made), predicate=inspect.isfunction)]
    assert [n for n in names if not n.startswith("_")] == ["get_reward", "guess", "hint", "reset"]
    assert made.guess(number=-1) == "Error: it is not negative"
    assert made.guess(number="no").startswith("Error: bad arguments for guess")
    assert (made.hint(), made.guess(number=3), made.get_reward()) == ('{"parity":1}', "right", 1.0)
    made.reset(**{**ROW, "secret": 4})  # made once, reset often
    assert (made.guess(number=3), made.get_reward()) == ("wrong", 0.0)


def test_what_trl_has_no_room_for() -> None:
    class Odd(Number):
        @tool(name="get_reward")
        def other(self) -> str:
            """Do something."""
            return ""

    with pytest.raises(BadInput, match="rename it"):
        as_trl(Odd)
    with pytest.raises(BadInput, match="no class of an Environment"):
        as_trl(dict)  # type: ignore[arg-type]


def test_schemas_are_those_of_transformers() -> None:
    from transformers.utils import get_json_schema

    made = as_trl(Number)()
    schema: Any = get_json_schema(made.guess)["function"]
    assert schema["parameters"]["properties"] == {
        "number": {"type": "integer", "description": "a whole one."}
    }
    assert schema["description"] == "Guess the number."
    assert get_json_schema(made.hint)["function"]["parameters"]["properties"] == {}
