"""`jsonl`: write the whole record as the store has it, one run per line.

`Run.model_validate_json` reads a line back. Listed in catalog.py.
"""

import math

from cray_agents.records import Run
from cray_agents.runtime.exports.export_format import LineFormat, Written, unsupported


def _write_run(run: Run) -> Written:
    check_finite(run)
    return Written([run.model_dump(mode="json")])


def check_finite(run: Run) -> None:
    """Raise BadInput for a reward or logprob that is infinite or NaN: JSON would make it null."""
    if not all(math.isfinite(reward.value) for reward in run.rewards):
        raise unsupported(run, "rewards", "hold an infinity or NaN, which JSON cannot carry")
    if not all(_all_finite(call.logprobs) for call in run.calls):
        raise unsupported(run, "logprobs", "hold an infinity or NaN, which JSON cannot carry")


def _all_finite(numbers: list[float]) -> bool:
    return math.isfinite(sum(numbers)) or all(map(math.isfinite, numbers))


JSONL = LineFormat(
    name="jsonl",
    title="JSON lines of the whole record",
    about="everything: messages, turns, exact tokens and logprobs, rewards, tags, times",
    write_run=_write_run,
)
