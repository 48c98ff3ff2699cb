"""Run heads: what was asked and answered in listed runs that only their calls tell of.

The index keeps both for described runs. Foreign clients describe none, so the last call of each is
read. Called by `cray-agents runs list` and by GET /v1/trajectories.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from cray_agents.errors import CrayError
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import RunFacts
from cray_agents.runtime.store.segments.facts import head_of, text_of


def with_heads(store: Store, rows: Iterable[RunFacts]) -> Iterator[RunFacts]:
    """Yield the rows; `input` and `output` of one without a description are of its last call."""
    for row in rows:
        if row.described:
            yield row
            continue
        heads = {}
        with suppress(CrayError, KeyError, TypeError):  # moved or damaged: `runs fsck` tells
            for call in store.bodies(store.places(row.run_id)[1].calls[-1:]):
                asked = next((m for m in call["messages"] if m.get("role") == "user"), {})
                heads = {
                    "input": head_of(text_of(asked)),
                    "output": head_of(text_of(call["message"])),
                }
        yield row._replace(**heads)
