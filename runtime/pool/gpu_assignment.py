"""Which GPUs each replica of this host gets: its own, told by CUDA_VISIBLE_DEVICES.

Without that, every vLLM would take the first ones. Called by cli/compose.py; replica.py sets it.
Where the trainer trains on the same GPUs, name those that serve by CUDA_VISIBLE_DEVICES.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from cray_agents.errors import BadInput, SetupError

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: vLLM's flags whose product is how many GPUs one server takes.
_SIZES = {
    "--tensor-parallel-size": ("-tp",),
    "--pipeline-parallel-size": ("-pp",),
    "--data-parallel-size": ("-dp",),
    "--prefill-context-parallel-size": ("-pcp",),
}
_FLAGS = {flag: name for name, short in _SIZES.items() for flag in (name, *short)}


def shares(
    replicas: int,
    engine_args: Sequence[str],
    environment: Mapping[str, str],
    here: int,
) -> list[str]:
    """Each replica's CUDA_VISIBLE_DEVICES, on a host with so many GPUs `here`.

    Only what `environment` shows is shared out. Raises SetupError where there are too few.
    """
    each, there = size(engine_args), visible(environment, here)
    if len(there) < replicas * each:
        shown = f"{VISIBLE}={environment[VISIBLE]}" if VISIBLE in environment else "this host"
        raise SetupError(
            f"{replicas} replica(s) of {each} GPU(s) each need {replicas * each}, and {shown} has "
            f"{len(there)}: fewer --replicas, less parallelism in engine_args, or name the GPUs "
            f"with {VISIBLE}"
        )
    return [",".join(there[n * each : (n + 1) * each]) for n in range(replicas)]


def size(engine_args: Sequence[str]) -> int:
    """How many GPUs a server with these flags takes. Raises BadInput for one that is no number."""
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


def visible(environment: Mapping[str, str], here: int) -> list[str]:
    """The GPUs that CUDA shows: by number or UUID; what follows on one that is none is hidden."""
    if VISIBLE not in environment:
        return [str(number) for number in range(here)]
    shown: list[str] = []
    for name in map(str.strip, environment[VISIBLE].split(",")):
        if not name or name.startswith("-"):
            break
        shown.append(name)
    return shown
