"""Health warnings: failures that raise no error, found in the runs of the last while.

Rules over groups come from the index. For two, the last calls of the newest runs are read: whether
a model wrote tool calls or thoughts that no parser took. Called by gateway/routes/platform.py.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from cray_agents.errors import CrayError
from cray_agents.messages import text_of
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.background import FAILURES
from cray_agents.runtime.store import Store
from cray_agents.runtime.views.view_records import HealthWarning

LEAST = 8  # runs or groups about which a rule says something
FAILED = 0.1  # share of runs
FLAT = 0.8  # share of groups
NEWEST = 64  # runs whose last call is read
#: How models begin a tool call in their text, where no parser took it out.
TOOL_MARKS = (
    "<tool_call>",
    "<function=",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
)
#: How models begin or end a thought.
THOUGHT_MARKS = ("<think>", "</think>", "[THINK]", "<|channel|>analysis")

Rows = list[dict[str, Any]]


def health_warnings(
    store: Store, since: float, missing: Sequence[str], failed: Mapping[str, str]
) -> Rows:
    """Return HealthWarnings as JSON, errors first, of the runs begun since then.

    `missing`: versions that should be served and are not. `failed`: the errors of the jobs that
    failed since then. Blocks. Raises StoreError.
    """
    which = RunFilter(since=since)
    by_loop = store.stats(which, ["loop"], percentiles=False)
    message = "no replica can answer with {}, which is promoted: `cray-agents status` tells more"
    unserved = ((message.format(version), 1) for version in missing)
    warnings = [_error("version_not_served", *each) for each in unserved]
    warnings += _tasks(since)
    for job, error in failed.items():
        message = f"{job} failed: {error[:500] or 'it left no reason'}"
        warnings.append(_error("failed_job", message, 1).model_copy(update={"job": job}))
    if count := len(store.problems):
        message = f"{count} damaged places in the store: `cray-agents maintain fsck` names them"
        warnings.append(_error("damage", message, count))
    warnings += _of_loops(by_loop, since)
    training = RunFilter(since=since, split="train")
    groups = store.stats(training, ["loop", "iteration", "task"], percentiles=False)
    warnings += [*_flat_groups(groups, since), *_unparsed(store, since)]
    warnings.sort(key=lambda warning: warning.level != "error")
    return [warning.model_dump(mode="json") for warning in warnings]


def _tasks(since: float) -> list[HealthWarning]:
    """Tell of the background tasks of this process that failed since then."""
    message = "the platform's task {!r} failed {} times, and was started again; the last time: {}"
    return [
        _warning("failed_task", message.format(name, count, error[:500]), count, count, None, {})
        for name, (count, error, last) in list(FAILURES.by_task.items())
        if last >= since
    ]


def _of_loops(rows: Rows, since: float) -> list[HealthWarning]:
    warnings = []
    for row in rows:
        loop, runs, rewarded = row["loop"], row["runs"], row["rewarded"]
        of = f"of loop {loop!r}" if loop is not None else "outside loops"
        query = {"since": since} | ({"loop": loop} if loop is not None else {})
        if loop is not None and runs >= LEAST and not rewarded:
            message = f"0 rewards in {runs} runs {of}: nothing can be learnt from them"
            warnings.append(_warning("no_rewards", message, runs, runs, loop, query))
        if loop is not None and rewarded >= LEAST and row["min_reward"] == row["max_reward"]:
            message = f"all {rewarded} rewards {of} are {row['min_reward']:g}"
            warnings.append(_warning("equal_rewards", message, rewarded, runs, loop, query))
        if row["errors"] >= max(3, FAILED * runs):
            message = f"{row['errors']} of {runs} runs {of} ended with an error"
            failed = {**query, "error": "*"}
            warnings.append(_warning("failed_runs", message, row["errors"], runs, loop, failed))
    return warnings


def _flat_groups(rows: Rows, since: float) -> list[HealthWarning]:
    """Tell of iterations in which most tasks got the same reward at every attempt."""
    groups: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for row in rows:
        if row["loop"] is not None and row["iteration"] is not None and row["rewarded"] > 1:
            flat = row["min_reward"] == row["max_reward"]
            groups[row["loop"], row["iteration"]].append(flat)
    newest = {loop: max(n for name, n in groups if name == loop) for loop, _ in groups}
    warnings = []
    for (loop, iteration), flat in groups.items():
        if iteration == newest[loop] and len(flat) >= LEAST and sum(flat) > FLAT * len(flat):
            message = (
                f"{sum(flat)} of {len(flat)} tasks of iteration {iteration} of loop {loop!r} got"
                " the same reward at every attempt: grpo learns nothing from these"
            )
            query = {"loop": loop, "iteration": iteration, "since": since, "order": "task"}
            warnings.append(_warning("zero_variance", message, sum(flat), len(flat), loop, query))
    return warnings


def _unparsed(store: Store, since: float) -> list[HealthWarning]:
    """Tell of answers whose text no parser took apart, in the last calls of the newest runs."""
    looked = {"tool_call": 0, "thought": 0}
    marked = dict(looked)
    for facts in islice(store.facts(RunQuery(since=since, order="newest", limit=NEWEST)), NEWEST):
        with suppress(CrayError, KeyError, TypeError):  # moved or damaged: another rule tells
            places = store.places(facts.run_id)[1].calls
            for call in store.bodies(places[-1:]):
                message = call["message"]
                text = text_of(message)
                looked["thought"] += 1
                marked["thought"] += any(mark in text for mark in THOUGHT_MARKS)
                if call.get("tools"):
                    looked["tool_call"] += 1
                    writes_call = any(mark in text for mark in TOOL_MARKS)
                    marked["tool_call"] += writes_call and not message.get("tool_calls")
    rules = (
        ("tool_call", "a tool call", "tool_call_parser"),
        ("thought", "the model's thoughts", "reasoning_parser"),
    )
    return [
        _warning(
            f"unparsed_{kind}s",
            f"{marked[kind]} of {looked[kind]} answers hold {what} as text: set `{setting}` to"
            " vLLM's parser for this model",
            *(marked[kind], looked[kind], None, {"since": since}),
        )
        for kind, what, setting in rules
        if marked[kind]
    ]


def _error(kind: str, message: str, count: int) -> HealthWarning:
    return HealthWarning(kind=kind, level="error", message=message, count=count, of=count)


def _warning(
    kind: str, message: str, count: int, of: int, loop: str | None, query: dict[str, Any]
) -> HealthWarning:
    return HealthWarning(
        kind=kind, level="warning", message=message, count=count, of=of, loop=loop, query=query
    )
