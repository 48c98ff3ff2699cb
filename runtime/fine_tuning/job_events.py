"""What a fine-tuning job tells of itself, put together at each look from what lies on the disk.

Ids are derived from what an event tells of, so that they are the same at every look, in every
process, and a page can be asked for by the last one's. Read next: trainers/journal.py, which writes
the job's own events and the pauses.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.paths import Home
from cray_agents.records import digest
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.fine_tuning.job_records import Ended, TuningRequest, Validated

MEASURES = ("reward_margin", "accuracy", "chosen_reward", "rejected_reward")


class TuningEvent(NamedTuple):
    """An event on its way. `key` tells it from the others of the job."""

    time: float
    key: str
    message: str
    level: str = "info"
    data: dict[str, Any] | None = None
    metrics: bool = False


def events(
    home: Home, asked: TuningRequest, validated: Validated | None, ended: Ended | None
) -> list[dict[str, Any]]:
    """All of a job's events in OpenAI's shape, newest first."""
    told = [
        TuningEvent(asked.created, "created", f"Created fine-tuning job: {asked.id}"),
        TuningEvent(
            asked.created, "validating", f"Validating training file: {asked.training_file}"
        ),
    ]
    if asked.validation_file is not None:
        message = f"Validating validation file: {asked.validation_file}"
        told.append(TuningEvent(asked.created, "validating too", message))
    if validated is not None:
        told.append(_validated(validated))
        told += sorted(_of_job(home.job(validated.spec.id), validated), key=lambda e: e.time)
    if ended is not None:
        told += _end(ended)
    return [_shown(asked.id, event) for event in reversed(told)]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The step events of a job's folder, in order; with `valid_loss` where it was evaluated."""
    events = _lines(folder)
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "evaluation"}
    steps = [event for event in events if event["event"] == "step"]
    return [{**event, "valid_loss": losses.get(event["step"])} for event in steps]


def _validated(validated: Validated) -> TuningEvent:
    left_out = f", {validated.left_out} left out as duplicates" if validated.left_out else ""
    message = f"Files validated, moving job to queued state: {validated.examples} examples"
    if validated.validation:
        message += f", {validated.validation} to validate on"
    data = {"job": validated.spec.id, "dataset": validated.spec.dataset}
    return TuningEvent(validated.time, "validated", message + left_out, data=data)


def _end(ended: Ended) -> Iterator[TuningEvent]:
    if ended.state == "succeeded":
        yield TuningEvent(ended.time, "model", f"New fine-tuned model created: {ended.model}")
        yield TuningEvent(ended.time, "ended", "The job has successfully completed")
    elif ended.state == "cancelled":
        yield TuningEvent(ended.time, "ended", "The job was cancelled")
    else:
        message = ended.error["message"] if ended.error else "The job failed"
        yield TuningEvent(ended.time, "ended", message, "error")


def _of_job(folder: Path, validated: Validated) -> Iterator[TuningEvent]:
    """What training itself told, and when it was paused."""
    resumed = list(_times(folder / "pauses", ".resumed"))
    for number, time in _times(folder / "pauses", ""):
        yield TuningEvent(time, f"paused {number}", "The job is paused: it saves and stops")
    for number, time in resumed:
        yield TuningEvent(time, f"resumed {number}", "The job is resumed")
    last = 0.0  # when it was last started
    for event in _lines(folder):
        time = event["time"]
        if event["event"] == "started":
            meant = any(last < when <= time for _, when in resumed)
            yield _started(event, meant)
            last = time
        elif event["event"] == "corrupt":
            yield TuningEvent(time, f"corrupt {event['message']}", event["message"], "warn")
        elif event["event"] == "layout":
            yield TuningEvent(time, "layout", f"Spread over ranks: {'; '.join(event['reasons'])}")
        elif event["event"] == "agreement":
            yield _agreement(event)
        elif event["event"] == "step":
            yield _step(event, validated)
        elif event["event"] == "evaluation":
            yield _evaluation(event, validated)


def _started(event: dict[str, Any], meant: bool) -> TuningEvent:
    key, step = f"started {event['attempt']}", event["from_step"]
    if event["attempt"] == 1:
        return TuningEvent(event["time"], key, "Fine-tuning job started")
    if meant:
        return TuningEvent(event["time"], key, f"Fine-tuning job goes on at step {step}")
    message = f"The job's processes ended before it did; started again at step {step}"
    return TuningEvent(event["time"], key, message, "warn")


def _agreement(event: dict[str, Any]) -> TuningEvent:
    """How far the trainer is from an engine that sampled some of the tokens."""
    most, limit = event["max_difference"], event["limit"]
    message = (
        f"Log-probabilities differ from the engine's by at most {_number(most)}, limit {limit:g}"
    )
    agrees = most is not None and most <= limit
    return TuningEvent(event["time"], "agreement", message, "info" if agrees else "error")


def _step(event: dict[str, Any], validated: Validated) -> TuningEvent:
    step, total = event["step"], validated.spec.hyperparameters.steps
    data = {
        "step": step,
        "total_steps": total,
        "train_loss": event["loss"],
        "learning_rate": event["lr"],
        "grad_norm": event["grad_norm"],
        "tokens": event["tokens"],
        "tokens_per_second": event["tokens_per_second"],
        **_measured(event),
    }
    message = f"Step {step}/{total}: training loss={_number(event['loss'])}"
    return TuningEvent(event["time"], f"step {step}", message, data=data, metrics=True)


def _evaluation(event: dict[str, Any], validated: Validated) -> TuningEvent:
    """OpenAI's two losses are one here: the whole validation file is always looked at."""
    step, total, loss = event["step"], validated.spec.hyperparameters.steps, event["loss"]
    message = f"Step {step}/{total}: validation loss={_number(loss)}"
    data = {"step": step, "total_steps": total, "valid_loss": loss, "full_valid_loss": loss}
    data |= {f"valid_{name}": value for name, value in _measured(event).items()}
    return TuningEvent(event["time"], f"evaluation {step}", message, data=data, metrics=True)


def _measured(event: dict[str, Any]) -> dict[str, Any]:
    """What dpo measures beside its loss."""
    return {name: event[name] for name in MEASURES if name in event}


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _shown(job_id: str, event: TuningEvent) -> dict[str, Any]:
    return {
        "id": f"ftevent-{digest([job_id, event.key], 24)}",
        "object": "fine_tuning.job.event",
        "created_at": int(event.time),
        "level": event.level,
        "message": event.message,
        "type": "metrics" if event.metrics else "message",
        "data": event.data or {},
    }


def _lines(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a job's events; a last one that is still being written is left out."""
    path = folder / "events.jsonl"
    return list(checksums.read_lines(path)) if path.is_file() else []


def _times(folder: Path, suffix: str) -> Iterator[tuple[int, float]]:
    """The numbers and times of the files `<n><suffix>`."""
    for path in folder.glob(f"[0-9]*{suffix}") if folder.is_dir() else ():
        number = path.name.removesuffix(suffix)
        if number.isdecimal():
            yield int(number), checksums.read_json(path)["time"]
