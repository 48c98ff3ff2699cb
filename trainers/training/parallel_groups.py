"""Parallel groups: process groups, a rank's share of a micro-batch, and sums over ranks.

train_step.py owns one `Ranks`, which holds every collective of a step. A `Relay` passes on what
rank 0 decides alone. Read next: train_step.py.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.distributed import distributed_c10d

from cray_agents.errors import FULL, DiskFull, StoreError
from cray_agents.trainers.data.context_parallel import ContextShard, fill_up, share
from cray_agents.trainers.data.packer import Packed
from cray_agents.trainers.data.samples import Floats, Ints
from cray_agents.trainers.methods.loss import TrainedTokens
from cray_agents.trainers.models.attention import packed_sequences, send
from cray_agents.training_jobs import Layout

Value = TypeVar("Value")

FP8_ROWS = 32  # Transformer Engine multiplies matrices of 16 rows, or with mxfp8 of 32
FOR_EVER = timedelta(days=7)  # rank 0 may be idle for long; its end ends the others, too
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank may hash big files meanwhile


def join_ranks(layout: Layout, rank: int, world: int, store: Any, on_cpu: bool) -> None:
    """Join this rank's process groups. Collective."""
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
        num_distributed_optimizer_instances=layout.optimizer_instances,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


class Ranks:
    """This rank's place in the layout, and the collectives with its peers."""

    def __init__(self, layout: Layout, on_cpu: bool, *, fp8: bool = False) -> None:
        from megatron.core import parallel_state as ps

        self.layout, self.on_cpu, self.fp8 = layout, on_cpu, fp8
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.data_rank: int = ps.get_data_parallel_rank()
        self.context_rank: int = ps.get_context_parallel_rank()
        self._names: list[str] | None = None

    def seed(self, seed: int, step: int) -> None:
        """Make all randomness of a step a function of (seed, step, place) alone.

        Resume points therefore keep no random state. Tensor ranks share a seed, from which
        Megatron derives its own per rank.
        """
        from megatron.core import parallel_state as ps
        from megatron.core import tensor_parallel

        stage = ps.get_pipeline_model_parallel_rank()
        text = f"{seed} {step} {self.data_rank} {self.context_rank} {stage}"
        tensor_parallel.model_parallel_cuda_manual_seed(zlib.crc32(text.encode()) % 2**30)

    # ---- this rank's share of a micro-batch
    def share(self, packed: Packed) -> ContextShard:
        """Return this context rank's share of a micro-batch."""
        return share(packed, self.context_rank, self.layout.context, self._multiple)

    @property
    def _multiple(self) -> int:
        """What the number of a share's tokens is a multiple of."""
        sequence = self.layout.tensor if self.layout.sequence_parallel else 1
        return sequence * (FP8_ROWS if self.fp8 else 1)

    def stage_links(self, chunk: Any, batches: Sequence[Packed]) -> dict[str, Any]:
        """Return arguments of Megatron's schedules with which stages tell each other no shapes.

        Megatron's own links send a shape before each tensor, and wait for the device to read it.
        Here every stage packs all micro-batches, and so knows what it receives next.
        """
        from megatron.core.pipeline_parallel import p2p_communication, schedules
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.utils import get_model_config

        layout, config = self.layout, get_model_config(chunk)
        if layout.pipeline == 1:
            return {}
        names = ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]
        groups = ProcessGroupCollection.use_mpu_process_groups(names)
        links = p2p_communication.P2PCommunicator(groups.pp, config)
        ranks = layout.context * self.sequence_part[1]
        sizes = [fill_up(each, layout.context, self._multiple).sum() for each in batches]
        shapes = [(int(size) // ranks, 1, config.hidden_size) for size in sizes]
        table = schedules.get_schedule_table(len(batches), layout.interleave, layout.pipeline)

        def received(starts: bool) -> Iterator[tuple[int, ...]]:
            # what starts here, in the first chunk on the first stage, comes from nobody
            return iter([shapes[batch] for batch, chunk in table if chunk or not starts])

        forward = received(groups.pp.rank() == 0)
        backward = received(groups.pp.rank() == layout.pipeline - 1)
        links._communicate_shapes = lambda _next, _previous, from_previous, from_next: (
            next(forward) if from_previous else None,
            next(backward) if from_next else None,
        )
        return {"p2p_communicator": links, "pg_collection": groups}

    @property
    def sequence_part(self) -> tuple[int, int]:
        """Which part of a micro-batch's tokens this tensor rank's routers get, of how many."""
        if not self.layout.sequence_parallel:
            return 0, 1
        from megatron.core import parallel_state as ps

        return ps.get_tensor_model_parallel_rank(), self.layout.tensor

    def packed_layout(self, share: ContextShard) -> Any:
        """Return the bounds of a share's sequences in the form of Megatron's attention."""
        return packed_sequences(share.bounds, self.device, share.shared_tokens, share.heads)

    def trained_tokens(
        self,
        share: ContextShard,
        rows: Ints,
        logprobs: torch.Tensor,
        drift: float,
        scale: float,
    ) -> TrainedTokens:
        """Collect the loss's inputs for the trained tokens of a share (`rows`: their places)."""
        from megatron.core import parallel_state as ps

        zeros, now = torch.zeros_like(logprobs, requires_grad=False), logprobs.detach()

        def column(name: str, else_: torch.Tensor = zeros) -> torch.Tensor:
            values = share.columns.get(name)
            return else_ if values is None else send(values[rows], self.device)

        return TrainedTokens(
            logprobs=logprobs,
            sequence=send(share.sequence[rows], self.device),
            sequences=len(share.chosen),
            weight=column("weight") * scale,
            advantages=column("advantages"),
            sampled=column("sampled"),
            before=column("before", now),
            reference=column("reference", now),
            teacher=column("teacher"),
            chosen=send(share.chosen, self.device),
            drift=drift,
            context=ps.get_context_parallel_group() if self.layout.context > 1 else None,
            counts=self.context_rank == 0,
        )

    # ---- reductions over ranks
    def on_any(self, condition: bool) -> bool:
        """Return True on every rank if the condition holds on any rank. Collective."""
        if self.layout.world == 1:
            return condition
        flag = torch.tensor(float(condition), device=self.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def add_up(self, reports: Sequence[dict[str, Any]], stop: bool) -> dict[str, Any]:
        """Sum reports: name -> (sum, count) over micro-batches, data and context ranks.

        "stop" counts the ranks that were asked to stop. All is added on the device, and read once:
        a read waits for all work before it. Collective.
        """
        from megatron.core import parallel_state as ps

        if self._names is None:  # only the last pipeline stage knows the names; exchange them once
            self._names = self._longest(list(reports[0]) if reports else [])
        mine = torch.zeros(len(self._names) + 1, 2, dtype=torch.float64, device=self.device)
        if reports and ps.get_tensor_model_parallel_rank() == 0:
            for report in reports:
                pairs = [torch.stack([v.detach().double() for v in report[n]]) for n in self._names]
                mine[:-1] += torch.stack(pairs)
        mine[-1, 0].fill_(float(stop))  # `= float(stop)` would wait for the device
        if self.layout.world > 1:
            torch.distributed.all_reduce(mine)
        sums = [(total, count) for total, count in mine.tolist()]
        return {**dict(zip(self._names, sums, strict=False)), "stop": (sums[-1][0], 1.0)}

    def _longest(self, names: list[str]) -> list[str]:
        """Return the longest list of names on any rank. Collective."""
        if self.layout.world == 1:
            return names
        gathered = gather_from_ranks(json.dumps(names).encode())
        return max((list(json.loads(one)) for one in gathered), key=len)

    def collect(
        self,
        rows: Sequence[tuple[Ints, torch.Tensor]],
        batches: Sequence[Packed],
        members: Sequence[Sequence[int]],
        sizes: Sequence[int],
    ) -> list[Floats]:
        """Merge the ranks' numbers of trained tokens into an array [size] for each sample.

        `rows[n]` are places in micro-batch n and their numbers; `members[n]` the samples in it.
        Collective.
        """
        from megatron.core import parallel_state as ps

        ends = np.cumsum([0, *sizes])
        whole = torch.zeros(int(ends[-1]), dtype=torch.float32)
        if rows and ps.get_tensor_model_parallel_rank() == 0:
            values = torch.cat([numbers for _, numbers in rows]).cpu()  # one read for all
            each = torch.split(values, [len(places) for places, _ in rows])
            for (places, _), mine, packed, batch in zip(rows, each, batches, members, strict=False):
                if batch:
                    targets = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in batch])
                    order = np.cumsum(packed.mask > 0) - 1
                    whole[targets[order[places]]] = mine
        if self.layout.world > 1:
            whole = whole.to(self.device)
            torch.distributed.all_reduce(whole)
            whole = whole.cpu()
        numbers = whole.numpy()
        return [numbers[ends[i] : ends[i + 1]] for i in range(len(sizes))]


def is_rank0() -> bool:
    """Return True on rank 0, the rank that writes files."""
    return torch.distributed.get_rank() == 0


# Ranks exchange JSON and tensors, never pickles: a process of another user that reached their
# rendezvous would run code with them. So torch's `..._object` collectives are not used.
def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's value, which JSON can hold, on every rank. Collective."""
    if torch.distributed.get_world_size() == 1:
        return value
    content = _as_tensor(json.dumps(value).encode() if is_rank0() else b"")
    size = torch.tensor(len(content), device=content.device)
    torch.distributed.broadcast(size, 0)
    if not is_rank0():
        content = content.new_empty(int(size))
    torch.distributed.broadcast(content, 0)
    return json.loads(_as_bytes(content))


def write_together(what: str, write: Callable[[], Value]) -> Value:
    """Write files on every rank. Raises StoreError on all ranks if one of them cannot. Collective.

    `what` is written, such as "the checkpoint". DiskFull if a disk is full.
    """
    problem: tuple[str, bool] | None = None
    value: Value | None = None
    try:
        value = write()
    except OSError as error:
        problem = (error.strerror or str(error), error.errno in FULL)
    every = [json.loads(one) for one in gather_from_ranks(json.dumps(problem).encode())]
    for text, full in filter(None, every):
        raise (DiskFull if full else StoreError)(f"{what} was not written: {text}")
    return cast("Value", value)


def gather_from_ranks(content: bytes) -> list[bytes]:
    """Return the bytes of every rank, in the order of ranks, on every rank. Collective."""
    world = torch.distributed.get_world_size()
    if world == 1:
        return [content]
    mine = _as_tensor(content)
    sizes = [torch.tensor(0, device=mine.device) for _ in range(world)]
    torch.distributed.all_gather(sizes, torch.tensor(len(mine), device=mine.device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=mine.device)
    padded[: len(mine)] = mine
    room = [torch.empty_like(padded) for _ in range(world)]
    torch.distributed.all_gather(room, padded)
    return [_as_bytes(one[: int(size)]) for one, size in zip(room, sizes, strict=True)]


def _as_tensor(content: bytes) -> torch.Tensor:
    """Return bytes as a tensor on the device of the ranks' backend."""
    device = "cpu" if torch.distributed.get_backend() == "gloo" else "cuda"
    return torch.tensor(np.frombuffer(content, np.uint8), device=device)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy())


class Relay:
    """A sequence of decisions under a name that no other sequence of these ranks has.

    The others wait in the ranks' store, not in a collective: that would keep a GPU busy, and end
    after a timeout.
    """

    def __init__(self, name: str) -> None:
        self._name, self._number = name, 0
        self._leads = torch.distributed.get_rank() == 0
        self._alone = torch.distributed.get_world_size() == 1
        default: Any = distributed_c10d._get_default_store()
        self._store = default if self._alone else default.clone()

    def next(self, decide: Callable[[], Any]) -> Any:
        """Return what `decide` returns on rank 0, which JSON can hold, on every rank."""
        self._number += 1
        key = f"{self._name}/{self._number}"
        if not self._leads:
            self._store.wait([key], FOR_EVER)
            return json.loads(self._store.get(key))
        decision = decide()
        if not self._alone:
            self._store.set(key, json.dumps(decision))
        return decision
