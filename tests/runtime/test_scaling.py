"""Scaling: the rules of the controller, alone and in simulated days."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cluster.comparison import rules_for
from bench.cluster.controller import Cluster
from bench.cluster.simulation import Action, ClusterView, Simulation
from bench.cluster.traces import Failure, JobTrace, make_trace
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.ports import Command
from cray_agents.runtime.scaling.decision import (
    Observed,
    Scaler,
    ScalingAction,
    ScalingRules,
    ServingRule,
    ServingView,
    TrainingView,
)
from cray_agents.runtime.scheduler.slurm import Job, NodeRoom, Preemption
from cray_agents.server import cluster_view
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.training_jobs import Hyperparameters, JobSpec

CHAT = ServingRule("chat", slots=10, use=1.0, calm=60.0, empty=120.0)


def seen(time: float = 0.0, *, free: int = 10, leaving: int = 0, hour: float = 12.0,
         jobs: list[TrainingView] | None = None, **chat: float) -> Observed:  # fmt: skip
    view = ServingView(**chat)  # type: ignore[arg-type]
    return Observed(time, hour, 30, free, leaving, view, jobs or [])


def job(name: str, nodes: int, **values: float) -> TrainingView:
    return TrainingView(name, nodes, values.pop("since", -1e6), **values)  # type: ignore[arg-type]


def names(actions: list[ScalingAction]) -> list[tuple[str, str, int]]:
    return [(action.kind, action.name, action.count) for action in actions]


def test_a_first_request_starts_a_replica_and_the_last_one_goes_when_none_comes() -> None:
    scaler = Scaler(ScalingRules(CHAT))
    assert scaler.decide(seen(0)) == []
    assert names(scaler.decide(seen(70, waiting=1))) == [("start", "chat", 1)]
    assert scaler.decide(seen(71, waiting=1, starting=1)) == []
    assert scaler.decide(seen(100, in_flight=1, serving=1)) == []
    assert scaler.decide(seen(200, serving=1)) == []  # longer than calm, not than empty
    assert names(scaler.decide(seen(221, serving=1))) == [("end", "chat", 1)]


def test_those_that_had_to_sleep_deeper_take_the_places_of_the_others() -> None:
    scaler = Scaler(ScalingRules(replace(CHAT, warm=2, least=1)))
    assert scaler.decide(seen(0, serving=4)) == []
    slept = scaler.decide(seen(100, serving=4, asleep=(0, 1)))  # type: ignore[arg-type]
    assert names(slept) == [("sleep", "chat", 1), ("end", "chat", 2)]


def test_sleeping_replicas_wake_before_others_start() -> None:
    rule = replace(CHAT, warm=2, cold=1)
    scaler = Scaler(ScalingRules(rule))
    load = {"arrivals": 50.0, "answer_seconds": 1.0}
    asleep = {"asleep": (2, 1), "wakeable": (1, 1)}
    actions = scaler.decide(seen(0, **load, **asleep))  # type: ignore[arg-type]
    assert [(a.kind, a.level, a.count) for a in actions] == [
        ("wake", 1, 1), ("wake", 2, 1), ("start", 0, 3)]  # fmt: skip
    scaler.decide(seen(100, serving=5))
    down = scaler.decide(seen(300, serving=5, asleep=(1, 0)))  # type: ignore[arg-type]
    assert [(a.kind, a.level, a.count) for a in down] == [
        ("sleep", 1, 1), ("sleep", 2, 1), ("end", 0, 3)]  # fmt: skip


def test_a_new_controller_gives_nothing_back_before_it_has_watched() -> None:
    scaler = Scaler(ScalingRules(CHAT))
    for time in (0, 30, 59):
        assert scaler.decide(seen(time, serving=5, arrivals=1.0)) == []
    assert names(scaler.decide(seen(61, serving=5, arrivals=1.0))) == [("end", "chat", 4)]


def test_jobs_are_preempted_by_priority_and_size_and_no_more_than_needed() -> None:
    jobs = [
        job("dear", 2, priority=1),
        job("big", 9),
        job("young", 3, since=-10.0),
        job("slow", 3, saved_at=-500.0),
        job("quick", 3, saved_at=-5.0),
    ]
    load = {"arrivals": 40.0, "answer_seconds": 1.0, "free": 0}
    rules = ScalingRules(CHAT, least_run=60.0)
    decide = Scaler(rules).decide
    # quick before slow; then one node is missing, for which slow is the smallest of its priority
    assert names(decide(seen(0, jobs=jobs, **load))) == [  # type: ignore[arg-type]
        ("preempt", "quick", 1), ("preempt", "slow", 1)]  # fmt: skip
    rest = [one for one in jobs if one.name not in ("quick", "slow")]
    saving = seen(5, jobs=rest, leaving=6, **load)  # type: ignore[arg-type]
    assert Scaler(rules).decide(saving) == []
    floor = Scaler(replace(rules, training_nodes=18))
    assert names(floor.decide(seen(0, jobs=jobs, **load))) == [  # type: ignore[arg-type]
        ("preempt", "dear", 1)]  # fmt: skip
    patient = Scaler(replace(rules, preempts=False))
    assert patient.decide(seen(0, jobs=jobs, **load)) == []  # type: ignore[arg-type]


def test_the_job_with_sleeping_replicas_goes_first() -> None:
    jobs = [job("bare", 1), job("covers", 1)]
    jobs[1].sleepers = 1
    actions = Scaler(ScalingRules(CHAT)).decide(seen(0, waiting=1, free=0, jobs=jobs))
    assert names(actions) == [("preempt", "covers", 1)]


def test_of_jobs_of_one_size_the_one_with_the_newest_resume_point_goes() -> None:
    jobs = [job("a", 1), job("b", 1), job("c", 1, priority=1), job("d", 1)]
    jobs[0].saved_at, jobs[1].saved_at, jobs[2].saved_at, jobs[3].saved_at = -900, -20, -1, -5
    load = {"free": 0, "arrivals": 20.0, "answer_seconds": 1.0}
    scaler = Scaler(ScalingRules(CHAT))
    view = seen(0, jobs=jobs, **load)  # type: ignore[arg-type]
    assert scaler.grows(view)
    assert names(scaler.decide(view)) == [("preempt", "d", 1), ("preempt", "b", 1)]
    assert scaler.short == 2
    assert not scaler.grows(seen(1, serving=2, **load))  # type: ignore[arg-type]


def test_in_quiet_hours_only_a_first_replica_takes_nodes() -> None:
    rules = ScalingRules(CHAT, quiet_hours=((22, 6),))
    jobs = [job("one", 1), job("two", 1)]
    load = {"free": 0, "arrivals": 30.0, "answer_seconds": 1.0}
    for hour, serving, expected in ((21.9, 1, 2), (22, 1, 0), (5.9, 0, 1), (6, 1, 2)):
        view = seen(0, hour=hour, jobs=jobs, serving=serving, **load)  # type: ignore[arg-type]
        assert len(Scaler(rules).decide(view)) == expected, hour


@pytest.mark.parametrize("wrong", [
    {"slots": 0}, {"use": 1.5}, {"least": 3, "most": 2}, {"most": 0}, {"empty": 1.0}, {"clear": 0},
])  # fmt: skip
def test_a_rule_that_cannot_be_followed_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="chat"):
        replace(CHAT, **wrong)  # type: ignore[arg-type]


class Watched(Cluster):
    """A controller that notes what it saw, and checks each decision against it."""

    def __init__(self, rules: list[ScalingRules]) -> None:
        super().__init__(rules)
        self.grown: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def decide(self, seen: ClusterView) -> list[Action]:
        actions = super().decide(seen)
        taken = 0
        sizes = {job.name: job.nodes for job in [*seen.queued, *seen.running]}
        rules = {each.rules.serving.name: each.rules.serving for each in self.scalers}
        common = self.scalers[0].rules
        for action in actions:
            self.counts[action.kind] += 1
            if action.kind in ("start", "wake"):
                taken += action.count * rules[action.name].nodes
                self.grown[action.name] = seen.time
            elif action.kind in ("sleep", "end"):
                calm = rules[action.name].calm
                assert seen.time - self.grown.get(action.name, -calm) >= calm, "it flaps"
            elif action.kind == "admit":
                taken += sizes[action.name]
            else:
                left = next(job for job in seen.running if job.name == action.name)
                assert seen.time - left.since >= common.least_run
        assert taken <= seen.free
        for view in seen.serving:
            up = sum(
                a.count for a in actions if a.name == view.name and a.kind in ("start", "wake")
            )
            gone = sum(
                a.count for a in actions if a.name == view.name and a.kind in ("sleep", "end")
            )
            rule, now = rules[view.name], view.replicas
            assert now + up <= (rule.most or seen.nodes)
            assert not gone or now - gone >= rule.least
            assert gone <= view.serving
        rest = sum(job.nodes for job in seen.running)
        rest -= sum(sizes[a.name] for a in actions if a.kind == "preempt")
        if any(a.kind == "preempt" for a in actions):
            assert rest >= common.training_nodes
        return actions


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [("bursty", 1), ("diurnal", 2), ("failures", 3)])
def test_a_simulated_day_keeps_the_rules(kind: str, seed: int) -> None:
    trace = make_trace(kind, seed, 40, hours=8)
    if kind == "failures":
        often = tuple(Failure(600.0 * n, 7 * n % 40, 1800.0) for n in range(1, 40))
        trace = replace(trace, failures=often)
    scaler = Watched(
        [
            replace(each, serving=replace(each.serving, least=1, most=30), training_nodes=4)
            for each in rules_for(trace)
        ]
    )
    simulation = Simulation(trace, scaler, patience=60.0, watch=True)
    result = simulation.run()
    assert {"start", "wake", "sleep", "preempt", "admit"} <= set(scaler.counts)
    # every request was answered, or has waited until the end
    requests = sum(sum(each.arrivals) for each in trace.serving)
    again = sum(result.waits.values()) - requests
    assert again == 0 if not trace.failures else again >= 0
    # no work is counted twice, and none vanishes
    finished = sum(each.work * each.nodes for each in trace.jobs
                   if each.name not in simulation.queued | simulation.running)  # fmt: skip
    assert finished > 0 and result.trained_work >= finished
    assert result.goodput <= result.utilisation <= 1
    if not trace.failures:
        assert result.lost_steps == 0
        open_work = sum(  # also of jobs that save, and that wait to go on
            (job.kept if job.saving else simulation._done(job)) * job.trace.nodes
            for job in simulation.running.values()
        )
        open_work += sum(job.kept * job.trace.nodes for job in simulation.queued.values())
        assert result.trained_work == pytest.approx(finished + open_work)


def test_a_class_goes_down_to_nothing_and_its_next_request_is_answered() -> None:
    trace = make_trace("bursty", 1, 16, hours=3)
    chat = trace.serving[0]
    arrivals = [0] * len(chat.arrivals)
    arrivals[100] = arrivals[1500] = 1
    jobs = tuple(JobTrace(f"job-{n}", nodes=1, work=1e6) for n in range(20))
    trace = replace(trace, serving=(replace(chat, arrivals=arrivals),), jobs=jobs)
    rule = replace(rules_for(trace)[0].serving, empty=1200.0, spare=0)
    simulation = Simulation(trace, Cluster([ScalingRules(rule)]), 120.0, watch=True)
    result = simulation.run()
    kinds = [action.kind for _, action in simulation.actions if action.name == "chat"]
    assert kinds == ["start", "sleep", "wake", "sleep"]
    assert sum(result.waits.values()) == 2 and result.unanswered == 0
    assert 0 < max(result.waits) <= 120


class Queue:
    """What squeue and sinfo say of one node with one job: its own answers, set by the test."""

    def __init__(self, name: str, home: Home) -> None:
        self.name, self.runs, self.free, self.home = name, True, 0, home

    def room(self, kind: str) -> list[NodeRoom]:
        return [NodeRoom("n1", 8, self.free)]

    def live(self) -> dict[str, Job]:
        found = Job(7, "running", "RUNNING", "", self.name, "n1", 1.0)
        return {self.name: found} if self.runs else {}

    def preemption(self, name: str, job_id: int) -> Preemption:
        return Preemption(2e9, "replicas")


def test_a_job_that_has_left_counts_until_its_node_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm forgets a job before its node is free: no other job is preempted for that node."""
    home = Home(tmp_path)
    spec = JobSpec(
        dataset="d", parent="p", parent_sha256="0", hyperparameters=Hyperparameters(steps=1)
    )
    JobJournal(home, spec.id).write_spec(spec)
    queue: Any = Queue(spec.id, home)
    replica = Command(name="r", argv=["true"], directory="/", log="/dev/null", cpus_per_rank=8)
    view = cluster_view.ClusterView(home, queue, Resources(cpus_per_rank=8), replica)
    state = view.look(0.0)
    assert (state.leaving, state.free, state.running, state.used) == (1, 0, [], {"n1"})
    queue.runs = False
    assert (view.look(0.0).leaving, view.look(0.0).free) == (1, 0)
    queue.free = 8
    assert (view.look(0.0).leaving, view.look(0.0).free) == (0, 1)
    queue.runs, queue.free = True, 0
    assert view.look(0.0).leaving == 1
    queue.runs = False  # a node that never comes back is waited for no longer
    monkeypatch.setattr(cluster_view, "RETURN_SECONDS", 0.0)
    assert view.look(0.0).leaving == 0
    view.close()
