"""Training step: one rank's model chunks, optimizer, and forward and backward passes.

job/rank.py makes a `RankTraining` and calls `step` repeatedly. In checkpointing/, save.py and
resume.py save and restore it, and hf_export.py writes its weights. This module knows no files of a
job. Read next: methods/ for the losses.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from cray_agents.errors import BadInput
from cray_agents.trainers.data.context_parallel import ContextShard
from cray_agents.trainers.data.packer import (
    BaselineLogprobs,
    Columns,
    Packed,
    microbatches,
    step_units,
)
from cray_agents.trainers.data.samples import Floats, Ints, Samples
from cray_agents.trainers.methods import METHODS
from cray_agents.trainers.methods.learning_rate import learning_rate
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.attention import send, takes_shared_prompts
from cray_agents.trainers.models.backends import (
    AnySource,
    StoredTypes,
    adapt_chunks,
    build_chunks,
    fill_chunks,
    first_source,
    round_chunks,
    source_of,
    stored_types,
)
from cray_agents.trainers.models.lora import (
    AdapterBase,
    adapters,
    continued_base,
    load_adapters,
    merged_weight,
    without_adapters,
)
from cray_agents.trainers.models.router_replay import replay
from cray_agents.trainers.models.transformers_backend.passes import Packing
from cray_agents.trainers.models.transformers_backend.weight_shards import WeightShards
from cray_agents.trainers.progress import CLOCK, OwnWork
from cray_agents.trainers.training.optimizer import (
    build_optimizer,
    gather_weights,
    optimizer_to_weights,
    wrap,
)
from cray_agents.trainers.training.parallel_groups import Ranks, broadcast_from_rank0
from cray_agents.training_jobs import ON_POLICY, Hyperparameters, Layout, MethodName

Sums = dict[str, tuple[float, float]]  # name -> (sum, count)
Item = TypeVar("Item")

SCORED_TOGETHER = 128  # units per data rank that are packed together when only scoring


class Stopped(Exception):
    """Raised on all ranks between two slices of a long task, if any rank was asked to stop."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class StepReport:
    """The results of a step, the same on every rank."""

    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int  # trained on
    processed: int  # read, trained on or not
    length: float  # of a processed token's sequence, in the mean over tokens
    stop: bool  # some rank was asked to stop
    measures: dict[str, float] = field(default_factory=dict)


#: Hyperparameters that decide how model and optimizer are built; the others may change in between.
BUILT_IN = ("dtype", "fp8", "lora", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")


def build_of(
    model: Architecture, layout: Layout, hyper: Hyperparameters, recompute: str
) -> tuple[Any, ...]:
    """Return what decides how model and optimizer are built: equal for jobs that fit the same."""
    return (model, layout, recompute, *(getattr(hyper, name) for name in BUILT_IN))


class RankTraining:
    """One rank's share of a training job. All methods are collective.

    Each step calls `asked_to_stop` and reports the answer. `score` and `evaluate` call it at
    intervals and raise Stopped. `overlap`: see `wrap` in optimizer.py; None means only on GPUs.
    `source` None: the first weights are the parent's, or random ones, as the hyperparameters say;
    without `loaded` the caller puts them in place. Where `build` is equal, `switch_job` takes
    up another job with the same model and optimizer. `saved` is the resume point that was written
    or loaded last, on rank 0. `base` is of adapters; `first` are the trained weights that the job
    began with, as its parent's files have them (job/master_weights.py).
    """

    def __init__(
        self,
        model: Architecture,
        layout: Layout,
        hyper: Hyperparameters,
        parent: Path,
        on_cpu: bool,
        *,
        method: MethodName = "sft",
        recompute: str = "none",
        overlap: bool | None = None,
        asked_to_stop: Callable[[], bool] = _never,
        source: AnySource | None = None,
        loaded: bool = True,
    ) -> None:
        self.model, self.layout, self.hyper, self.parent = model, layout, hyper, parent
        self.on_cpu, self.method, self.asked_to_stop = on_cpu, method, asked_to_stop
        self.recompute = recompute
        self.replays = model.backend == "megatron" and bool(model.experts)  # the engine's routes
        self.ranks = Ranks(layout, on_cpu, fp8=hyper.fp8 is not None)
        self.done = 0  # steps
        self.microbatch: int | None = None  # tokens, if the job's own are too many for the memory
        self.saved: Path | None = None
        source = source or first_source(parent, model, hyper)
        self.chunks = build_chunks(
            model, layout, hyper, on_cpu, recompute, source, broadcast_from_rank0, loaded=loaded
        )
        if hyper.lora is not None:
            adapt_chunks(self.chunks, model, hyper.lora, hyper.seed, source)
            if loaded:
                self._continue_adapters()
        overlap = not on_cpu if overlap is None else overlap
        self.wrapped_chunks = wrap(self.chunks, layout, hyper, overlap)
        if self.shards is not None:
            fill_chunks(self.chunks, model, source)
            self.shards.weights_to_optimizer()
        self.own_work = OwnWork(on_cpu)
        _time_own_work(self.chunks, self.own_work)
        self.optimizer = build_optimizer(self.wrapped_chunks, hyper)
        self.head = _head_of(self.chunks)
        self.shares_prompts = takes_shared_prompts(self.chunks)
        self.base: AdapterBase | None = None
        self.first: list[torch.Tensor] = []
        self._types: StoredTypes | None = None  # of the parent
        self.sender: Any = None  # a WeightSender, if published weights are sent to replicas

    @property
    def packing(self) -> Packing | None:
        """How it computes several sequences at once; None for the megatron backend."""
        return getattr(self.chunks[0], "packing", None)

    @property
    def shards(self) -> WeightShards | None:
        """This rank's shards of the weights; None where each data rank has them whole."""
        return getattr(self.chunks[0], "shards", None)

    @property
    def build(self) -> tuple[Any, ...]:
        """Everything that decides how model and optimizer are built: see `build_of`."""
        return build_of(self.model, self.layout, self.hyper, self.recompute)

    def switch_job(
        self,
        parent: Path,
        hyper: Hyperparameters,
        method: MethodName,
        asked_to_stop: Callable[[], bool],
    ) -> None:
        """Switch to another job of this `build`; weights, adapters and moments stay as they are."""
        self.parent, self.hyper, self.method = parent, hyper, method
        self.asked_to_stop = asked_to_stop
        self.ranks = Ranks(self.layout, self.on_cpu, fp8=hyper.fp8 is not None)
        for group in self.optimizer.param_groups:  # a client's commands may have changed them
            group["betas"], group["eps"] = (hyper.adam_beta1, hyper.adam_beta2), hyper.adam_eps
        self.optimizer.config.clip_grad = hyper.clip_grad
        self.done, self.saved, self.microbatch, self._types = 0, None, None, None

    @property
    def source(self) -> AnySource:
        """The weights that the job starts from. Raises BadInput, NotFound."""
        return first_source(self.parent, self.model, self.hyper)

    def stored_types(self) -> StoredTypes:
        """Return the types that each weight of this rank is stored in (backends.py)."""
        if self._types is None or self.shards is not None:  # the tensors of shards change
            self._types = stored_types(self.chunks, self.model, self.source)
        return self._types

    def take_weights(self) -> None:
        """Load the weights that the job starts from."""
        fill_chunks(self.chunks, self.model, self.source)
        self.start_from_weights()

    def start_from_weights(self) -> None:
        """Begin with the parent's adapters, or new ones; give the optimizer the model's weights."""
        for _, _, adapter in adapters(self.chunks):
            adapter.start(self.hyper.seed)
        self._continue_adapters()
        if self.shards is None:
            self.optimizer.reload_model_params()
        else:
            self.shards.weights_to_optimizer()

    def _continue_adapters(self) -> None:
        if continued_base(self.parent, self.hyper.lora) is not None:
            load_adapters(self.chunks, self.model, self.parent)

    def optimizer_to_weights(self) -> None:
        """Give the model, on all data ranks, the weights that the optimizer has now."""
        if self.shards is not None:
            self.shards.forget_gathered()
            self.shards.optimizer_to_weights()
            return
        self.finish()
        optimizer_to_weights(self.optimizer, self.wrapped_chunks)

    def scorer(self, model: Architecture, checkpoint: Path) -> "RankTraining":
        """Build another model beside this one, on the same ranks, that can only `score`."""
        other = copy.copy(self)
        other.model, other.parent = model, checkpoint
        other.replays = False  # its experts are others
        source = source_of(checkpoint, model)
        other.chunks = build_chunks(
            model, self.layout, self.hyper, self.on_cpu, "none", source, broadcast_from_rank0
        )
        other.wrapped_chunks, other.head = other.chunks, _head_of(other.chunks)
        other.shares_prompts = takes_shared_prompts(other.chunks)
        if self.layout.sharding == "full":
            other.chunks[0].requires_grad_(False)  # or FSDP takes memory for an optimizer
            other.wrapped_chunks = wrap(other.chunks, self.layout, self.hyper, overlap=False)
            fill_chunks(other.chunks, model, source)
        return other

    def finish(self) -> None:
        """Fetch the last step's weights to every rank, for readers of the weights."""
        gather_weights(self.wrapped_chunks)

    # ---- other weights for a while
    @contextmanager
    def as_stored(self, *, merged: bool = True) -> Iterator[bool]:
        """Let the model compute within the context with its weights as the files store them.

        Yields True if these are others than outside of it.

        Where a file's type is coarser than the training's, such as bfloat16 under float32, weights
        are rounded, with their adapters merged in, and come back as they were. Elsewhere they are
        left alone: files hold what the model computes with, beside which adapters stay. So do
        adapters that are not `merged` into files.
        """
        types = self.stored_types()
        coarse = [
            weight
            for weight, stored in types.items()
            if any(torch.promote_types(weight.dtype, one) != one for one in stored)
        ]
        if not merged or not self.ranks.on_any(bool(coarse)):
            yield False
            return
        under = (adapter.base.weight for _, _, adapter in adapters(self.chunks))
        with self._kept({*coarse, *under}):
            self.settle()
            with without_adapters(self.chunks):
                yield True

    @torch.no_grad()
    def settle(self) -> None:
        """Make the weights those that were published: adapters merged in, all of them rounded."""
        with without_adapters(self.chunks) as around:
            for weight, adapter in around.items():
                weight.copy_(merged_weight(adapter))
            round_chunks(self.chunks, self.model, self.source)

    @contextmanager
    def holding(self, checkpoint: Path) -> Iterator[None]:
        """Let another checkpoint's weights, of the same model, stand in within the context."""
        with self._kept(self.stored_types()), without_adapters(self.chunks):
            fill_chunks(self.chunks, self.model, source_of(checkpoint, self.model))
            yield

    @contextmanager
    def _kept(self, weights: Iterable[torch.Tensor]) -> Iterator[None]:
        """Keep this rank's weights in host memory, to put them back after the context."""
        shards = self.shards
        own = [(one if shards is None else shards.own(one)).detach() for one in weights]
        copies = [weight.to("cpu", copy=True) for weight in own]
        try:
            yield
        finally:
            if shards is not None:
                shards.forget_gathered()
            with torch.no_grad():
                for weight, copy_ in zip(own, copies, strict=True):
                    weight.copy_(copy_)

    # ---- learning
    def step(self, baseline: BaselineLogprobs) -> StepReport:
        """Train one step on the next units of the samples.

        If the loss is not finite, the weights stay unchanged.
        """
        samples = baseline.samples
        numbers = step_units(self.hyper, self.done, samples.unit_weights, samples.groups)
        units = [samples.units[number] for number in numbers]
        self.ranks.seed(self.hyper.seed, self.done)
        drift = self._drift(baseline, units)
        self.drop_gradients()
        self.own_work.begin()
        members = _members(units)
        sums = self._sums(baseline, units, drift, baseline.weight_scale(members), learn=True)
        stops, _ = sums.pop("stop")
        lengths, processed = sums.pop("length")
        loss, measures = self._means(sums)
        if self.method == "grpo":
            measures["reward"] = float(samples.rewards[members].mean())
        rate, norm = self.rate_at(self.done), math.nan
        if math.isfinite(loss):
            norm = self.update(rate)
            self.done += 1
        return StepReport(
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
            tokens=int(baseline.marks[members].sum()),
            processed=int(processed),
            length=lengths / processed,
            stop=stops > 0,
            measures=measures,
        )

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate(self.hyper, step)

    def update(self, rate: float, weight_decay: float | None = None) -> float:
        """Let the optimizer take a step; return the norm of the gradient before clipping."""
        decay = self.hyper.weight_decay if weight_decay is None else weight_decay
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = decay * group.get("wd_mult", 1.0)
        norm = float(self.optimizer.step()[1])
        CLOCK.ready = True
        return norm

    def drop_gradients(self) -> None:
        """Set all gradients to zero."""
        for chunk in self.wrapped_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, baseline: BaselineLogprobs) -> tuple[float, dict[str, float]]:
        """Return the method's loss over all samples, and its measures, without learning."""
        sums: Sums = {}
        with self._without_dropout():
            drift = self._drift(baseline, baseline.samples.units)
            scale = baseline.weight_scale(range(len(baseline.samples)))
            for units in self._slices(baseline.samples.units):
                added = self._sums(baseline, units, drift, scale, learn=False)
                for name, (total, count) in added.items():
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = before[0] + total, before[1] + count
        del sums["stop"], sums["length"]
        return self._means(sums)

    def score(
        self,
        samples: Samples,
        indices: Sequence[int] | None = None,
        temperature: float | None = None,
    ) -> list[Floats]:
        """Return log-probabilities of the trained tokens of samples; `indices` None means all.

        Each sample has an array, [its trained tokens], the same on every rank. `temperature` None
        means the method's.
        """
        return self._score(samples, indices, temperature, top=False)[0]

    def score_with_top(
        self, samples: Samples, temperature: float | None = None
    ) -> tuple[list[Floats], list[Ints]]:
        """Return what `score` returns, and the most likely token in each of these places."""
        logprobs, top = self._score(samples, None, temperature, top=True)
        return logprobs, [row.astype(np.int64) for row in top]

    @torch.no_grad()
    def _score(
        self,
        samples: Samples,
        indices: Sequence[int] | None,
        temperature: float | None,
        *,
        top: bool,
    ) -> list[list[Floats]]:
        """Return a list of logprobs and, if wanted, one of tokens, which float32 holds exactly."""
        columns: list[list[Floats]] = [[], []] if top else [[]]
        with self._without_dropout():
            for wanted in self._slices(range(len(samples)) if indices is None else indices):
                batches, members = self.pack_share(samples, [[i] for i in wanted])
                places = {i: n for n, i in enumerate(wanted)}
                self.set_head(temperature, top=top)
                reports = self.run_passes(batches, self._logprobs, learn=False)
                for place, rows in enumerate(columns):
                    rows += self.ranks.collect(
                        [(at, numbers[place]) for at, *numbers in reports],
                        batches,
                        [[places[i] for i in batch] for batch in members],
                        [int((samples.masks[i][1:] > 0).sum()) for i in wanted],
                    )
        return columns

    def _drift(self, baseline: BaselineLogprobs, units: Sequence[Sequence[int]]) -> float:
        """Estimate kto's divergence from the reference, on mismatched completions; 0 without."""
        if baseline.mismatched is None:
            return 0.0
        indices = _members(units)
        different = sorted(set(indices))
        now = self.score(baseline.mismatched, different)
        before = baseline.mismatched_reference
        drifts = {i: row.sum() - before[i] for i, row in zip(different, now, strict=True)}
        return max(0.0, float(np.mean([drifts[i] for i in indices])))

    def _sums(
        self,
        baseline: BaselineLogprobs,
        units: Sequence[Sequence[int]],
        drift: float,
        scale: float,
        *,
        learn: bool,
    ) -> Sums:
        """Return the loss over units and its measures, as sums and counts over all ranks."""
        batches, _ = self.pack_share(baseline.samples, units, baseline.columns)
        self.set_head(entropy=self.method in ON_POLICY)
        reports = self.run_passes(batches, partial(self._loss, drift, scale), learn=learn)
        return self.ranks.add_up(reports, self.asked_to_stop())

    def _means(self, sums: Sums) -> tuple[float, dict[str, float]]:
        """Return the loss, and the means of the other measures."""
        means = {name: total / count for name, (total, count) in sums.items() if count}
        if "loss" not in means:
            raise BadInput(f"step {self.done}: no trainable token in the whole batch")
        return means.pop("loss"), means

    def _slices(self, values: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Yield slices small enough to pack quickly. Raises Stopped."""
        size = SCORED_TOGETHER * self.layout.data
        for start in range(0, len(values), size):
            if self.ranks.on_any(self.asked_to_stop()):
                raise Stopped
            yield values[start : start + size]

    # ---- one pass through the pipeline
    def pack_share(
        self,
        samples: Samples,
        units: Sequence[Sequence[int]],
        columns: Columns | None = None,
    ) -> tuple[list[Packed], list[list[int]]]:
        """Pack this data rank's share of units; return the micro-batches and their members.

        A sequence that is longer than a micro-batch has one of its own.
        """
        return microbatches(
            samples,
            units,
            self.microbatch or self.hyper.max_tokens_per_microbatch,
            self.ranks.data_rank,
            self.layout.data,
            columns=columns,
            rounds=self.layout.pipeline if self.layout.interleave > 1 else 1,
            share=self.shares_prompts,
        )

    def run_passes(self, batches: list[Packed], report: Any, *, learn: bool) -> list[Any]:
        """Run forward (and backward) over micro-batches; the last pipeline stage gets reports."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks = self.wrapped_chunks
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward, report),
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks,
            num_microbatches=len(batches),
            seq_length=self.hyper.max_tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=not learn,
            **self.ranks.stage_links(chunks[0], batches),
        )
        return reports

    def _forward(self, report: Any, batches: Iterator[Packed], chunk: Any) -> tuple[Any, Any]:
        """Run a chunk's forward pass over the next micro-batch; the last chunk returns losses.

        It never waits for a GPU, which therefore computes while the next micro-batch is prepared.
        """
        CLOCK.tick()
        share = self.ranks.share(next(batches))
        rows = np.flatnonzero(share.mask)
        # only trained tokens need logits; without any, one row keeps the graph alive
        with_logits = rows if len(rows) else np.zeros(1, np.int64)
        tokens, labels, positions, selected = (
            send(array.astype(np.int64, copy=False), self.ranks.device)
            for array in (share.tokens, share.labels[with_logits], share.positions, with_logits)
        )
        if self.head is not None:
            self.head.rows = selected
        if self.replays:
            replay(chunk, share.routes, *self.ranks.sequence_part)
        layout = self.ranks.packed_layout(share)
        out = chunk(
            tokens[None], positions[None], None, labels=labels[None], packed_seq_params=layout
        )
        return out, partial(report, share, rows)

    def _logprobs(
        self, share: ContextShard, rows: Ints, per_token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Report log-probabilities in place of a loss, and the most likely tokens if wanted."""
        numbers = [-per_token[0, : len(rows)].detach().float()]
        if self.head is not None and self.head.want_top:
            assert self.head.top is not None
            numbers.append(self.head.top[: len(rows)].float())
        count = torch.ones((), dtype=torch.int)
        return per_token.sum(), count, (share.places[rows], *numbers)

    def _loss(
        self,
        drift: float,
        scale: float,
        share: ContextShard,
        rows: Ints,
        per_token: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return the method's loss of a micro-batch in Megatron's form: sum, count, report."""
        logprobs = -per_token[0, : len(rows)].float()
        tokens = self.ranks.trained_tokens(share, rows, logprobs, drift, scale)
        if self.head is not None and self.head.entropy is not None:
            tokens = tokens.with_entropy(self.head.entropy[: len(rows)])
        loss = METHODS[self.method](tokens, self.hyper)
        sizes = [torch.full_like(loss.count, size, dtype=torch.float64) for size in share.sizes]
        report = {"loss": (loss.total.detach(), loss.count), "length": sizes, **loss.measures}
        # a micro-batch of filler teaches nothing, but every rank must send a gradient
        total = loss.total if len(rows) else per_token.sum() * 0.0
        return total, loss.count.int(), report

    def set_head(
        self, temperature: float | None = None, entropy: bool = False, top: bool = False
    ) -> None:
        """Set the temperature of the next passes' logits, and what is computed beside."""
        if self.head is not None:
            usual = self.hyper.policy.temperature  # 1 unless the method is grpo or distill
            self.head.temperature = usual if temperature is None else temperature
            self.head.want_entropy, self.head.want_top = entropy, top

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Switch dropout off within the context."""
        for chunk in self.wrapped_chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in self.wrapped_chunks:
                chunk.train()


def _time_own_work(chunks: Sequence[Any], own_work: OwnWork) -> None:
    """Let the sum of gradients over data ranks end a step's own work."""
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    if config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func = own_work.timed(config.finalize_model_grads_func)


def _head_of(chunks: Sequence[Any]) -> Any:
    """Return the head of the chunk with the output layer; None if another stage has it."""
    return next((chunk.head for chunk in chunks if chunk.post_process), None)


def _members(units: Sequence[Sequence[int]]) -> list[int]:
    """Return the samples of units, one after the other."""
    return [i for unit in units for i in unit]
