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

    async def get(self, path: str, **query: Any) -> Json:
        """Return what a route that shows something answers, as `get("/cost", by="loop")`.

        `path`: as the HTTP reference lists it, behind `/v1`.
        """
        return await self._http.get(path, query)

    async def outline(self, run_id: str, first: int = 0, limit: int = 10_000) -> Json:
        """Return a run's facts, rewards, and a mark for each turn: sizes, tools, errors."""
        return await self._http.get(
            f"/trajectories/{run_id}/outline", {"from": first, "limit": limit}
        )

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

    async def changes(self, after: str | None = None) -> AsyncIterator[Json]:
        """Yield what changes on the platform: kind, id, change, and the `cursor` to go on after.

        It ends when the platform does; call it again with the last cursor then.
        """
        query = {} if after is None else {"after": after}
        async for cursor, data in self._http.events("/events", query):
            yield {**data, "cursor": cursor}
