"""What happens in a training job, as lines that people read. For jobs.py and job_page.py.

The events and their fields are told in trainers/journal.py. One that is not known here, from newer
code, is shown with all it says.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

Event = dict[str, Any]

USUAL = ("loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds", "mfu", "memory_gib")
_DIMENSIONS = ("data", "tensor", "pipeline", "interleave", "context", "expert")


def sentence(event: Event, steps: int) -> str:
    """An event of a job of so many steps, on a line, with its time of day."""
    at = datetime.fromtimestamp(event["time"], UTC).astimezone().strftime("%H:%M:%S")
    tell = _TELLERS.get(event["event"])
    if event["event"] == "step":
        return f"{at}  {step_line(event, steps)}"
    return f"{at}  {tell(event) if tell is not None else _unknown(event)}"


def step_line(event: Event, steps: int) -> str:
    """A step's numbers: what is usual, then what its method measures."""
    parts = [
        f"step {event['step']:>{len(str(steps))}}/{steps}",
        f"loss {_number(event, 'loss', '.4f')}",
        f"lr {_number(event, 'lr', '.2e')}",
        f"grad norm {_number(event, 'grad_norm', '.3f')}",
        *_measures(event),
        f"{_number(event, 'tokens_per_second', ',.0f')} tokens/s",
    ]
    if "mfu" in event:
        parts.append(f"MFU {_number(event, 'mfu', '.1%')}")
    if "memory_gib" in event:
        parts.append(f"{_number(event, 'memory_gib', '.1f')} GiB")
    return "  ".join(parts)


def layout_text(layout: dict[str, Any]) -> str:
    """A layout by the dimensions that split anything."""
    split = [f"{name} {layout[name]}" for name in _DIMENSIONS if layout.get(name, 1) > 1]
    if layout.get("sequence_parallel"):
        split.append("sequence parallel")
    return ", ".join(split) or "one rank"


def _measures(event: Event) -> list[str]:
    """What a method measures beyond what every step has, by name."""
    names = [n for n, value in event.items() if n not in USUAL and _is_measure(event, n, value)]
    return [f"{name.replace('_', ' ')} {_number(event, name, '.4g')}" for name in names]


def _is_measure(event: Event, name: str, value: Any) -> bool:
    if name in ("time", "step"):
        return False
    return isinstance(value, int | float) or name in event.get("not_finite", {})


def _number(event: Event, name: str, form: str) -> str:
    """A number of an event; one that was not finite by its word."""
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
    return text


def _evaluation(event: Event) -> str:
    loss = f"loss {_number(event, 'loss', '.4f')} over {event['tokens']:,} tokens"
    return "  ".join([f"evaluation after step {event['step']}: {loss}", *_measures(event)])


def _agreement(event: Event) -> str:
    where = f"; the most at token {event['place']} of {event['run_id']}" if "place" in event else ""
    return (
        "the trainer's log-probabilities differ from the engine's by"
        f" {_number(event, 'max_difference', '.2g')} at most and"
        f" {_number(event, 'mean_difference', '.2g')} on average, over {event['tokens']:,} tokens"
        f" (limit {_number(event, 'limit', 'g')}{where})"
    )


def _saved(event: Event) -> str:
    return f"resume point after step {event['step']} saved in {event['seconds']:.2f} s"


def _unknown(event: Event) -> str:
    said = {name: value for name, value in event.items() if name not in ("event", "time")}
    return f"{event['event']}: " + ", ".join(f"{name} {value}" for name, value in said.items())


_TELLERS: dict[str, Callable[[Event], str]] = {
    "layout": _layout,
    "started": _started,
    "corrupt": lambda event: f"{event['message']}: set aside, the one before it is used",
    "evaluation": _evaluation,
    "agreement": _agreement,
    "saved": _saved,
    "failed": lambda event: f"failed: {event['message']}",
    "retried": lambda event: f"tried again: {'; '.join(event['changes'])}",
    "succeeded": lambda event: f"succeeded: checkpoint {event['checkpoint']}",
}
