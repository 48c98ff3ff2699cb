"""`openenv`: OpenEnv's traces become runs with their exact tokens, and bad ones are named."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.records import ModelCall, Reward, Run, StopReason, Task, Trajectory, Turn
from cray_agents.runtime.imports import FORMATS, Importing
from cray_agents.runtime.store.assembly import assemble
from tests.support.command_line import cli
from tests.support.exports.example_runs import LINE_FORMATS

TRACE: dict[str, Any] = {
    "schema_version": 1,
    "turns": [
        {
            "node_id": "first",
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3, 4],
            "per_token_logps": [-0.5, 0],
            "loss_mask": [0, 0, 1, 1],
            "request": {"messages": [{"role": "user", "content": "q"}], "temperature": 1.0},
            "response": {"message": {"role": "assistant", "content": "a"}},
        },
        {
            "node_id": "second",
            "prompt_token_ids": [1, 2, 3, 4, 5],
            "completion_token_ids": [6],
            "per_token_logps": [-1.5],
            "loss_mask": [0, 0, 0, 0, 0, 0],
        },
    ],
}


def read(trace: Any) -> Run[Any]:
    (events,) = FORMATS["openenv"](trace, Importing())
    calls = [event.body for event in events if event.kind == "call"]
    (described,) = [event.body for event in events if event.kind == "run"]
    return assemble(events[0].run_id, described, calls, [])


def test_a_trace_is_a_run_with_its_tokens() -> None:
    run = read(TRACE)
    first, second = run.calls
    assert (first.prompt_token_ids, first.token_ids, first.logprobs) == ([1, 2], [3, 4], [-0.5, 0])
    assert (first.sampling, first.message["content"]) == ({"temperature": 1.0}, "a")
    assert (second.token_ids, second.logprobs) == ([], [])  # its mask forbids to learn it
    assert run.imported == "openenv" and read(copy.deepcopy(TRACE)).id == run.id
    other = copy.deepcopy(TRACE)
    other["turns"][0]["completion_token_ids"][1] = 5
    assert read(other).id != run.id


def test_what_was_exported_comes_back() -> None:
    calls = [
        ModelCall(
            id=f"c{n}",
            run_id="r",
            model="m@3",
            messages=[{"role": "user", "content": "1+1?"}],
            message={"role": "assistant", "content": "2"},
            tools=[{"type": "function", "function": {"name": "add"}}],
            prompt_token_ids=[1, n],
            token_ids=[7, 8],
            logprobs=[-0.25, -1.0],
            sampling={"temperature": 0.5},
            finish_reason="stop",
        )
        for n in range(2)
    ]
    run: Run[Any] = Run(
        id="r",
        agent="clerk",
        model="m@3",
        input="1+1?",
        output="2",
        stop_reason=StopReason.max_turns,
        trajectory=Trajectory(turns=[Turn(call_id=call.id, call=call) for call in calls]),
        rewards=[Reward(name="correct", value=1.0)],
        task=Task(input="1+1?", id="t", split="holdout"),
        tags=["night"],
    )
    (record,) = LINE_FORMATS["openenv"].write_run(run).records
    back = read(json.loads(json.dumps(record)))
    assert back.calls == calls
    same = ("id", "agent", "model", "input", "output", "stop_reason", "task", "tags", "reward")
    assert [getattr(back, name) for name in same] == [getattr(run, name) for name in same]
    (again,) = LINE_FORMATS["openenv"].write_run(back).records
    assert again == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2"),
        ({"turns": []}, "turns must be a list that is not empty"),
        ({"node_id": ""}, r"turns\[0\].node_id must be a text"),
        ({"prompt_token_ids": [1, -2]}, r"turns\[0\].prompt_token_ids must be a list of whole"),
        ({"completion_token_ids": [1, True]}, r"turns\[0\].completion_token_ids must be"),
        ({"per_token_logps": [0.0]}, r"turns\[0\].per_token_logps must have a number for each"),
        ({"per_token_logps": [0.0, float("nan")]}, r"per_token_logps must be finite"),
        ({"loss_mask": [0, 0, 1, 0]}, r"turns\[0\].loss_mask must be 0 for each prompt token"),
        ({"loss_mask": [0, 0, 1]}, r"turns\[0\].loss_mask must be 0 for each prompt token"),
        ({"request": []}, r"turns\[0\].request is not a JSON object"),
        ({"request": {"messages": "x"}}, "messages"),
        ({"metadata": {"run": "r", "stop_reason": "odd"}}, "stop_reason"),
    ],
)
def test_what_is_no_trace(change: dict[str, Any], message: str) -> None:
    trace = copy.deepcopy(TRACE)
    (trace if set(change) & set(trace) else trace["turns"][0]).update(change)
    with pytest.raises(BadInput, match=message):
        read(trace)


def test_two_turns_of_a_name_are_refused() -> None:
    trace = copy.deepcopy(TRACE)
    for turn in trace["turns"]:
        turn |= {"node_id": "same", "metadata": {"run": "r", "stop_reason": "completed"}}
    with pytest.raises(BadInput, match="two turns have the same node_id"):
        read(trace)


def test_the_command_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    bad = copy.deepcopy(TRACE)
    bad["turns"][1]["loss_mask"] = [1]
    file.write_text(json.dumps(TRACE) + "\n" + json.dumps(bad) + "\n")
    done = cli("import", file, "--format", "openenv", "--home", tmp_path / "home", cwd=tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "turns[1].loss_mask" in said and "2" in said
