"""This rank among the others: process groups, its share of a micro-batch, sums over all of them.

train.py owns one `Ranks`; everything collective about a step is here. Read next: train.py.
"""

import datetime
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cray_agents.trainers.data.context_parallel import ContextShard, share
from cray_agents.trainers.data.packer import Packed
from cray_agents.trainers.data.samples import Floats, Ints
from cray_agents.trainers.methods.loss import Marked
from cray_agents.training_jobs import Layout

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)  # rank 0 may hash a big checkpoint meanwhile


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
        virtual_pipeline_model_parallel_size=layout.interleave if layout.interleave > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


class Ranks:
    """Where this rank stands in the layout, and what it shares with whom."""

    def __init__(self, layout: Layout, on_cpu: bool) -> None:
        from megatron.core import parallel_state as ps

        self.layout, self.on_cpu = layout, on_cpu
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.data_rank: int = ps.get_data_parallel_rank()
        self.context_rank: int = ps.get_context_parallel_rank()
        self._names: list[str] | None = None

    def seed(self, seed: int, step: int) -> None:
        """Make whatever is random in a step a function of (seed, step, place) alone.

        So nothing random has to be kept in a resume point. Tensor ranks share a seed, and
        Megatron gives each what it needs besides.
        """
        from megatron.core import parallel_state as ps
        from megatron.core import tensor_parallel

        stage = ps.get_pipeline_model_parallel_rank()
        text = f"{seed} {step} {self.data_rank} {self.context_rank} {stage}"
        tensor_parallel.model_parallel_cuda_manual_seed(zlib.crc32(text.encode()) % 2**30)

    # ---- this rank's share of a micro-batch
    def share(self, packed: Packed) -> ContextShard:
        """What this context rank has of it."""
        multiple = self.layout.tensor if self.layout.sequence_parallel else 1
        return share(packed, self.context_rank, self.layout.context, multiple)

    def packed_layout(self, share: ContextShard) -> Any:
        """Where the sequences of a share lie, as Megatron's attention is told."""
        from megatron.core.packed_seq_params import PackedSeqParams

        bounds = torch.from_numpy(share.bounds).to(self.device)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=share.longest,
            max_seqlen_kv=share.longest,
        )

    def marked(
        self,
        share: ContextShard,
        rows: Ints,
        logprobs: torch.Tensor,
        drift: float,
        scale: float,
    ) -> Marked:
        """The marked tokens of a share (`rows`: their places in it), with what is known of each."""
        from megatron.core import parallel_state as ps

        zeros = torch.zeros_like(logprobs, requires_grad=False)

        def column(name: str) -> torch.Tensor:
            values = share.columns.get(name)
            return zeros if values is None else torch.from_numpy(values[rows]).to(self.device)

        spread = self.layout.context > 1
        return Marked(
            logprobs=logprobs,
            sequence=torch.from_numpy(share.sequence[rows]).to(self.device),
            sequences=len(share.chosen),
            weight=column("weight") * scale,
            advantages=column("advantages"),
            sampled=column("sampled"),
            before=column("before"),
            reference=column("reference"),
            chosen=torch.from_numpy(share.chosen).to(self.device),
            drift=drift,
            context=ps.get_context_parallel_group() if spread else None,
            counts=self.context_rank == 0,
        )

    # ---- what every rank must know
    def on_any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        if self.layout.world == 1:
            return here
        flag = torch.tensor(float(here), device=self.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def add_up(self, reports: Sequence[dict[str, Any]], stop: bool) -> dict[str, Any]:
        """name -> (sum, count) over micro-batches, data and context ranks; `stop` sums ranks."""
        from megatron.core import parallel_state as ps

        if self._names is None:  # those of the last pipeline stage, once
            self._names = self._agreed(list(reports[0]) if reports else [])
        mine = torch.zeros(len(self._names) + 1, 2, dtype=torch.float64)
        if reports and ps.get_tensor_model_parallel_rank() == 0:
            for report in reports:
                pairs = [torch.stack([v.detach().double() for v in report[n]]) for n in self._names]
                mine[:-1] += torch.stack(pairs).cpu()
        mine[-1, 0] = float(stop)
        if self.layout.world > 1:
            mine = mine.to(self.device)
            torch.distributed.all_reduce(mine)
        sums = [(total, count) for total, count in mine.tolist()]
        return {**dict(zip(self._names, sums, strict=False)), "stop": (sums[-1][0], 1.0)}

    def _agreed(self, names: list[str]) -> list[str]:
        if self.layout.world == 1:
            return names
        gathered: list[Any] = [None] * self.layout.world
        torch.distributed.all_gather_object(gathered, names)
        return max(gathered, key=len)

    def collect(
        self,
        found: Sequence[tuple[Ints, Floats]],
        batches: Sequence[Packed],
        members: Sequence[Sequence[int]],
        sizes: Sequence[int],
    ) -> list[Floats]:
        """Numbers of marked tokens that ranks found, put together: an array [size] for each sample.

        `found[n]` are places in micro-batch n and their numbers; `members[n]` the samples in it.
        """
        from megatron.core import parallel_state as ps

        ends = np.cumsum([0, *sizes])
        whole = torch.zeros(int(ends[-1]), dtype=torch.float32)
        if ps.get_tensor_model_parallel_rank() == 0:
            for (places, values), packed, batch in zip(found, batches, members, strict=False):
                if batch:
                    targets = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in batch])
                    order = np.cumsum(packed.mask > 0) - 1
                    whole[targets[order[places]]] = torch.from_numpy(values)
        if self.layout.world > 1:
            whole = whole.to(self.device)
            torch.distributed.all_reduce(whole)
            whole = whole.cpu()
        numbers = whole.numpy()
        return [numbers[ends[i] : ends[i + 1]] for i in range(len(sizes))]


def is_main() -> bool:
    """Whether this is rank 0: the one that writes."""
    return torch.distributed.get_rank() == 0


def agree(value: Any) -> Any:
    """Rank 0's value, on every rank. Collective."""
    if torch.distributed.get_world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]
