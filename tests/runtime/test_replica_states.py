"""The table of a replica's states: each transition happens by a scripted engine, and no other."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, get_args

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import CrayError, EngineUnavailable, PoolBusy
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE
from cray_agents.runtime.pool.golden_probe import LoadedVersion
from cray_agents.runtime.pool.published_replicas import State
from cray_agents.runtime.pool.replica import TRANSITIONS, Event
from cray_agents.runtime.pool.request_router import PoolNotifier
from cray_agents.runtime.pool.upkeep import PoolReplica
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_pool import checkpoint, probe, says_version, until

JOB = "job-1"
LISTED = [(event, state) for event, (states, _) in TRANSITIONS.items() for state in states.split()]


class Engine(ScriptedEngine):
    """Its loads and sleeps wait at a gate."""

    def __init__(self) -> None:
        super().__init__(says_version)
        self.gate = asyncio.Event()
        self.gate.set()
        self.offered = {JOB}

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        await self.gate.wait()
        return await super().load(checkpoint, version, keep=keep)

    async def sleep(self, level: int) -> None:
        await self.gate.wait()
        await super().sleep(level)


class Host(InProcessEngine):
    """Its place can be missing, and can end."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__(Engine())
        self.found, self.ending = asyncio.Event(), asyncio.Event()

    async def allocate(self) -> None:
        if not self.placed:
            await self.found.wait()
            raise EngineUnavailable("the job ended")

    async def wait_until_ending(self) -> None:
        await self.ending.wait()


class Site(PoolReplica):
    """A replica that writes down its transitions, and ways to bring it into each state."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[tuple[Event, State]] = []
        self.here = Host()
        super().__init__(self.here, FLOAT32_PROBE, 0.05, PoolNotifier())
        self.one, self.two = (
            LoadedVersion.create(checkpoint(folder, n), f"m@{n}", probe(n)) for n in (1, 2)
        )
        self.going: list[asyncio.Task[Any]] = []

    def take(self, event: Event) -> None:
        before = self.state
        super().take(event)
        self.seen.append((event, before))

    async def begin(self, work: Coroutine[Any, Any, Any], state: State) -> None:
        """Begin work that does not end, and wait for its state."""
        self.going.append(asyncio.create_task(work))
        await until(lambda: self.state == state)

    async def reach(self, state: State) -> None:
        gate = self.here.engine.gate
        if state == "away":
            self.stay_away(self.one)
            return
        if state in ("starting", "waiting"):
            self.here.placed = state == "starting"
            gate.clear()
            await self.begin(self.open(self.one), state)
            return
        await self.open(self.one)
        match state:
            case "down":
                self.mark_lost("it is lost")
            case "swapping":
                gate.clear()
                await self.begin(self.change(self.two), state)
            case "out":
                self.here.engine.drift = 1.0
                with pytest.raises(CrayError):
                    await self.change(self.two, go_back=False)
                self.here.engine.drift = 0.0
            case "sleeping":
                gate.clear()
                await self.begin(self.fall_asleep(), state)
            case "unproven":
                assert await self.receive(JOB)
            case "leaving":
                self.here.ending.set()
                await self._drain_ending_place(self.here)
        assert self.state == state

    async def go_on(self, *, drift: float = 0.0) -> None:
        """Let what was begun come to its end."""
        self.here.engine.drift = drift
        self.here.engine.gate.set()
        await asyncio.gather(*self.going, return_exceptions=True)

    async def cancel(self) -> None:
        for task in self.going:
            task.cancel()
        await asyncio.gather(*self.going, return_exceptions=True)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    yield site
    await site.cancel()


async def cause(site: Site, event: Event, state: State) -> None:
    """What happens to a replica in a state, so that the event is taken."""
    match event:
        case "wait":
            site.here.placed = False
            site.going.append(asyncio.create_task(site._find_place()))
            await until(lambda: (event, state) in site.seen)
        case "start" if state == "swapping":
            await site.go_on(drift=1.0)
        case "start" if state == "sleeping":
            await site.go_on()
            await site.wake_up()
        case "start":
            site.here.engine.gate.set()
            await site.restore(site.one)
        case "serve" if state in ("starting", "swapping"):
            await site.go_on()
        case "serve" if state == "sleeping":
            await site.go_on()
            await site.wake_up()
            with site.requests.track("m@1"), pytest.raises(PoolBusy):
                await site.fall_asleep()
        case "serve":
            await site._hand_over(site.here, Host())
        case "change":
            site.here.engine.gate.set()
            await site.change(site.two)
        case "receive":
            site.seen.clear()
            await site.go_on()
            await site.receive(JOB)
        case "lose" if state == "serving":
            site.fail(0, "it is silent")
        case "lose" if state == "waiting":
            site.here.found.set()
            await asyncio.gather(*site.going, return_exceptions=True)
        case "lose" if state in ("leaving", "unproven", "away"):
            site._note_loss()
        case "lose":  # starting, swapping, sleeping
            await site.cancel()
        case "leave out" if state == "swapping":
            await site.cancel()
            with pytest.raises(CrayError):
                site.here.engine.drift = 1.0
                site.here.engine.gate.set()
                await site.change(site.two, go_back=False)
        case "leave out":
            await site.cancel()
            fresh = Site(site.one.checkpoint.parent)
            await fresh.reach("out")
            fresh.here.engine.drift = 1.0
            await fresh.restore(fresh.one)
            site.seen, site.state = fresh.seen, fresh.state
        case "sleep":
            await site.fall_asleep()
        case "leave" if state == "serving":
            site.leave().close()
        case "leave":
            site.stay_away(site.one)
        case "call back":
            assert site.come_back()
        case "end":
            site.here.ending.set()
            await site._drain_ending_place(site.here)
        case "close":
            await site.close()


@pytest.mark.parametrize(("event", "state"), LISTED)
async def test_a_listed_transition_happens(site: Site, event: Event, state: State) -> None:
    await site.reach(state)
    await cause(site, event, state)
    assert (event, state) in site.seen
    after = [before for _, before in site.seen] + [site.state]
    assert after[site.seen.index((event, state)) + 1] == TRANSITIONS[event][1]


async def test_no_other_transition_is_taken(site: Site) -> None:
    others = {(e, s) for e in TRANSITIONS for s in get_args(State)} - {*LISTED}
    assert len(others) + len(LISTED) == len(TRANSITIONS) * len(get_args(State))
    for event, state in others:
        site.state = state
        with pytest.raises(RuntimeError, match=f"{state}' cannot take '{event}"):
            site.take(event)
        assert site.state == state
