"""The Megatron training step: one rank's part of the model, its optimizer, forward and backward.

rank.py makes a `Training` and calls `step` in order. resume.py saves and restores it, export.py
writes what it learnt. Nothing here knows files of a job. Read next: sft.py for the loss.
"""

import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cray_agents.errors import BadInput
from cray_agents.records import Hyperparameters, Layout
from cray_agents.trainers import sft
from cray_agents.trainers.architecture import Architecture
from cray_agents.trainers.data import Packed, Samples, pack_prompts, step_microbatches
from cray_agents.trainers.model import build_model
from cray_agents.trainers.weights import load_weights

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class StepReport:
    """What a step came to, the same on every rank. `tokens` are those trained on."""

    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    stop: bool  # some rank was asked to stop


def join_ranks(layout: Layout, rank: int, world: int, store: Any, on_cpu: bool) -> None:
    """Form the process groups of this rank. Collective."""
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group(
        "gloo" if on_cpu else "nccl",
        store=store,
        rank=rank,
        world_size=world,
        timeout=COLLECTIVE_TIMEOUT,
    )
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        expert_model_parallel_size=layout.expert,
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


class Training:
    """One rank's share of a training job. All methods are collective."""

    def __init__(
        self,
        model: Architecture,
        layout: Layout,
        hyper: Hyperparameters,
        parent: Path,
        on_cpu: bool,
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.utils import get_model_config

        self.model, self.layout, self.hyper, self.parent = model, layout, hyper, parent
        self.on_cpu = on_cpu
        self.multiple = layout.tensor if layout.sequence_parallel else 1
        self.done = 0  # steps
        half = hyper.dtype == "bfloat16"
        part = build_model(model, layout, hyper.dtype, on_cpu)
        load_weights(part, model, parent)
        config = get_model_config(part)
        self.inner = part
        self._rows: torch.Tensor | None = None  # where a token is to be predicted; None: everywhere
        if part.post_process and not layout.sequence_parallel:
            part.output_layer.register_forward_pre_hook(self._only_rows)
        self.part = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                check_for_nan_in_grad=False,  # a NaN loss is told with its step, by job.py
            ),
            Float16Module(config, part) if half else part,
        )
        self.optimizer = get_megatron_optimizer(
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
                bf16=half,
                params_dtype=torch.bfloat16 if half else torch.float32,
            ),
            [self.part],
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    def restart_from_parent(self) -> None:
        """Take the parent's weights again, keeping the optimizer's moments; the step count is 0."""
        load_weights(self.inner, self.model, self.parent)
        self.optimizer.reload_model_params()
        self.done = 0

    def step(self, samples: Samples, stop: bool = False) -> StepReport:
        """Train one step on the samples that are its turn.

        `stop` says whether this rank was asked to stop; the report says whether any was. On a loss
        that is not finite the weights stay as they were.
        """
        from megatron.core import parallel_state as ps

        batches = step_microbatches(
            samples,
            self.hyper,
            self.done,
            ps.get_data_parallel_rank(),
            ps.get_data_parallel_world_size(),
            self.multiple,
        )
        self.part.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._run(batches, forward_only=False)
        total, count, stops = self._sum(reports, stop)
        value = total / count
        rate = sft.learning_rate(self.hyper, self.done)
        norm = math.nan
        if math.isfinite(value):
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group.get("lr_mult", 1.0)
                group["weight_decay"] = self.hyper.weight_decay * group.get("wd_mult", 1.0)
            norm = float(self.optimizer.step()[1])
            self.done += 1
        return StepReport(value, rate, norm, int(count), stops > 0)

    @torch.no_grad()
    def logprobs(self, prompts: Sequence[list[int]]) -> list[float]:
        """Log-probabilities of every token but each prompt's first, one after the other."""
        from megatron.core import parallel_state as ps

        packed = pack_prompts(prompts, self.multiple)
        losses = self._run([packed], forward_only=True, whole=True)
        count = int(packed.mask.sum())
        found = torch.zeros(count, dtype=torch.float64)
        if ps.is_pipeline_last_stage():
            found = -losses[0].flatten()[:count].double().cpu()
        return [float(x) for x in self._from_last_stage(found)]

    # ---- one pass through the pipeline
    def _run(
        self, batches: list[Packed], forward_only: bool, whole: bool = False
    ) -> list[torch.Tensor]:
        """Forward (and backward) over micro-batches; reports, on the last pipeline stage only."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        reports: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=partial(self._forward, whole),
            data_iterator=iter(batches),
            model=[self.part],
            num_microbatches=len(batches),
            seq_length=self.hyper.max_tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return reports

    def _forward(self, whole: bool, batches: Iterator[Packed], part: Any) -> tuple[Any, Any]:
        from megatron.core.packed_seq_params import PackedSeqParams

        packed = next(batches)
        device = "cpu" if self.on_cpu else "cuda"
        tokens, labels, mask, positions = (
            torch.from_numpy(array)[None].to(device)
            for array in (packed.tokens, packed.labels, packed.mask, packed.positions)
        )
        bounds = torch.from_numpy(packed.bounds).to(device)
        longest = int((packed.bounds[1:] - packed.bounds[:-1]).max())
        layout = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        if not self.layout.sequence_parallel:  # there the rows lie on several ranks
            self._rows = mask[0].nonzero()[:, 0] if packed.mask.any() else bounds[:1].long()
            labels, mask = labels[:, self._rows], mask[:, self._rows]
        out = part(tokens, positions, None, labels=labels, packed_seq_params=layout)
        return out, partial(_keep_whole if whole else sft.loss, mask)

    def _only_rows(self, layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Compute logits only where the mask asks for them: it saves their memory and time."""
        hidden, *others = arguments
        return hidden.index_select(0, self._rows), *others

    # ---- what every rank must know
    def _sum(self, reports: list[torch.Tensor], stop: bool) -> tuple[float, float, float]:
        """Sums over micro-batches and data ranks: loss, trained tokens, ranks asked to stop."""
        mine = torch.zeros(3, dtype=torch.float64)
        from megatron.core import parallel_state as ps

        if reports and ps.get_tensor_model_parallel_rank() == 0:
            mine[:2] = torch.stack(reports).sum(0).cpu()
        mine[2] = float(stop)
        if self.layout.world > 1:
            mine = mine if self.on_cpu else mine.cuda()
            torch.distributed.all_reduce(mine)
        total, count, stops = mine.tolist()
        if not count:
            raise BadInput(f"step {self.done}: no trainable token in the whole batch")
        return total, count, stops

    def _from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """Give every pipeline stage what the last one has."""
        from megatron.core import parallel_state as ps

        if self.layout.pipeline > 1:
            values = values if self.on_cpu else values.cuda()
            last = ps.get_pipeline_model_parallel_last_rank()
            torch.distributed.broadcast(values, last, group=ps.get_pipeline_model_parallel_group())
        return values


def _keep_whole(
    mask: torch.Tensor, per_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In place of a loss: the negative log-likelihoods themselves, for the probe."""
    return per_token.sum(), mask.sum().int(), per_token.detach().float()
