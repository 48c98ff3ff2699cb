"""Forked ranks: a function as the ranks of a job, with Megatron loaded once, before the fork."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cray_agents.training_jobs import Hyperparameters, Layout


def run_forked(world: int, logs: Path, work: Callable[[int, Any, Any], int]) -> str | None:
    """Run `work(rank, store, stop)` in each rank to its end, and return why they refused, if so."""
    from cray_agents.trainers.checkpointing import hf_export  # noqa: F401
    from cray_agents.trainers.job.launch import find_placement, run_ranks
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import offload, train_step  # noqa: F401

    load_megatron()
    outcome = run_ranks(find_placement(world, "test"), logs, work)
    written = [path.read_text()[-3000:] for path in sorted(logs.glob("*")) if path.is_file()]
    assert outcome.refusal is not None or outcome.code == 0, "\n".join([str(outcome), *written])
    return outcome.refusal


def training_in_rank(
    folder: Path, layout: Layout, hyper: Hyperparameters, rank: int, store: Any, **how: Any
) -> Any:
    """Join the other ranks, and return this one's training with a parent's weights, on a CPU."""
    import torch

    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    torch.set_num_threads(1)
    join_ranks(layout, rank, layout.world, store, on_cpu=True)
    return RankTraining(read_architecture(folder), layout, hyper, folder, on_cpu=True, **how)
