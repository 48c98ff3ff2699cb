"""Which events there are, where they lie, and what is known of each run: a file to throw away.

index.py is the door; schema.py and database.py hold the SQLite file, placing.py says where on this
host it lies; intake.py, run_rows.py, merging.py take events in, in any order; filters.py, pages.py
and statistics.py answer questions.
"""

from cray_agents.runtime.store.index.index import Index, Places, Problem
from cray_agents.runtime.store.index.run_merge import RunFacts
from cray_agents.runtime.store.index.schema import cache_of, identity_of, sweep_caches

__all__ = ["Index", "Places", "Problem", "RunFacts", "cache_of", "identity_of", "sweep_caches"]
