"""A dataset's samples with all that a loss needs to know of their tokens before a step.

baselines.py makes one at a job's start. No torch. Read next: train.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cray_agents.trainers.data.packer import Columns
from cray_agents.trainers.data.samples import Floats, Ints, Samples


@dataclass(frozen=True)
class Known:
    """Samples, and numbers of their tokens by name, of those that are trained on.

    `mismatched` (kto) are their prompts with other samples' completions, and
    `mismatched_reference`, [samples], the reference's log-probabilities of those completions.
    """

    samples: Samples
    columns: Columns = field(default_factory=dict)
    mismatched: Samples | None = None
    mismatched_reference: Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    @cached_property
    def marks(self) -> Ints:
        """[samples]: how many tokens of each are trained on."""
        return np.array([int((mask[1:] > 0).sum()) for mask in self.samples.masks])

    def weight_scale(self, indices: Sequence[int]) -> float:
        """What makes the samples' weights 1 in the mean over their marked tokens."""
        marks, weights = self.marks[list(indices)], self.samples.weights[list(indices)]
        total = float((marks * weights).sum())
        return float(marks.sum()) / total if total > 0 else 0.0


@dataclass(frozen=True)
class OfMarked:
    """Rows for packing.py from what is known of marked tokens alone, which is all that is kept.

    `values`, by sample: [its marked tokens], or one number for them all. Elsewhere a row is 0.
    """

    masks: Sequence[Floats]
    values: Mapping[int, Floats | float]

    def __getitem__(self, place: int) -> Floats:
        mask = self.masks[place]
        row = np.zeros(len(mask), np.float32)
        row[1:][mask[1:] > 0] = self.values[place]
        return row
