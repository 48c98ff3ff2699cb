"""What the weights before training say of the samples: once, at a job's start.

dpo and kto compare with a reference, grpo with the policy that the job starts from. Both are
log-probabilities under weights that do not change, so that they are computed once, of the samples
that a step will take, and kept in the job's folder: a restarted job reads them. Called by rank.py.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from cray_agents.runtime.disk import durable
from cray_agents.trainers.data.baseline_logprobs import Known, OfMarked
from cray_agents.trainers.data.packer import Rows, trained_on
from cray_agents.trainers.data.samples import Floats, Ints, Samples
from cray_agents.trainers.training.parallel_groups import is_main
from cray_agents.trainers.training.train_step import Training
from cray_agents.training_jobs import JobSpec


def mismatched(samples: Samples, limit: int) -> Samples:
    """Each sample's prompt with another one's completion, cut to `limit` tokens in all.

    A prompt is what stands before the first token that is trained on, and a completion all from
    there on, with the same mask. Completions are passed on by as many places as the longest row of
    equal prompts has: attempts at a task stand side by side, and none gets one of its own task
    unless there are hardly others. Each completion is used once.
    """
    starts = [1 + int((mask[1:] > 0).argmax()) for mask in samples.masks]
    prompts = [ids[:start] for ids, start in zip(samples.tokens, starts, strict=True)]
    shift = _longest_row(prompts) % len(samples) or 1
    tokens: list[Ints] = []
    masks: list[Floats] = []
    for place, prompt in enumerate(prompts):
        other = (place + shift) % len(samples)
        completion = slice(starts[other], starts[other] + limit - len(prompt))
        tokens.append(np.concatenate([prompt, samples.tokens[other][completion]]))
        nothing = np.zeros(len(prompt), np.float32)
        masks.append(np.concatenate([nothing, samples.masks[other][completion]]))
    return replace(Samples.of(tokens, masks), chosen=samples.chosen, weights=samples.weights)


def _longest_row(prompts: Sequence[Ints]) -> int:
    """How many equal ones there are side by side, at most."""
    return max(len(list(same)) for _, same in groupby(ids.tobytes() for ids in prompts))


HASH_BYTES = 32  # SHA-256 of what comes behind it
Found = dict[int, Floats]  # by sample, of its marked tokens


class Baselines:
    """A job's samples under its parent's and its reference's weights.

    `training` holds the parent's weights when this is made and after each call. Collective. Raises
    Stopped (train.py) when asked to stop; what was finished by then is kept.
    """

    def __init__(
        self, training: Training, spec: JobSpec, reference: Path | None, folder: Path
    ) -> None:
        self._training, self._spec = training, spec
        self._of, self._folder = reference, folder

    def of_training(self, samples: Samples) -> Known:
        """The training split with what the job's method needs to know of it."""
        return self._known(samples, "train", trained_on(self._spec.hyperparameters, samples))

    def of_validation(self, samples: Samples) -> Known:
        """The same for the validation split."""
        return self._known(samples, "validation", list(range(len(samples))))

    def _known(self, samples: Samples, split: str, places: list[int]) -> Known:
        spec = self._spec
        columns: dict[str, Rows] = {}
        if spec.hyperparameters.weigh_loss:
            weights = dict(enumerate(samples.weights.tolist()))
            columns["weight"] = OfMarked(samples.masks, weights)
        if spec.method == "grpo":
            columns |= {"sampled": samples.sampled, "advantages": samples.advantages}
            before = self._parent(samples, f"{split}-before", places)
            columns["before"] = columns["reference"] = OfMarked(samples.masks, before)
        if spec.method in ("dpo", "kto") or (self._of and spec.hyperparameters.policy.kl):
            found = self._reference(samples, f"{split}-reference", places)
            columns["reference"] = OfMarked(samples.masks, found)
        if spec.method != "kto":
            return Known(samples, columns)
        training = self._training  # a mismatched sequence must fit into a micro-batch, too
        limit = min(training.model.max_tokens, training.hyper.max_tokens_per_microbatch + 1)
        others = mismatched(samples, limit)
        sums = np.full(len(samples), np.nan, np.float32)
        for place, row in self._reference(others, f"{split}-mismatched", places).items():
            sums[place] = row.sum()
        return Known(samples, columns, others, sums)

    def _parent(self, samples: Samples, name: str, places: list[int]) -> Found:
        return self._kept(samples, name, places, lambda: self._training.score(samples, places))

    def _reference(self, samples: Samples, name: str, places: list[int]) -> Found:
        """Under the reference's weights: the parent's, unless the job names others."""
        reference, training = self._of, self._training
        if reference is None:
            return self._parent(samples, name, places)

        def compute() -> list[Floats]:
            training.take_weights(reference)
            found = training.score(samples, places)
            training.take_weights()
            return found

        return self._kept(samples, name, places, compute)

    def _kept(
        self, samples: Samples, name: str, places: list[int], compute: Callable[[], list[Floats]]
    ) -> Found:
        """Read what was computed by an attempt before, or compute and keep it."""
        path = self._folder / name
        sizes = [int((samples.masks[i][1:] > 0).sum()) for i in places]
        flat = _read(path, sum(sizes))
        missing = self._training.ranks.on_any(flat is None)  # all compute it, or none
        if flat is None or missing:
            found = compute()
            if is_main():
                _write(path, np.concatenate(found))
        else:
            found = np.split(flat, np.cumsum(sizes)[:-1])
        return dict(zip(places, found, strict=True))


def _write(path: Path, numbers: Floats) -> None:
    """Float32, little-endian, behind their hash."""
    content = numbers.astype("<f4").tobytes()
    durable.replace_file(path, hashlib.sha256(content).digest() + content)


def _read(path: Path, size: int) -> Floats | None:
    """So many numbers; None where there is no such file, or another content than was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    told, numbers = content[:HASH_BYTES], memoryview(content)[HASH_BYTES:]
    if len(numbers) != 4 * size or hashlib.sha256(numbers).digest() != told:
        return None
    return np.frombuffer(numbers, "<f4")
