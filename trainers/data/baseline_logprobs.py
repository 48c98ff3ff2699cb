"""Baseline log-probabilities: a dataset's samples with the per-token inputs of a loss.

job/baselines.py makes one at a job's start. No torch. Read next: training/train_step.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cray_agents.trainers.data.packer import Columns
from cray_agents.trainers.data.samples import Floats, Ints, Samples


@dataclass(frozen=True)
class BaselineLogprobs:
    """Samples with named columns of numbers for their trained tokens.

    `mismatched` (kto) pairs their prompts with other samples' completions.
    `mismatched_reference`, [samples], is the reference's log-probability of these completions.
    """

    samples: Samples
    columns: Columns = field(default_factory=dict)
    mismatched: Samples | None = None
    mismatched_reference: Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    @cached_property
    def marks(self) -> Ints:
        """The number of trained tokens of each sample, [samples]."""
        return np.array([int((mask[1:] > 0).sum()) for mask in self.samples.masks])

    def weight_scale(self, indices: Sequence[int]) -> float:
        """Return the factor that makes the samples' mean weight 1 over their trained tokens."""
        marks, weights = self.marks[list(indices)], self.samples.weights[list(indices)]
        total = float((marks * weights).sum())
        return float(marks.sum()) / total if total > 0 else 0.0


@dataclass(frozen=True)
class TrainedTokenRows:
    """Rows for packer.py, expanded from numbers of the trained tokens alone.

    `values`, by sample: [its trained tokens], or one number for all of them. Other places are 0.
    """

    masks: Sequence[Floats]
    values: Mapping[int, Floats | float]

    def __getitem__(self, place: int) -> Floats:
        mask = self.masks[place]
        row = np.zeros(len(mask), np.float32)
        row[1:][mask[1:] > 0] = self.values[place]
        return row
