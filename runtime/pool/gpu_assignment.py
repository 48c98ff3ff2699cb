"""GPU assignment: give each replica of this host its own GPUs by CUDA_VISIBLE_DEVICES.

Without that variable every vLLM would take the first GPUs. Called by cli/platform/compose.py;
vllm_replica.py sets the variable. To keep some GPUs for the trainer, start the platform with a
CUDA_VISIBLE_DEVICES that names the others.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from cray_agents.errors import BadInput, SetupError

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: vLLM's parallelism flags, with short forms: one server takes the product of their values in GPUs.
_SIZES = {
    "--tensor-parallel-size": ("-tp",),
    "--pipeline-parallel-size": ("-pp",),
    "--data-parallel-size": ("-dp",),
    "--prefill-context-parallel-size": ("-pcp",),
}
_FLAGS = {flag: name for name, short in _SIZES.items() for flag in (name, *short)}


def assign_gpus(
    replicas: int,
    engine_args: Sequence[str],
    environment: Mapping[str, str],
    gpu_count: int,
) -> list[str]:
    """Return each replica's CUDA_VISIBLE_DEVICES on a host with `gpu_count` GPUs.

    Only GPUs visible in `environment` are assigned. Raises SetupError where there are too few.
    """
    each, gpus = gpus_per_server(engine_args), visible_gpus(environment, gpu_count)
    if len(gpus) < replicas * each:
        owner = f"{VISIBLE}={environment[VISIBLE]}" if VISIBLE in environment else "this host"
        raise SetupError(
            f"{replicas} replica(s) of {each} GPU(s) each need {replicas * each}, and {owner} has "
            f"{len(gpus)}: fewer --replicas, less parallelism in engine_args, or name the GPUs "
            f"with {VISIBLE}"
        )
    return [",".join(gpus[n * each : (n + 1) * each]) for n in range(replicas)]


def gpus_per_server(engine_args: Sequence[str]) -> int:
    """Return how many GPUs one server takes by its flags. Raises BadInput for a bad number."""
    words = [*(word for arg in engine_args for word in arg.split("=", 1)), ""]
    sizes = dict.fromkeys(_SIZES, 1)
    for flag, value in pairwise(words):
        name = _FLAGS.get(flag.replace("_", "-"))
        if name is None:
            continue
        if not (value.isdecimal() and int(value) > 0):
            raise BadInput(f"engine_args: {flag} {value!r} is no number", param="engine_args")
        sizes[name] = int(value)  # the last one counts, as in vLLM
    return prod(sizes.values())


def visible_gpus(environment: Mapping[str, str], gpu_count: int) -> list[str]:
    """Return the GPUs visible to CUDA, by number or UUID; an empty or negative entry ends them."""
    if VISIBLE not in environment:
        return [str(number) for number in range(gpu_count)]
    gpus: list[str] = []
    for name in map(str.strip, environment[VISIBLE].split(",")):
        if not name or name.startswith("-"):
            break
        gpus.append(name)
    return gpus
