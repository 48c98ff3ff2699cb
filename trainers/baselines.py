"""What the weights before training say of the samples: once, at a job's start.

dpo and kto compare with a reference, grpo with the policy that the job starts from. Both are
log-probabilities under weights that do not change, so that they are computed once and kept in the
job's folder: a restarted job reads them. Called by rank.py.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cray_agents.runtime import durable
from cray_agents.trainers.agree import agree, is_main
from cray_agents.trainers.data.known import Known, spread_out
from cray_agents.trainers.data.mismatched import mismatched
from cray_agents.trainers.data.samples import Floats, Samples
from cray_agents.trainers.train import Training
from cray_agents.training import JobSpec


class Baselines:
    """A job's samples under its parent's and its reference's weights.

    `training` holds the parent's weights when this is made and after each call. Collective.
    """

    def __init__(
        self, training: Training, spec: JobSpec, reference: Path | None, folder: Path
    ) -> None:
        self._training, self._spec = training, spec
        self._of, self._folder = reference, folder

    def known(self, samples: Samples, split: str) -> Known:
        """The samples of a split with what the job's method needs to know of them."""
        spec, columns = self._spec, {}
        if spec.hyperparameters.weigh_loss:
            weighed = zip(samples.masks, samples.weights, strict=True)
            columns["weight"] = [(mask * weight).astype(np.float32) for mask, weight in weighed]
        if spec.method == "grpo":
            columns |= {"sampled": samples.sampled, "advantages": samples.advantages}
            columns["before"] = spread_out(samples, self._parent(samples, f"{split}-before"))
            if spec.hyperparameters.policy.kl:
                found = self._reference(samples, f"{split}-reference")
                columns["reference"] = spread_out(samples, found)
        if spec.method in ("dpo", "kto"):
            found = self._reference(samples, f"{split}-reference")
            columns["reference"] = spread_out(samples, found)
        if spec.method != "kto":
            return Known(samples, columns)
        training = self._training  # a mismatched sequence must fit into a micro-batch, too
        limit = min(training.model.max_tokens, training.hyper.max_tokens_per_microbatch + 1)
        others = mismatched(samples, limit)
        sums = [row.sum() for row in self._reference(others, f"{split}-mismatched")]
        return Known(samples, columns, others, np.array(sums, np.float32))

    def _parent(self, samples: Samples, name: str) -> list[Floats]:
        return self._kept(samples, name, lambda: self._training.score(samples))

    def _reference(self, samples: Samples, name: str) -> list[Floats]:
        """Under the reference's weights: the parent's, unless the job names others."""
        reference, training = self._of, self._training
        if reference is None:
            return self._parent(samples, name)

        def compute() -> list[Floats]:
            training.take_weights(reference)
            found = training.score(samples)
            training.take_weights()
            return found

        return self._kept(samples, name, compute)

    def _kept(
        self, samples: Samples, name: str, compute: Callable[[], list[Floats]]
    ) -> list[Floats]:
        """Read what was computed by an attempt before, or compute and keep it."""
        path = self._folder / f"{name}.npy"
        sizes = [int((mask[1:] > 0).sum()) for mask in samples.masks]
        if agree(path.exists()):
            flat = np.load(path, allow_pickle=False)
            return np.split(flat, np.cumsum(sizes)[:-1])
        found = compute()
        if is_main():
            buffer = io.BytesIO()
            np.save(buffer, np.concatenate(found), allow_pickle=False)
            durable.replace_file(path, buffer.getvalue())
        return found
