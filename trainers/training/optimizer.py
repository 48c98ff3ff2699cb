"""Megatron's data parallelism and optimizer around a model's chunks. Called by train.py."""

from typing import Any

import torch

from cray_agents.training_jobs import Hyperparameters, Layout


def wrap(chunks: list[Any], layout: Layout, hyper: Hyperparameters, overlap: bool) -> list[Any]:
    """Each chunk in Megatron's DDP, gradients summed in float32 over data and context ranks.

    `overlap`: gradients travel during the backward pass, and weights during the next forward pass:
    before it, a rank has but its own share of what a step changed (`gather_weights`).
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    overlap = overlap and layout.data * layout.context > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        check_for_nan_in_grad=False,  # a NaN is told with its step, by rank.py
    )
    parts = [
        DistributedDataParallel(
            config,
            ddp,
            Float16Module(config, chunk) if hyper.dtype == "bfloat16" else chunk,
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        several = len(parts) > 1
        no_sync, start = [p.no_sync for p in parts], [p.start_param_sync for p in parts]
        config.no_sync_func = no_sync if several else no_sync[0]
        config.param_sync_func = start if several else start[0]
    return parts


def gather_weights(parts: list[Any]) -> None:
    """Have all that the last step changed, now. Collective."""
    for part in parts:
        if part.ddp_config.overlap_param_gather:
            part.start_param_sync(force_sync=True)


def optimizer_of(parts: list[Any], hyper: Hyperparameters) -> Any:
    """AdamW over all data ranks' shards; norms and biases do not decay."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    half = hyper.dtype == "bfloat16"
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=hyper.learning_rate,
            min_lr=hyper.min_learning_rate,
            weight_decay=hyper.weight_decay,
            adam_beta1=hyper.adam_beta1,
            adam_beta2=hyper.adam_beta2,
            adam_eps=hyper.adam_eps,
            clip_grad=hyper.clip_grad,
            use_distributed_optimizer=True,
            overlap_param_gather=parts[0].ddp_config.overlap_param_gather,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
        ),
        parts,
        use_gloo_process_groups=False,
    )
    get_model_config(parts[0]).grad_scale_func = optimizer.scale_loss
    return optimizer
