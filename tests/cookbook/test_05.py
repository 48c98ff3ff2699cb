"""05_database.py: its shop, turn by turn; and the whole of it, small, as its docstring says."""

from pathlib import Path
from typing import Any

import pytest

from cray_agents import Run, Task
from cray_agents.cli.user_files import load
from cray_agents.engines.scripted import tool_call
from cray_agents.testing import ScriptedEngine
from tests.support.quick_recipe import quick_lines

FILE = Path(__file__).parents[2] / "cookbook" / "05_database.py"
book = load(FILE)
TASK = next(iter(book.make_loop(quick=True).tasks))
UPDATE, SELECT = book.solution(TASK)


def run(*replies: Any, task: Task = TASK) -> Run:
    says = [reply if isinstance(reply, dict) else tool_call("query", sql=reply)
            for reply in replies[:-1]]  # fmt: skip
    done: Run = book.agent.override(engine=ScriptedEngine([*says, replies[-1]])).run_sync(task)
    assert done.error is None
    return done


def shop(done: Run) -> list[tuple[int | None, float]]:
    """What the environment gave, by turn."""
    return [(reward.turn, reward.value) for reward in done.rewards]


def told(done: Run) -> list[Any]:
    return [call.error or call.result for turn in done.trajectory.turns for call in turn.tool_calls]


def test_demonstrations_are_what_a_perfect_run_says() -> None:
    done = run(UPDATE, SELECT, TASK.target)
    assert shop(done) == [(0, book.SHOP)] and book.answer(done) == 1 - book.SHOP
    shown = [(m["role"], m.get("content") or "") for m in book.demonstration(TASK)]
    assert [(m["role"], m.get("content") or "") for m in done.trajectory.messages] == shown


def test_what_puts_the_shop_wrong_again_loses_what_was_earned() -> None:
    done = run(UPDATE, UPDATE, SELECT, "many")
    assert shop(done) == [(0, book.SHOP), (1, -book.SHOP)] and book.answer(done) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("SELEC stock", "syntax error"),
        ("DROP TABLE items", "no such table"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("COMMIT", "no transaction"),
    ],
)
def test_what_sqlite_refuses_is_told_and_changes_nothing(sql: str, error: str) -> None:
    done = run(sql, UPDATE, SELECT, TASK.target)
    assert error in told(done)[0]
    assert shop(done) == [(1, book.SHOP)] and told(done)[2] == f"[[{TASK.target}]]"


def test_each_run_has_a_shop_of_its_own() -> None:
    first, second = run(UPDATE, SELECT, "1"), run(UPDATE, SELECT, "1")
    assert told(first) == told(second) == ["rows changed: 1", f"[[{TASK.target}]]"]


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.vllm
@pytest.mark.megatron
def test_quick(tmp_path: Path) -> None:
    lines = [line.split() for line in quick_lines(FILE, tmp_path)]
    assert [line[0] for line in lines] == ["0", "1"]
    assert all(line[1].startswith("shop@") for line in lines)
