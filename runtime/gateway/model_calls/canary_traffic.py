"""Live sessions under a canary: whose answer comes from the candidate, and what came of it.

The hot path: without a canary it costs a look into the registry's memory. answers.py asks `meant`
and lets `watched` see how a request ends; routes/trajectories.py tells of rewards. promoting.py
makes this, and acts on what is found. Read next: runtime/canary.py, the test.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from cray_agents.errors import EngineError, NotFound
from cray_agents.paths import Home
from cray_agents.ports import EngineCall
from cray_agents.records import ModelVersion, reward_by
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry.canary import Canary, Side, Verdict
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import RunFacts

SAVED = 1.0  # seconds between two times that what was seen is written down

Pieces = AsyncGenerator[bytes, None]


class CanaryTraffic:
    """The canaries that run, by name.

    `missing` is told of one that no replica was given since this process began, `decided` of one
    whose test has ended.
    """

    def __init__(
        self,
        home: Home,
        store: Store,
        registry: Registry,
        missing: Callable[[Canary], None],
        decided: Callable[[Canary, Verdict, str], None],
    ) -> None:
        self._home = home
        self._store = store
        self._registry = registry
        self._missing = missing
        self._decided = decided
        self._canaries: dict[str, Canary] = {}
        self._looked = False
        self._saving: asyncio.Task[None] | None = None

    def canary(self, name: str) -> Canary | None:
        """The canary that runs under a name. Raises NotFound for a name without versions."""
        start = self._registry.canary(name)
        if start is None:
            if self._canaries:
                self._canaries.pop(name, None)
            return None
        canary = self._canaries.get(name)
        if canary is None or canary.start != start:
            canary = self._canaries[name] = Canary.opened(self._home, start)
            self._missing(canary)
            self._save_from_now_on()
        return canary

    def meant(self, model: str, session: str) -> ModelVersion:
        """The version that a request's model means now, in a session. Raises NotFound."""
        version = self._registry.resolve(model)
        if version.id == model:
            return version
        canary = self.canary(model)
        if canary is None or not canary.staged or canary.decided == "roll back":
            return version
        return self._registry.resolve(canary.version) if canary.draws(session) else version

    def watched(
        self, model: str, session: str, exchange: EngineCall, pieces: Pieces, last: bytes | None
    ) -> Pieces:
        """The same pieces; how they end is counted, if a canary runs.

        `last`: what a stream that ended well has in it; None where it is no stream.
        """
        if not self._canaries or model not in self._canaries:
            return pieces
        return self._watched(self._canaries[model], session, exchange, pieces, last)

    async def _watched(
        self, canary: Canary, session: str, exchange: EngineCall, pieces: Pieces, last: bytes | None
    ) -> Pieces:
        whole = last is None
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    whole = whole or (last is not None and last in piece)
                    yield piece
        except EngineError as error:
            if not 400 <= error.status < 500:  # those are the client's
                self._answered(canary, session, exchange.version, failed=True)
            raise
        self._answered(canary, session, exchange.version, failed=not whole)

    def _answered(self, canary: Canary, session: str, version: str, *, failed: bool) -> None:
        side = self._side(canary, {version})
        if side is not None:
            canary.answered(session, side, failed=failed)
            self._judge(canary)

    async def rewarded(self, run_id: str) -> None:
        """Something was told of a run, perhaps its reward; a loop's own runs are not live."""
        if not self._looked:  # a restart in the middle of a canary: no request has come yet
            self._looked = True
            for name in self._registry.names():
                with contextlib.suppress(NotFound):
                    self.canary(name)
        if not self._canaries:
            return
        run = await asyncio.to_thread(self._run, run_id)
        if run is None or run.reward is None or run.loop is not None or run.imported is not None:
            return
        for canary in list(self._canaries.values()):
            side = self._side(canary, set(run.models))
            reward = reward_by(run.reward, run.given, canary.test.givers)
            if side is not None and reward is not None and run.started >= canary.start.time:
                canary.rewarded(run_id, side, reward)
                self._judge(canary)

    async def close(self) -> None:
        """Keep what was seen."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        await self._save()

    def _run(self, run_id: str) -> RunFacts | None:
        self._store.refresh()
        return self._store.index.run(run_id)

    def _side(self, canary: Canary, versions: set[str]) -> Side | None:
        """Which side gave what came from these versions; None if both did, or another."""
        if versions == {canary.version}:
            return "canary"
        incumbent = self._registry.promoted(canary.start.name)
        return "control" if incumbent is not None and versions == {incumbent.id} else None

    def _judge(self, canary: Canary) -> None:
        current = self._canaries.get(canary.start.name) is canary
        if current and canary.decided is None:
            verdict, reason = canary.verdict()
            if verdict != "continue":
                canary.decided = verdict
                self._decided(canary, verdict, reason)

    def _save_from_now_on(self) -> None:
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._keep_saving())

    async def _keep_saving(self) -> None:
        while self._canaries:
            await asyncio.sleep(SAVED)
            await self._save()

    async def _save(self) -> None:
        for canary in list(self._canaries.values()):
            if canary.changed:
                path = self._home.canary(canary.start.name, canary.start.number)
                await asyncio.to_thread(durable.replace_file, path, canary.kept())
