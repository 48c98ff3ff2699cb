"""Baselines: log-probabilities of the samples under the weights before training.

dpo and kto compare with a reference, grpo with the policy that the job starts from, distill also
with a teacher. None of these changes during the job. The log-probabilities are therefore computed
once, only for samples that some step takes, and kept in the job's folder for restarts. A job of one
step needs no pass for its own policy before it: that step computes the same. Called by rank.py.

A reference or a teacher that is not the one that was named changes every loss and no loss shows it.
So before it judges a sample, it scores the golden probe: prompts that its own training job recorded
(runtime/logprob_limits.py). Checkpoints without a probe, such as downloaded ones, are not checked.
"""

import gc
import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from cray_agents.errors import FULL, NotFound
from cray_agents.runtime.disk import durable
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE, bfloat16_limits, measure
from cray_agents.runtime.registry.checkpoints import manifest_of
from cray_agents.trainers.data.packer import (
    BaselineLogprobs,
    Rows,
    TrainedTokenRows,
    samples_to_train_on,
)
from cray_agents.trainers.data.samples import Floats, Ints, Samples
from cray_agents.trainers.job.weights_check import FailedEverywhere, check_weights
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.layouts import scoring_backend
from cray_agents.trainers.training.parallel_groups import broadcast_from_rank0, is_rank0
from cray_agents.trainers.training.train_step import RankTraining
from cray_agents.training_jobs import ON_POLICY, JobSpec


def mismatch_completions(samples: Samples, limit: int) -> Samples:
    """Pair each sample's prompt with another sample's completion, cut to `limit` tokens in all.

    A prompt ends before the first token that is trained on. A completion is the rest, with the same
    mask. Completions move on by the length of the longest row of equal prompts: attempts at one
    task stand side by side, so a prompt gets a completion of another task unless there are hardly
    any. Each completion is used once.
    """
    starts = [1 + int((mask[1:] > 0).argmax()) for mask in samples.masks]
    prompts = [ids[:start] for ids, start in zip(samples.tokens, starts, strict=True)]
    shift = _longest_row(prompts) % len(samples) or 1
    tokens: list[Ints] = []
    masks: list[Floats] = []
    for place, prompt in enumerate(prompts):
        donor = (place + shift) % len(samples)
        completion = slice(starts[donor], starts[donor] + limit - len(prompt))
        tokens.append(np.concatenate([prompt, samples.tokens[donor][completion]]))
        untrained = np.zeros(len(prompt), np.float32)
        masks.append(np.concatenate([untrained, samples.masks[donor][completion]]))
    return replace(Samples.of(tokens, masks), chosen=samples.chosen, weights=samples.weights)


def _longest_row(prompts: Sequence[Ints]) -> int:
    """Return the length of the longest run of equal prompts."""
    return max(len(list(same)) for _, same in groupby(ids.tobytes() for ids in prompts))


HASH_BYTES = 32  # SHA-256 of the rest of the file
LogprobsBySample = dict[int, Floats]  # sample -> [its trained tokens]


class Baselines:
    """Baselines of a job's samples under the weights of its parent, reference and teacher.

    `training` must hold the parent's weights, and holds them again after each call. Methods are
    collective. They raise Stopped (train_step.py) when asked to stop; finished columns are kept.
    """

    def __init__(
        self,
        training: RankTraining,
        spec: JobSpec,
        reference: Path | None,
        teacher: Path | None,
        folder: Path,
    ) -> None:
        self._training, self._spec = training, spec
        self._reference_path, self._teacher_path, self._folder = reference, teacher, folder

    def of_training(
        self, samples: Samples, scored: LogprobsBySample, *, others: bool
    ) -> BaselineLogprobs:
        """Return the training split with the baselines that the job's method needs.

        `scored`: samples whose log-probabilities under the parent's weights are known already.
        `others`: the first step begins with other weights than those that the files store.
        """
        hyper = self._spec.hyperparameters
        scores = self._spec.method != "sft" or self._reference_path is not None
        places = samples_to_train_on(hyper, samples) if scores else ()
        drops = hyper.lora is not None and hyper.lora.dropout > 0
        itself = hyper.steps == 1 and not others and not drops
        return self._baseline(samples, "train", places, None if itself else scored)

    def of_validation(self, samples: Samples) -> BaselineLogprobs:
        """Return the validation split with the same baselines."""
        return self._baseline(samples, "validation", range(len(samples)), {})

    def _baseline(
        self, samples: Samples, split: str, places: Sequence[int], scored: LogprobsBySample | None
    ) -> BaselineLogprobs:
        """Return a split with its columns. `scored` None: the step itself computes p_before."""
        spec = self._spec
        columns: dict[str, Rows] = {}
        if spec.hyperparameters.weigh_loss:
            weights = dict(enumerate(samples.weights.tolist()))
            columns["weight"] = TrainedTokenRows(samples.masks, weights)
        if spec.method in ON_POLICY:
            columns |= {"sampled": samples.sampled, "advantages": samples.advantages}
            if scored is not None:
                before = self._parent(samples, f"{split}-before", places, scored)
                columns["before"] = columns["reference"] = TrainedTokenRows(samples.masks, before)
        if spec.method in ("dpo", "kto") or (
            self._reference_path and spec.hyperparameters.policy.kl
        ):
            reference = self._reference(samples, f"{split}-reference", places)
            columns["reference"] = TrainedTokenRows(samples.masks, reference)
        if self._teacher_path is not None:
            teacher = self._teacher(self._teacher_path, samples, f"{split}-teacher", places)
            columns["teacher"] = TrainedTokenRows(samples.masks, teacher)
        if spec.method != "kto":
            return BaselineLogprobs(samples, columns)
        training = self._training  # a mismatched sequence must fit into a micro-batch, too
        limit = min(training.model.max_tokens, training.hyper.max_tokens_per_microbatch + 1)
        mismatched = mismatch_completions(samples, limit)
        sums = np.full(len(samples), np.nan, np.float32)
        for place, row in self._reference(mismatched, f"{split}-mismatched", places).items():
            sums[place] = row.sum()
        return BaselineLogprobs(samples, columns, mismatched, sums)

    def _parent(
        self, samples: Samples, name: str, places: Sequence[int], scored: LogprobsBySample
    ) -> LogprobsBySample:
        def compute() -> list[Floats]:
            unknown = [i for i in places if i not in scored]
            rows = dict(zip(unknown, self._training.score(samples, unknown), strict=True))
            return [scored[i] if i in scored else rows[i] for i in places]

        return self._load_or_compute(samples, name, places, compute)

    def _reference(self, samples: Samples, name: str, places: Sequence[int]) -> LogprobsBySample:
        """Score under the reference's weights, which are the parent's unless the job names some."""
        reference, training = self._reference_path, self._training
        if reference is None:
            return self._parent(samples, name, places, {})

        def compute() -> list[Floats]:
            with ExitStack() as stack:
                with check_weights(reference, self._spec.reference_sha256 or ""):
                    stack.enter_context(training.holding(reference))
                check_probe(training, reference, "reference")
                return training.score(samples, places)

        return self._load_or_compute(samples, name, places, compute)

    def _teacher(
        self, teacher: Path, samples: Samples, name: str, places: Sequence[int]
    ) -> LogprobsBySample:
        """Score under a teacher, whose weights are in memory only meanwhile."""

        def compute() -> list[Floats]:
            with check_weights(teacher, self._spec.teacher_sha256 or ""):
                layout = self._spec.layout
                model = read_parent(teacher, backend=scoring_backend(layout), layout=layout)
                scorer = self._training.scorer(model, teacher)
            check_probe(scorer, teacher, "teacher")
            rows = scorer.score(samples, places)
            if scorer.shards is not None:  # FSDP's hooks refer to it in circles
                del scorer
                gc.collect()
            return rows

        return self._load_or_compute(samples, name, places, compute)

    def _load_or_compute(
        self,
        samples: Samples,
        name: str,
        places: Sequence[int],
        compute: Callable[[], list[Floats]],
    ) -> LogprobsBySample:
        """Read the numbers of an earlier attempt, or compute and keep them."""
        path = self._folder / name
        sizes = [int((samples.masks[i][1:] > 0).sum()) for i in places]
        flat = _read(path, sum(sizes))
        missing = self._training.ranks.on_any(flat is None)  # all compute it, or none
        if flat is None or missing:
            rows = compute()
            if is_rank0():
                _keep(path, np.concatenate(rows))
        else:
            rows = np.split(flat, np.cumsum(sizes)[:-1])
        return dict(zip(places, rows, strict=True))


def _keep(path: Path, numbers: Floats) -> None:
    """Write the hash, then the numbers as little-endian float32, unless the disk is full."""
    content = numbers.astype("<f4").tobytes()
    try:
        durable.replace_file(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"{path} is not kept, and computed again after a restart: {error}", flush=True)


def _read(path: Path, size: int) -> Floats | None:
    """Read `size` numbers; return None if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, numbers = content[:HASH_BYTES], memoryview(content)[HASH_BYTES:]
    if len(numbers) != 4 * size or hashlib.sha256(numbers).digest() != digest:
        return None
    return np.frombuffer(numbers, "<f4")


# ---- the golden probe
def check_probe(training: RankTraining, checkpoint: Path, role: str) -> None:
    """Score a checkpoint's golden probe with the weights in memory. Collective.

    `role`: what the weights are for, in the error. Raises FailedEverywhere if they differ by more
    than rounding: see logprob_limits.py. Where one of the two jobs was not in float32, they are
    judged as in bfloat16.
    """
    probe = broadcast_from_rank0(_probe_of(checkpoint) if is_rank0() else None)
    if not probe:
        return
    prompts, expected, exact = probe
    scores = training.score(Samples.of(prompts), temperature=1.0)
    exact = exact and training.hyper.dtype == "float32"
    limits = FLOAT32_PROBE if exact else bfloat16_limits()
    distance = measure(
        [value for row in scores for value in row.tolist()],
        [value for row in expected for value in row],
    )
    if limits.exceeded(distance):
        raise FailedEverywhere(
            f"the weights in memory are not those of the {role} {checkpoint.name}: over"
            f" {distance.tokens} tokens of its probe their log-probabilities differ by"
            f" {distance.max:.3g} at most and {distance.mean:.3g} on average (allowed: {limits})."
            " Nothing was trained. Were its files changed by hand? Then make the checkpoint anew"
        )


def _probe_of(checkpoint: Path) -> tuple[list[list[int]], list[list[float]], bool] | None:
    """Return prompts, log-probabilities, and whether the job that made them was in float32."""
    try:
        manifest = manifest_of(checkpoint)
    except NotFound:
        return None
    prompts = [prompt.token_ids for prompt in manifest.probe]
    logprobs = [prompt.logprobs for prompt in manifest.probe]
    return prompts, logprobs, manifest.dtype == "float32"
