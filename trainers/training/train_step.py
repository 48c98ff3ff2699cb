"""The Megatron training step: one rank's part of the model, its optimizer, forward and backward.

rank.py makes a `Training` and calls `step` in order. resume.py saves and restores it, export.py
writes what it learnt. Nothing here knows files of a job. Read next: methods/ for the losses.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from cray_agents.errors import BadInput
from cray_agents.trainers.data.baseline_logprobs import Known
from cray_agents.trainers.data.context_parallel import ContextShard
from cray_agents.trainers.data.packer import Packed, microbatches, step_units
from cray_agents.trainers.data.samples import Floats, Ints, Samples
from cray_agents.trainers.methods import METHODS
from cray_agents.trainers.methods.learning_rate import learning_rate
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.lora import adapters, add_lora
from cray_agents.trainers.models.model import build_model
from cray_agents.trainers.models.weights import SafeTensors, load_weights, weight_source
from cray_agents.trainers.training.optimizer import gather_weights, optimizer_of, wrap
from cray_agents.trainers.training.parallel_groups import Ranks
from cray_agents.training_jobs import Hyperparameters, Layout, MethodName

Sums = dict[str, tuple[float, float]]  # name -> (sum, count)
Item = TypeVar("Item")

AT_ONCE = 128  # units for each data rank that are packed together when nothing is learnt


class Stopped(Exception):
    """Raised on all ranks alike, between two parts of what takes long, if any was asked to stop."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class StepReport:
    """What a step came to, the same on every rank."""

    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int  # trained on
    processed: int  # read, trained on or not
    length: float  # of the sequence that a processed token is in, in the mean
    stop: bool  # some rank was asked to stop
    measures: dict[str, float] = field(default_factory=dict)


class Training:
    """One rank's share of a training job. All methods are collective.

    `asked_to_stop` is looked at in every step, whose report tells of it, and now and then by
    `score` and `evaluate`, which raise Stopped. `overlap` (None: on GPUs): see optimization.py.
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
    ) -> None:
        self.model, self.layout, self.hyper, self.parent = model, layout, hyper, parent
        self.on_cpu, self.method, self.asked_to_stop = on_cpu, method, asked_to_stop
        self.ranks = Ranks(layout, on_cpu)
        self.done = 0  # steps
        self.inner = build_model(model, layout, hyper, on_cpu, recompute)
        load_weights(self.inner, model, weight_source(parent, model, hyper))
        if hyper.lora is not None:
            add_lora(self.inner, model, hyper.lora, hyper.seed)
        self.parts = wrap(self.inner, layout, hyper, not on_cpu if overlap is None else overlap)
        self.optimizer = optimizer_of(self.parts, hyper)
        self.head = next((part.head for part in self.inner if part.post_process), None)

    def take_weights(self, checkpoint: Path | None = None) -> None:
        """Replace the weights by another checkpoint's, or by those that the job starts from."""
        first = weight_source(self.parent, self.model, self.hyper)
        source = first if checkpoint is None else SafeTensors(checkpoint, tied=self.model.tied)
        load_weights(self.inner, self.model, source)
        for _, _, adapter in adapters(self.inner):
            adapter.start()
        self.optimizer.reload_model_params()

    def restart(self) -> None:
        """Start again, keeping the optimizer's moments."""
        self.take_weights()
        self.done = 0

    def finish(self) -> None:
        """Have the last step's weights on every rank: what comes next reads them."""
        gather_weights(self.parts)

    # ---- learning
    def step(self, known: Known) -> StepReport:
        """Train one step on the samples that are its turn.

        On a loss that is not finite the weights stay as they were.
        """
        samples = known.samples
        turn = step_units(self.hyper, self.done, samples.unit_weights)
        units = [samples.units[u] for u in turn]
        self.ranks.seed(self.hyper.seed, self.done)
        drift = self._drift(known, units)
        for part in self.parts:
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        members = _members(units)
        sums = self._sums(known, units, drift, known.weight_scale(members), learn=True)
        stops, _ = sums.pop("stop")
        loss, measures = self._means(sums)
        costs = [samples.cost(i) for i in members]
        if self.method == "grpo":
            measures["reward"] = float(samples.rewards[members].mean())
        rate, norm = learning_rate(self.hyper, self.done), math.nan
        if math.isfinite(loss):
            norm = self._update(rate)
            self.done += 1
        return StepReport(
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
            tokens=int(known.marks[members].sum()),
            processed=sum(costs),
            length=sum(cost * cost for cost in costs) / sum(costs),
            stop=stops > 0,
            measures=measures,
        )

    def _update(self, rate: float) -> float:
        """Let the optimizer take a step; returns the norm of the gradient before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.hyper.weight_decay * group.get("wd_mult", 1.0)
        return float(self.optimizer.step()[1])

    @torch.no_grad()
    def evaluate(self, known: Known) -> tuple[float, dict[str, float]]:
        """The method's loss over all samples, and its measures; nothing is learnt."""
        sums: Sums = {}
        with self._not_training():
            drift = self._drift(known, known.samples.units)
            scale = known.weight_scale(range(len(known.samples)))
            for units in self._slices(known.samples.units):
                found = self._sums(known, units, drift, scale, learn=False)
                for name, (total, count) in found.items():
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = before[0] + total, before[1] + count
        del sums["stop"]
        return self._means(sums)

    @torch.no_grad()
    def score(
        self,
        samples: Samples,
        indices: Sequence[int] | None = None,
        temperature: float | None = None,
    ) -> list[Floats]:
        """Log-probabilities of the marked tokens of samples (all, unless some are named).

        Of each sample an array, [its marked tokens], the same on every rank. `temperature`: None
        means that of the method.
        """
        found: list[Floats] = []
        with self._not_training():
            for wanted in self._slices(range(len(samples)) if indices is None else indices):
                batches, members = self._share(samples, [[i] for i in wanted])
                places = {i: n for n, i in enumerate(wanted)}
                self._look(temperature)
                found += self.ranks.collect(
                    self._run(batches, self._logprobs, learn=False),
                    batches,
                    [[places[i] for i in batch] for batch in members],
                    [int((samples.masks[i][1:] > 0).sum()) for i in wanted],
                )
        return found

    def _drift(self, known: Known, units: Sequence[Sequence[int]]) -> float:
        """kto: how far completions that belong to other prompts have drifted from the reference."""
        if known.mismatched is None:
            return 0.0
        indices = _members(units)
        different = sorted(set(indices))
        now = self.score(known.mismatched, different)
        before = known.mismatched_reference
        drifts = {i: row.sum() - before[i] for i, row in zip(different, now, strict=True)}
        return max(0.0, float(np.mean([drifts[i] for i in indices])))

    def _sums(
        self,
        known: Known,
        units: Sequence[Sequence[int]],
        drift: float,
        scale: float,
        *,
        learn: bool,
    ) -> Sums:
        """The loss over units and its measures, as sums and counts over all ranks."""
        batches, _ = self._share(known.samples, units, known)
        self._look(entropy=self.method == "grpo")
        report = partial(self._loss, drift, scale)
        return self.ranks.add_up(self._run(batches, report, learn=learn), self.asked_to_stop())

    def _means(self, sums: Sums) -> tuple[float, dict[str, float]]:
        """The loss, and the other means."""
        means = {name: total / count for name, (total, count) in sums.items() if count}
        if "loss" not in means:
            raise BadInput(f"step {self.done}: no trainable token in the whole batch")
        return means.pop("loss"), means

    def _slices(self, values: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """So many at a time that packing them is quick. Raises Stopped."""
        size = AT_ONCE * self.layout.data
        for start in range(0, len(values), size):
            if self.ranks.on_any(self.asked_to_stop()):
                raise Stopped
            yield values[start : start + size]

    # ---- one pass through the pipeline
    def _share(
        self, samples: Samples, units: Sequence[Sequence[int]], known: Known | None = None
    ) -> tuple[list[Packed], list[list[int]]]:
        return microbatches(
            samples,
            units,
            self.hyper.max_tokens_per_microbatch,
            self.ranks.data_rank,
            self.layout.data,
            columns=known.columns if known else None,
            rounds=self.layout.pipeline if self.layout.interleave > 1 else 1,
        )

    def _run(self, batches: list[Packed], report: Any, *, learn: bool) -> list[Any]:
        """Forward (and backward) over micro-batches; reports, on the last pipeline stage only."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        several = len(self.parts) > 1
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward, report),
            data_iterator=[iter(batches) for _ in self.parts] if several else iter(batches),
            model=self.parts,
            num_microbatches=len(batches),
            seq_length=self.hyper.max_tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=not learn,
        )
        return found

    def _forward(self, report: Any, batches: Iterator[Packed], part: Any) -> tuple[Any, Any]:
        """A chunk's forward pass over the next micro-batch; the last chunk's gives losses."""
        share = self.ranks.share(next(batches))
        tokens, labels, positions = (
            torch.from_numpy(array)[None].to(self.ranks.device, torch.int64)
            for array in (share.tokens, share.labels, share.positions)
        )
        rows = np.flatnonzero(share.mask)
        # logits only where they are asked for; of one row where none is, so that there is a graph
        asked = torch.from_numpy(rows if len(rows) else np.zeros(1, np.int64)).to(self.ranks.device)
        if self.head is not None:
            self.head.rows = asked
        layout = self.ranks.packed_layout(share)
        out = part(tokens, positions, None, labels=labels[:, asked], packed_seq_params=layout)
        return out, partial(report, share, rows)

    def _logprobs(
        self, share: ContextShard, rows: Ints, per_token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """In place of a loss: the log-probabilities themselves."""
        found = -per_token[0, : len(rows)].float().cpu().numpy()
        places = share.places[rows]
        return per_token.sum(), torch.ones((), dtype=torch.int), (places, found)

    def _loss(
        self,
        drift: float,
        scale: float,
        share: ContextShard,
        rows: Ints,
        per_token: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The method's loss of a micro-batch, as Megatron wants it: sum, count, report."""
        logprobs = -per_token[0, : len(rows)].float()
        marked = self.ranks.marked(share, rows, logprobs, drift, scale)
        if self.head is not None and self.head.entropy is not None:
            marked = marked.with_entropy(self.head.entropy[: len(rows)])
        loss = METHODS[self.method](marked, self.hyper)
        report = {"loss": (loss.total.detach(), loss.count), **loss.measures}
        # a micro-batch of filler alone: nothing is learnt, but every rank has a gradient to send
        total = loss.total if len(rows) else per_token.sum() * 0.0
        return total, loss.count.int(), report

    def _look(self, temperature: float | None = None, entropy: bool = False) -> None:
        """Set what the next pass is to see of the logits."""
        if self.head is not None:
            usual = self.hyper.policy.temperature  # 1 with the other methods
            self.head.temperature = usual if temperature is None else temperature
            self.head.want_entropy = entropy

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        """While it lasts, dropout is off."""
        for part in self.parts:
            part.eval()
        try:
            yield
        finally:
            for part in self.parts:
                part.train()


def _members(units: Sequence[Sequence[int]]) -> list[int]:
    """The samples of units, one after the other."""
    return [i for unit in units for i in unit]
