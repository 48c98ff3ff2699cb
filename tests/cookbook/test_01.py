"""01_hello_agent.py, run as its docstring says: from a script, and against a gateway."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cray_agents.engines.scripted import tool_call
from cray_agents.paths import Home
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_platform import platform

FILE = Path(__file__).parents[2] / "cookbook" / "01_hello_agent.py"


def run(*arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, FILE, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_scripted() -> None:
    assert run("--scripted") == [
        'calculator {"expression": "47 + 385"} -> 432',
        "calc completed output: 432",
    ]


@pytest.mark.slow
def test_against_a_gateway(tmp_path: Path) -> None:
    engine = ScriptedEngine([tool_call("calculator", expression="47 + 385"), "432"])
    with platform(tmp_path, engine, name="calc") as where:
        assert run(CRAY_AGENTS_URL=where.url) == [
            'calculator {"expression": "47 + 385"} -> 432',
            "calc@1 completed output: 432",
        ]
    [kept] = Store(Home(tmp_path)).runs()
    assert (kept.output, kept.model, kept.stop_reason) == (432, "calc@1", "completed")
    first, second = kept.trajectory.turns
    assert first.tool_calls[0].result == 432
    assert second.call is not None
    assert bytes(second.call.token_ids) == b"432"
    assert len(second.call.logprobs) == 3
    assert second.call.run_id == kept.id
