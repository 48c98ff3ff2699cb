"""How a job is spread whose spec leaves that open: a layout, and in words why that one.

MegatronTrainer calls `spread` before it writes the spec down. Read next: planning/choosing.py.
"""

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.datasets.reader import read_dataset
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.cluster_resources import Gpus, Resources
from cray_agents.trainers.planning.layout_choice import choose_layout
from cray_agents.training_jobs import JobSpec, Layout

DATA_ONLY = "on CPUs ranks only share the data: what splits the model costs more than it saves"
LOUD = (
    "IT DOES NOT FIT by this estimate and will most likely run out of memory; it is started all"
    " the same, for the estimate is one from above"
)


def spread(spec: JobSpec, home: Home, resources: Resources) -> tuple[JobSpec, list[str]]:
    """The spec with a layout, and the reasons; none where it names one itself.

    `recompute` is chosen with the layout, where it was left out as well. Raises BadInput and
    NotFound for a model or a dataset that nothing can be chosen for.
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
    choice = choose_layout(
        read_parent(home.root / spec.parent, spec.hyperparameters.init),
        resources.ranks,
        memory_gib_per_rank=gpus.gib,
        ranks_per_node=resources.ranks_per_node,
        hyper=spec.hyperparameters,
        sequence_length=usual_length(spec, home),
        recompute=spec.recompute if "recompute" in spec.model_fields_set else None,
    )
    reasons = choice.reasons if choice.fits else [LOUD, *choice.reasons]
    chosen = {"layout": choice.layout, "recompute": choice.recompute}
    return spec.model_copy(update=chosen), reasons


def usual_length(spec: JobSpec, home: Home) -> int:
    """Tokens of a batch's usual unit: the mean of a training sample, twice that for a pair."""
    found = read_dataset(home, spec.dataset).get("splits", {}).get("train", {})
    if not found.get("samples"):
        raise BadInput(f"dataset {spec.dataset} has no samples to train on", param="dataset")
    mean: float = found["tokens"] / found["samples"]
    return max(1, round(2 * mean if spec.method == "dpo" else mean))
