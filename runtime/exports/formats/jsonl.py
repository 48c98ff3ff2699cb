"""Whole runs: `jsonl`, the record as the store has it, and `openenv`, OpenEnv's TrainingTrace.

`Run.model_validate_json` reads a line of `jsonl` back. A line of `openenv` is a run too; each model
call is a turn with its exact tokens. A turn's mask covers prompt and completion; only sampled
tokens are learned. OpenEnv forbids further fields in a trace, so the run's id, task, rewards and
ending are in the metadata of each turn, and messages in its `request` and `response`. Listed in
exporter.py.
"""

import math

from cray_agents.records import ModelCall, Run
from cray_agents.runtime.exports.export_format import Json, LineFormat, Written, unsupported

SCHEMA_VERSION = 1  # of OpenEnv's traces


def _write_run(run: Run) -> Written:
    check_finite(run)
    return Written([run.model_dump(mode="json")])


def check_finite(run: Run) -> None:
    """Raise BadInput for a reward or logprob that is infinite or NaN: JSON would make it null."""
    if not all(math.isfinite(reward.value) for reward in run.rewards):
        raise unsupported(run, "rewards", "hold an infinity or NaN, which JSON cannot carry")
    for logprobs in (call.logprobs for call in run.calls):
        if not (math.isfinite(sum(logprobs)) or all(map(math.isfinite, logprobs))):
            raise unsupported(run, "logprobs", "hold an infinity or NaN, which JSON cannot carry")


JSONL = LineFormat(
    name="jsonl",
    title="JSON lines of the whole record",
    about="everything: messages, turns, exact tokens and logprobs, rewards, tags, times",
    write_run=_write_run,
)


def _write_trace(run: Run) -> Written:
    check_finite(run)
    if not run.calls:
        raise unsupported(run, "calls", "are missing: a trace consists of them")
    turns = [_turn(run, number, call) for number, call in enumerate(run.calls)]
    return Written([{"schema_version": SCHEMA_VERSION, "turns": turns}])


def _turn(run: Run, number: int, call: ModelCall) -> Json:
    if not (call.prompt_token_ids and call.token_ids):
        raise unsupported(run, "token ids", f"of call {call.id} are missing")
    prompt, sampled = len(call.prompt_token_ids), len(call.token_ids)
    rewards = [reward.model_dump(mode="json", exclude={"time"}) for reward in run.rewards]
    return {
        "node_id": call.id,
        "prompt_token_ids": call.prompt_token_ids,
        "completion_token_ids": call.token_ids,
        "per_token_logps": call.logprobs,
        "loss_mask": [0] * prompt + [1] * sampled,
        "request": {"messages": call.messages, "tools": call.tools, **call.sampling},
        "response": {"message": call.message, "finish_reason": call.finish_reason},
        "metadata": {
            "run": run.id,
            "turn": number,
            "model": call.model,
            "agent": run.agent,
            "task": None if run.task is None else run.task.model_dump(mode="json"),
            "rewards": rewards,
            "stop_reason": run.stop_reason,
            "tags": run.tags,
        },
    }


OPENENV = LineFormat(
    name="openenv",
    title="OpenEnv's TrainingTrace",
    about="each model call with its exact tokens, logprobs and mask; the run in its metadata",
    write_run=_write_trace,
)
