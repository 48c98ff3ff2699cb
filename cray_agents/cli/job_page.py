"""Job page of `jobs show`: gather a job's folder as JSON and print it as a page. For jobs.py."""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from cray_agents.cli.screen import clock, line, show, size, when
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.scheduler.choose import site_cluster
from cray_agents.runtime.views.job_hardware import JobHardware, NodeHardware, job_hardware
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import JobSpec

Event = dict[str, Any]

USUAL = ("loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds", "mfu", "memory_gib")
_DIMENSIONS = (
    "data",
    "tensor",
    "pipeline",
    "interleave",
    "context",
    "expert",
    "optimizer_instances",
)


def sentence(event: Event, steps: int) -> str:
    """Return an event as one line with its time of day; `steps` is the job's number of steps."""
    at = datetime.fromtimestamp(event["time"], UTC).astimezone().strftime("%H:%M:%S")
    describe = _DESCRIPTIONS.get(event["event"])
    if event["event"] == "step":
        return f"{at}  {step_line(event, steps)}"
    return f"{at}  {describe(event) if describe is not None else _unknown(event)}"


def step_line(event: Event, steps: int) -> str:
    """Return a step's numbers as one line, with the measures of its method in the middle."""
    columns = [
        f"step {event['step']:>{len(str(steps))}}/{steps}",
        f"loss {_number(event, 'loss', '.4f')}",
        f"lr {_number(event, 'lr', '.2e')}",
        f"grad norm {_number(event, 'grad_norm', '.3f')}",
        *_measures(event),
        f"{_number(event, 'tokens_per_second', ',.0f')} tokens/s",
    ]
    if "mfu" in event:
        columns.append(f"MFU {_number(event, 'mfu', '.1%')}")
    if "memory_gib" in event:
        columns.append(f"{_number(event, 'memory_gib', '.1f')} GiB")
    return "  ".join(columns)


def layout_text(layout: dict[str, Any]) -> str:
    """Describe a layout by its dimensions greater than one."""
    split = [
        f"{name.replace('_', ' ')} {layout[name]}"
        for name in _DIMENSIONS
        if layout.get(name, 1) > 1
    ]
    if layout.get("sequence_parallel"):
        split.append("sequence parallel")
    if layout.get("sharding") == "full":
        split.append("fully sharded")
    return ", ".join(split) or "one rank"


def _measures(event: Event) -> list[str]:
    """Return the measures of a method beyond the usual ones, each with its name."""
    names = [n for n, value in event.items() if n not in USUAL and _is_measure(event, n, value)]
    return [f"{name.replace('_', ' ')} {_number(event, name, '.4g')}" for name in names]


def _is_measure(event: Event, name: str, value: Any) -> bool:
    if name in ("time", "step"):
        return False
    return isinstance(value, int | float) or name in event.get("not_finite", {})


def _number(event: Event, name: str, form: str) -> str:
    """Format a number of an event; a number that was not finite is a word such as nan."""
    value = event.get(name)
    if value is None:
        return str(event.get("not_finite", {}).get(name, "-"))
    return format(value, form)


def _layout(event: Event) -> str:
    recompute = event.get("recompute", "none")
    again = f", {recompute} recomputation" if recompute != "none" else ""
    return f"spread over {layout_text(event['layout'])}{again}: {'; '.join(event['reasons'])}"


def _started(event: Event) -> str:
    text = f"attempt {event['attempt']} starts after step {event['from_step']}"
    text += f" on {layout_text(event['layout'])}" if event.get("layout") else ""
    if event.get("left_out"):
        text += f"; {event['left_out']} samples without anything to learn are left out"
    text += f"; layers: {event['layers']}" if event.get("layers") else ""
    text += f"; learning rate: {event['learning_rate']}" if event.get("learning_rate") else ""
    return text


def _evaluation(event: Event) -> str:
    loss = f"loss {_number(event, 'loss', '.4f')} over {event['tokens']:,} tokens"
    return "  ".join([f"evaluation after step {event['step']}: {loss}", *_measures(event)])


def _agreement(event: Event) -> str:
    place = f"; the most at token {event['place']} of {event['run_id']}" if "place" in event else ""
    judged, limits = "", f"limit {_number(event, 'limit', 'g')}"
    if event.get("mean_limit") is not None:  # bfloat16
        judged = f" {_number(event, 'p99_difference', '.2g')} in the 99th percentile,"
        limits = f"limits {_number(event, 'limit', 'g')} there"
        limits += f" and {_number(event, 'mean_limit', 'g')} on average"
    return (
        "the trainer's log-probabilities differ from the engine's by"
        f" {_number(event, 'max_difference', '.2g')} at most{',' if judged else ''}{judged} and"
        f" {_number(event, 'mean_difference', '.2g')} on average, over {event['tokens']:,} tokens"
        f" ({limits}{place}){_above(event)}"
    )


def _above(event: Event) -> str:
    """Describe what the engine's importance ratios came to; "" in older events."""
    if event.get("kl") is None:
        return ""
    return (
        f"; KL {event['kl']:.2g}, ratio above 2 for {event['tokens_above']:.2%} of the tokens and"
        f" {event['sequences_above']:.2%} of the samples"
    )


def _saved(event: Event) -> str:
    return f"resume point after step {event['step']} saved in {event['seconds']:.2f} s"


def _taken_up(event: Event) -> str:
    place = {"memory": "memory", "parked": "host memory", "files": "files"}[event["source"]]
    return f"the session took it up from {place} in {event['seconds']:.2f} s"


def _moved(record: Event) -> str:
    """Describe what files show of a training, from an event or a status; "" without figures."""
    share, ratio = record.get("changed_share"), record.get("update_ratio")
    if share is None:
        return ""
    text = f"{share:.2%} of the trained weights changed in the files"
    return text if ratio is None else f"{text}, which show {ratio:.1%} of the update's norm"


def _verdict(event: Event) -> str:
    return f"attempt {event['attempt']} ended: {event['message']}; {event['done']}"


def _straggler(event: Event) -> str:
    times = event["seconds"] / event["median"]
    return (
        f"rank {event['rank']} on {event['node']} is slow: {event['seconds']:.3f} s a step for its"
        f" own work, {times:.1f} times the median, over {event['steps']} steps"
    )


def _unknown(event: Event) -> str:
    fields = {name: value for name, value in event.items() if name not in ("event", "time")}
    return f"{event['event']}: " + ", ".join(f"{name} {value}" for name, value in fields.items())


_DESCRIPTIONS: dict[str, Callable[[Event], str]] = {
    "layout": _layout,
    "started": _started,
    "taken_up": _taken_up,
    "packing": lambda event: event["how"],
    "warning": lambda event: f"warning: {event['message']}",
    "moved": lambda event: f"{event['checkpoint']}: {_moved(event)}",
    "corrupt": lambda event: f"{event['message']}: set aside, the one before it is used",
    "evaluation": _evaluation,
    "agreement": _agreement,
    "saved": _saved,
    "version": lambda event: f"step {event['step']}: published {event['version']}",
    "verdict": _verdict,
    "straggler": _straggler,
    "failed": lambda event: f"failed: {event['message']}",
    "retried": lambda event: f"tried again: {'; '.join(event['changes'])}",
    "succeeded": lambda event: f"succeeded: checkpoint {event['checkpoint']}",
}


LABEL = 16  # columns of the labels
RECENT = 20  # newest steps, whose pace estimates the time left
LOG_LINES = 20  # of the log of a failed job

Json = dict[str, Any]


def job_report(home: Home, job_id: str) -> Json:
    """Return everything that a job's folder records. Raises NotFound."""
    journal = JobJournal(home, job_id)
    spec, status, events = journal.spec(), read_status(home, job_id), journal.events()
    failed = status.state == "failed"
    agreements = [e for e in events if e["event"] == "agreement"]
    return {
        "id": job_id,
        "folder": str(journal.folder),
        "spec": spec.model_dump(mode="json"),
        "layout_reasons": [why for e in events if e["event"] == "layout" for why in e["reasons"]],
        "status": status.model_dump(mode="json"),
        "attempts": _attempts(journal),
        "verdicts": [e for e in events if e["event"] == "verdict"],
        "progress": _progress(events, status.step, status.steps, status.state),
        "evaluations": [e for e in events if e["event"] == "evaluation"],
        "agreement": agreements[-1] if agreements else None,
        "corrupt": [e["message"] for e in events if e["event"] == "corrupt"],
        "resume_points": list(_resume_points(journal)),
        "checkpoint": str(home.checkpoint(status.checkpoint)) if status.checkpoint else None,
        "log_tail": journal.log_tail(LOG_LINES) if failed else "",
    }


def _attempts(journal: JobJournal) -> list[Json]:
    """Return the number, host and start time of each attempt."""
    numbers = range(1, journal.attempts + 1)
    return [
        {"number": number} | checksums.read_json(journal.folder / "attempts" / str(number))
        for number in numbers
    ]


def _progress(events: list[Json], done: int, steps: int, state: str) -> Json:
    """Return the pace of the newest steps, and the seconds left at that pace."""
    newest = [e for e in events if e["event"] == "step"][-RECENT:]
    seconds, tokens = sum(e["seconds"] for e in newest), sum(e["tokens"] for e in newest)
    pace = seconds / len(newest) if newest else None
    left = pace * (steps - done) if pace is not None and state == "running" else None
    return {
        "seconds_per_step": pace,
        "trained_tokens_per_second": tokens / seconds if seconds else None,
        "seconds_left": left,
    }


def _resume_points(journal: JobJournal) -> Iterator[Json]:
    """Yield the resume points of a job, newest first."""
    for path in journal.resume_points:
        try:
            size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        except FileNotFoundError:  # the job has just removed it for a newer one
            continue
        yield {"step": int(path.name.removeprefix("step-")), "path": str(path), "bytes": size}


def print_page(job: Json) -> None:
    """Print the report of a job for people."""
    line(job["id"], style="bold")
    for name, value in [*_request_rows(job), *_progress_rows(job), *_output_rows(job)]:
        if value:
            line(f"{name:<{LABEL}}{value}", 2, hanging=LABEL)
    if job["status"]["error"]:
        line("why it failed", style="bold red")
        line(job["status"]["error"], 2)
    if job["log_tail"]:
        line("the end of its log", style="bold")
        line(job["log_tail"], 2, "dim")


def _request_rows(job: Json) -> list[tuple[str, str]]:
    """Return the rows of the job's spec, with the hyperparameters that differ from the defaults."""
    spec = JobSpec.model_validate(job["spec"])
    hyper = spec.hyperparameters.model_dump(exclude_defaults=True)
    chosen = ", ".join(f"{name} {_format_value(value)}" for name, value in hyper.items())
    run_options = {
        "save_every": f"a resume point every {spec.save_every} steps, the last {spec.keep} kept",
        "evaluate_every": f"evaluated every {spec.evaluate_every} steps",
        "recompute": f"{spec.recompute} recomputation of activations",
    }
    given = {"save_every"} | spec.model_dump(exclude_defaults=True).keys()
    return [
        ("method", spec.method if spec.commands is None else ""),
        ("commands", spec.commands or ""),
        ("dataset", spec.dataset),
        ("parent", spec.parent),
        ("reference", spec.reference or ""),
        ("teacher", spec.teacher or ""),
        ("optimizer from", spec.optimizer_from or ""),
        ("hyperparameters", f"{chosen} (the others as they are by default)"),
        ("layout", "\n".join([layout_text(job["spec"]["layout"]), *job["layout_reasons"]])),
        ("run", "; ".join(text for name, text in run_options.items() if name in given)),
    ]


def _format_value(value: Any) -> str:
    """Format a hyperparameter; the settings of a method become name=value."""
    if isinstance(value, dict):
        return (
            "(" + ", ".join(f"{name}={_format_value(inner)}" for name, inner in value.items()) + ")"
        )
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _progress_rows(job: Json) -> list[tuple[str, str]]:
    """Return the rows of the job's state, attempts, loss and pace."""
    status, progress = job["status"], job["progress"]
    attempts = [f"{a['number']}: {when(a['time'])} on {a['host']}" for a in job["attempts"]]
    pace, rate = progress["seconds_per_step"], progress["trained_tokens_per_second"]
    scheduler = f" ({status['scheduler_job_id']})" if status["scheduler_job_id"] else ""
    state = f"{status['state']}{scheduler}"
    if not job["spec"].get("commands"):
        state += f" after step {status['step']} of {status['steps']}"
    if progress["seconds_left"] is not None:
        state += f", about {clock(progress['seconds_left'])} left"
    state += f"; it waits: {status['reason']}" if status["reason"] else ""
    measures = {name: value for name, value in status["metrics"].items() if name not in USUAL}
    return [
        ("state", state),
        ("attempts", "\n".join(attempts)),
        ("ended early", "\n".join(_verdict(event) for event in job["verdicts"])),
        ("loss", _range(status["loss_first"], status["loss_last"])),
        ("warnings", "\n".join(status["warnings"])),
        ("moved", _moved(status)),
        ("trained", f"{status['trained_tokens']:,} tokens in {clock(status['seconds'])}"),
        ("pace", "" if pace is None else f"{pace:.3f} s a step, {rate or 0:,.0f} trained tokens/s"),
        ("newest measures", _listed(measures)),
        ("mean measures", _listed(status["mean_metrics"]) if status["step"] > 1 else ""),
    ]


def _output_rows(job: Json) -> list[tuple[str, str]]:
    """Return the rows of the job's evaluations, resume points and checkpoint."""
    agreement = job["agreement"]
    points = [
        f"step {point['step']}: {point['bytes'] / 2**20:,.1f} MiB, {point['path']}"
        for point in job["resume_points"]
    ]
    losses = [f"{e['loss']:.4f} after step {e['step']}" for e in job["evaluations"] if e["loss"]]
    return [
        ("evaluation loss", "\n".join(losses[-RECENT:])),
        ("agreement", sentence(agreement, 0).partition("  ")[2] if agreement else ""),
        ("set aside", "\n".join(job["corrupt"])),
        ("resume points", "\n".join(points)),
        ("checkpoint", job["checkpoint"] or ""),
    ]


def _range(first: float | None, last: float | None) -> str:
    return "" if first is None or last is None else f"{first:.4f} → {last:.4f}"


def _listed(measures: Json) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in measures.items())


def _short(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


# ---- Hardware of a job, for `jobs show --hardware`: its nodes with their GPUs and ports
NODES = 100_000  # of a job, at most
COLUMNS = ["device", "load", "memory", "watts", "celsius", "sent", "received",
           "notes"]  # fmt: skip


def read_hardware(home: Home, job_id: str, points: int) -> JobHardware:
    """Return a job on its nodes, from the files of the root. Raises NotFound."""
    status = read_status(home, job_id)
    if status.scheduler_job_id and site_cluster() is not None:
        status = status.model_copy(update={"scheduler": "slurm"})
    return job_hardware(home, status, points=points, limit=NODES, now=time.time())


def print_hardware(hardware: JobHardware) -> None:
    """Print the last sample of each node, the slowest rank, why it waits, and Slurm's account."""
    line(hardware.id, style="bold")
    if (waits := hardware.waits) is not None:
        line(f"it waits: {waits.meaning}; next: {waits.next}", 2)
    if (slow := hardware.slowest) is not None:
        times = slow.seconds / slow.median
        line(f"slowest: rank {slow.rank} on {slow.node}, {times:.1f} times the median", 2)
    if (slurm := hardware.slurm) is not None:
        facts = [
            f"{slurm.cpu_seconds:.0f} CPU-seconds" if slurm.cpu_seconds is not None else "",
            f"{size(slurm.memory_bytes)} at most in a task" if slurm.memory_bytes else "",
            f"{slurm.joules:.0f} J of its nodes" if slurm.joules is not None else "",
        ]
        line(slurm.why_unknown or f"by Slurm: {', '.join(filter(None, facts)) or 'nothing'}", 2)
    why = "no node of it was sampled: it has not started, or an older release trained it"
    print_nodes(hardware.nodes, why)


def print_nodes(nodes: Sequence[NodeHardware], why: str) -> None:
    """Print the last sample of each node; `why` there is none."""
    if not nodes:
        line(why, 2)
    for node in nodes:
        _print_node(node)


def _print_node(node: NodeHardware) -> None:
    seen = "was not sampled in its time" if node.time is None else f"at {when(node.time)}"
    line(f"{node.node} {seen}", style="bold")
    newest = node.newest
    load, cores = newest.get("host.load"), newest.get("host.rank_cores")
    host = [
        f"load {load}" if load is not None else "",
        f"{cores:.1f} cores in use by it" if isinstance(cores, float) else "",
    ]
    line("; ".join(filter(None, host)), 2)
    rows = []
    for gpu in node.gpus:
        at = f"gpu{gpu['gpu']}."
        rows.append(
            {
                "device": f"GPU {gpu['gpu']} {gpu['name']}",
                "load": _share(newest.get(f"{at}utilization")),
                "memory": _size(newest.get(f"{at}memory_bytes")),
                "watts": newest.get(f"{at}power_watts"),
                "celsius": newest.get(f"{at}temperature_celsius"),
                "notes": newest.get(f"{at}slowed_by", ""),
            }
        )
    for port in sorted({name.rpartition(".")[0] for name in newest if ":" in name}):
        figures = {name.removeprefix(f"{port}."): value for name, value in newest.items()
                   if name.startswith(f"{port}.")}  # fmt: skip
        grown = [f"{name} {value}" for name, value in figures.items()
                 if name != "up" and not name.endswith("_per_second")]  # fmt: skip
        rows.append(
            {
                "device": port,
                "sent": _rate(figures.get("sent_bytes_per_second")),
                "received": _rate(figures.get("received_bytes_per_second")),
                "notes": "; ".join(([] if figures.get("up", 1) else ["down"]) + grown),
            }
        )
    if rows:
        show(rows, COLUMNS)


def _share(value: float | str | None) -> str:
    return f"{value:.0%}" if isinstance(value, int | float) else ""


def _size(value: float | str | None) -> str:
    return size(int(value)) if isinstance(value, int | float) else ""


def _rate(value: float | str | None) -> str:
    return f"{_size(value)}/s" if value is not None else ""
