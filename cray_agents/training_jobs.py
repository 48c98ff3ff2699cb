"""Training jobs as data: what is trained, by which method, how it is spread, how it went.

    JobSpec(method, dataset, parent, Hyperparameters(Lora, Preference, Policy)) -> JobStatus

A spec is named by the hash of what decides what comes of it; the layout and everything else
that only decides how the job is run stays out of its name. Read next: `trainers/job.py`.
"""

from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from cray_agents.errors import BadInput
from cray_agents.records import Record, StrictRecord, digest

MethodName = Literal["sft", "dpo", "kto", "grpo"]


LoraTarget = Literal["qkv", "proj", "fc1", "fc2"]


class Lora(StrictRecord):
    """Low-rank adapters instead of all weights (arXiv 2106.09685): W + alpha / rank * B A.

    `targets`: the projections that get one; those of a mixture's experts are not among them.
    `dropout` is on the adapters' input. The checkpoint holds the merged weights, and beside them
    `adapter/` in PEFT's layout.
    """

    rank: int = Field(16, gt=0)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[LoraTarget, ...] = Field(("qkv", "proj", "fc1", "fc2"), min_length=1)


class Preference(StrictRecord):
    """What dpo (arXiv 2305.18290) and kto (arXiv 2402.01306) weigh.

    `beta` is how closely the reference is kept to. `label_smoothing` (dpo) is the share of pairs
    that are believed to be the wrong way round. `desirable` and `undesirable` (kto) are the
    weights of the two kinds: choose them so that weight times number is about the same for both.
    """

    beta: float = Field(0.1, gt=0)
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    desirable: float = Field(1.0, gt=0)
    undesirable: float = Field(1.0, gt=0)


class Policy(StrictRecord):
    """What grpo (arXiv 2402.03300) does with the samples' advantages.

    - `objective`: `ppo` clips each token's ratio (arXiv 1707.06347) to 1 - `clip_low` ..
      1 + `clip_high`; `cispo` clips the weight and keeps every token's gradient (arXiv 2506.13585);
      `gspo` takes the sequence's ratio, its geometric mean over tokens (arXiv 2507.18071), for
      which bounds near 3e-4 are usual. A `clip_low` of 1 or more is no lower bound.
    - `dual_clip`, for ppo: where the advantage A is negative, a token adds at most
      -`dual_clip` times A to the loss, however large its ratio (arXiv 1912.09729; verl's
      `clip_ratio_c`, 3 there). None: not bounded.
    - `normalization` of the sum over tokens: `token` divides by the batch's tokens (DAPO, arXiv
      2503.14476), `sequence` averages within each sequence first (GRPO), `constant` divides by the
      batch's sequences times `constant` (Dr. GRPO, arXiv 2503.20783). None: `token`, and for gspo
      `sequence`, which is all it has.
    - `kl`: weight of the k3 estimate of the divergence from the reference, added to the loss.
    - `importance_cap`: truncated importance sampling: each token is weighted by
      min(p_trainer / p_engine, cap), which corrects what the engine computes differently and
      what older versions sampled; the KL is not weighted. None: not corrected.
    - `temperature` at which the runs were sampled; log-probabilities are of that distribution.
    """

    objective: Literal["ppo", "cispo", "gspo"] = "ppo"
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    normalization: Literal["token", "sequence", "constant"] | None = None
    constant: int = Field(1024, gt=0)
    kl: float = Field(0.0, ge=0)
    importance_cap: float | None = Field(2.0, gt=0)
    temperature: float = Field(1.0, gt=0)

    @property
    def normalized_by(self) -> Literal["token", "sequence", "constant"]:
        """The normalization, also where it was left open."""
        return self.normalization or ("sequence" if self.objective == "gspo" else "token")

    @model_validator(mode="after")
    def _dual_clip_is_of_ppo(self) -> Self:
        if self.dual_clip is not None and self.objective != "ppo":
            raise ValueError(f"dual_clip has no effect with {self.objective}: it is of ppo")
        return self

    @model_validator(mode="after")
    def _gspo_is_of_sequences(self) -> Self:
        if self.objective == "gspo" and self.normalized_by != "sequence":
            raise ValueError(f"gspo has no normalization {self.normalization!r}: it is 'sequence'")
        return self


class Hyperparameters(StrictRecord):
    """How to train. `batch_size` counts sequences per optimizer step (dpo: pairs), over all ranks.

    `learning_rate`: 1e-3 suits models of a few million parameters. Billions want about 1e-5 (LoRA
    ten times that), and dpo, kto and grpo 1e-7 to 5e-6. At 0 the weights stay what they are.
    `init`: `parent` goes on from the parent's weights; `random` starts afresh from its config.json
    alone, seeded. `order`: `epoch` goes through a seeded permutation of the samples per epoch;
    `weighted` draws each step's samples with probability proportional to their weight. Both depend
    on `seed` and the step alone, so that a resumed job sees the data an undisturbed one would.
    `weigh_loss` multiplies a sample's loss by its weight (sft). `wsd` is warm-up, stable, decay:
    constant until the last `decay_fraction` of the steps, then linear to the minimum.
    """

    steps: int = Field(gt=0)
    batch_size: int = Field(16, gt=0)
    learning_rate: float = Field(1e-3, ge=0)
    min_learning_rate: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    decay_fraction: float = Field(0.1, gt=0, le=1)
    weight_decay: float = Field(0.1, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, gt=0)
    order: Literal["epoch", "weighted"] = "epoch"
    weigh_loss: bool = False
    seed: int = Field(0, ge=0)
    max_tokens_per_microbatch: int = Field(4096, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    init: Literal["parent", "random"] = "parent"
    lora: Lora | None = None
    preference: Preference = Field(default_factory=Preference)
    policy: Policy = Field(default_factory=Policy)


def as_hyperparameters(given: Any) -> Hyperparameters:
    """Hyperparameters, also from a dict of them. Raises BadInput."""
    if isinstance(given, Hyperparameters):
        return given
    try:
        return Hyperparameters.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(["hyperparameters", *map(str, first["loc"])])
        raise BadInput(f"{place}: {first['msg']}", param="hyperparameters") from error


class Layout(StrictRecord):
    """Over how many ranks a job is spread, and along which dimensions.

    `interleave`: model chunks per pipeline rank (virtual pipeline stages). `context` splits each
    sequence over ranks. `expert` parallelism lives inside the data ranks.
    """

    data: int = Field(1, gt=0)
    tensor: int = Field(1, gt=0)
    pipeline: int = Field(1, gt=0)
    interleave: int = Field(1, gt=0)
    context: int = Field(1, gt=0)
    expert: int = Field(1, gt=0)
    sequence_parallel: bool = False

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.data * self.tensor * self.pipeline * self.context


class JobSpec(StrictRecord):
    """A training job. Two specs with the same id are the same job, whoever submits them.

    `dataset` is a dataset id; `parent` the directory of a Hugging Face checkpoint,
    `parent_sha256` the hash of its weights, and `parent_settings_sha256` that of its config,
    tokenizer and chat template (None: of a job from before that was asked). `reference` is the
    checkpoint that dpo, kto and grpo's KL compare with; None: the parent. `optimizer_from` names
    the job whose optimizer state goes on.

    How the job is run, and not what it is: the layout; `save_every` steps a resume point, of which
    the last `keep` stay, and one when it has succeeded; `evaluate_every` steps the loss on the
    dataset's validation split, if it has one (None: before the first step and at the end);
    `recompute` activations; `oversubscribe`: also if it takes more cores, memory or GPUs than there
    are; `logprob_limit`, by how much the trainer's log-probabilities may differ
    from the engine's (None: 0.01 in float32, 0.5 in bfloat16).
    """

    method: MethodName = "sft"
    dataset: str
    parent: str
    parent_sha256: str
    parent_settings_sha256: str | None = None
    reference: str | None = None
    reference_sha256: str | None = None
    optimizer_from: str | None = None
    hyperparameters: Hyperparameters
    code: str = ""
    layout: Layout = Field(default_factory=Layout)
    save_every: int = Field(50, gt=0)
    keep: int = Field(2, gt=0)
    evaluate_every: int | None = Field(None, gt=0)
    recompute: Literal["none", "selective", "full"] = "none"
    logprob_limit: float | None = Field(None, gt=0)
    oversubscribe: bool = False

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        """An option of another method is a mistake, not a no-op."""
        hyper, method = self.hyperparameters, self.method
        unused = {
            "policy": method != "grpo" and hyper.policy != Policy(),
            "preference": method not in ("dpo", "kto") and hyper.preference != Preference(),
            "weigh_loss": method != "sft" and hyper.weigh_loss,
            "reference": self.reference is not None
            and (method == "sft" or (method == "grpo" and not hyper.policy.kl)),
        }
        for name, wrong in unused.items():
            if wrong:
                without = " and policy.kl 0" if method == "grpo" else ""
                raise ValueError(
                    f"{name} has no effect with method {method!r}{without}: leave it out"
                )
        if (self.reference is None) != (self.reference_sha256 is None):
            raise ValueError("reference and reference_sha256 go together")
        return self

    @property
    def id(self) -> str:
        """`job-` and a hash of everything that decides the resulting checkpoint."""
        what = self.model_dump(exclude=_HOW_IT_IS_RUN, mode="json")
        if self.parent_settings_sha256 is None:  # jobs from before are found by the ids they have
            del what["parent_settings_sha256"]
        if self.hyperparameters.policy.dual_clip is None:  # likewise
            del what["hyperparameters"]["policy"]["dual_clip"]
        return f"job-{digest(what)}"


_HOW_IT_IS_RUN = {
    "layout",
    "save_every",
    "keep",
    "evaluate_every",
    "recompute",
    "logprob_limit",
    "oversubscribe",
    "parent",
    "reference",
}


JobState = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]


class JobStatus(Record):
    """Where a training job stands. `metrics` is the newest step's, by name."""

    id: str
    state: JobState
    scheduler: str = ""
    scheduler_job_id: str = ""
    step: int = 0
    steps: int = 0
    attempts: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    trained_tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    checkpoint: str | None = None
