"""Speed stages: tokens a second, MFU and memory by size, micro-batch and kind of layers.

MFU is tokens a second, times the operations to train on one (6 N + 12 L a d s: planning/
arithmetic.py), over the peak of the device's dense bfloat16 (planning/step_time.py, or --peak).
"""

import json
import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cray_agents.errors import JobError
from cray_agents.training_jobs import Hyperparameters, Layout, Lora
from tests.gpu.bench import (
    TE,
    VARLEN,
    Bench,
    Failed,
    free_memory,
    kernel_paths,
    layers_of,
    seconds_of,
    sequences,
)
from tests.gpu.golden import last_line

SHAPES = ("equal", "chats")
#: MFU that a dense model of 1B should reach, by the kind of layers.
AIMS = {TE: 0.5, VARLEN: 0.35}


def main(
    bench: Bench,
    stage: str,
    name: str,
    lora: Lora | None = None,
    aims: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Measure a model in each kind of layers, each in a rank of its own.

    `aims`: the MFU to reach, by the kind of layers. A missed one is a figure, not a failure.
    """
    problems = []
    for path in kernel_paths(bench.on_cpu):
        try:
            bench.in_rank(measure, stage, name, path, lora)
        except JobError as death:
            bench.report.add(stage, model=name, layers=path, problem=last_line(death))
            problems.append(path)
            continue
        if path in aims:
            rows = bench.report.read()["stages"][stage]["rows"]
            best = max(
                (row.get("mfu") or 0.0 for row in rows if row["layers"] == path), default=0.0
            )
            bench.report.add(
                stage, model=name, layers=path, sequences="best", mfu=best, aim=aims[path]
            )
    if problems:
        raise Failed(f"died with {', '.join(problems)}")


def measure(bench: Bench, stage: str, name: str, path: str, lora: Lora | None) -> None:
    """In a rank: measure each micro-batch, and the ragged sequences in the middle one."""
    import torch

    from cray_agents.trainers.planning.layouts import LayoutQuestion, choose_layout
    from cray_agents.trainers.training.train_step import build_of

    _, model = bench.model(name)
    sizes = bench.scale.microbatches
    cases = [("equal", tokens) for tokens in sizes] + [("chats", sizes[len(sizes) // 2])]
    training: Any = None
    for shape, tokens in cases:
        row = {"model": name, "layers": path, "sequences": shape, "microbatch": tokens}
        if bench.over:
            bench.report.add(stage, **row, problem="no time left")
            continue
        known = data(bench, model.vocab, shape)
        hyper = hyperparameters(len(known.samples), tokens, lora)
        longest = bench.scale.longest
        choice = choose_layout(LayoutQuestion(model, hyper, 1, bench.gib, 1, longest))
        row |= {"recompute": choice.recompute, "planned_gib": choice.memory.gib}
        if not choice.fits:
            bench.report.add(stage, **row, problem="does not fit by the plan: not tried")
            continue
        try:
            build = build_of(model, Layout(), hyper, choice.recompute)
            if training is None or training.build != build:
                training = None  # before the next one takes as much memory
                free_memory(bench)
                with layers_of(path):
                    training = bench.build(name, hyper, choice.recompute)
            else:
                training.switch_job(training.parent, hyper, "sft", lambda: False)
                training.start_from_weights()
            row |= take_steps(bench, training, known)
        except torch.OutOfMemoryError:
            row["problem"] = "out of memory"
        if "problem" in row:
            training = None
        free_memory(bench)
        bench.report.add(stage, **row)


def on_all(bench: Bench, stage: str, name: str) -> None:
    """Measure a model on all GPUs, in the layout that the plan chooses for them."""
    ranks = bench.most_ranks
    if ranks == 1:
        bench.report.add(stage, note="one GPU: not run")
        return
    from cray_agents.trainers.planning.layouts import LayoutQuestion, choose_layout

    _, model = bench.model(name)
    tokens, longest = bench.scale.microbatches[0], bench.scale.longest
    hyper = hyperparameters(ranks * bench.scale.tokens // longest, tokens)
    question = LayoutQuestion(model, hyper, ranks, bench.gib, ranks, longest)
    choice = choose_layout(question)
    words = ", ".join(
        f"{k}={v}" for k, v in choice.layout.model_dump(exclude_defaults=True).items()
    )
    row = {"model": name, "ranks": ranks, "layout": words, "planned_gib": choice.memory.gib}
    if not choice.fits:
        bench.report.add(stage, **row, problem="does not fit by the plan: not tried")
        return
    out = bench.folder / "all.json"
    bench.in_rank(measure_on_all, name, choice.layout, choice.recompute, out, layout=choice.layout)
    bench.report.add(stage, **row, **json.loads(out.read_bytes()))


def measure_on_all(bench: Bench, name: str, layout: Layout, recompute: str, out: Path) -> None:
    """In each rank: take steps; rank 0 writes their figures, by the GPU."""
    from cray_agents.trainers.training.parallel_groups import is_rank0

    _, model = bench.model(name)
    wide = replace(bench, scale=replace(bench.scale, tokens=layout.world * bench.scale.tokens))
    known = data(wide, model.vocab, "equal")
    hyper = hyperparameters(len(known.samples), bench.scale.microbatches[0])
    training = bench.build(name, hyper, recompute, layout)
    row = take_steps(bench, training, known)
    for per_gpu in ("tokens_per_second", "mfu"):
        row[per_gpu] = row[per_gpu] and row[per_gpu] / layout.world
    if is_rank0():
        out.write_text(json.dumps(row))


def data(bench: Bench, vocab: int, shape: str) -> Any:
    """Return a step's samples."""
    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples

    return BaselineLogprobs(Samples.of(sequences(bench.scale, vocab, shape)))


def hyperparameters(batch: int, tokens: int, lora: Lora | None = None) -> Hyperparameters:
    return Hyperparameters(
        steps=10**6,
        batch_size=batch,
        learning_rate=1e-5,
        max_tokens_per_microbatch=tokens,
        dtype="bfloat16",
        init="random",
        lora=lora,
    )


def take_steps(bench: Bench, training: Any, known: Any) -> dict[str, Any]:
    """Train some steps, and return their figures: medians, and the peak of memory."""
    from cray_agents.trainers.job.rank import memory_gib
    from cray_agents.trainers.planning.arithmetic import flops_per_token

    first = training.step(known)  # compiles, allocates
    taken = [seconds_of(bench, lambda: training.step(known)) for _ in range(bench.scale.steps)]
    seconds = statistics.median(taken)
    syncs = None if bench.on_cpu else count_syncs(training, known)
    last = training.step(known)
    if not math.isfinite(last.loss):
        raise Failed(f"the loss is {last.loss}")
    rate = first.processed / seconds
    peak = peak_of(bench)
    flops = flops_per_token(training.model, first.length, training.hyper.lora)
    return {
        "tokens_per_second": rate,
        "mfu": rate * flops / peak if peak else None,
        "step_seconds": seconds,
        "peak_gib": memory_gib(bench.on_cpu),
        "syncs": syncs,
        "loss_first": first.loss,
        "loss_last": last.loss,
    }


def peak_of(bench: Bench) -> float | None:
    """Return the operations a second that MFU is measured against; None if unknown."""
    import torch

    from cray_agents.trainers.planning.step_time import peak_flops

    if bench.teraflops is not None:
        return bench.teraflops * 1e12
    return None if bench.on_cpu else peak_flops(torch.cuda.get_device_name())


def count_syncs(training: Any, known: Any) -> int:
    """Count how often a step's host code waits for the device."""
    import torch

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.step(known)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


# ---- transformers
def against_transformers(bench: Bench, stage: str, name: str) -> None:
    """Measure trainer and transformers with the same weights and data, one after the other."""
    bench.in_rank(both, stage, name)


def both(bench: Bench, stage: str, name: str) -> None:
    """In a rank: the trainer's steps, then those of a plain loop."""
    _, model = bench.model(name)
    tokens = bench.scale.microbatches[len(bench.scale.microbatches) // 2]
    for shape in SHAPES:
        known = data(bench, model.vocab, shape)
        training = bench.build(name, hyperparameters(len(known.samples), tokens))
        ours = take_steps(bench, training, known)
        del training
        free_memory(bench)
        theirs = plain_loop(bench, name, known, tokens)
        free_memory(bench)
        bench.report.add(
            stage,
            model=name,
            sequences=shape,
            microbatch=tokens,
            trainer_tokens_per_second=ours["tokens_per_second"],
            transformers_tokens_per_second=theirs["tokens_per_second"],
            ratio=ours["tokens_per_second"] / theirs["tokens_per_second"],
            trainer_gib=ours["peak_gib"],
            transformers_gib=theirs["peak_gib"],
            trainer_first_loss=ours["loss_first"],
            transformers_first_loss=theirs["loss_first"],
        )


def plain_loop(bench: Bench, name: str, known: Any, limit: int) -> dict[str, Any]:
    """The loop of transformers' documentation: bfloat16 weights, torch's fused AdamW, padding.

    Sequences are sorted by length before they are cut into micro-batches of at most `limit` tokens
    with padding, which wastes least.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoConfig, AutoModelForCausalLM

    from cray_agents.trainers.job.rank import memory_gib
    from cray_agents.trainers.models.weights import InitialWeights

    folder, model = bench.model(name)
    with torch.device(bench.device):
        network = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), attn_implementation="sdpa", dtype=torch.bfloat16
        )
    source = InitialWeights(model, 0, bench.device)
    with torch.no_grad():
        for parameter_name, parameter in network.named_parameters():
            parameter.copy_(source[parameter_name])
    hyper = hyperparameters(1, limit)
    adam = torch.optim.AdamW(
        network.parameters(),
        lr=hyper.learning_rate,
        betas=(hyper.adam_beta1, hyper.adam_beta2),
        weight_decay=hyper.weight_decay,
        fused=True,
    )
    rows = sorted((torch.from_numpy(ids).long() for ids in known.samples.tokens), key=len)
    batches: list[list[torch.Tensor]] = [[]]
    for row in reversed(rows):
        if batches[-1] and len(batches[-1][0][1:]) * (len(batches[-1]) + 1) > limit:
            batches.append([])
        batches[-1].append(row)
    count = sum(len(row) - 1 for row in rows)

    def step() -> float:
        total = torch.zeros((), device=bench.device)
        for batch in batches:
            ids = pad_sequence([row[:-1] for row in batch], batch_first=True).to(bench.device)
            labels = pad_sequence([row[1:] for row in batch], True, -100).to(bench.device)
            mask = None if bool((labels >= 0).all()) else (labels >= 0).long()
            logits = network(ids, attention_mask=mask, use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            (loss / count).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(network.parameters(), hyper.clip_grad)
        adam.step()
        adam.zero_grad()
        return float(total) / count

    first = step()
    taken = [seconds_of(bench, step) for _ in range(bench.scale.steps)]
    return {
        "tokens_per_second": count / statistics.median(taken),
        "peak_gib": memory_gib(bench.on_cpu),
        "loss_first": first,
    }
