"""Session process: `python -m cray_agents.trainers.session.session_process <home>/sessions/<id>`.

A scheduler starts it once per node. It claims the session's next attempt, forks the ranks, and ends
when the session was idle for too long. Whatever kills it, its jobs are unfinished jobs: the trainer
starts the session again, and each goes on from its last resume point.

    exit 0   idle for too long, or asked to end     exit 75  stopped: its jobs go on later
    exit 1   a rank died; the job it worked on may be tried again

Read next: resident.py for the work of each rank, job/launch.py for their processes.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from cray_agents.errors import JobError, SetupError
from cray_agents.paths import Home
from cray_agents.processes import exit_at_once
from cray_agents.trainers.job.failures.health_gate import check_node
from cray_agents.trainers.job.failures.rank_monitor import BadEnd, node_name, note_end
from cray_agents.trainers.job.job_state import record_failure
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import (
    EX_TEMPFAIL,
    RankMain,
    find_placement,
    holding_node,
    load_for_ranks,
    run_ranks,
)
from cray_agents.trainers.job.session_journal import SessionJournal


def main(argv: list[str] | None = None) -> int:
    """Run the session of a folder; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m cray_agents.trainers.session.session_process <home>/sessions/<id>")
        return 2
    folder = Path(arguments[0]).resolve()
    session = SessionJournal(Home(folder.parents[1]), folder.name)
    try:
        return run(session)
    except JobError as death:
        report = f"--- the end of the rank's log:\n{death.log_tail}\n---\n{death}"
        print(report, flush=True)
        if (job_id := session.current) is not None:
            with JobJournal(session.home, job_id).log.open("a") as log:
                print(report, file=log)
        return 1
    except SetupError as problem:
        print(problem, flush=True)
        note_end(session.folder, BadEnd(rank=-1, how=str(problem), node=node_name()))
        return 1


def run(session: SessionJournal) -> int:
    """Claim the session, and run its ranks on this node until they end."""
    spec = session.spec()
    placement = find_placement(spec.layout.world, session.session_id)
    attempt = session.claim_attempt() if placement.node == 0 else session.attempts
    placement = replace(placement, attempt=attempt)
    check_node(session.home.root)
    on_cpu = load_for_ranks(placement, spec.layout, ipc=spec.weight_transfer == "ipc")
    from cray_agents.trainers.session import resident

    print(f"attempt {attempt}: {spec.layout.world} ranks wait for jobs of {spec.name}", flush=True)
    main_of_rank = partial(resident.run, session, attempt, on_cpu)
    arguments = [str(session.home.root), session.session_id, attempt]
    recipe = None if on_cpu else ("cray_agents.trainers.session.session_process", arguments)
    holder = (session.session_id, attempt, spec.name, spec.layout.world)
    with holding_node(session.home, "session", *holder):
        outcome = run_ranks(placement, session.folder / "logs", main_of_rank, recipe)
    if outcome.refusal is not None and (job_id := session.current) is not None:
        record_failure(JobJournal(session.home, job_id), outcome.refusal)
        session.withdraw(job_id)
    if placement.node and outcome.code == EX_TEMPFAIL:
        return 0  # by another code, srun would end the first launcher before it has published
    return outcome.code


def rank_main(on_cpu: bool, root: str, session_id: str, attempt: int) -> RankMain:
    """Return what a rank in a new Python runs."""
    from cray_agents.trainers.session import resident

    session = SessionJournal(Home(Path(root)), session_id)
    return partial(resident.run, session, attempt, on_cpu)


if __name__ == "__main__":
    exit_at_once(main())
