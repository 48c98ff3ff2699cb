"""Timelines: spans lie where the records say, nested as they happened, on as few tracks as fit."""

from typing import Any

import orjson

from cray_agents.records import ModelCall, Run, StopReason, ToolCall, Trajectory, Turn
from cray_agents.runtime.telemetry.timeline import (
    JOB,
    MOST_RUNS,
    PHASES,
    RUNS,
    iteration_timeline,
    job_timeline,
)

EVENTS: list[dict[str, Any]] = [
    {"event": "layout", "time": 99.0, "layout": "dp1"},
    {"event": "started", "time": 100.0, "attempt": 1, "from_step": 0},
    {"event": "step", "time": 104.0, "seconds": 1.0, "step": 1, "loss": 2.0, "grad_norm": None},
    {"event": "step", "time": 105.0, "seconds": 1.0, "step": 2, "loss": 1.5},
    {"event": "saved", "time": 105.5, "seconds": 0.25, "step": 2},
    {"event": "started", "time": 110.0, "attempt": 2, "from_step": 2},
    {"event": "step", "time": 112.0, "seconds": 1.0, "step": 3, "loss": 1.0},
    {"event": "succeeded", "time": 113.0, "checkpoint": "c"},
]


def spans(trace: dict[str, Any], process: int) -> dict[str, list[tuple[float, float, int]]]:
    """Of each name the begins and lengths in seconds, and the tracks."""
    assert orjson.loads(orjson.dumps(trace)) == trace
    begin, found = trace["otherData"]["begin"], dict[str, list[tuple[float, float, int]]]()
    for event in trace["traceEvents"]:
        assert event["ph"] in "XiCM"
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X" and event["pid"] == process:
            place = (begin + event["ts"] / 1e6, event["dur"] / 1e6, event["tid"])
            found.setdefault(event["name"], []).append(place)
    return found


def run(name: str, started: float, seconds: float) -> Run:
    call = ModelCall(
        id=f"call-{name}", run_id=name, model="m@1", messages=[], message={}, token_ids=[1, 2],
        prompt_token_ids=[1], started=started, seconds=seconds / 2,
    )  # fmt: skip
    tool = ToolCall(id="t", name="calculator", arguments="{}", seconds=seconds / 4)
    return Run(
        id=name, agent="a", model="m", input="?", stop_reason=StopReason.completed,
        started=started, seconds=seconds,
        trajectory=Trajectory(turns=[Turn(call_id=call.id, tool_calls=[tool], call=call)]),
    )  # fmt: skip


def test_a_job_by_attempts() -> None:
    trace = job_timeline("job-1", EVENTS)
    found = spans(trace, JOB)
    assert trace["otherData"] == {"begin": 99.0, "job": "job-1"}
    assert found["start"] == [(100.0, 3.0, 2), (110.0, 1.0, 3)]
    assert found["step"] == [(103.0, 1.0, 2), (104.0, 1.0, 2), (111.0, 1.0, 3)]
    assert found["save"] == [(105.25, 0.25, 2)]
    losses = [e["args"]["loss"] for e in trace["traceEvents"] if e["name"] == "loss"]
    assert losses == [2.0, 1.5, 1.0]
    instants = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert instants == ["layout", "started", "started", "succeeded"]
    assert job_timeline("job-1", [])["traceEvents"][0]["args"] == {"name": "job job-1"}


def test_an_iteration() -> None:
    record = {
        "iteration": 3, "version": "m@4", "promoted": True, "wall": 30.0, "job_id": "job-1",
        "seconds": {"rollouts": 9.0, "dataset": 1.0, "train": 13.0, "swap": 2.0},
    }  # fmt: skip
    runs = [run("r1", 89.0, 4.0), run("r2", 90.0, 2.0), run("r3", 93.0, 1.0)]
    trace = iteration_timeline("calc", record, 118.0, job_events=EVENTS, runs=runs)
    phases = spans(trace, PHASES)
    assert phases["promoted"] == [(88.0, 30.0, 1)]
    assert phases["rollouts"][0][:2] == (89.0, 9.0)
    assert phases["dataset"][0][:2] == (98.0, 1.0)  # after the phase before
    assert phases["train"][0][:2] == (99.0, 13.0)  # where its job began
    assert phases["swap"][0][:2] == (112.0, 2.0)
    assert len(spans(trace, JOB)["step"]) == 3
    drawn = spans(trace, RUNS)
    tracks = {name: drawn[name][0][2] for name in ("r1", "r2", "r3")}
    assert tracks == {"r1": 1, "r2": 2, "r3": 2}  # r3 begins when r2 has ended
    assert (90.0, 1.0, 2) in drawn["chat m@1"]
    assert (91.0, 0.5, 2) in drawn["tool calculator"]


def test_an_iteration_without_job_or_runs_and_one_with_too_many() -> None:
    empty = iteration_timeline("calc", {"iteration": 0, "promoted": False}, 5.0)
    assert spans(empty, PHASES) == {"not promoted": [(5.0, 0.0, 1)]}
    many = (run(f"r{n}", float(n + 1), 0.5) for n in range(MOST_RUNS + 3))
    trace = iteration_timeline("calc", {"iteration": 1, "wall": 1.0}, 5.0, runs=many)
    assert trace["otherData"]["runs_left_out"] == 3
    assert sum(len(of) for of in spans(trace, RUNS).values()) == 3 * MOST_RUNS
