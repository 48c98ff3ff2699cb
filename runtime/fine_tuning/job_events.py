"""Fine-tuning events: assemble a job's events, in OpenAI's shape, from its files.

Event ids are derived from the events' contents. They are the same in every process and at every
read, so that a page can start after the last event of the one before. Read next:
trainers/job/journal.py, which writes the training job's own events and its pauses.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.paths import Home
from cray_agents.records import digest
from cray_agents.runtime.disk import checksums, journal
from cray_agents.runtime.fine_tuning.job_records import Ended, TuningRequest, Validated

MEASURES = ("reward_margin", "accuracy", "chosen_reward", "rejected_reward")


class TuningEvent(NamedTuple):
    """An event before its conversion. `key` is unique in the job."""

    time: float
    key: str
    message: str
    level: str = "info"
    data: dict[str, Any] | None = None
    metrics: bool = False


def events(
    home: Home, request: TuningRequest, validated: Validated | None, ended: Ended | None
) -> list[dict[str, Any]]:
    """Return all of a job's events in OpenAI's shape, newest first."""
    created = request.created
    history = [
        TuningEvent(created, "created", f"Created fine-tuning job: {request.id}"),
        TuningEvent(created, "validating", f"Validating training file: {request.training_file}"),
    ]
    if request.validation_file is not None:
        message = f"Validating validation file: {request.validation_file}"
        history.append(TuningEvent(created, "validating too", message))
    if validated is not None:
        history.append(_validated_event(validated))
        training = _training_events(home.job(validated.spec.id), validated)
        history += sorted(training, key=lambda event: event.time)
    if ended is not None:
        history += _end_events(ended)
    return [_to_openai(request.id, event) for event in reversed(history)]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the step events of a job's folder in order, each with its `valid_loss` or None."""
    events = list(journal.read(folder / "events.jsonl"))
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "evaluation"}
    steps = [event for event in events if event["event"] == "step"]
    return [{**event, "valid_loss": losses.get(event["step"])} for event in steps]


def _validated_event(validated: Validated) -> TuningEvent:
    left_out = f", {validated.left_out} left out as duplicates" if validated.left_out else ""
    message = f"Files validated, moving job to queued state: {validated.examples} examples"
    if validated.validation:
        message += f", {validated.validation} to validate on"
    losses = "".join(f", {count} lack {loss}" for loss, count in validated.losses.items())
    data = {"job": validated.spec.id, "dataset": validated.spec.dataset}
    return TuningEvent(validated.time, "validated", message + left_out + losses, data=data)


def _end_events(ended: Ended) -> Iterator[TuningEvent]:
    if ended.state == "succeeded":
        yield TuningEvent(ended.time, "model", f"New fine-tuned model created: {ended.model}")
        yield TuningEvent(ended.time, "ended", "The job has successfully completed")
    elif ended.state == "cancelled":
        yield TuningEvent(ended.time, "ended", "The job was cancelled")
    else:
        message = ended.error["message"] if ended.error else "The job failed"
        yield TuningEvent(ended.time, "ended", message, "error")


def _training_events(folder: Path, validated: Validated) -> Iterator[TuningEvent]:
    """Yield the training job's own events and its pauses."""
    resumed = list(_numbered_times(folder / "pauses", ".resumed"))
    for number, time in _numbered_times(folder / "pauses", ""):
        yield TuningEvent(time, f"paused {number}", "The job is paused: it saves and stops")
    for number, time in resumed:
        yield TuningEvent(time, f"resumed {number}", "The job is resumed")
    last_start = 0.0
    for event in journal.read(folder / "events.jsonl"):
        time = event["time"]
        if event["event"] == "started":
            after_resume = any(last_start < when <= time for _, when in resumed)
            yield _start_event(event, after_resume)
            last_start = time
        elif event["event"] in ("corrupt", "warning"):  # an attempt may repeat another's text
            key = f"{event['event']} {time}: {event['message']}"
            yield TuningEvent(time, key, event["message"], "warn")
        elif event["event"] in ("verdict", "straggler"):
            yield _trouble_event(event)
        elif event["event"] == "layout":
            yield TuningEvent(time, "layout", f"Spread over ranks: {'; '.join(event['reasons'])}")
        elif event["event"] == "agreement":
            yield _agreement_event(event)
        elif event["event"] == "step":
            yield _step_event(event, validated)
        elif event["event"] == "evaluation":
            yield _evaluation_event(event, validated)
        elif event["event"] == "version":
            message = f"Checkpoint created at step {event['step']}: {event['version']}"
            yield TuningEvent(time, f"version {event['step']}", message)


def _start_event(event: dict[str, Any], after_resume: bool) -> TuningEvent:
    key, step = f"started {event['attempt']}", event["from_step"]
    if event["attempt"] == 1:
        return TuningEvent(event["time"], key, "Fine-tuning job started")
    if after_resume:
        return TuningEvent(event["time"], key, f"Fine-tuning job goes on at step {step}")
    message = f"The job's processes ended before it did; started again at step {step}"
    return TuningEvent(event["time"], key, message, "warn")


def _trouble_event(event: dict[str, Any]) -> TuningEvent:
    """Return the event of an attempt that ended early, or of a rank that is slow."""
    key = f"{event['event']} {event['time']}"
    if event["event"] == "verdict":
        message = f"Attempt {event['attempt']} ended: {event['message']}; {event['done']}"
    else:
        message = f"Rank {event['rank']} on {event['node']} is slower than the others"
    return TuningEvent(event["time"], key, message, "warn")


def _agreement_event(event: dict[str, Any]) -> TuningEvent:
    """Describe how much the trainer's logprobs differ from the engine's."""
    most, limit, mean_limit = event["max_difference"], event["limit"], event.get("mean_limit")
    message = "Log-probabilities differ from the engine's by "
    if mean_limit is None:  # float32
        message += f"at most {_format_loss(most)}, limit {limit:g}"
    else:
        mean, p99 = event["mean_difference"], event["p99_difference"]
        message += (
            f"{_format_loss(mean)} on average, limit {mean_limit:g}, and by"
            f" {_format_loss(p99)} in the 99th percentile, limit {limit:g}"
        )
    agrees = event.get("agrees", most is not None and most <= limit)
    return TuningEvent(event["time"], "agreement", message, "info" if agrees else "error")


def _step_event(event: dict[str, Any], validated: Validated) -> TuningEvent:
    step, total = event["step"], validated.spec.hyperparameters.steps
    data = {
        "step": step,
        "total_steps": total,
        "train_loss": event["loss"],
        "learning_rate": event["lr"],
        "grad_norm": event["grad_norm"],
        "tokens": event["tokens"],
        "tokens_per_second": event["tokens_per_second"],
        **_preference_measures(event),
    }
    message = f"Step {step}/{total}: training loss={_format_loss(event['loss'])}"
    return TuningEvent(event["time"], f"step {step}", message, data=data, metrics=True)


def _evaluation_event(event: dict[str, Any], validated: Validated) -> TuningEvent:
    """Describe an evaluation. OpenAI's two losses are equal: it is always over the whole file."""
    step, total, loss = event["step"], validated.spec.hyperparameters.steps, event["loss"]
    message = f"Step {step}/{total}: validation loss={_format_loss(loss)}"
    data = {"step": step, "total_steps": total, "valid_loss": loss, "full_valid_loss": loss}
    data |= {f"valid_{name}": value for name, value in _preference_measures(event).items()}
    return TuningEvent(event["time"], f"evaluation {step}", message, data=data, metrics=True)


def _preference_measures(event: dict[str, Any]) -> dict[str, Any]:
    """Return dpo's measures other than the loss."""
    return {name: event[name] for name in MEASURES if name in event}


def _format_loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _to_openai(job_id: str, event: TuningEvent) -> dict[str, Any]:
    return {
        "id": f"ftevent-{digest([job_id, event.key], 24)}",
        "object": "fine_tuning.job.event",
        "created_at": int(event.time),
        "level": event.level,
        "message": event.message,
        "type": "metrics" if event.metrics else "message",
        "data": event.data or {},
    }


def _numbered_times(folder: Path, suffix: str) -> Iterator[tuple[int, float]]:
    """Yield the numbers and times of the files `<n><suffix>`."""
    for path in folder.glob(f"[0-9]*{suffix}") if folder.is_dir() else ():
        number = path.name.removesuffix(suffix)
        if number.isdecimal():
            yield int(number), checksums.read_json(path)["time"]
