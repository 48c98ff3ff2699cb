"""Optimizer: Megatron's data parallelism and AdamW around a model's chunks.

Called by train_step.py. Read next: models/transformers_backend/weight_shards.py.
"""

from typing import Any

import torch

from cray_agents.trainers.models.transformers_backend.weight_shards import wrap_fully
from cray_agents.training_jobs import Hyperparameters, Layout


def wrap(chunks: list[Any], layout: Layout, hyper: Hyperparameters, overlap: bool) -> list[Any]:
    """Wrap each chunk in Megatron's DDP; sum gradients in float32 over data and context ranks.

    In a layout with `sharding` `full` it is Megatron's FSDP. With `overlap`, gradients travel
    during the backward pass and weights during the next forward pass. Until then a rank has only
    its own share of the new weights (see `gather_weights`).
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    if layout.sharding == "full":
        return [wrap_fully(chunk, hyper) for chunk in chunks]
    overlap = overlap and layout.data * layout.context > 1
    # a gradient that never comes would be waited for
    overlap = overlap and all(getattr(chunk, "always_reached", True) for chunk in chunks)
    # networks of transformers have their types already, and keep some numbers in float32
    convert = hyper.dtype == "bfloat16" and not hasattr(chunks[0], "network")
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=layout.optimizer_instances,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        check_for_nan_in_grad=False,  # job/rank.py reports a NaN with its step
    )
    wrapped = [
        DistributedDataParallel(
            config,
            ddp,
            Float16Module(config, chunk) if convert else chunk,
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    if overlap:
        several = len(wrapped) > 1
        no_sync = [chunk.no_sync for chunk in wrapped]
        start = [chunk.start_param_sync for chunk in wrapped]
        config.no_sync_func = no_sync if several else no_sync[0]
        config.param_sync_func = start if several else start[0]
    return wrapped


def gather_weights(wrapped: list[Any]) -> None:
    """Fetch all weights that the last step changed, now, unless ranks keep shards. Collective."""
    for chunk in wrapped:
        if chunk.ddp_config.overlap_param_gather and not chunk.ddp_config.use_megatron_fsdp:
            chunk.start_param_sync(force_sync=True)


def optimizer_to_weights(optimizer: Any, wrapped: list[Any]) -> None:
    """Round the optimizer's weights into the model's, of all ranks that share them. Collective."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        one._copy_main_params_to_model_params()
    for chunk in wrapped:
        chunk.start_param_sync(force_sync=True)


def build_optimizer(wrapped: list[Any], hyper: Hyperparameters) -> Any:
    """Build AdamW over all data ranks' shards; norms and biases do not decay."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    half = hyper.dtype == "bfloat16"
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=hyper.learning_rate or 0.0,  # each step sets its own
            min_lr=hyper.min_learning_rate,
            weight_decay=hyper.weight_decay,
            adam_beta1=hyper.adam_beta1,
            adam_beta2=hyper.adam_beta2,
            adam_eps=hyper.adam_eps,
            clip_grad=hyper.clip_grad,
            use_distributed_optimizer=True,
            overlap_param_gather=wrapped[0].ddp_config.overlap_param_gather,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    get_model_config(wrapped[0]).grad_scale_func = optimizer.scale_loss
    return optimizer
