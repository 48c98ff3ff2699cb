"""An exported log in the real Inspect View, in real Chromium: list, transcript, tool calls."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.rivals.server_process import answers, foreign, free_port, program, wait_until
from cray_agents import Task
from cray_agents.records import Reward, ToolCall
from cray_agents.runtime.exports.export_format import line_of
from cray_agents.runtime.exports.formats.inspect_eval import EVAL, pack_log
from tests.support.environments.pythons import venv
from tests.support.exports.example_runs import called, of_calls
from tests.support.watched_pages import CHROMIUM, WAIT, chromium

pytestmark = [
    pytest.mark.timeout(2400),  # the venv may have to be made, once
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]


@contextmanager
def inspect_view(logs: Path) -> Iterator[str]:
    """Inspect View of a folder of logs; its URL."""
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    options = ["--log-dir", str(logs), "--host", "127.0.0.1", "--port", port]
    argv = [venv("inspect") / "bin" / "inspect", "view", "start", *options]
    with program(argv, logs, foreign(logs)) as process:
        wait_until(lambda: answers(url, 60), process, logs)
        yield url


def test_it_shows_what_models_and_tools_said(tmp_path: Path) -> None:
    asked = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    question = {"role": "user", "content": "How much is one and one?"}
    wants = {"role": "assistant", "content": "", "tool_calls": [asked]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "the sum is 2"}
    answer = {"role": "assistant", "content": "It is two."}
    trimmed = {"role": "user", "content": "A summary that only this call saw."}
    first = called([question], wants, "c1", finish_reason="tool_calls")
    second = called([question, wants, result], answer, "c2")
    third = called([trimmed], {"role": "assistant", "content": "An answer to the summary."}, "c3")
    run = of_calls(
        first, second, third,
        messages=[question, wants, result, answer], model="m@3", input="How much is one and one?",
        task=Task(input="How much is one and one?", id="sum"), rewards=[Reward(name="r", value=1)],
    )  # fmt: skip
    run.trajectory.turns[0].tool_calls.append(
        ToolCall(id="c1", name="add", arguments='{"a": 1}', result="the sum is 2")
    )
    written = EVAL.write_run(run)
    assert "other_calls" not in written.losses
    pack_log([line_of(run, written.records[0])], tmp_path / "runs.eval")
    with inspect_view(tmp_path) as url, chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(WAIT)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{url}/#/logs/runs.eval/samples")
        page.get_by_text("How much is one and one?").first.wait_for()
        for tab, texts in {
            "transcript": ["It is two.", "the sum is 2", "An answer to the summary."],
            "messages": ["It is two.", "the sum is 2"],
        }.items():
            page.goto(f"{url}/#/logs/runs.eval/samples/sample/sum/1/{tab}")
            for text in texts:
                page.get_by_text(re.compile(re.escape(text))).first.wait_for()
        assert not problems
