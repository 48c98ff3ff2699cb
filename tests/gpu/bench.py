"""Bench of the GPU stages: their sizes, models, data and kernels, and the ranks they run in.

Models start from random weights that are made on the device, so nothing large is read. A stage
runs in ranks forked by the trainer's own launcher: a stage that dies takes nothing with it.
"""

import gc
import json
import pickle
import time
from base64 import b85decode, b85encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cray_agents.errors import JobError
from cray_agents.runtime.disk import durable
from cray_agents.trainers.models.architecture import Architecture, read_architecture
from cray_agents.training_jobs import Hyperparameters, Layout
from tests.gpu.report import Report
from tests.support.trainers.model_configs import LLAMA_31_8B, QWEN3_06B, QWEN3_30B_A3B

_ANY = {"max_position_embeddings": 40960, "dtype": "bfloat16"}
LLAMA_32_3B = LLAMA_31_8B | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
LLAMA_32_1B = LLAMA_32_3B | {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "head_dim": 64,
    "num_hidden_layers": 16,
}
QWEN3_4B = QWEN3_06B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
}
#: 1.5B weights, of which 0.5B work on a token.
QWEN3_MOE = QWEN3_30B_A3B | {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
#: Of the comparison with the CPU, whose float32 arithmetic should not take long either.
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
SMALL_SIZES = TINY | {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64}
SMALL = QWEN3_06B | SMALL_SIZES


@dataclass(frozen=True)
class Scale:
    """The sizes of all stages. `longest`: tokens of a sequence; `tokens`: of a step."""

    configs: dict[str, dict[str, Any]]
    longest: int
    tokens: int
    microbatches: tuple[int, ...]
    steps: int
    jobs: int  # of the session

    def config(self, name: str) -> dict[str, Any]:
        return _ANY | self.configs[name]


FULL = Scale(
    {"1B": LLAMA_32_1B, "3B": LLAMA_32_3B, "4B": QWEN3_4B, "8B": LLAMA_31_8B, "small": SMALL}
    | {
        "moe": QWEN3_MOE,
        "small-moe": QWEN3_30B_A3B | SMALL_SIZES | EXPERTS | {"moe_intermediate_size": 128},
    },
    longest=4096,
    tokens=32768,
    microbatches=(4096, 16384, 32768),
    steps=4,
    jobs=4,
)
ONE_CORE = Scale(
    {"1B": LLAMA_32_1B | TINY, "3B": LLAMA_32_3B | TINY, "4B": QWEN3_4B | TINY}
    | {"8B": LLAMA_31_8B | TINY, "small": QWEN3_06B | TINY}
    | dict.fromkeys(("moe", "small-moe"), QWEN3_30B_A3B | TINY | EXPERTS),
    longest=24,
    tokens=96,
    microbatches=(24, 96),
    steps=1,
    jobs=2,
)


class Failed(Exception):
    """A stage's figures are out of their bounds. They are in the report."""


@dataclass(frozen=True)
class Bench:
    """What stages share. `deadline`: by time.monotonic. `teraflops`: the peak, if given by hand."""

    report: Report
    folder: Path
    scale: Scale
    on_cpu: bool
    deadline: float
    teraflops: float | None = None

    @property
    def over(self) -> bool:
        """True if there is no time for another measurement."""
        return time.monotonic() > self.deadline

    @property
    def device(self) -> str:
        return "cpu" if self.on_cpu else "cuda"

    @property
    def most_ranks(self) -> int:
        """The ranks that stages of several take: a GPU each, or two on the CPU."""
        import torch

        return 2 if self.on_cpu else torch.cuda.device_count()

    @property
    def gib(self) -> float:
        """The device's memory."""
        return float(self.report.read()["about"]["device GiB"])

    def model(self, name: str) -> tuple[Path, Architecture]:
        """Return the folder with a model's config.json, and what training reads there."""
        folder = self.folder / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        # several ranks write it at once, and read it
        durable.replace_file(folder / "config.json", json.dumps(self.scale.config(name)).encode())
        return folder, read_architecture(folder)

    def build(
        self,
        name: str,
        hyper: Hyperparameters,
        recompute: str = "none",
        layout: Layout | None = None,
    ) -> Any:
        """Build the `RankTraining` of a model whose random weights are made on the device."""
        from cray_agents.trainers.models.weights import InitialWeights
        from cray_agents.trainers.training.train_step import RankTraining

        parent, model = self.model(name)
        return RankTraining(
            model,
            layout or Layout(),
            hyper,
            parent,
            self.on_cpu,
            recompute=recompute,
            source=InitialWeights(model, hyper.seed, self.device),
        )

    def in_rank(
        self, work: Callable[..., None], *arguments: Any, layout: Layout | None = None
    ) -> None:
        """Call `work(bench, *arguments)` in a rank, started as a job's is, or in a layout's ranks.

        Raises JobError, with its log, if one dies.
        """
        from cray_agents.trainers.job.launch import RankPlacement, run_ranks

        layout = layout or Layout()
        pickled = b85encode(pickle.dumps((self, work, arguments, layout))).decode()
        recipe = None if self.on_cpu else ("tests.gpu.bench", [pickled])
        placement = RankPlacement(0, 1, layout.world, "127.0.0.1", 0)
        main = partial(_be_rank, self, work, arguments, layout)
        outcome = run_ranks(placement, self.folder / "logs", main, recipe)
        if outcome.code:
            raise JobError(f"the ranks ended with {outcome.code}: {outcome.refusal}")


def rank_main(on_cpu: bool, pickled: str) -> Callable[..., int]:
    """Return what a rank in a new Python runs."""
    return partial(_be_rank, *pickle.loads(b85decode(pickled)))


def _be_rank(
    bench: Bench,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    layout: Layout,
    *rank: Any,
) -> int:
    """Work as one rank."""
    import torch

    from cray_agents.trainers.job import rank as job_rank

    number, store, _ = rank
    job_rank.join(layout, number, store, bench.on_cpu)
    work(bench, *arguments)
    torch.distributed.destroy_process_group()
    return 0


def sequences(scale: Scale, vocab: int, shape: str = "equal") -> list[list[int]]:
    """A step's random sequences: of one length, or of lengths such as chats have."""
    random = np.random.default_rng(0)
    if shape == "equal":
        sizes = [scale.longest] * (scale.tokens // scale.longest)
    else:
        median = max(4, scale.longest // 23)  # 180 of 4,096
        each = np.exp(random.normal(np.log(median), 0.8, scale.tokens)).astype(int)
        each = each.clip(min(16, median), scale.longest)
        sizes = each[: int((each.cumsum() <= scale.tokens).sum())].tolist()
    # the last token is only ever a target
    return [random.integers(0, vocab, size + 1).tolist() for size in sizes]


# ---- kernels
TE, VARLEN, BY_LENGTH = "Transformer Engine", "torch, varlen_attn", "torch, a call per length"


def kernel_paths(on_cpu: bool) -> list[str]:
    """The kinds of layers that the trainer can build here; its own choice comes first."""
    from megatron.core.models.gpt import gpt_layer_specs

    from cray_agents.trainers.models.layer_choice import choose_layers

    if on_cpu:
        return ["cpu"]
    varlen = choose_layers(gpu=True, transformer_engine=False).varlen
    return [TE] * gpt_layer_specs.HAVE_TE + [VARLEN] * varlen + [BY_LENGTH]


@contextmanager
def layers_of(path: str) -> Iterator[None]:
    """Let models that are built within the context have a path's layers, as far as they can."""
    from cray_agents.trainers.models import layer_choice, model

    def choose(**about: Any) -> Any:
        choice = layer_choice.choose_layers(**about | {"transformer_engine": path == TE})
        return replace(choice, varlen=choice.varlen and path == VARLEN)

    vars(model)["choose_layers"] = choose
    try:
        yield
    finally:
        vars(model)["choose_layers"] = layer_choice.choose_layers


# ---- the device
def synchronize(bench: Bench) -> None:
    """Wait until the device has done its work, so that a clock may be read."""
    import torch

    if not bench.on_cpu:
        torch.cuda.synchronize()


def seconds_of(bench: Bench, work: Callable[[], object]) -> float:
    """Time some work on the device."""
    synchronize(bench)
    begun = time.perf_counter()
    work()
    synchronize(bench)
    return time.perf_counter() - begun


def free_memory(bench: Bench) -> None:
    """Give the device what nothing holds any more."""
    import torch

    gc.collect()
    if not bench.on_cpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
