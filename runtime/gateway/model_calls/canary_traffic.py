"""Canary traffic: send a share of live sessions to the candidate and count the outcomes.

On the hot path: without a canary it costs one look into the registry's memory. answer.py calls
`resolve` and `count_outcome`; routes/trajectories.py calls `note_reward`. version_switch.py makes
this object and acts on the verdicts. Read next: runtime/registry/canary.py, the test.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from cray_agents.errors import Corrupt, EngineError, NotFound
from cray_agents.paths import Home
from cray_agents.ports import EngineCall
from cray_agents.records import CLEAR, SCAN, ModelVersion, reward_of_givers
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry.canary import Canary, Side, Verdict
from cray_agents.runtime.registry.registry import ModelEvent, Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import RunFacts

SAVE_INTERVAL = 1.0  # between two writes of the counts to disk

Pieces = AsyncGenerator[bytes, None]


async def tell_outcome(
    note: Callable[..., None], exchange: EngineCall, pieces: Pieces, last_event: bytes | None
) -> Pieces:
    """Yield the pieces, then call `note(version, failed=...)`; not for a client's own fault."""
    whole = last_event is None
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                whole = whole or (last_event is not None and last_event in piece)
                yield piece
    except EngineError as error:
        if not 400 <= error.status < 500:  # 4xx is the client's fault
            note(exchange.version, failed=True)
        raise
    note(exchange.version, failed=not whole)


class LiveCanaries(ABC):
    """The running canaries, by name: the versions of live sessions, and the outcomes of answers."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._canaries: dict[str, Canary] = {}

    def canary(self, name: str) -> Canary | None:
        """Return the canary that runs under a name. Raises NotFound for a name without versions."""
        start = self._registry.canary(name)
        if start is None:
            self._canaries.pop(name, None)
            return None
        canary = self._canaries.get(name)
        if canary is None or canary.start != start:
            canary = self._canaries[name] = self._begin(start)
        return canary

    def resolve(self, model: str, session: str) -> ModelVersion:
        """Return the version that a model means now, in a session. Raises NotFound."""
        version = self._registry.resolve(model)
        if version.id == model or (canary := self.canary(model)) is None:
            return version
        drawn = self._takes_sessions(canary) and canary.draws(session)
        return self._registry.resolve(canary.version) if drawn else version

    def count_outcome(
        self,
        model: str,
        session: str,
        exchange: EngineCall,
        pieces: Pieces,
        last_event: bytes | None,
    ) -> Pieces:
        """Return the same pieces and, if a canary runs, count whether they end well.

        A stream ended well if it contains `last_event`, which is None for other answers.
        """
        if (begun := self._canaries.get(model)) is None:
            return pieces

        def note(version: str, *, failed: bool) -> None:
            with contextlib.suppress(NotFound):
                if self.canary(model) is begun:  # not a later one of this name
                    self.note_outcome(model, session, version, failed=failed)

        return tell_outcome(note, exchange, pieces, last_event)

    def _begin(self, start: ModelEvent) -> Canary:
        return Canary(start)

    @abstractmethod
    def _takes_sessions(self, canary: Canary) -> bool:
        """Tell whether a canary may answer now."""

    @abstractmethod
    def note_outcome(self, model: str, session: str, version: str, *, failed: bool) -> None:
        """Count the outcome of an answer."""

    @abstractmethod
    async def note_reward(self, run_id: str) -> None:
        """Count the reward of a live run."""


class CanaryTraffic(LiveCanaries):
    """The running canaries, whose outcomes are judged here.

    Args:
        on_unstaged: called for a canary that has had no replica since this process began.
        on_verdict: called for a canary whose test has reached its verdict.
    """

    def __init__(
        self,
        home: Home,
        store: Store,
        registry: Registry,
        on_unstaged: Callable[[Canary], None],
        on_verdict: Callable[[Canary, Verdict, str], None],
    ) -> None:
        super().__init__(registry)
        self._home = home
        self._store = store
        self._on_unstaged = on_unstaged
        self._on_verdict = on_verdict
        self._loaded_all = False
        self._tasks = BackgroundTasks()
        self._saving = False

    def _begin(self, start: ModelEvent) -> Canary:
        canary = Canary.load(self._home, start)
        self._on_unstaged(canary)
        if not self._saving:
            self._saving = True
            self._tasks.keep("canary counts", self._keep_saving)
        return canary

    def _takes_sessions(self, canary: Canary) -> bool:
        return canary.staged and canary.decided != "roll back"

    def note_outcome(self, model: str, session: str, version: str, *, failed: bool) -> None:
        """Count the outcome of an answer, of this gateway or another."""
        with contextlib.suppress(NotFound):
            canary = self.canary(model)
            if canary is not None and (side := self._side(canary, {version})) is not None:
                canary.add_answer(session, side, failed=failed)
                self._judge(canary)

    async def note_reward(self, run_id: str) -> None:
        """Count the reward of a live run, if it has one, and what scanners found in it.

        A loop's own runs are not live.
        """
        if not self._loaded_all:  # after a restart no request may have come yet
            self._loaded_all = True
            for name in self._registry.names():
                with contextlib.suppress(NotFound, Corrupt):  # of another model perhaps
                    self.canary(name)
        if not self._canaries:
            return
        run = await asyncio.to_thread(self._run_facts, run_id)
        if run is None or run.loop is not None or run.imported is not None:
            return
        for canary in list(self._canaries.values()):
            side = self._side(canary, set(run.models))
            if side is None or run.started < canary.start.time:
                continue
            reward = reward_of_givers(run.reward, run.given, canary.test.givers)
            if reward is not None:
                canary.add_reward(run_id, side, reward)
            for scanner in canary.test.scanners:
                if (has_finding := SCAN + scanner in run.tags) or CLEAR + scanner in run.tags:
                    canary.add_finding(run_id, scanner, side, has_finding=has_finding)
            self._judge(canary)

    async def close(self) -> None:
        """Stop saving in the background and save the last counts."""
        await self._tasks.close()
        await self._save()

    def _run_facts(self, run_id: str) -> RunFacts | None:
        self._store.refresh()
        return self._store.index.run(run_id)

    def _side(self, canary: Canary, versions: set[str]) -> Side | None:
        """Return the side that all these versions belong to, or None."""
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
                self._on_verdict(canary, verdict, reason)

    async def _keep_saving(self) -> None:
        while self._canaries:
            await asyncio.sleep(SAVE_INTERVAL)
            await self._save()
        self._saving = False

    async def _save(self) -> None:
        for canary in list(self._canaries.values()):
            if canary.changed:
                path = self._home.canary(canary.start.name, canary.start.number)
                await asyncio.to_thread(durable.replace_file, path, canary.to_bytes())
