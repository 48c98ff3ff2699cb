"""A platform for tests of loops: all real but for a scripted engine and trainer."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from cray_agents import Platform
from cray_agents.config.settings import PriceSettings
from cray_agents.paths import Home
from cray_agents.ports import Trainer
from cray_agents.records import ProbePrompt
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.bare_models import bare_model as bare_model
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_services import first_version, listening, start_pool
from tests.support.scripted_trainer import ScriptedTrainer

PROBE = [ProbePrompt(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0])]


@contextmanager
def platform(
    root: Path,
    engine: ScriptedEngine | InProcessEngine,
    *,
    model: Path | None = None,
    name: str = "m",
    trainer: Trainer | None = None,
    others: Sequence[ScriptedEngine] = (),
    spares: Sequence[ScriptedEngine] = (),
    beside: Callable[[Pool], Coroutine[Any, Any, None]] | None = None,
    prices: PriceSettings | None = None,
    facts: dict[str, Any] | None = None,
    **scripted: Any,
) -> Iterator[Platform]:
    """A real gateway in a thread, as `cray-agents up` wires it but for the scripted parts.

    `engine` may come with a host of its own. `trainer`: another one than a ScriptedTrainer, which
    `scripted` is for. `others`: of further replicas; `spares`: of those started on demand. `beside`
    runs beside the gateway, in its event loop. `facts`: the answer of `/v1/platform`.
    """
    home = Home(root)
    host = engine if isinstance(engine, InProcessEngine) else InProcessEngine(engine)
    registry = first_version(home, name, model)
    ready, stop = threading.Event(), threading.Event()
    url: list[str] = []

    async def serve() -> None:
        pool = Pool([host, *map(InProcessEngine, others)], spares=[*map(InProcessEngine, spares)])
        services = Services(
            home=home,
            store=Store(home),
            registry=registry,
            trainer=trainer or ScriptedTrainer(home, probe=PROBE, **scripted),
            pool=pool,
            prices=prices or PriceSettings(),
            platform=facts or {},
        )
        await start_pool(pool, home, registry, name)
        async with listening(create_app(services)) as address:
            url.append(address)
            background = [] if beside is None else [asyncio.create_task(beside(pool))]
            ready.set()
            await asyncio.to_thread(stop.wait)
            await services.changes.close()
        for one in background:
            one.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await services.close()
        await pool.stop()
        await services.store.close()

    thread = threading.Thread(target=uvloop.run, args=(serve(),))
    thread.start()
    assert ready.wait(120)
    try:
        yield Platform(url[0])
    finally:
        stop.set()
        thread.join()
