"""Reads of numbers by the host: a step's do not grow with its micro-batches or layers.

On a GPU each read waits for all work before it, and then the GPU waits for the host.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cray_agents.training_jobs import JobSpec

pytestmark = pytest.mark.megatron
METHODS = ("sft", "grpo", "dpo")
#: Of each case: its model, and tokens in a micro-batch.
CASES = {"usual": ("qwen3", 4096), "many": ("qwen3", 90), "deep": ("qwen3-deep", 4096)}

READS = {"item", "tolist", "cpu", "numpy", "__array__"}
READS |= {"__bool__", "__int__", "__float__", "__index__"}
MAKING = {"tensor", "as_tensor"}
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2"}


class CalledReads(TorchFunctionMode):
    """Counts what Python calls. None of it is an operator that a dispatch mode would see."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        self.found.update([name] if name in READS else [])
        if name in MAKING:  # tensors of tensors read each of them
            self.found[name] += sum(map(torch.is_tensor, tree_leaves(args)))
        return function(*args, **(kwargs or {}))


class ReadingOperators(TorchDispatchMode):
    """Counts operators whose result's size or number the host needs, backward pass included."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        masks = args[1] if name == "index" else ()
        by_mask = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        self.found.update([name] if name in WAITING or by_mask else [])
        return function(*args, **(kwargs or {}))


def reads_in(run: Callable[[], Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    with CalledReads(found), ReadingOperators(found):
        run()
    return found


def count_reads(
    specs: dict[str, JobSpec], datasets: Path, out: Path, rank: int, store: Any, stop: Any
) -> int:
    """A rank: the reads of each spec's second step, and of scoring its samples; rank 0 tells."""
    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import read_samples
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    on_cpu = not torch.cuda.is_available()
    layout = next(iter(specs.values())).layout
    join_ranks(layout, rank, layout.world, store, on_cpu=on_cpu)
    found = {}
    for name, spec in specs.items():
        samples = read_samples(datasets / spec.method, spec.method)
        zeros = [np.zeros(len(row), np.float32) for row in samples.tokens]
        columns = {"advantages": samples.advantages, "before": zeros, "sampled": zeros}
        known = BaselineLogprobs(samples, {**columns, "reference": zeros})
        parent, hyper = Path(spec.parent), spec.hyperparameters
        model = read_architecture(parent)
        training = RankTraining(model, spec.layout, hyper, parent, on_cpu, method=spec.method)
        training.step(known)
        step, score = (partial(training.step, known), partial(training.score, samples))
        packed = training.pack_share(samples, samples.units)[0]
        count: Callable[..., Any] = reads_in if on_cpu else waits_in
        found[name] = (len(packed), count(step), count(score))
    if rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    return 0


def waits_in(run: Callable[[], Any]) -> int:
    """How often a function waits for the GPU, as torch itself tells."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}, {"pipeline": 2, "interleave": 2}])
def test_the_reads_of_a_step_grow_neither_with_its_micro_batches_nor_with_layers(
    lab: Any, tmp_path: Path, layout: dict[str, int]
) -> None:
    """On a GPU this counts what torch reports as waiting, in bfloat16; kto is left out."""
    from cray_agents.trainers.job.launch import find_placement, run_ranks
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import train_step  # noqa: F401  (loaded before the fork)

    on_cpu = load_megatron()
    ranks = layout.get("pipeline", 1)
    if not on_cpu and ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    specs = {}
    for method in METHODS:
        lab.dataset(method, method=method)
        for case, (parent, tokens) in CASES.items():
            hyper: dict[str, Any] = {"steps": 2, "max_tokens_per_microbatch": tokens}
            # gradients are clipped in any case: their norm is far above
            hyper |= {"batch_size": 12, "clip_grad": 1e-3}
            hyper["dtype"] = "float32" if on_cpu else "bfloat16"
            spec = lab.spec(parent, dataset=method, method=method, hyper=hyper, layout=layout)
            specs[f"{method} {case}"] = spec
    work = partial(count_reads, specs, lab.home.dataset("sft").parent, tmp_path)
    assert run_ranks(find_placement(ranks, "reads"), tmp_path / "logs", work).code == 0
    found = json.loads((tmp_path / "found.json").read_bytes())
    for method in METHODS:
        usual, many, deep = (found[f"{method} {case}"] for case in CASES)
        assert many[0] > 4 and usual[0] == layout.get("interleave", 1)
        assert many[1:] == deep[1:] == usual[1:], method
