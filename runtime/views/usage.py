"""Usage: the runs, calls, tokens and seconds of API keys and models, by time, from the index."""

from typing import Any

from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter
from cray_agents.runtime.store import Store

BY = ("key", "model")
SUMS = ("runs", "calls", "prompt_tokens", "sampled_tokens", "cached_tokens", "seconds", "errors",
        "last")  # fmt: skip


def check_groups(by: list[str]) -> None:
    """Raise BadInput for a group that usage has not."""
    if unknown := [name for name in by if name not in BY]:
        raise BadInput(f"cannot sum up by {unknown[0][:50]!r}: {', '.join(BY)}", param="by")


def usage_table(
    store: Store,
    which: RunFilter,
    by: list[str],
    names: dict[str, str],
    *,
    bucket: float | None,
    owner: str | None,
    limit: int,
) -> dict[str, Any]:
    """Return a UsageTable as JSON: of more groups than `limit` the largest, in its order.

    names: those of keys, by id. bucket: seconds of a span of time, or None. owner: the id of the
    only key that is looked at; None: all.
    """
    rows = store.stats(which, by, bucket=bucket, percentiles=False, owner=owner, limit=limit + 1)
    usage: list[dict[str, Any]] = [
        {
            "key": row.get("key"),
            "name": names.get(row["key"] or "", row["key"]) if "key" in row else None,
            "model": row.get("model"),
            "time": row.get("time"),
            **{name: row[name] or 0 for name in SUMS},
        }
        for row in rows[:limit]
    ]
    usage.sort(key=lambda row: (row["time"] or 0, -row["prompt_tokens"] - row["sampled_tokens"]))
    return {"by": by, "bucket": bucket, "data": usage, "has_more": len(rows) > limit}
