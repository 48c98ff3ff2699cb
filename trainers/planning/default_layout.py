"""Default layout: choose a layout for a job whose spec names none, and say why in words.

MegatronTrainer calls `choose_default_layout` before it writes the spec. Read next:
layout_choice.py.
"""

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.datasets.reader import read_dataset
from cray_agents.trainers.models.architecture import Architecture, read_architecture
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.cluster_resources import Gpus, Resources
from cray_agents.trainers.planning.layout_choice import choose_layout
from cray_agents.training_jobs import JobSpec, Layout

DATA_ONLY = "on CPUs ranks only share the data: what splits the model costs more than it saves"
COMMANDED = 1024  # tokens of a sequence that a client sends
LOUD = (
    "IT DOES NOT FIT by this estimate and will most likely run out of memory; it is started all"
    " the same, for the estimate is one from above"
)


def choose_default_layout(
    spec: JobSpec, home: Home, resources: Resources
) -> tuple[JobSpec, list[str]]:
    """Return the spec with a layout, and the reasons, which are empty if the spec names a layout.

    A missing `recompute` is chosen with the layout. Raises BadInput and NotFound if the model or
    the dataset allows no choice.
    """
    if "layout" in spec.model_fields_set:
        return spec, []
    if resources.gpus is None:
        layout, reasons = _on_cpus(spec, resources.ranks)
        return spec.model_copy(update={"layout": layout}), reasons
    return _on_gpus(spec, home, resources, resources.gpus)


def _on_cpus(spec: JobSpec, ranks: int) -> tuple[Layout, list[str]]:
    batch = spec.hyperparameters.batch_size
    if batch >= ranks:
        return Layout(data=ranks), [f"data={ranks}: {DATA_ONLY}"]
    return Layout(data=batch), [f"data={batch} of {ranks} ranks: a batch has no more; {DATA_ONLY}"]


def _on_gpus(
    spec: JobSpec, home: Home, resources: Resources, gpus: Gpus
) -> tuple[JobSpec, list[str]]:
    hyper = spec.hyperparameters
    choice = choose_layout(
        read_parent(home.root / spec.parent, hyper.init, hyper.way),
        resources.ranks,
        memory_gib_per_rank=gpus.gib,
        ranks_per_node=resources.ranks_per_node,
        hyper=hyper,
        sequence_length=usual_length(spec, home),
        recompute=spec.recompute if "recompute" in spec.model_fields_set else None,
        teacher=teacher_of(spec, home),
    )
    reasons = choice.reasons if choice.fits else [LOUD, *choice.reasons]
    chosen = {"layout": choice.layout, "recompute": choice.recompute}
    return spec.model_copy(update=chosen), reasons


def teacher_of(spec: JobSpec, home: Home) -> Architecture | None:
    """Return the model that judges a job's samples; None without one. Raises BadInput, NotFound."""
    return None if spec.teacher is None else read_architecture(home.root / spec.teacher)


def usual_length(spec: JobSpec, home: Home) -> int:
    """Return the tokens of a usual unit: a training sample's mean, twice that for a pair.

    Of a job by commands, whose samples come later, it is a guess.
    """
    if spec.commands is not None:
        return COMMANDED
    split = read_dataset(home, spec.dataset).get("splits", {}).get("train", {})
    if not split.get("samples"):
        raise BadInput(f"dataset {spec.dataset} has no samples to train on", param="dataset")
    mean: float = split["tokens"] / split["samples"]
    return max(1, round(2 * mean if spec.method == "dpo" else mean))
