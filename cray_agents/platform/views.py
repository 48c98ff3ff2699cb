"""Views: what pages show of a platform, for programs: parts of runs, statistics, usage, changes.

`Platform.views` has one. Answers are JSON; runtime/views/view_records.py tells their fields.
"""

from collections.abc import AsyncIterator
from typing import Any

from cray_agents.platform.transport import Transport

Json = dict[str, Any]


class Views:
    """The routes of a platform that show things. Filters are those of `Platform.runs`.

    Raises the errors of `Platform`.
    """

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def outline(self, run_id: str, first: int = 0, limit: int = 10_000) -> Json:
        """Return a run's facts, rewards, and a mark for each turn: sizes, tools, errors."""
        return await self._http.get(
            f"/trajectories/{run_id}/outline", {"from": first, "limit": limit}
        )

    async def turns(
        self, run_id: str, first: int = 0, limit: int = 20, *, full: bool = False
    ) -> Json:
        """Return some turns of a run, with the messages that are new in each (or `full`)."""
        query = {"from": first, "limit": limit, "full": str(full).lower()}
        return await self._http.get(f"/trajectories/{run_id}/turns", query)

    async def tokens(self, run_id: str, turn: int, *, prompt: bool = True) -> Json:
        """Return the tokens of a turn (from 0) with their exact text and logprobs."""
        query = {"prompt": str(prompt).lower()}
        return await self._http.get(f"/trajectories/{run_id}/turns/{turn}/tokens", query)

    async def score(self, run_id: str, turn: int, model: str, top: int = 5) -> Json:
        """Return the logprobs of a turn's sampled tokens under another version."""
        body = {"model": model, "top": top}
        path = f"/trajectories/{run_id}/turns/{turn}/score"
        return await self._http.post(path, body, patient=True)

    async def diff(self, one: str, other: str) -> Json:
        """Return where two runs differ."""
        return await self._http.get("/trajectories/diff", {"a": one, "b": other})

    async def stats(self, by: str = "", **options: Any) -> Json:
        """Return figures of the matching runs by group.

        `options`: filters, and bucket, facets, histograms, bins, sample, percentiles, limit.
        """
        return await self._http.get("/trajectories/stats", {"by": by, **options})

    async def queue(self) -> Json:
        """Return the requests at the engines and those that wait, by class and key."""
        return await self._http.get("/queue")

    async def warnings(self, since: float | None = None) -> list[Json]:
        """Return failures that raise no error, in runs begun since then (24 hours ago)."""
        query = {} if since is None else {"since": since}
        return list((await self._http.get("/health/warnings", query))["data"])

    async def jobs(self) -> list[Json]:
        """Return the newest training jobs, newest first."""
        return list((await self._http.get("/jobs"))["data"])

    async def loops(self) -> AsyncIterator[Json]:
        """Yield the loops, newest change first, with last iteration and held-out success."""
        query: Json = {"limit": 100}
        while True:
            answer = await self._http.get("/loops", query)
            for row in answer["data"]:
                yield row
            if not answer["has_more"]:
                return
            query["after"] = answer["last_id"]

    async def lineage(self) -> list[Json]:
        """Return every version of every name with its origins, parents first."""
        return list((await self._http.get("/models/lineage"))["data"])

    async def usage(self, by: str = "key,model", **options: Any) -> Json:
        """Return runs, calls, tokens and seconds by group; options: bucket, since, until, limit."""
        return await self._http.get("/usage", {"by": by, **options})

    async def cost(self, **options: Any) -> Json:
        """Return what devices, energy and money went into, with what nobody used.

        Options: by (use, key, model, loop, iteration), key, loop, run, bucket, since, until,
        limit, after. What the lines mean is in docs/operations.md, Cost.
        """
        return await self._http.get("/cost", options)

    async def keys(self) -> list[Json]:
        """Return the newest thousand API keys, without their secrets (role admin)."""
        return list((await self._http.get("/keys", {"limit": 1000}))["data"])

    async def create_key(self, name: str, role: str = "use") -> Json:
        """Make an API key (role admin). Its `secret` is in this answer and nowhere else."""
        once = "look at `cray-agents keys list` before you ask again"
        return await self._http.post("/keys", {"name": name, "role": role}, once=once)

    async def revoke_key(self, key: str) -> list[Json]:
        """End the key of this id, or all keys of this name (role admin). Raises NotFound."""
        return list((await self._http.delete(f"/keys/{key}", {}))["data"])

    async def series(self, job_id: str, names: str = "", points: int = 600) -> Json:
        """Return measures of a job by step, of at most so many points each."""
        query = {"points": points, **({"names": names} if names else {})}
        return await self._http.get(f"/jobs/{job_id}/series", query)

    async def hardware(
        self, job_id: str, names: str = "", points: int = 200, *, limit: int = 8, after: str = ""
    ) -> Json:
        """Return a job on its nodes: GPUs, network ports, the slowest rank, why it waits.

        `limit` nodes behind the node `after`.
        """
        query = {"points": points, "limit": limit, "names": names, "after": after}
        given = {name: value for name, value in query.items() if value != ""}
        return await self._http.get(f"/jobs/{job_id}/hardware", given)

    async def job_timeline(self, job_id: str) -> Json:
        """Return a job in Chrome's trace format, which Perfetto opens."""
        return await self._http.get(f"/jobs/{job_id}/timeline")

    async def iteration_timeline(self, loop: str, iteration: int) -> Json:
        """Return a loop's iteration in Chrome's trace format, which Perfetto opens."""
        return await self._http.get(f"/loops/{loop}/iterations/{iteration}/timeline")

    async def iteration(self, loop: str, iteration: int) -> Json:
        """Return an iteration with the decision on its candidate, and the wealth after each pair.

        Raises NotFound.
        """
        return await self._http.get(f"/loops/{loop}/iterations/{iteration}")

    async def pairs(
        self, loop: str, iteration: int, at: int = 0, limit: int = 100, **options: Any
    ) -> Json:
        """Return the pairs of runs behind a decision, in their order; option: outcome.

        `outcome` is won, lost or even. Raises NotFound where none are noted.
        """
        query = {"at": at, "limit": limit, **options}
        return await self._http.get(f"/loops/{loop}/iterations/{iteration}/pairs", query)

    async def histograms(self, dataset: str, bins: int = 24) -> Json:
        """Return distributions over a dataset: rewards, tokens, trained tokens, versions."""
        return await self._http.get(f"/datasets/{dataset}/histograms", {"bins": bins})

    async def dataset_diff(self, one: str, other: str, bins: int = 24) -> Json:
        """Return how two datasets differ: runs, reasons, recipes, counts, distributions."""
        return await self._http.get("/datasets/diff", {"a": one, "b": other, "bins": bins})

    async def dataset_diff_runs(self, one: str, other: str, **options: Any) -> Json:
        """Return runs that two datasets treat differently; options: change, limit, after."""
        return await self._http.get("/datasets/diff/runs", {"a": one, "b": other, **options})

    async def samples(self, dataset: str, at: int = 0, limit: int = 1, **options: Any) -> Json:
        """Return samples of a dataset as the trainer reads them; options: split, model."""
        query = {"at": at, "limit": limit, **options}
        return await self._http.get(f"/datasets/{dataset}/samples", query)

    async def batch_errors(self, batch: str, examples: int = 3) -> Json:
        """Return the failed lines of a batch by code, with examples."""
        return await self._http.get(f"/batches/{batch}/errors", {"examples": examples})

    async def changes(self, after: str | None = None) -> AsyncIterator[Json]:
        """Yield what changes on the platform: kind, id, change, and the `cursor` to go on after.

        It ends when the platform does; call it again with the last cursor then.
        """
        query = {} if after is None else {"after": after}
        async for cursor, data in self._http.events("/events", query):
            yield {**data, "cursor": cursor}
