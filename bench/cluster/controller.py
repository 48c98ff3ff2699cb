"""Cluster: the platform's rules for several classes of serving that share the nodes, and for jobs.

A platform has one class of replicas, and Slurm says which job begins. Here a `Scaler` judges each
class. Where they need more nodes than there are, each gets an equal share. Waiting jobs begin on
what serving leaves, in their order; smaller ones fill the gaps, but none overtakes one that has
waited for long.
"""

from collections.abc import Sequence

from bench.cluster.simulation import Action, ClusterView
from cray_agents.runtime.scaling.decision import Scaler, ScalingRules

STARVE = 3600.0  # seconds after which a waiting job is not overtaken
_LOOK_AHEAD = 200  # waiting jobs that are considered in a period


class Cluster:
    """The controller of a simulated cluster. `rules`: of each class, which agree about training."""

    def __init__(self, rules: Sequence[ScalingRules]) -> None:
        self.scalers = [Scaler(each) for each in rules]

    def decide(self, seen: ClusterView) -> list[Action]:
        """Return what is to be done now."""
        views = {view.name: view for view in seen.serving}
        rules = self.scalers[0].rules
        judged = []
        for scaler in self.scalers:
            view = views[scaler.rules.serving.name]
            judged.append((scaler, view, *scaler.need(view, seen.time)))
        room = max(0, seen.nodes - rules.training_nodes)
        limits = share_nodes([keep * s.rules.serving.nodes for s, _, _, keep in judged], room)
        actions: list[Action] = []
        free, short, first = seen.free, 0, 0
        # a class without any replica comes first, then the one that has waited longest
        order = sorted(
            zip(judged, limits, strict=True),
            key=lambda each: (each[0][1].replicas > 0, -each[0][1].waited, each[0][1].name),
        )
        for (scaler, view, need, keep), nodes in order:
            rule = scaler.rules.serving
            limit = nodes // rule.nodes
            grow = min(need, limit) - view.replicas
            if grow > 0:
                grown, rest = scaler.grow(view, grow, free)
                actions += [Action(a.kind, a.name, a.count, a.level) for a in grown]
                free -= (grow - rest) * rule.nodes
                short += rest * rule.nodes
                first += rule.nodes if rest == grow and not view.replicas else 0
            else:
                for each in scaler.shrink(view, min(keep, limit), seen.time):
                    actions.append(Action(each.kind, each.name, each.count, each.level))
        missing = short - seen.leaving
        if missing > 0 and rules.preempts:
            if rules.is_quiet(seen.hour):
                missing = min(missing, first - seen.leaving)
            for each in self.scalers[0].preempt(seen.running, missing, seen.time):
                actions.append(Action("preempt", each.name))
        return actions if short else [*actions, *self._admit(seen, free)]

    def _admit(self, seen: ClusterView, free: int) -> list[Action]:
        """Let waiting jobs begin on free nodes."""
        actions = []
        for job in seen.queued[:_LOOK_AHEAD]:
            if free <= 0:
                break
            if job.nodes <= free:
                actions.append(Action("admit", job.name))
                free -= job.nodes
            elif seen.time - job.since > STARVE:
                break
        return actions


def share_nodes(needs: Sequence[int], room: int) -> list[int]:
    """Divide nodes among classes: what one needs less than its share goes to the others."""
    limits = [0] * len(needs)
    for left, at in enumerate(sorted(range(len(needs)), key=lambda at: needs[at])):
        limits[at] = min(needs[at], room // (len(needs) - left))
        room -= limits[at]
    return limits
