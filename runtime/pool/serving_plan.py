"""Serving plan: the settings of vLLM that follow from the model, the device and its memory.

A setting that is 0, or `dtype` "auto", is chosen here; any other is taken as it is.
server/replica_count.py describes the device, and `up` says in a line what was chosen.

On a CPU bfloat16 and a core more pay from some size on: BENCHMARKS.md, Serving, has the figures of
SmolLM2-135M. For a toy of 0.4M parameters the calls around the products are the work.

Readers of weights (`--load-format`): names and packages are those of vLLM 0.32, without the formats
that cannot load again into a running server. The order of FAST follows their makers' figures;
nothing was run on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cray_agents.config import Config
from cray_agents.errors import BadInput, SetupError
from cray_agents.runtime.registry.deltas import rebuilt_bytes
from cray_agents.runtime.registry.foreign_model import CONFIG, read_json
from cray_agents.runtime.scheduler.gpu_placement import check_weights_fit, count_gpus
from cray_agents.training_jobs import BFLOAT16_FROM

LARGE = BFLOAT16_FROM  # parameters from which a CPU also computes on all cores
CPU_REQUESTS = 64
GPU_REQUESTS, LARGE_GPU_REQUESTS, LARGE_GPU = 256, 1024, 70  # vLLM's own, the last from 70 GiB on
USUAL_TOKENS = 512  # of a request: fewer requests are let in than have these in the KV cache
KV_SHARE = 1 / 8  # of a host's memory, which trainer and programs of agents use as well
LEAST_KV_GIB = 1.0  # on a CPU; memory is taken as it is used
TIER_TOKENS = 2**15  # several steps' worth: vLLM keeps nothing of a step that does not fit
USABLE = 0.85  # of a GPU's memory: vLLM takes 0.92, some of it for activations
SECONDS_PER_GIB = 5.0  # to read weights from a slow shared filesystem, and to convert them

AUTO = "auto"  # vLLM's own reader of safetensors
#: Readers for GPUs by their package, fastest first.
FAST = {
    "instanttensor": "instanttensor",
    "fastsafetensors": "fastsafetensors",
    "runai_streamer": "runai_model_streamer",
}
#: Readers that need CUDA; the other one streams to any device.
_CUDA = {"instanttensor", "fastsafetensors"}
PLAIN = (AUTO, "safetensors")
#: Flags that a KV tier does not go with.
_NO_TIER = ("--kv-transfer-config", "--kv_transfer_config", "--no-enable-prefix-caching")


@dataclass(frozen=True)
class ServedModel:
    """A model as serving sees it.

    `weights`: bytes as stored, in `dtype`. `context`: its positions. `kv_numbers`: what the KV
    cache keeps of a token, at most. 0: unknown.
    """

    name: str
    weights: int
    dtype: str = "float32"
    context: int = 0
    kv_numbers: int = 0

    @property
    def parameters(self) -> float:
        """The number of weights, as if all had the dtype that config.json names."""
        return self.weights / (4 if self.dtype == "float32" else 2)

    @classmethod
    def of(cls, name: str, checkpoint: Path) -> "ServedModel":
        """Read a checkpoint's sizes. What its config.json does not say stays unknown."""
        has_config = (checkpoint / CONFIG).is_file()
        config: dict[str, Any] = read_json(checkpoint.resolve(), CONFIG) if has_config else {}
        text = config.get("text_config")
        config |= text if isinstance(text, dict) else {}

        def number(key: str) -> int:
            value = config.get(key)
            return value if isinstance(value, int) and value > 0 else 0

        heads = number("num_attention_heads")
        size = number("head_dim") or number("hidden_size") // max(1, heads)
        each = 2 * (number("num_key_value_heads") or heads) * size
        if latent := number("kv_lora_rank"):  # multi-head latent attention: DeepSeek, Kimi
            each = latent + number("qk_rope_head_dim")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        kept = number("num_hidden_layers") * each
        return cls(name, rebuilt_bytes(checkpoint), dtype, number("max_position_embeddings"), kept)


@dataclass(frozen=True)
class ServingDevice:
    """A replica's hardware: `gpus` of a kind, or a share of a host's cores.

    `gib`: memory of a GPU, or the replica's share of the host's; 0: unknown. `bfloat16`: the CPU
    has instructions for it.
    """

    gib: float = 0.0
    gpus: int = 0
    kind: str = ""
    cores: int = 1
    bfloat16: bool = False


class _Choices:
    """The choices so far, and why: a setting of the configuration's own wins."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.reasons: list[str] = []

    def take(self, key: str, value: Any, text: str, why: str) -> Any:
        """Choose a setting; return it. `text` has {} for its value."""
        given = getattr(self.config, key)
        if given not in (0, "auto"):
            value, why = given, f"{key} is set"
        self.config = self.config.model_copy(update={key: value})
        number = f"{value:,.3g}" if isinstance(value, float) else value
        self.reasons.append(f"{text.format(number)} ({why})")
        return value


def plan_serving(config: Config, model: ServedModel, device: ServingDevice) -> tuple[Config, str]:
    """Choose the settings of serving that `config` leaves open; say in a line which, and why.

    The context is left to vLLM, which takes as much as its KV cache holds: here it is foretold.
    Raises BadInput for weights that do not fit.
    """
    choices = _Choices(config)
    most, why, cache, width = (_on_gpus if device.gpus else _on_cpu)(choices, model, device)
    tokens = int(cache * 2**30 / (model.kv_numbers * width)) if model.kv_numbers else 0
    fits = tokens // USUAL_TOKENS if tokens else most
    if fits < most:
        why = f"so many have {USUAL_TOKENS} tokens each in {cache:.3g} GiB of KV cache"
    choices.take("max_num_seqs", max(1, min(most, fits)), "{} requests at once", why)
    context, why = f"{config.max_model_len or model.context} tokens of context", "the model's"
    if not model.context:
        context, why = "a context that vLLM finds", "config.json names none"
    elif tokens and tokens < model.context and not config.max_model_len:
        context, why = f"about {tokens} tokens of context", "more do not fit the KV cache"
    choices.take("max_model_len", 0, context, why)
    if config.kv_tier is not None:
        kept, why = model.kv_numbers * width * TIER_TOKENS / 2**30, f"{TIER_TOKENS:,} tokens"
        text = "{} GiB of memory before the KV tier"
        choices.take("kv_tier_memory_gib", max(LEAST_KV_GIB, kept), text, why)
    gib = model.weights / 2**30
    more, why = round(SECONDS_PER_GIB * gib), f"{gib:.2g} GiB of weights"
    choices.take("start_timeout", 300 + more, "{} s to start", why)
    choices.take("load_timeout", 300 + more, "{} s to load", why)
    choices.take("swap_timeout", 120 + more, "{} s to wait for a version", why)
    return choices.config, "; ".join(choices.reasons)


def _on_gpus(
    choices: _Choices, model: ServedModel, device: ServingDevice
) -> tuple[int, str, float, int]:
    """Choose for GPUs; return the most requests and why, GiB of KV cache, bytes of a number."""
    choices.take("dtype", "auto", "dtype {}", f"stored as {model.dtype}")
    unused = [key for key in ("threads", "kv_cache_gib") if getattr(choices.config, key)]
    choices.reasons += [f"{key} has no effect on GPUs" for key in unused]
    gpus = f"{count_gpus(device.gpus)} {device.kind}".rstrip()
    if not device.gib:
        return GPU_REQUESTS, f"{gpus} of unknown memory", 0.0, 2
    check_weights_fit(model.name, model.weights, device.gpus, device.gib)
    large = device.gib >= LARGE_GPU and "A100" not in device.kind.upper()  # as vLLM does
    most = LARGE_GPU_REQUESTS if large else GPU_REQUESTS
    cache = USABLE * device.gib * device.gpus - model.weights / 2**30
    return most, f"{gpus} of {device.gib:.4g} GiB", max(0.1, cache), 2


def _on_cpu(
    choices: _Choices, model: ServedModel, device: ServingDevice
) -> tuple[int, str, float, int]:
    """Choose for a CPU; return the same as for GPUs."""
    large, why = model.parameters >= LARGE, f"{model.parameters / 1e6:,.3g}M parameters"
    # weights stored with more digits would lose what a job with a small learning rate changes
    half = large and model.dtype == "bfloat16" and device.bfloat16
    if large:
        slow = model.dtype == "bfloat16" and not half
        why += f" stored as {model.dtype}" + ", and a CPU without it" * slow
    dtype = choices.take("dtype", "bfloat16" if half else "float32", "{}", why)
    width = 4 if dtype == "float32" else 2
    gib = model.parameters * width / 2**30
    if 0 < device.gib < gib:
        raise BadInput(
            f"the weights of {model.name} take {gib:.4g} GiB in {dtype}, and a replica has"
            f" {device.gib:.4g} GiB of this host: serve a smaller model, or fewer replicas",
            param="model",
        )
    threads = device.cores if large else max(1, device.cores - 1)
    choices.take("threads", threads, "threads: {}", "all cores" if large else "a core is free")
    need = CPU_REQUESTS * model.context * model.kv_numbers * width / 2**30
    cache, why = min((need, "what all requests need"), (KV_SHARE * device.gib, "an eighth of all"))
    if cache < LEAST_KV_GIB:
        cache, why = LEAST_KV_GIB, "the least"
    cache = choices.take("kv_cache_gib", cache, "{} GiB of KV cache", why)
    return CPU_REQUESTS, "a CPU", cache, width


def check_fast_rollouts(config: Config, *, gpu: bool) -> None:
    """Refuse fast rollouts where they cannot be. Raises SetupError."""
    if config.quantization and not gpu:
        raise SetupError(
            f"quantization = {config.quantization!r} needs replicas on GPUs, and the installed vLLM"
            " computes on the CPU: leave it out"
        )
    if config.quantization and any("quantization" in flag for flag in config.engine_args):
        raise SetupError("engine_args quantise, and so does the setting quantization: give one")
    if config.router_replay and not gpu:
        raise SetupError(
            "router_replay needs replicas on GPUs: vLLM for CPUs does not return the experts of a"
            " token. Leave it out"
        )
    draft = config.speculative
    if draft and not gpu:
        raise SetupError(
            f"speculative = {draft!r} needs replicas on GPUs: on the CPU vLLM 0.32 computes wrong"
            " log-probabilities for some of the tokens that follow a guess. Leave it out"
        )
    if draft not in ("", "ngram") and not (Path(draft).expanduser() / CONFIG).is_file():
        raise SetupError(
            f"speculative = {draft!r} is neither ngram nor a directory with {CONFIG}: give that of"
            " a draft model, or of an EAGLE head"
        )


def check_kv_tier(config: Config, *, sleeps: bool) -> None:
    """Refuse a KV tier beside what vLLM cannot do with it. Raises SetupError."""
    own = next((f for f in config.engine_args if f.startswith(_NO_TIER)), "")
    refused = {
        "router_replay": config.router_replay,  # files have blocks without their experts' names
        "replica_nodes": config.replica_nodes > 1,  # vLLM keeps blocks in one host's memory
        "share_gpus = 'turns' and replica_warm": sleeps,  # never seen to survive a sleep
        f"engine_args with {own}": own,
    }
    if config.kv_tier is not None and (beside := [name for name in refused if refused[name]]):
        raise SetupError(f"kv_tier does not go with {' and '.join(beside)}: leave one of them out")


def _has_package(name: str) -> bool:
    return find_spec(name) is not None


def load_format(
    wanted: str, *, gpu: bool, has_package: Callable[[str], bool] = _has_package
) -> str:
    """Return the format to start vLLM with; "auto" is resolved to the fastest reader there is.

    Raises SetupError for an unknown format, and for one whose package or GPU is missing.
    """
    installed = [name for name, package in FAST.items() if has_package(package)]
    usable = [name for name in installed if gpu or name not in _CUDA]
    if wanted == AUTO:
        return usable[0] if gpu and usable else AUTO
    if wanted in PLAIN or wanted in usable:
        return wanted
    if wanted in installed:
        why = "reads to GPUs alone, and the installed vLLM computes on the CPU"
    elif wanted in FAST:
        why = f"needs the package {FAST[wanted]}, which is not installed: pip install it"
    else:
        why = f"is none of {', '.join((*PLAIN, *FAST))}"
    raise SetupError(f"load_format = {wanted!r} {why}. Usable here: {', '.join((*PLAIN, *usable))}")
