"""Weight shards: a network's weights, gradients and optimizer spread over all data ranks (ZeRO-3).

Megatron's own FSDP (arXiv 1910.02054, stage 3) does it. It gathers the weights of one layer right
before they are used, forgets them right after, and scatters the sum of their gradients at once.
Weights outside of the layers, such as the embedding, stay gathered for a pass. `wrap_fully` is
called by training/optimizer.py; state.py and backends.py read and write the shards.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cray_agents.errors import BadInput
from cray_agents.trainers.models.transformers_backend.passes import decoder_layers
from cray_agents.training_jobs import Hyperparameters

REMEDY = "ask for sharding=optimizer, which every model supports"
_GATHERED = 2  # groups of parameters that an export holds whole at a time


class _Called(torch.nn.Module):
    """A module that calls its child, whose hooks then run: FSDP calls `forward` of its own."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def wrap_fully(chunk: Any, hyper: Hyperparameters) -> Any:
    """Spread a TransformersModel's weights over the data ranks, and set its `shards`. Collective.

    Its parameters may be on the CPU and hold nothing: see WeightShards.put. Where none of them
    requires a gradient, there is no memory for gradients and an optimizer. Raises BadInput where
    the ranks' passes could differ, for each of them is collective.
    """
    from megatron.core.distributed import DistributedDataParallelConfig, FullyShardedDataParallel

    kind = type(chunk.network).__name__
    if chunk.packing.shape != "packed":
        raise BadInput(
            f"sharding=full cannot train {kind}, which is computed as {chunk.packing.text}: ranks"
            f" would call it different numbers of times, and each call gathers weights; {REMEDY}",
            param="layout",
        )
    if not chunk.always_reached:
        raise BadInput(
            f"sharding=full cannot train {kind}: some batches give some of its weights no gradient,"
            f" and ranks would differ in what they send; {REMEDY}",
            param="layout",
        )
    if len({parameter.requires_grad for parameter in chunk.network.parameters()}) > 1:
        raise BadInput(
            f"sharding=full cannot train {kind}: no batch gives some of its weights a gradient, and"
            f" Megatron's FSDP knows no weights that stay as they are; {REMEDY}",
            param="layout",
        )
    layers = decoder_layers(chunk.network)
    if layers is None:
        raise BadInput(
            f"sharding=full gathers the weights of one layer at a time, and which parts of {kind}"
            f" are its layers is not known; {REMEDY}",
            param="layout",
        )
    for parameter in chunk.network.parameters():
        if not parameter.requires_grad:  # where torch refuses the hook that FSDP gives to all
            parameter.register_post_accumulate_grad_hook = lambda hook: None
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers[1])
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,  # FSDP has no other way
        overlap_param_gather=True,
        preserve_fp32_weights=hyper.dtype != "float32",
        check_for_nan_in_grad=False,  # job/rank.py reports a NaN with its step
        # elements under way: the next layer's weights, and the gradients of two. By default it is
        # a billion, which is more than many models have
        suggested_communication_unit_size=2 * largest,
    )
    wrapped = FullyShardedDataParallel(
        chunk.config,
        ddp,
        _Called(chunk),
        fsdp_unit_modules=list({type(layer) for layer in layers[1]}),
        device=chunk.device,
    )
    chunk.shards = WeightShards(wrapped)
    return wrapped


@dataclass(frozen=True)
class ParameterShard:
    """This rank's elements of a flattened parameter, from `begin` on.

    `weights` are those that the network computes with, `main` those that the optimizer changes:
    the same memory in float32. `optimized` is what the optimizer knows the parameter by.
    """

    begin: int
    weights: torch.Tensor
    main: torch.Tensor
    optimized: torch.nn.Parameter


class WeightShards:
    """This rank's shards of a network that `wrap_fully` wrapped.

    The network's own parameters are by turns empty, gathered, or distributed tensors; all of them
    lead to the same shard.
    """

    def __init__(self, wrapped: Any) -> None:
        self._fsdp, self._buffer = wrapped.module, wrapped.param_and_grad_buffer
        named = self._buffer.optimizer_named_parameters
        self._optimized = {one.orig_param: one for _, one in named}

    def of(self, tensor: torch.Tensor) -> ParameterShard | None:
        """Return the shard of a parameter of the network; None for any other tensor."""
        place = self._place(tensor)
        if place is None:
            return None
        parameter, group = place
        weights, main = group.model_weight_buffer, group.main_weight_buffer
        item = weights.param_idx[parameter]
        mine = weights.get_item(item, only_shard=True)
        return ParameterShard(
            weights.locate_item_in_global_item(item)[0],
            mine,
            mine if main is None else main.get_item(item, only_shard=True),
            self._optimized[parameter],
        )

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a parameter, as the network has them; else the tensor."""
        return tensor if (shard := self.of(tensor)) is None else shard.weights

    def put(self, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Take this rank's elements of a parameter's new weights; copy any other tensor."""
        if (shard := self.of(tensor)) is None:
            tensor.copy_(whole)
        else:
            end = shard.begin + len(shard.weights)
            shard.weights.copy_(whole.reshape(-1)[shard.begin : end])

    def whole(self, tensor: torch.Tensor, gathered: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return a parameter with the elements of all ranks, or any other tensor itself.

        Collective. `gathered`, at first empty, keeps what came with it, for the next calls.
        """
        place = self._place(tensor)
        if place is None:
            return tensor
        parameter, group = place
        buffer, number = group.model_weight_buffer, self._buffer.param_to_param_group[parameter]
        if number not in gathered:
            if len(gathered) == _GATHERED:
                del gathered[next(iter(gathered))]
            shard = buffer.get_shard_from_local_buffer()
            bucket = shard.new_empty(buffer.bucket_index.size)
            torch.distributed.all_gather_into_tensor(
                bucket, shard, group=buffer.data_parallel_group
            )
            gathered[number] = bucket
        index = buffer.item_index_map[buffer.param_idx[parameter]]
        first = index.global_data_index - buffer.bucket_index.global_data_index
        return gathered[number][first : first + index.size].view(parameter.shape)

    def forget_gathered(self) -> None:
        """Drop what passes have gathered, before shards change: the next pass gathers anew."""
        self._fsdp.synchronize_param_gather()

    def weights_to_optimizer(self) -> None:
        """Give the optimizer the weights that the network has now."""
        self._buffer.copy_model_weights_to_main_weights()

    def optimizer_to_weights(self) -> None:
        """Give the network the weights that the optimizer has now."""
        self._buffer.copy_main_weights_to_model_weights()

    def storages(self) -> Iterator[torch.Tensor]:
        """Yield this rank's memory of weights, for the network and for the optimizer."""
        for group in self._buffer.parameter_groups:
            for buffer in (group.model_weight_buffer, group.main_weight_buffer):
                if buffer is not None:
                    yield buffer.data

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield this rank's memory of gradients."""
        for group in self._buffer.parameter_groups:
            if group.main_grad_buffer is not None:
                yield group.main_grad_buffer.data

    def _place(self, tensor: torch.Tensor) -> tuple[torch.nn.Parameter, Any] | None:
        parameter: Any = getattr(tensor, "orig_param", tensor)
        number = self._buffer.param_to_param_group.get(parameter)
        return None if number is None else (parameter, self._buffer.parameter_groups[number])
