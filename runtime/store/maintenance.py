"""What the platform does for its store now and then: seal what dead writers left, compact.

Started by cli/compose.py as a task; each step in a thread. Several platforms on one root may do so
at once.
"""

import asyncio
import logging

from cray_agents.errors import StoreError
from cray_agents.runtime.store.compaction import compact, plan
from cray_agents.runtime.store.index import sweep_caches
from cray_agents.runtime.store.store import Store

EVERY = 600.0  # seconds

log = logging.getLogger(__name__)


async def keep_up(store: Store, every: float = EVERY) -> None:
    """Look after a store until cancelled; what cannot be done is logged and tried again."""
    while True:
        try:
            await asyncio.to_thread(tidy, store)
        except (StoreError, OSError) as error:
            log.warning("the store's upkeep failed: %s", error)
        await asyncio.sleep(every)


def tidy(store: Store) -> None:
    """One round. Raises StoreError, OSError."""
    store.seal_orphans()
    sweep_caches()
    for group in plan(store):
        done = compact(store, group)
        if done is not None:
            log.info("%d segments became %s", len(done.segments), done.into)
