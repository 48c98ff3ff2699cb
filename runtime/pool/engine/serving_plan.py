"""Serving plan: how vLLM serves a model, from the model, the device and its memory.

A setting that is 0, or `dtype` "auto", is chosen here; any other is taken as it is. Pure but for
`ServedModel.of`, so that every process comes to the same plan. cli/platform/replica_devices.py
describes the device, and `up` says in a line what was chosen and why.

On a CPU bfloat16 and a core more pay from some size on. 80 prompts of 420 tokens, 64 at a time,
took SmolLM2-135M 76 s in float32 on one of two cores, 39 s on both, 32 s in bfloat16 on one, and 18
s in bfloat16 on both. For a toy of 0.4M parameters the calls around the products are the work.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cray_agents.config import Config
from cray_agents.errors import BadInput
from cray_agents.runtime.registry.deltas import rebuilt_bytes
from cray_agents.runtime.registry.model_files import CONFIG, read_json
from cray_agents.runtime.scheduler.gpu_placement import check_weights_fit, count_gpus

LARGE = 30e6  # parameters from which a CPU computes in bfloat16, on all cores
CPU_REQUESTS = 64
GPU_REQUESTS, LARGE_GPU_REQUESTS, LARGE_GPU = 256, 1024, 70  # vLLM's own, the last from 70 GiB on
USUAL_TOKENS = 512  # of a request: fewer requests are let in than have these in the KV cache
KV_SHARE = 1 / 8  # of a host's memory, which trainer and programs of agents use as well
LEAST_KV_GIB = 1.0  # on a CPU; memory is taken as it is used
USABLE = 0.85  # of a GPU's memory: vLLM takes 0.92, some of it for activations
SECONDS_PER_GIB = 5.0  # to read weights from a slow shared filesystem, and to convert them
_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class ServedModel:
    """A model as serving sees it.

    `weights` are bytes as stored, in `dtype`. `context`: the model's positions. `kv_numbers`: what
    the KV cache keeps of a token, at most. 0: unknown.
    """

    name: str
    weights: int
    dtype: str = "float32"
    context: int = 0
    kv_numbers: int = 0

    @property
    def parameters(self) -> float:
        """The number of weights, as if all had the dtype that config.json names."""
        return self.weights / _BYTES.get(self.dtype, 2)

    @property
    def size(self) -> str:
        """The number of weights in words, as "135M parameters"."""
        millions = self.parameters / 1e6
        text = f"{millions:.3g}M" if millions < 999 else f"{millions / 1e3:.3g}B"
        return f"{text} parameters"

    @classmethod
    def of(cls, name: str, checkpoint: Path) -> "ServedModel":
        """Read a checkpoint's sizes. What its config.json does not say stays unknown."""
        config: dict[str, Any] = {}
        if (checkpoint / CONFIG).is_file():
            config = read_json(checkpoint.resolve(), CONFIG)
        text = config.get("text_config")
        config |= text if isinstance(text, dict) else {}

        def number(key: str) -> int:
            value = config.get(key)
            return value if isinstance(value, int) and value > 0 else 0

        heads = number("num_attention_heads")
        size = number("head_dim") or (number("hidden_size") // heads if heads else 0)
        each = 2 * (number("num_key_value_heads") or heads) * size
        if latent := number("kv_lora_rank"):  # multi-head latent attention: DeepSeek, Kimi
            each = latent + number("qk_rope_head_dim")
        return cls(
            name=name,
            weights=rebuilt_bytes(checkpoint),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            context=number("max_position_embeddings"),
            kv_numbers=number("num_hidden_layers") * each,
        )


@dataclass(frozen=True)
class ServingDevice:
    """What one replica has: `gpus` of a kind, or a share of a host's cores.

    `gib`: memory of a GPU, or the replica's share of the host's; 0: unknown. `bfloat16`: the CPU
    has instructions for it.
    """

    gib: float = 0.0
    gpus: int = 0
    kind: str = ""
    cores: int = 1
    bfloat16: bool = False


@dataclass(frozen=True)
class ServingPlan:
    """The configuration with every setting of serving chosen, and the reason of each choice."""

    config: Config
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Say what was chosen and why, in one line."""
        return "; ".join(self.reasons)


class _Choices:
    """The choices so far: a setting of the configuration's own wins."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.values: dict[str, Any] = {}
        self.reasons: list[str] = []

    def take(self, key: str, value: Any, text: str, why: str) -> Any:
        """Choose a setting; return it. `text` has {} for its value."""
        given = getattr(self._config, key)
        if is_set := given not in (0, "auto"):
            value = given
        self.values[key] = value
        shown = f"{value:,.3g}" if isinstance(value, float) else str(value)
        self.reasons.append(f"{text.format(shown)} ({f'{key} is set' if is_set else why})")
        return value

    def note_unused(self, *keys: str) -> None:
        """Say which settings have no effect on this device."""
        unused = [key for key in keys if getattr(self._config, key)]
        self.reasons += [f"{key} has no effect, for it is of CPUs" for key in unused]


def plan_serving(config: Config, model: ServedModel, device: ServingDevice) -> ServingPlan:
    """Choose the settings of serving that `config` leaves open.

    The context is left to vLLM, which takes as much as its KV cache holds: here it is foretold.
    Raises BadInput for weights that do not fit.
    """
    choices = _Choices(config)
    plan = _on_gpus if device.gpus else _on_cpu
    most, why, cache, width = plan(choices, model, device)
    tokens = int(cache * 2**30 / (model.kv_numbers * width)) if model.kv_numbers else 0
    held = tokens // USUAL_TOKENS if tokens else most
    if held < most:
        why = f"so many have {USUAL_TOKENS} tokens each in {cache:.3g} GiB of KV cache"
    choices.take("max_num_seqs", max(1, min(most, held)), "{} requests at once", why)
    context, why = f"{model.context} tokens of context", "the model's"
    if not model.context:
        context, why = "a context that vLLM finds", "config.json names none"
    elif tokens and tokens < model.context:
        context, why = f"about {tokens} tokens of context", "more do not fit the KV cache"
    given = config.max_model_len
    choices.take("max_model_len", 0, "{} tokens of context" if given else context, why)
    gib = model.weights / 2**30
    more, why = round(SECONDS_PER_GIB * gib), f"{gib:.2g} GiB of weights"
    choices.take("start_timeout", 300 + more, "{} s to start", why)
    choices.take("load_timeout", 300 + more, "{} s to load", why)
    choices.take("swap_timeout", 120 + more, "{} s to wait for a version", why)
    return ServingPlan(config.model_copy(update=choices.values), tuple(choices.reasons))


def _on_gpus(
    choices: _Choices, model: ServedModel, device: ServingDevice
) -> tuple[int, str, float, int]:
    """Choose for GPUs; return the most requests and why, GiB of KV cache, bytes of a number."""
    gpus = f"{count_gpus(device.gpus)} {device.kind}".rstrip()
    choices.take("dtype", "auto", "dtype {}", f"stored as {model.dtype}")
    choices.note_unused("threads", "kv_cache_gib")
    if not device.gib:
        return GPU_REQUESTS, f"{gpus} of unknown memory", 0.0, 2
    check_weights_fit(model.name, model.weights, device.gpus, device.gib)
    # vLLM's own numbers; A100s are slower with more (vllm-project/vllm#17885)
    large = device.gib >= LARGE_GPU and "A100" not in device.kind.upper()
    cache = USABLE * device.gib * device.gpus - model.weights / 2**30
    most = LARGE_GPU_REQUESTS if large else GPU_REQUESTS
    return most, f"{gpus} of {device.gib:.4g} GiB", max(0.1, cache), 2


def _on_cpu(
    choices: _Choices, model: ServedModel, device: ServingDevice
) -> tuple[int, str, float, int]:
    """Choose for a CPU; return the same as for GPUs."""
    large, why = model.parameters >= LARGE, model.size
    # weights stored with more digits would lose what a job with a small learning rate changes
    half = large and model.dtype == "bfloat16" and device.bfloat16
    if large:
        slow = model.dtype == "bfloat16" and not half
        why += ", and this CPU is slow in bfloat16" if slow else f" stored as {model.dtype}"
    dtype = choices.take("dtype", "bfloat16" if half else "float32", "{}", why)
    width = 4 if dtype == "float32" else 2
    gib = model.parameters * width / 2**30
    if 0 < device.gib < gib:
        raise BadInput(
            f"the weights of {model.name} take {gib:.4g} GiB in {dtype}, and a replica has"
            f" {device.gib:.4g} GiB of this host's memory: serve a smaller model"
            " or fewer replicas",
            param="model",
        )
    threads = device.cores if large else max(1, device.cores - 1)
    choices.take("threads", threads, "threads: {}", "all cores" if large else "a core is free")
    need = CPU_REQUESTS * model.context * model.kv_numbers * width / 2**30
    share = KV_SHARE * device.gib
    cache, why = LEAST_KV_GIB, "the least"
    if min(need, share) > cache:
        cache, why = min((need, "what all requests need"), (share, "an eighth of the memory"))
    cache = choices.take("kv_cache_gib", cache, "{} GiB of KV cache", why)
    return CPU_REQUESTS, "a CPU", cache, width
