"""The cookbook's notebook, by IPython itself; HTML of runs, iterations and training sets."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from cray_agents import Run
from cray_agents.iteration import Iteration
from cray_agents.platform.client import Platform
from cray_agents.queries import DatasetRecipe
from cray_agents.records import RunError, Task, Trajectory
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_platform import platform

BOOK = Path(__file__).parents[1] / "cookbook" / "10_notebook.ipynb"


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_the_notebook_runs_and_shows_what_it_makes(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: dict[str, Any], version: str) -> str:
        number = str(request["messages"][-1]["content"])
        return number if version == "m@2" or int(number) % 2 else "no"

    shown = []
    with platform(tmp_path / "home", ScriptedEngine(answer)) as where:
        monkeypatch.setenv("CRAY_AGENTS_URL", where.url)
        for cell in json.loads(BOOK.read_text())["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                with capture_output() as captured:  # in an event loop, as in Jupyter
                    done = asyncio.run(shell.run_cell_async(source, transformed_cell=source))
                    done.raise_error()
                formatted, _ = shell.display_formatter.format(done.result)
                shown.append((formatted, [o.data["text/html"] for o in captured.outputs]))
                kept = "".join(one["data"]["text/html"] for one in cell["outputs"])
                assert bool(kept) == (bool(captured.outputs) or "text/html" in formatted)
        built = asyncio.run(Platform(where.url).build_dataset(DatasetRecipe(loop="echo-m")))
    _, (run, _), (_, watched), (iterations, _) = shown
    assert ">user</td>" in run["text/html"] and ">7</td>" in run["text/html"]
    again = iterations["text/html"]
    assert watched[0] == "" and watched[-1] == f"{again}<p></p>" and "<polyline" in again
    assert "m@2" in again and ">promoted</td>" in again
    html = shell.display_formatter.format(built)[0]["text/html"]
    assert built["samples"] > 1 and f">{built['samples']}</td>" in html and built["id"] in html


def test_a_run_shows_its_tool_calls_and_no_markup_of_a_models() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "<b>1 + 1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    run = Run[str](
        id="run_1", agent="a", model="m@1", input="<b>1 + 1", stop_reason="error",
        error=RunError(type="ToolError", message="no <i>"), task=Task(input="<b>1 + 1", target=2),
        trajectory=Trajectory(messages=messages),
    )  # fmt: skip
    html = run._repr_html_()
    assert "add({&quot;a&quot;: 1})" in html and ">2</td>" in html
    assert "&lt;b&gt;1 + 1" in html and "<b>" not in html and "<i>" not in html


def test_one_iteration_is_a_row_and_no_curve() -> None:
    one = Iteration(iteration=0, holdout_success=0.5, holdout_tasks=4, version="m@1")
    html = one._repr_html_()
    assert ">0.500</td>" in html and "<svg" not in html and html.count("<tr>") == 2
