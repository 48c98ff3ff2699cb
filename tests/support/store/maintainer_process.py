"""A process that seals and compacts for ever, for fault tests.

    python -m tests.support.store.maintainer_process ROOT

It takes every writer for dead at once, also those that live: they must notice, and lose nothing.
"""

import sys
import time
from pathlib import Path

from cray_agents.paths import Home
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.compaction import compact, plan


def main(root: str) -> None:
    """One round after another."""
    store = Store(Home(Path(root)))
    while True:
        store.seal_orphans(older_than=0)
        for group in plan(store, thorough=True):
            compact(store, group)
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
