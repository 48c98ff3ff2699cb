"""Forked ranks: a function as the ranks of a job, with Megatron loaded once, before the fork."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_forked(world: int, logs: Path, work: Callable[[int, Any, Any], int]) -> str | None:
    """Run `work(rank, store, stop)` in each rank to its end, and return why they refused, if so."""
    from cray_agents.trainers.job.launch import find_placement, run_ranks
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import offload, train_step  # noqa: F401

    load_megatron()
    outcome = run_ranks(find_placement(world, "test"), logs, work)
    written = [path.read_text()[-3000:] for path in sorted(logs.glob("*")) if path.is_file()]
    assert outcome.refusal is not None or outcome.code == 0, "\n".join([str(outcome), *written])
    return outcome.refusal
