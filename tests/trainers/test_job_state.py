"""A job's states: every row of the table, and every combination of facts."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import get_args

import pytest

from cray_agents.paths import Home
from cray_agents.ports import Command, CommandState, CommandStatus
from cray_agents.trainers.job.job_state import ROWS, TRANSITIONS, JobFacts, Move, Row
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.training_jobs import Hyperparameters, JobSpec, JobState, JobStatus, Layout
from tests.support.waiting_scheduler import WaitingScheduler

ENDED = JobStatus(id="j", state="failed")
TABLE: list[tuple[JobFacts, JobState, Move]] = [
    (JobFacts(cancelled=True), "cancelled", "report"),
    (JobFacts(ended=ENDED), "succeeded", "report"),
    (JobFacts(all_done=True), "queued", "report"),
    (JobFacts(command="queued", nodes_changed=True), "queued", "resubmit"),
    (JobFacts(command="queued", paused=True), "paused", "withdraw"),
    (JobFacts(command="queued"), "queued", "report"),
    (JobFacts(command="running"), "running", "report"),
    (JobFacts(paused=True), "paused", "report"),
    (JobFacts(resumed=True), "queued", "hand_over"),
    (JobFacts(not_begun=True, cannot_begin=True), "queued", "restart_session"),
    (JobFacts(not_begun=True), "queued", "hand_over_again"),
    (JobFacts(due=True), "queued", "start_when_due"),
    (JobFacts(by_somebody=True), "cancelled", "cancel"),
    (JobFacts(), "queued", "restart"),
]


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_each_row_has_its_facts_and_gives_way_to_those_before(number: int) -> None:
    facts, state, move = TABLE[number]
    assert len(TABLE) == len(ROWS) and facts.row is ROWS[number]
    assert (facts.row.state, facts.row.move) == (state, move)
    assert replace(facts, cancelled=True).row is ROWS[0]
    assert number == 0 or replace(facts, ended=ENDED).row is ROWS[1]


def everything() -> list[tuple[JobFacts, Row]]:
    flags = ("cancelled", "all_done", "nodes_changed", "paused", "resumed", "not_begun",
             "cannot_begin", "due", "by_somebody")  # fmt: skip
    found = []
    for values in product((False, True), repeat=len(flags)):
        for command in get_args(CommandState):
            for ended in (None, ENDED):
                named = dict(zip(flags, values, strict=True))
                facts = JobFacts(command=command, ended=ended, **named)
                found.append((facts, facts.row))
    return found


def test_whatever_a_look_finds_nothing_starts_that_must_not() -> None:
    moves = set()
    for facts, row in everything():
        moves.add(row.move)
        if facts.cancelled or facts.ended or facts.all_done or facts.paused:
            assert not row.starts, facts
        if facts.command in ("queued", "running"):
            assert row.move in ("report", "withdraw", "resubmit"), facts
        if row.move == "withdraw":
            assert facts.paused and facts.command == "queued"
    assert moves == set(get_args(Move))


def test_transitions_lead_from_a_submission_to_every_state_and_to_an_end() -> None:
    reached: set[JobState | None] = {None}
    while more := {after for state in reached for after in TRANSITIONS[state]} - reached:
        reached |= more
    assert reached == TRANSITIONS.keys() == {None, *get_args(JobState)}
    assert TRANSITIONS["cancelled"] == frozenset()
    may_be_cancelled = {state for state, after in TRANSITIONS.items() if "cancelled" in after}
    assert may_be_cancelled == {"queued", "running", "paused"}
    assert TRANSITIONS["succeeded"] == TRANSITIONS["failed"] == {"queued"}  # submitted again


class Hand(WaitingScheduler):
    """A scheduler whose commands are in the state that a test gives them."""

    state: CommandState = "queued"

    def submit(self, command: Command) -> str:
        self.state = "queued"
        return super().submit(command)

    def status(self, name: str) -> CommandStatus:
        return super().status(name).model_copy(update={"state": self.state, "exit_code": 75})

    def cancel(self, name: str) -> None:
        self.state = "cancelled"


def test_a_trainer_walks_by_the_transitions(tmp_path: Path) -> None:
    home, scheduler = Home(tmp_path / "home"), Hand()
    make_seed_model(tmp_path / "p", seed=0, corpus=["What is 1 + 1?"])
    spec = JobSpec(
        dataset="d",
        parent=str(tmp_path / "p"),
        parent_sha256="0" * 64,
        hyperparameters=Hyperparameters(steps=8, learning_rate=1e-3),
        layout=Layout(),
    )
    trainer, journal = MegatronTrainer(home, scheduler), JobJournal(home, spec.id)
    states = [trainer.submit(spec).state]

    def look(after: CommandState | None = None) -> JobState:
        scheduler.state = after or scheduler.state
        states.append(trainer.status(spec.id).state)
        return states[-1]

    assert look("running") == "running"
    assert look("failed") == "queued" and look("running") == "running"  # preempted
    trainer.pause(spec.id)
    assert look("running") == "running" and look("failed") == "paused"
    states.append(trainer.resume(spec.id).state)
    states.append(trainer.pause(spec.id).state)  # before it has a process
    states.append(trainer.resume(spec.id).state)
    assert look("running") == "running"
    journal.write_status(JobStatus(id=spec.id, state="failed", error="by a test"))
    assert look("failed") == "failed"
    other = spec.model_copy(update={"logprob_limit": 2.0})
    assert other.id == spec.id
    states.append(trainer.submit(other).state)
    states.append(trainer.cancel(spec.id).state)
    assert set(states) == {"queued", "running", "paused", "failed", "cancelled"}
    for before, after in pairwise(states):
        assert after == before or after in TRANSITIONS[before], (before, after)
