"""Static split: so many replicas of each class for ever, and training on all other nodes.

It is what the controller is compared with. `best_split` searches the one that leaves training the
most nodes while requests wait no longer than a limit. Replicas and nodes are not counted in common:
each class is simulated alone for each number of replicas that is tried.
"""

from collections.abc import Mapping
from dataclasses import replace

from bench.cluster.simulation import Action, ClusterView, Simulation
from bench.cluster.traces import ServingTrace, Trace
from cray_agents.errors import BadInput

TAIL = 0.01  # share of the requests that may wait longer than the limit


class StaticSplit:
    """A controller that keeps the same number of replicas, and takes no node from anybody."""

    def __init__(self, replicas: Mapping[str, int]) -> None:
        self.replicas = replicas

    def decide(self, seen: ClusterView) -> list[Action]:
        """Start what is missing, and let jobs begin on the nodes that are no replica's."""
        actions, free = [], seen.free
        for view in seen.serving:
            missing = self.replicas[view.name] - view.serving - view.starting
            if (count := min(missing, free)) > 0:
                actions.append(Action("start", view.name, count))
            free -= max(0, missing)
        for job in seen.queued:
            if job.nodes <= free:
                actions.append(Action("admit", job.name))
                free -= job.nodes
        return actions


def best_split(trace: Trace, limit: float) -> dict[str, int]:
    """Return the fewest replicas with which 99 % of all requests wait at most `limit` seconds.

    First the fewest with which each class alone does, then fewer wherever that makes the fewest
    requests late, as long as one in a hundred of all may be. Raises BadInput if all nodes do not
    suffice.
    """
    late = {each.name: _LateRequests(trace, each, limit) for each in trace.serving}
    total = sum(sum(each.arrivals) for each in trace.serving)
    split = {name: counts.fewest(TAIL) for name, counts in late.items()}
    if sum(split.values()) > trace.nodes:
        raise BadInput(f"no static split answers 99 % of the requests within {limit:g} s")
    step = max(1, trace.nodes // 100)
    while step:
        options = []
        for name, counts in late.items():
            fewer = split[name] - step
            if fewer >= 0:
                elsewhere = sum(late[n].of(k) for n, k in split.items() if n != name)
                if elsewhere + counts.of(fewer) <= TAIL * total:
                    options.append((counts.of(fewer) - counts.of(split[name]), name))
        if options:
            split[min(options)[1]] -= step
        else:
            step //= 2
    return split


class _LateRequests:
    """The requests of one class that wait longer than a limit, by the number of its replicas."""

    def __init__(self, trace: Trace, serving: ServingTrace, limit: float) -> None:
        self._serving, self._limit, self._nodes = serving, limit, trace.nodes
        self._trace = replace(trace, serving=(serving,), jobs=())
        self._known: dict[int, int] = {}

    def of(self, replicas: int) -> int:
        """Return the number of late requests with so many replicas."""
        if replicas not in self._known:
            split = StaticSplit({self._serving.name: replicas})
            waits = Simulation(self._trace, split, self._limit).run().waits
            self._known[replicas] = sum(n for wait, n in waits.items() if wait > self._limit)
        return self._known[replicas]

    def fewest(self, share: float) -> int:
        """Return the fewest replicas with which at most a share of the requests is late."""
        few, enough = 0, self._nodes
        while few < enough:
            middle = (few + enough) // 2
            if self.of(middle) <= share * sum(self._serving.arrivals):
                enough = middle
            else:
                few = middle + 1
        return enough
