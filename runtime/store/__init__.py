"""Run store: a durable journal of calls, runs and rewards, each kept once, with an index.

store.py is the entry point: `append`, and all queries.
segments/ holds the events as lines, one writer a file; a finished file is sealed.
index/ finds events. It is a file on this host's own disk and may be deleted at any time.
indexing.py adds new events to the index, and those of other writers.
assembly.py joins events to Run records, and picks their turns.
redaction/ removes sensitive text before it is written.
compaction.py merges segments, and conversations.py matches a request to the run it continues.
run_conversation.py reads a run as messages, each answer matched to its call.
"""

from cray_agents.runtime.store.store import Appended, Store

__all__ = ["Appended", "Store"]
