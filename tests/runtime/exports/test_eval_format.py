"""`eval`: logs that Inspect AI's own reader takes, with what the runs say."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Task
from cray_agents.errors import BadInput
from cray_agents.records import Reward, Run, RunError, StopReason, ToolCall
from cray_agents.runtime.exports.export_format import line_of
from cray_agents.runtime.exports.formats.inspect_eval import EVAL, pack_log
from tests.support.environments.pythons import venv
from tests.support.exports.example_runs import called, of_calls

READ = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries
from inspect_ai.log import read_eval_log_sample
path = sys.argv[1]
log = read_eval_log(path)
summaries = read_eval_log_sample_summaries(path)
header = read_eval_log(path, header_only=True)
first = log.samples[0]
one = read_eval_log_sample(path, first.id, first.epoch)
assert one.messages == first.messages and header.eval == log.eval
assert len(list_eval_logs(path.rpartition("/")[0])) == 1
print(json.dumps({
    "log": log.model_dump(mode="json"),
    "texts": [m.text for s in log.samples for m in s.messages],
    "summaries": [s.model_dump(mode="json") for s in summaries],
}))
"""
pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]


def read(path: Path) -> dict[str, Any]:
    """A log as Inspect reads it."""
    python = venv("inspect") / "bin" / "python"
    done = subprocess.run([python, "-c", READ, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    read: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return read


def packed(runs: list[Run], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "runs.eval"
    pack_log([line_of(run, EVAL.write_run(run).records[0]) for run in runs], file)
    return file


def test_inspect_reads_every_run(runs: dict[str, Run], tmp_path: Path) -> None:
    carried = []
    for run in runs.values():
        try:
            line_of(run, EVAL.write_run(run).records[0])
        except BadInput as error:
            assert error.code == "unsupported_export"
            continue
        carried.append(run)
    assert len(carried) > len(runs) / 2
    said = read(packed(carried, tmp_path / "logs"))
    assert [sample["uuid"] for sample in said["log"]["samples"]]
    assert {s["uuid"] for s in said["log"]["samples"]} == {run.id for run in carried}
    assert {s["uuid"] for s in said["summaries"]} == {run.id for run in carried}


def test_a_sample_says_what_its_run_says(tmp_path: Path) -> None:
    asked = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "It is 2.", "reasoning": "easy"},
    ]
    call = called(messages[:4], messages[4], prompt_token_ids=[1, 2, 3], token_ids=[4, 5],
                  logprobs=[-0.5, -0.5], finish_reason="stop")  # fmt: skip
    call = call.model_copy(update={"model": "m@3"})
    asked_apart = [{"role": "user", "content": "A summary that only this call saw."}]
    apart = called(asked_apart, {"role": "assistant", "content": "An answer to it."}, "c0")
    good = of_calls(
        apart,
        call,
        messages=messages,
        model="m@3",
        input="1 + 1?",
        task=Task(input="1 + 1?", target="2", metadata={"kind": "sum"}, id="sum"),
        rewards=[
            Reward(name="right", value=1.0, comment="well done"),
            Reward(name="short", value=0.5),
        ],
        loop="loop",
        iteration=4,
        tags=["t"],
    )
    done = ToolCall(id="c1", name="add", arguments='{"a": 1}', result="2")
    good.trajectory.turns[1].tool_calls.append(done)
    again = good.model_copy(
        update={
            "id": "run-again",
            "rewards": [Reward(name="right", value=0.0)],
            "stop_reason": StopReason.max_turns,
        }
    )
    failed = good.model_copy(
        update={
            "id": "run-failed",
            "rewards": [],
            "error": RunError(type="EnvironmentFailed", message="no world", infrastructure=True),
        }
    )
    log = read(packed([good, again, failed], tmp_path / "logs"))["log"]
    one, two, three = log["samples"]
    assert [(s["id"], s["epoch"], s["uuid"]) for s in log["samples"]] == [
        ("sum", 1, good.id),
        ("sum", 2, "run-again"),
        ("sum", 3, "run-failed"),
    ]
    assert [m["role"] for m in one["messages"]] == [m["role"] for m in messages]
    (told,) = one["messages"][2]["tool_calls"]
    assert (told["id"], told["function"], told["arguments"]) == ("c1", "add", {"a": 1})
    assert (one["messages"][3]["function"], one["messages"][3]["content"]) == ("add", "2")
    assert one["output"]["completion"] == "It is 2."
    calls = [event for event in one["events"] if event["event"] == "model"]
    assert [event["output"]["completion"] for event in calls] == ["An answer to it.", "It is 2."]
    assert [[m["content"] for m in event["input"]] for event in calls[:1]] == [
        ["A summary that only this call saw."]
    ]
    (tool,) = [event for event in one["events"] if event["event"] == "tool"]
    assert (tool["function"], tool["result"]) == ("add", "2")
    assert one["messages"][4]["content"][0]["reasoning"] == "easy"
    assert {name: score["value"] for name, score in one["scores"].items()} == {
        "right": 1.0,
        "short": 0.5,
    }
    assert one["scores"]["right"]["explanation"] == "well done"
    assert one["scores"]["right"]["answer"] == "It is 2."
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    assert usage.items() <= one["model_usage"]["m@3"].items()
    assert log["stats"]["model_usage"]["m@3"]["output_tokens"] == 6
    about = one["metadata"]
    assert (about["run"], about["model"], about["model_version"]) == (good.id, "m@3", 3)
    assert (about["loop"], about["iteration"], about["task"]) == ("loop", 4, {"kind": "sum"})
    assert (one["target"], one["input"]) == ("2", "1 + 1?")
    assert two["limit"]["type"] == "turn" and three["limit"] is None
    assert three["error"]["message"] == "EnvironmentFailed: no world" and not three["scores"]
    assert (log["status"], log["eval"]["model"]) == ("success", "m@3")
    assert (log["results"]["total_samples"], log["results"]["completed_samples"]) == (3, 2)
    means = {s["name"]: s["metrics"]["mean"]["value"] for s in log["results"]["scores"]}
    assert means == {"right": 0.5, "short": 0.5}
