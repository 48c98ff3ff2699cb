"""A simulated cluster whose clients hold so many requests, as the ones of virtual_cluster.py do."""

from collections import Counter

from bench.cluster.controller import Cluster
from bench.cluster.simulation import PERIOD, Simulation, _Serving
from bench.cluster.traces import JobTrace, ServingTrace, Trace
from cray_agents.runtime.scaling.decision import ScalingRules

Decisions = list[Counter[tuple[str, str]]]


class HeldRequests(Simulation):
    """A simulation in which `arrivals` are the requests under way in each step."""

    held = 0

    def _arrive(self, step: int) -> None:
        self.held = next(iter(self.classes.values())).trace.arrivals[step]
        for each in self.classes.values():
            self._answer(each)
        if (step + 1) * self.trace.step < self.trace.seconds:
            self._at(self.now + self.trace.step, lambda: self._arrive(step + 1))

    def _answer(self, each: _Serving) -> None:
        each.view.in_flight = min(self.held, each.capacity)
        each.view.waiting = self.held - each.view.in_flight

    def _serve(self, each: _Serving, node: int, token: int) -> None:
        super()._serve(each, node, token)
        self._answer(each)


def simulated_decisions(
    rules: ScalingRules, levels: list[int], periods: int, nodes: int, jobs: dict[str, int]
) -> Decisions:
    """What the controller decides in each phase of a trace: counts by kind and name.

    `levels`: requests under way in each phase of so many periods. `jobs`: priorities by name.
    """
    rule = rules.serving
    arrivals = [level for level in levels for _ in range(periods)]
    serving = ServingTrace(rule.name, arrivals, slots=rule.slots, answer=1.0, start=1.0)
    queue = tuple(
        JobTrace(name, nodes=1, work=1e9, priority=priority, load=1.0, save=1.0)
        for name, priority in jobs.items()
    )
    seconds = PERIOD * len(arrivals)
    trace = Trace("held", 0, nodes, seconds, PERIOD, (serving,), queue, ())
    simulation = HeldRequests(trace, Cluster([rules]), patience=60.0)
    simulation.run()
    decisions: Decisions = [Counter() for _ in levels]
    for time, action in simulation.actions:
        decisions[int(time // (PERIOD * periods))][action.kind, action.name] += action.count
    return decisions
