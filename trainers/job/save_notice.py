"""Save notice: how long before its time limit a job is told to save and stop.

`MegatronTrainer` gives it to the scheduler with each start. Saves of earlier attempts tell how long
one takes; a first attempt's is estimated by the bytes that it writes.
"""

from math import ceil

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.planning.arithmetic import adapter_weights, count_weights
from cray_agents.training_jobs import JobSpec

MARGIN = 60.0  # seconds: Slurm looks at time limits twice a minute, and processes have to end
SAVED_BYTES = 12  # of a trained weight: itself and both moments, in float32
WRITTEN = 5e8  # bytes a second of a node, before a save was measured
NEWEST = 5  # steps and saves that tell how long the next one takes


def notice_seconds(spec: JobSpec, home: Home, nodes: int) -> int:
    """Return the seconds between the early signal and the time limit of a job's next start.

    In that time the step under way ends, a save that is being written ends, and a last one is made.
    """
    events = JobJournal(home, spec.id).events()
    steps = _newest_seconds(events, "step")
    saves = _newest_seconds(events, "saved") or [first_save_seconds(spec, home, nodes)]
    return ceil(MARGIN + max(steps, default=0.0) + 2 * max(saves))


def first_save_seconds(spec: JobSpec, home: Home, nodes: int) -> float:
    """Estimate the seconds of a save, by the bytes of a resume point.

    0 if the parent cannot be read: the job's own process says so.
    """
    hyper = spec.hyperparameters
    try:
        model = read_architecture(home.root / spec.parent, hyper.way)
    except (BadInput, NotFound):
        return 0.0
    lora = hyper.lora
    weights = count_weights(model).total if lora is None else adapter_weights(model, lora)
    return SAVED_BYTES * weights / (WRITTEN * nodes)


def _newest_seconds(events: list[dict[str, object]], kind: str) -> list[float]:
    """Return the seconds of the newest events of a kind."""
    seconds = [event["seconds"] for event in events if event["event"] == kind]
    return [float(value) for value in seconds[-NEWEST:] if isinstance(value, int | float)]
