"""Sharding stage: Megatron's FSDP (ZeRO-3) beside the distributed optimizer, on all GPUs.

The same random weights and data in the transformers backend: losses must agree, and memory is
compared with the plan's. With one GPU there is nothing to divide, and the first is run alone.
"""

import json
from pathlib import Path

from cray_agents.training_jobs import Layout
from tests.gpu.bench import Bench, Failed, free_memory
from tests.gpu.speed import data, hyperparameters, take_steps

BOUND = 2e-2  # between losses of the two, relative: bfloat16, and another order of sums


def main(bench: Bench, stage: str, name: str) -> None:
    """Train a model in both, with a rank for each GPU, and compare."""
    ranks = bench.most_ranks
    parent = bench.folder / "parents" / name
    bench.in_rank(write_parent, name, parent)
    found = []
    layouts = [Layout(data=ranks), Layout(data=ranks, sharding="full")]
    for layout in layouts if ranks > 1 else layouts[:1]:
        out = bench.folder / f"{layout.sharding}.json"
        bench.in_rank(measure, name, parent, layout, out, layout=layout)
        row = json.loads(out.read_bytes())
        bench.report.add(stage, model=name, ranks=ranks, sharding=layout.sharding, **row)
        found.append(row)
    if ranks == 1:
        bench.report.add(stage, model=name, note="one GPU: full sharding was not run")
        return
    for of in ("loss_first", "loss_last"):
        whole, sharded = (row[of] for row in found)
        if abs(sharded - whole) > BOUND * abs(whole):
            raise Failed(f"{of} is {sharded} with full sharding, and {whole} without")


def write_parent(bench: Bench, name: str, parent: Path) -> None:
    """In a rank: write a model of transformers with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, _ = bench.model(name)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.save_pretrained(parent)


def measure(bench: Bench, name: str, parent: Path, layout: Layout, out: Path) -> None:
    """In each rank: take steps; rank 0 writes their figures, with what the plan says."""
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.planning.arithmetic import estimate_memory
    from cray_agents.trainers.training.parallel_groups import is_rank0
    from cray_agents.trainers.training.train_step import RankTraining

    model = read_architecture(parent, "transformers")
    known = data(bench, model.vocab, "equal")
    tokens = bench.scale.microbatches[0]
    hyper = hyperparameters(len(known.samples), tokens).model_copy(
        update={"init": "parent", "backend": "transformers"}
    )
    free_memory(bench)
    training = RankTraining(model, layout, hyper, parent, bench.on_cpu)
    row = take_steps(bench, training, known)
    planned = estimate_memory(model, layout, hyper, sequence_length=bench.scale.longest)
    if is_rank0():
        out.write_text(json.dumps({"planned_gib": planned.gib, **row}))
