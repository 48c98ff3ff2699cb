"""Index: a disposable SQLite file of the events' places and the facts of each run.

index.py is the entry point.
database.py has the SQLite file, its tables and its place on this host.
intake.py and run_merge.py add events, in any order.
run_queries.py answers queries.
"""

from cray_agents.runtime.store.index.database import cache_of, identity_of, sweep_caches
from cray_agents.runtime.store.index.index import Index, Places
from cray_agents.runtime.store.index.run_merge import RunFacts

__all__ = ["Index", "Places", "RunFacts", "cache_of", "identity_of", "sweep_caches"]
