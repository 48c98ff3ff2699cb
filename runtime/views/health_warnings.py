"""Health warnings: failures that raise no error, found in the runs of the last while.

Rules over groups come from the index. For one, the last calls of the newest runs are read: whether
a model wrote tool calls that no parser took. Called by gateway/routes/platform.py.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from cray_agents.errors import CrayError
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.segments.facts import text_of
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

Rows = list[dict[str, Any]]


def health_warnings(store: Store, since: float, missing: Sequence[str]) -> Rows:
    """Return HealthWarnings as JSON, errors first, of the runs begun since then.

    `missing`: versions that should be served and are not. Blocks. Raises StoreError.
    """
    which = RunFilter(since=since)
    by_loop = store.stats(which, ["loop"], percentiles=False)
    warnings = [*_missing(missing), *_damage(store), *_of_loops(by_loop, since)]
    training = RunFilter(since=since, split="train")
    groups = store.stats(training, ["loop", "generation", "task"], percentiles=False)
    warnings += [*_flat_groups(groups, since), *_unparsed(store, since)]
    warnings.sort(key=lambda warning: warning.level != "error")
    return [warning.model_dump(mode="json") for warning in warnings]


def _missing(versions: Sequence[str]) -> list[HealthWarning]:
    message = "no replica can answer with {}, which is promoted; GET /v1/pool tells more"
    return [
        HealthWarning(
            kind="version_not_served",
            level="error",
            message=message.format(version),
            count=1,
            of=1,
        )
        for version in versions
    ]


def _damage(store: Store) -> list[HealthWarning]:
    count = len(store.problems)
    if not count:
        return []
    message = f"{count} damaged places in the store: `cray-agents runs fsck` names them"
    return [HealthWarning(kind="damage", level="error", message=message, count=count, of=count)]


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
    """Tell of generations in which most tasks got the same reward at every attempt."""
    groups: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for row in rows:
        if row["loop"] is not None and row["generation"] is not None and row["rewarded"] > 1:
            flat = row["min_reward"] == row["max_reward"]
            groups[row["loop"], row["generation"]].append(flat)
    newest = {loop: max(n for name, n in groups if name == loop) for loop, _ in groups}
    warnings = []
    for (loop, generation), flat in groups.items():
        if generation == newest[loop] and len(flat) >= LEAST and sum(flat) > FLAT * len(flat):
            message = (
                f"{sum(flat)} of {len(flat)} tasks of generation {generation} of loop {loop!r} got"
                " the same reward at every attempt: grpo learns nothing from these"
            )
            query = {"loop": loop, "generation": generation, "since": since, "order": "task"}
            warnings.append(_warning("zero_variance", message, sum(flat), len(flat), loop, query))
    return warnings


def _unparsed(store: Store, since: float) -> list[HealthWarning]:
    """Tell of answers that hold a tool call as text, in the last calls of the newest runs."""
    looked = missed = 0
    for facts in islice(store.facts(RunQuery(since=since, order="newest", limit=NEWEST)), NEWEST):
        with suppress(CrayError, KeyError, TypeError):  # moved or damaged: another rule tells
            places = store.places(facts.run_id)[1].calls
            for call in store.bodies(places[-1:]):
                if call.get("tools"):
                    looked += 1
                    missed += not call["message"].get("tool_calls") and any(
                        mark in text_of(call["message"]) for mark in TOOL_MARKS
                    )
    if not missed:
        return []
    message = (
        f"{missed} of {looked} answers hold a tool call as text: set `tool_call_parser` to vLLM's"
        " parser for this model"
    )
    return [_warning("unparsed_tool_calls", message, missed, looked, None, {"since": since})]


def _warning(
    kind: str, message: str, count: int, of: int, loop: str | None, query: dict[str, Any]
) -> HealthWarning:
    return HealthWarning(
        kind=kind, level="warning", message=message, count=count, of=of, loop=loop, query=query
    )
