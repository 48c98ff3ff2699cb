"""`why`: a paragraph on why a job, a loop or a replica waits, hangs, failed or was rejected.

It rests on the records of the shared root, on the verdicts on ended attempts
(trainers/job/failures/failure.py), and on Slurm's reason. Only a replica needs the running
platform. Read next: jobs.py.
"""

import time
from typing import Annotated, Any

import typer

from cray_agents.cli.iteration_table import disagreement
from cray_agents.cli.jobs import job_ids, named_job
from cray_agents.cli.options import Commands, given
from cray_agents.cli.platform import describe_controller
from cray_agents.cli.screen import clock, line, print_json, root, when
from cray_agents.errors import NotFound
from cray_agents.iteration import Iteration
from cray_agents.paths import Home
from cray_agents.runtime.controller_lease import LEASE, standby_notes
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.disk.journal import read as read_journal
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scheduler.slurm import LEDGER, read_preemption
from cray_agents.runtime.scheduler.slurm_reports import describe_reason
from cray_agents.runtime.telemetry.audit_log import AuditLine
from cray_agents.server.platform_process import command, fetch, owner, running
from cray_agents.trainers.job.job_state import read_handover, read_status
from cray_agents.trainers.job.journal import JobJournal

REPLICA = "replica-"
CONTROLLER = "controller"
SILENT = 120.0  # seconds without an event after which a running job is said to be silent

Answer = dict[str, Any]


commands = Commands()


@commands.command("why")
def why(
    name: Annotated[
        str,
        typer.Argument(
            help="A job as `jobs show` takes it, a loop's name, replica-N, or controller."
        ),
    ],
) -> None:
    """Say why a job, a loop or a replica waits, hangs, failed or was rejected, and what to do.

    Of the controller it says who it is, since when, and which standbys wait.
    """
    answer = explain(root(), name)
    if given().json:
        print_json(answer)
        return
    line(" ".join(answer["why"]))
    line(f"Next: {answer['next']}.")


def explain(home: Home, name: str) -> Answer:
    """Return `what`, `name`, `state`, the sentences of `why`, and the `next` step.

    Raises NotFound, and BadInput if the name is short for several jobs.
    """
    if name.removeprefix(REPLICA).isdecimal() and name.startswith(REPLICA):
        return _explain_replica(home, int(name.removeprefix(REPLICA)))
    if name == CONTROLLER:
        return _explain_controller(home)
    if name not in job_ids(home) and home.iterations(name).is_dir():
        return _explain_loop(home, name)
    try:
        return _explain_job(home, named_job(home, name))
    except NotFound as error:
        loops = [path.name for path in home.loops.glob("*") if home.iterations(path.name).is_dir()]
        known = f"; loops: {', '.join(sorted(loops))}" if loops else ""
        raise NotFound(f"{error}{known}; replicas: {REPLICA}0 and so on", param="name") from error


def _explain_job(home: Home, job_id: str) -> Answer:
    from cray_agents.runtime.scheduler.excluded_nodes import excluded_nodes
    from cray_agents.trainers.job.failures.failure import WORDS

    journal, status = JobJournal(home, job_id), read_status(home, job_id)
    events = journal.events()
    verdicts = [event for event in events if event["event"] == "verdict"]
    sentences = [f"{job_id} is {status.state} after step {status.step} of {status.steps}."]
    step = "nothing: it goes on by itself"
    if status.state == "queued":
        meaning, step = describe_reason(status.reason) if status.reason else ("", "wait")
        sentences.append(
            f"It waits: {meaning}." if meaning else "Its scheduler has not said why it waits."
        )
        if running(home) is None:
            sentences.append("No platform runs on this root, so this may be old.")
            step = f"start `{command('up', home)}`, which starts it again when it ends early"
    elif status.state == "succeeded":
        step = f"nothing: it is done; `{command(f'jobs show {job_id}', home)}` has its figures"
    elif status.state == "paused":
        sentences.append("Somebody paused it.")
        step = f"`{command(f'jobs resume {job_id}', home)}`"
    elif status.state == "failed":
        sentences.append(f"{_sentence(status.error or 'It left no reason')}")
        cause = verdicts[-1]["cause"] if verdicts else ""
        step = WORDS[cause][1] if cause in WORDS else "mend the cause, and submit it again"
    elif status.state == "running":
        if (order := _preemption(home, journal)) is not None:
            sentences.append(
                f"It was asked at {when(order.time)} to save and leave its nodes: {order.why}."
            )
        silent = time.time() - max((event["time"] for event in events), default=time.time())
        if silent > SILENT:
            sentences.append(
                f"It has written no event for {clock(silent)}: a long step, or a hang, which is"
                " ended after train_hang_seconds."
            )
            step = f"`{command(f'jobs logs {job_id}', home)}` shows what it does"
    elif status.state == "cancelled":
        cancels = [
            (each.time, each.who)
            for file in home.audit.glob("*.jsonl")
            for each in read_journal(file, AuditLine, damaged="skip")
            if each.path == f"/v1/jobs/{job_id}/cancel" and each.status < 400
        ]
        at, who = min(cancels, default=(0.0, ""))
        who = (who or "Somebody") + (f" cancelled it at {when(at)}" if at else " cancelled it")
        sentences, step = [*sentences, f"{who}, for good."], "submit a job with another spec"
    for event in verdicts[-3:]:
        sentences.append(f"Attempt {event['attempt']} ended at {when(event['time'])}:"
                    f" {event['message']}; {event['done']}.")  # fmt: skip
    if (tokens := journal.microbatch) is not None:
        sentences.append(
            f"Its micro-batches have {tokens} tokens, as more were too many for memory."
        )
    if slow := [event for event in events if event["event"] == "straggler"]:
        last = slow[-1]
        times = last["seconds"] / last["median"]
        sentences.append(
            f"Rank {last['rank']} on {last['node']} took {times:.1f} times the median."
        )
    for node in excluded_nodes(home.excluded_nodes):
        if node.job == job_id:
            sentences.append(f"{node.node} is left out until {when(node.until)}.")
    if hangs := sorted((journal.folder / "hangs").glob("*.txt")):
        sentences.append(f"The stacks of its last hang are in {hangs[-1]}.")
    return {"what": "job", "name": job_id, "state": status.state, "why": sentences, "next": step}


def _preemption(home: Home, journal: Any) -> Any:
    """Return the order to leave its nodes that a running job or its session has; else None."""
    last = read_handover(journal)
    return read_preemption(home.slurm / LEDGER, last.session or journal.job_id, last.id)


def _explain_loop(home: Home, name: str) -> Answer:
    from cray_agents.runtime.store.loop_records import LoopRecords

    done = LoopRecords(home, name).finished()
    jobs = (job_id for job_id in job_ids(home) if not JobJournal(home, job_id).ended)
    current = [job for job in jobs if JobJournal(home, job).spec().session == name]
    if not done:
        sentences, step, state = [f"{name} has finished no iteration."], "wait", "running"
    else:
        last = done[-1]
        state = "promoted" if last.promoted else "not promoted"
        sentences = [f"Iteration {last.iteration} of {name}, {last.version}, was {state}."]
        step = "run the loop again: the same command goes on"
        if not last.promoted:
            sentences += _rejection(Registry(home), last)
            step = (
                "look at its runs: `cray-agents runs list`; more held-out tasks tell smaller"
                " differences, more attempts or a temperature of 0.8 bring more good runs, and"
                " parent='latest' goes on from a candidate that is not shown to be better"
            )
        if last.note:
            sentences.append(_sentence(last.note))
        sentences += map(_sentence, filter(None, [*last.remarks, disagreement(done)]))
        if last.stopped:
            sentences.append(f"The loop ended itself: {_sentence(last.stopped)}")
            state = "stopped"
            if last.promoted:
                step = "nothing, or change the setting that ended it to go on"
    answer = {"what": "loop", "name": name, "state": state, "why": sentences, "next": step}
    if current:
        job = _explain_job(home, current[-1])
        answer |= {
            "why": [*sentences, "Its job:", *job["why"]],
            "next": job["next"],
            "state": "training",
        }
    return answer


def _rejection(registry: Any, last: Iteration) -> list[str]:
    """Return the evidence of a rejection: of the test, and as the registry noted it."""
    sentences = []
    name, _, number = last.version.rpartition("@")
    reasons = [
        event.reason
        for event in (registry.history(name) if name in registry.names() else ())
        if event.kind == "rejected" and str(event.version) == number
    ]
    if reasons:
        sentences.append(_sentence(reasons[-1]))
    if last.wins is not None:
        sentences.append(
            f"On held-out tasks it was better in {last.wins}, worse in {last.losses} and equal in"
            f" {last.ties} pairs, with a mean reward of {last.holdout_success:.3f}."
        )
    if last.evidence is not None:
        sentences.append(f"The evidence against 'it is not better' is {last.evidence:.3g}.")
    return sentences


def _explain_replica(home: Home, number: int) -> Answer:
    if (info := running(home)) is None:
        sentences = ["No platform runs on this root, so there is no replica."]
        return {"what": "replica", "name": f"{REPLICA}{number}", "state": "none", "why": sentences,
                "next": f"start `{command('up', home)}`"}  # fmt: skip
    pool = fetch(info, "/v1/pool")
    replicas = [*pool["data"], *pool["spares"]]
    if number >= len(replicas):
        raise NotFound(f"there are {len(replicas)} replicas, from {REPLICA}0 on", param="name")
    replica, log = replicas[number], home.logs / f"{REPLICA}{number}.log"
    version = f" with {replica['version']}" if replica["version"] else ""
    sentences = [
        f"{REPLICA}{number} is {replica['state']}{version}, after {replica['restarts']} restarts."
    ]
    step = "nothing"
    if replica["error"]:
        sentences.append(_sentence(replica["error"]))
    if (last := replica["last_restart"]) is not None:
        sentences.append(f"It was lost at {when(last['time'])}: {_sentence(last['why'])}")
    if replica["state"] == "out":
        step = f"read {log}; it is tried again, and a promotion or a restart of the platform too"
    elif replica["state"] == "away":
        sentences.append("It gave its place back, as fewer replicas are needed.")
        step = "nothing: it comes back when requests need it"
    elif replica["state"] != "serving":
        step = f"wait, and read {log}"
    return {"what": "replica", "name": f"{REPLICA}{number}", "state": replica["state"],
            "why": sentences, "next": step}  # fmt: skip


def _sentence(text: str) -> str:
    """Return the first line of a text, with a full stop."""
    first = text.strip().partition("\n")[0].rstrip(":. ")
    return f"{first[:1].upper()}{first[1:]}."


def _explain_controller(home: Home) -> Answer:
    answer: Answer = {"what": CONTROLLER, "name": CONTROLLER}
    if (info := running(home)) is not None:
        controller = fetch(info, "/v1/platform").get("controller")
        words = describe_controller(controller) if controller else "an older version controls it"
        return answer | {"state": "running", "why": [_sentence(words)], "next": "nothing"}
    step = f"start `{command('up', home)}`"
    try:
        claim = checksums.read_json(home.platform)
    except FileNotFoundError:
        sentences = ["No platform runs on this root: the last one gave it back."]
        return answer | {"state": "none", "why": sentences, "next": step}
    if owner(home) is not None:
        sentences = [f"The platform of {claim['host']} (pid {claim['pid']}) starts or ends."]
        return answer | {"state": "starting", "why": sentences, "next": "ask again in a moment"}
    why = "handed the root over" if claim.get("released") else "ended without giving the root back"
    sentences = [f"{claim['host']} (pid {claim['pid']}), term {claim.get('term', 0)}, {why}."]
    if notes := standby_notes(home):
        names = ", ".join(f"{note['host']} (pid {note['pid']})" for note in notes)
        sentences.append(f"Standbys, unless they were killed: {names}.")
        step = f"wait {claim.get('lease', LEASE):g} s for a standby, or {step}"
    return answer | {"state": "gone", "why": sentences, "next": step}
