"""GPU placement: divide a host's GPUs among vLLM replicas and training jobs.

Replicas get theirs from the front. Training gets the rest, or from the end as many as it asks for;
spare replicas may start on the GPUs between. Where the GPUs do not suffice for both, both sides get
the same ones and use them by turns (server/gpu_turns.py). Both sides are told by
CUDA_VISIBLE_DEVICES. pool/vllm_process.py sets it for a replica, local.py and
batch_script.py for a job of this host. Called by choose.py, server/compose.py and `doctor`.
None of this was run on a GPU.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from pathlib import Path
from typing import Literal

from cray_agents.config import Config
from cray_agents.errors import BadInput

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: vLLM's parallelism flags, with short forms: one server takes the product of their values in GPUs.
_SIZES = {
    "--tensor-parallel-size": ("-tp",),
    "--pipeline-parallel-size": ("-pp",),
    "--data-parallel-size": ("-dp",),
    "--prefill-context-parallel-size": ("-pcp",),
}
_FLAGS = {flag: name for name, short in _SIZES.items() for flag in (name, *short)}


@dataclass(frozen=True)
class GpuPlacement:
    """The ids of the GPUs of each replica, of each possible spare replica, and of training.

    `turns`: replicas and training have GPUs in common, and use them by turns.
    """

    replicas: tuple[tuple[str, ...], ...] = ()
    spares: tuple[tuple[str, ...], ...] = ()
    training: tuple[str, ...] = ()
    turns: bool = False

    def __str__(self) -> str:
        """Describe the placement, as in "replica 0 has GPU 0, training jobs have GPUs 1, 2"."""
        uses = [f"replica {n} has {name_gpus(ids)}" for n, ids in enumerate(self.replicas)]
        uses += [f"a spare replica may have {name_gpus(ids)}" for ids in self.spares]
        uses.append(f"training jobs have {name_gpus(self.training)}")
        return ", ".join(uses) + ", by turns" * self.turns


def place_gpus(
    gpus: Sequence[str],
    *,
    replicas: int,
    each: int = 1,
    spares: int = 0,
    training: int | None = 0,
    share: Literal["auto", "split", "turns"] = "split",
) -> GpuPlacement:
    """Divide GPUs among replicas of `each` GPUs, training, and as many `spares` as are left.

    Args:
        gpus: the ids of a host's GPUs, as CUDA_VISIBLE_DEVICES names them.
        training: the number of GPUs for training; None: all that the replicas leave, at least one.
            By turns: None: all.
        share: "turns" lets replicas and training use the same GPUs by turns, without spares; "auto"
            does so where there are too few for both.

    Raises BadInput, with a list of what fits, if there are too few.
    """
    if twice := sorted({gpu for gpu in gpus if gpus.count(gpu) > 1}):
        raise BadInput(f"{VISIBLE} names {', '.join(twice)} twice: name each GPU once")
    if replicas and each > 1 and is_sliced(gpus):
        raise BadInput(
            f"a replica of {each} GPUs cannot run on MIG instances, of which CUDA shows a process "
            "one: leave the parallelism out of engine_args, or name whole GPUs",
            param="engine_args",
        )
    served, trained = replicas * each, 1 if training is None else training
    few = served + trained > len(gpus)
    if share != "split" and served and trained and (few or share == "turns"):
        if max(served, trained) > len(gpus):
            raise _refusal(gpus, replicas, each, training, turns=True)
        return GpuPlacement(
            replicas=_split(tuple(gpus), replicas, each),
            training=tuple(gpus[-(training or len(gpus)) :]),
            turns=True,
        )
    if few:
        raise _refusal(gpus, replicas, each, training)
    left = tuple(gpus[served:])
    between = len(left) - (len(left) if training is None else training)
    count = min(spares, between // each)
    return GpuPlacement(
        replicas=_split(tuple(gpus), replicas, each),
        spares=_split(left, count, each),
        training=left[between:],
    )


def place_on_host(
    config: Config, *, replicas: int, here: bool, gpus: Sequence[str] | None = None
) -> GpuPlacement:
    """Divide this host's GPUs by the configuration.

    Args:
        replicas: the vLLM servers that run on GPUs of this host.
        here: jobs run on this host, too.
        gpus: the ids of the host's GPUs; None: those that this process may use.

    Raises BadInput.
    """
    gpus = host_gpus() if gpus is None else gpus
    # without a GPU that was detected or named, jobs train on CPU cores
    wanted = config.train_gpus == "on" or config.train_gpu is not None or bool(nvidia_devices())
    trains = here and bool(gpus) and wanted and config.train_gpus != "off"
    return place_gpus(
        gpus,
        replicas=replicas,
        each=gpus_per_server(config.engine_args) if replicas else 1,
        spares=config.spare_replicas if replicas else 0,
        training=config.train_gpus_per_node if trains else 0,
        share=config.share_gpus,
    )


def check_weights_fit(name: str, weights: int, each: int, gib: float) -> None:
    """Raise BadInput if a replica of `each` GPUs of `gib` GiB cannot even hold `weights` bytes.

    A replica that shares its GPUs is alone on them in its turn. Its KV cache comes on top: vLLM
    itself refuses to start where nothing is left for one.
    """
    need = weights / 2**30
    if need > each * gib:
        fits = ceil(need / gib)
        raise BadInput(
            f"the weights of {name} take {need:.4g} GiB, and a replica has {count_gpus(each)} of"
            f" {gib:.4g} GiB. What fits: engine_args with --tensor-parallel-size {fits} or more, on"
            f" a host with as many; or a smaller model",
            param="engine_args",
        )


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


def host_gpus() -> list[str]:
    """Return the ids of this host's GPUs that this process may use."""
    return visible_gpus(os.environ, len(nvidia_devices()))


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


def is_sliced(gpus: Sequence[str]) -> bool:
    """Tell whether some are MIG instances. A process sees one of them, however many are named."""
    return any(gpu.startswith("MIG-") for gpu in gpus)


def nvidia_devices() -> list[str]:
    """Return the device files of this machine's GPUs."""
    devices = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    return [str(path) for path in sorted(devices, key=lambda path: int(path.name[6:]))]


def gpu_type(driver: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Return the model of this host's first GPU as Slurm writes it; "" without one.

    Such as `nvidia_h100_80gb_hbm3`: a type of gres that Slurm finds itself is a part of this name
    (gres.conf, AutoDetect=nvml). `driver`: the folder in which NVIDIA's driver describes GPUs.
    """
    for path in sorted(driver.glob("*/information")):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("Model:"):
                    return "_".join(line.removeprefix("Model:").lower().split())
    return ""


def name_gpus(gpus: Sequence[str]) -> str:
    """Name GPUs in a sentence: "GPU 0", "GPUs 0, 1", "no GPU"."""
    return f"GPU{'s' * (len(gpus) > 1)} {', '.join(gpus)}" if gpus else "no GPU"


def count_gpus(count: int) -> str:
    """Count GPUs in a sentence: "1 GPU", "2 GPUs"."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def _split(gpus: tuple[str, ...], shares: int, each: int) -> tuple[tuple[str, ...], ...]:
    return tuple(gpus[n * each : (n + 1) * each] for n in range(shares))


def _refusal(
    gpus: Sequence[str], replicas: int, each: int, training: int | None, *, turns: bool = False
) -> BadInput:
    """Return the error for too few GPUs: every remedy in it fits, or names what is missing."""
    total, served, trained = len(gpus), replicas * each, 1 if training is None else training
    if turns:
        return _refusal_of_turns(gpus, replicas, each, trained)
    uses, fits = [], []
    if replicas:
        servers = f"{replicas} replica{'' if replicas == 1 else 's'} of {count_gpus(each)}"
        uses.append(f"{servers} each" if replicas > 1 else servers)
        if 0 < (fewer := (total - trained) // each) < replicas:
            fits.append(f"--replicas {fewer}")
        if 0 < (smaller := (total - trained) // replicas) < each:
            fits.append(f"engine_args for at most {count_gpus(smaller)} a replica")
    if trained:
        least = "at least " if training is None else ""
        uses.append(f"training on {least}{count_gpus(trained)}")
        if 0 < (left := total - served) < trained:
            fits.append(f"train_gpus_per_node = {left}")
        if served <= total:
            fits.append("train_gpus = 'off', which trains on CPU cores")
            fits.append("a site's Slurm, which trains on other nodes")
    fits.append(f"a host with {count_gpus(served + trained)} that {VISIBLE}, if set, names")
    if replicas and trained and max(served, trained) <= total:
        fits.append("share_gpus = 'turns', by which they take turns on the same GPUs")
    return BadInput(
        f"{' and '.join(uses)} need {count_gpus(served + trained)}, and this host has"
        f" {name_gpus(gpus)}. What fits: {'; or '.join(fits)}",
        param="train_gpus" if trained else "replicas",
    )


def _refusal_of_turns(gpus: Sequence[str], replicas: int, each: int, trained: int) -> BadInput:
    """Return the error for a host whose GPUs do not suffice for one of the two sides alone."""
    total, served = len(gpus), replicas * each
    sides, fits = [], []
    if served > total:
        sides.append(f"{replicas} x {count_gpus(each)} for replicas")
        if fewer := total // each:
            fits.append(f"--replicas {fewer}")
        if smaller := total // replicas:
            fits.append(f"engine_args for at most {count_gpus(smaller)} a replica")
    if trained > total:
        sides.append(f"{count_gpus(trained)} for training")
        fits.append(f"train_gpus_per_node = {total}" if total else "train_gpus = 'off'")
    both = " and ".join(fits) if len(sides) > 1 else "; or ".join(fits)
    enough = f"a host with {count_gpus(max(served, trained))} that {VISIBLE}, if set, names"
    return BadInput(
        f"{' and '.join(sides)} are more than this host has, {name_gpus(gpus)}, even by turns. What"
        f" fits: {'; or '.join(filter(None, (both, enough)))}",
        param="replicas" if served > total else "train_gpus_per_node",
    )
