"""Job process: `python -m cray_agents.trainers.job.job <home>/jobs/<id>/spec.json`.

A scheduler starts the process once per node. It claims the next attempt, checks everything that can
be checked without Megatron, starts ranks, and records the end. Whatever kills it, the next start
goes on from the last resume point. Starting a finished job trains nothing.

    exit 0   finished (or nothing left to do)      exit 75  saved and stopped: go on later
    exit 1   failed: status.json says why; without status.json it died and may be started again

Read next: launch.py for the ranks' processes, rank.py for the work of each.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cray_agents.errors import CrayError, JobError, SetupError
from cray_agents.paths import Home
from cray_agents.processes import exit_at_once
from cray_agents.runtime.accounting.ledger import LedgerFile
from cray_agents.trainers.job.failures.health_gate import check_node
from cray_agents.trainers.job.failures.rank_monitor import BadEnd, forget_end, node_name, note_end
from cray_agents.trainers.job.job_inputs import JobInputs, choose_start, read_inputs
from cray_agents.trainers.job.job_state import already_ended, record_failure, record_success
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import (
    EX_TEMPFAIL,
    RankMain,
    RankPlacement,
    RanksOutcome,
    find_placement,
    holding_node,
    load_for_ranks,
    loading_seconds,
    note_steps,
    run_ranks,
)
from cray_agents.trainers.job.spare_nodes import HeldNodes
from cray_agents.training_jobs import JobSpec


def main(argv: list[str] | None = None) -> int:
    """Run the job of a spec file; return the exit code."""
    signal.signal(signal.SIGTERM, _stop_early)
    signal.signal(signal.SIGUSR1, _stop_early)
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m cray_agents.trainers.job.job <home>/jobs/<id>/spec.json")
        return 2
    path = Path(arguments[0]).resolve()
    journal = JobJournal(Home(path.parents[2]), path.parent.name)
    try:
        return run(journal)
    except JobError as death:  # a rank died: no status.json, so that it may be started again
        print(f"--- the end of the rank's log:\n{death.log_tail}\n---", flush=True)
        print(f"{death}; the last whole step was {journal.step}", flush=True)
        return 1
    except SetupError as problem:  # the machine's fault, not the job's
        print(problem, flush=True)
        note_end(journal.folder, BadEnd(rank=-1, how=str(problem), node=node_name()))
        return 1
    except CrayError as reason:
        return record_failure(journal, str(reason))


def run(journal: JobJournal) -> int:
    """Run the job from its last resume point to its end, or until a request to stop."""
    if (held := HeldNodes.of_job()) is not None:
        return _run_with_spares(journal, held)
    spec = journal.spec()
    return _attempt(journal, spec, lambda: find_placement(spec.layout.world, spec.id))


def _run_with_spares(journal: JobJournal, held: HeldNodes) -> int:
    """Run the job's attempts on the nodes that it holds, until it ends."""
    code = 1
    held.show_life()
    try:
        code = _rounds(journal, journal.spec(), held)
        return code
    except SystemExit as stop:  # a signal, before ranks run
        code = int(str(stop.code))
        raise
    except SetupError:  # of this node: the others go on without it
        code = -1
        raise
    finally:
        if code >= 0:
            held.end(code)


def _rounds(journal: JobJournal, spec: JobSpec, held: HeldNodes) -> int:
    """Train, or wait on a spare node, round by round; return the exit code.

    Raises JobError as `_attempt` does, if no node was lost or too few are left.
    """
    world = spec.layout.world
    while True:
        death = JobError("this node only waited")
        try:
            if held.trains:
                where = partial(held.placement, world, spec.id)
                return _attempt(journal, spec, where, held.round_ended)
            _wait_as_spare(journal, spec, held)
        except JobError as error:
            death = error
        decision = held.agree()
        if decision.nodes and held.here not in (*held.training, *held.spares):
            print(f"{held.here} answered too late: the others go on without it", flush=True)
            return 1
        if not decision.nodes and (decision.code != 1 or not (held.trains or decision.lost)):
            return decision.code
        lost = ", ".join(decision.lost)
        if not decision.nodes:
            if not lost:
                raise death
            how = f"NODE_FAIL: {lost} was lost, and no spare node is left in its place"
            note_end(journal.folder, BadEnd(rank=-1, how=how, node=decision.lost[0]))
            raise JobError(how, log_tail=death.log_tail) from death
        if held.here == held.training[0]:
            done = f"went on at once on {', '.join(held.training)}"
            print(f"{lost} was lost after step {journal.step}: {done}", flush=True)
            values = {"attempt": journal.attempts, "cause": "node", "node": decision.lost[0]}
            journal.event("verdict", **values, message=f"its node failed ({lost})", done=done)
            journal.close()
            forget_end(journal.folder)


def _wait_as_spare(journal: JobJournal, spec: JobSpec, held: HeldNodes) -> None:
    """Return when a round has ended; this node is checked and has Megatron imported by then."""
    world = spec.layout.world
    with holding_node(journal.home, "job", spec.id, journal.attempts, spec.parent, world):
        check_node(journal.home.root)
        load_for_ranks(held.placement(world, spec.id), spec.layout)
        from cray_agents.trainers.job import rank  # noqa: F401

        print(f"{held.here} waits as a spare node", flush=True)
        held.await_end()


def _attempt(
    journal: JobJournal,
    spec: JobSpec,
    where: Callable[[], RankPlacement],
    lost: Callable[[], bool] | None = None,
) -> int:
    """Run an attempt to its end; return the exit code. `lost`: see `run_ranks`."""
    if (ended := already_ended(journal, spec)) is not None:
        return ended
    placement = where()
    first = placement.node == 0
    attempt = journal.claim_attempt() if first else journal.attempts
    placement = replace(placement, attempt=attempt)
    world = spec.layout.world
    with holding_node(journal.home, "job", spec.id, attempt, spec.parent, world) as ledger:
        check_node(journal.home.root)
        work = read_inputs(journal, spec, attempt)
        try:
            outcome = _train(work, placement, ledger, lost)
        finally:
            if first:
                note_steps(ledger, journal)
    if not first:  # by another code, srun would end the first launcher before it has published
        return 0 if outcome.code == EX_TEMPFAIL else outcome.code
    if why := journal.fenced(attempt):
        print(f"stopped without publishing: {why}", flush=True)
    elif outcome.refusal is not None:
        return record_failure(journal, outcome.refusal)
    elif outcome.code == EX_TEMPFAIL:
        print(f"stopped after step {journal.step}; start it again to go on", flush=True)
    else:
        record_success(journal, spec)
    return outcome.code


def _train(
    work: JobInputs,
    placement: RankPlacement,
    ledger: LedgerFile,
    lost: Callable[[], bool] | None,
) -> RanksOutcome:
    """Import Megatron, choose the starting point, run this node's ranks."""
    on_cpu = load_for_ranks(placement, work.spec.layout)
    if placement.nodes > 1:
        placement = replace(placement, patience=loading_seconds(*work.folders))
    if placement.node == 0:
        work = choose_start(work, on_cpu, ledger)
        work.journal.close()
    from cray_agents.trainers.job import rank

    if work.model.backend == "megatron-bridge" and on_cpu:
        from cray_agents.trainers.models.megatron_bridge.bridged_model import load_bridge

        load_bridge()  # before the fork: it takes many seconds
    journal = work.journal
    arguments = [str(journal.home.root), journal.job_id, work.attempt, work.points]
    recipe = None if on_cpu else ("cray_agents.trainers.job.job", arguments)
    main = partial(rank.run, work, on_cpu)
    return run_ranks(placement, journal.folder / "logs", main, recipe, lost)


def rank_main(
    on_cpu: bool, root: str, job_id: str, attempt: int, points: Sequence[str | None]
) -> RankMain:
    """Return what a rank in a new Python runs: it reads the inputs as its launcher did."""
    from cray_agents.trainers.job import rank

    journal = JobJournal(Home(Path(root)), job_id)
    work = read_inputs(journal, journal.spec(), attempt)
    return partial(rank.run, work.at(attempt, *points), on_cpu)


def _stop_early(number: int, frame: object) -> None:
    """Exit on a signal that comes before the ranks run: there is nothing to save."""
    sys.exit(EX_TEMPFAIL)


if __name__ == "__main__":
    exit_at_once(main())
