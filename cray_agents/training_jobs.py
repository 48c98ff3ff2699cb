"""Training jobs as data: the spec, its hyperparameters and layout, and the status of a job.

    JobSpec(method, dataset, parent, Hyperparameters(Lora, Preference, Policy)) -> JobStatus

A spec's id is a hash of every field that decides the result. The layout and the other fields that
only decide how the job is run stay out of the id. Read next: `trainers/job/job.py`.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from cray_agents.config.job_section import check_options_of_job
from cray_agents.records import LogprobDistance, Prompt, Record, StrictRecord, digest

MethodName = Literal["sft", "dpo", "kto", "grpo", "distill"]
ON_POLICY = ("grpo", "distill")  # methods with a policy loss on the tokens that were sampled
Dtype = Literal["float32", "bfloat16"]
ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
MANY_EPOCHS = 10.0  # a set that is seen more often is rather learned by heart
MICROBATCH = 4096  # tokens, where no GPU's memory decides
BFLOAT16_FROM = 30e6  # parameters from which bfloat16 pays on a CPU: see BENCHMARKS.md, Serving
FP8_NEEDS_CAP = (
    "the replicas sample in FP8 (quantization), which is another policy than the trainer's:"
    " importance_cap, which corrects that, must not be None"
)
#: Hyperparameters that the trainer decides, if they are not given.
DECIDED_BY_TRAINER = {"dtype", "learning_rate", "max_tokens_per_microbatch"}

LoraTarget = Literal["qkv", "proj", "fc1", "fc2"]
Fp8 = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
RECOMPUTED_MODULES = ("core_attn", "layernorm", "mlp", "moe_act", "moe")


def check_recompute(text: str) -> str:
    """Return a way of recomputation with its modules in one order. Raises ValueError."""
    if text in ("none", "selective", "full"):
        return text
    modules = text.replace(" ", "").split(",")
    if unknown := set(modules) - set(RECOMPUTED_MODULES):
        raise ValueError(
            f"recompute {text!r} names {', '.join(map(repr, sorted(unknown)))}: write none,"
            f" selective, full, or some of {', '.join(RECOMPUTED_MODULES)}, joined by commas"
        )
    return ",".join(module for module in RECOMPUTED_MODULES if module in modules)


Recompute = Annotated[str, AfterValidator(check_recompute)]
Backend = Literal["megatron", "transformers", "megatron-bridge"]
#: The names of backends until 0.1, in records on disk and in the ids of jobs.
OLDER_BACKENDS: dict[str, Backend] = {
    "native": "megatron",
    "universal": "transformers",
    "bridge": "megatron-bridge",
}
Sharding = Literal["optimizer", "full"]


class Lora(StrictRecord):
    """Low-rank adapters instead of all weights (arXiv 2106.09685): W + alpha / rank * B A.

    `targets` are the projections with an adapter, never those of a mixture's experts. `dropout`
    applies to the adapters' input. The checkpoint contains `adapter/` in PEFT's layout alone, over
    a checkpoint of the root. A job with the same `rank` and `alpha` goes on with its parent's
    adapters; another one begins with the two merged, and publishes merged weights.
    """

    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: tuple[LoraTarget, ...] = Field(default=("qkv", "proj", "fc1", "fc2"), min_length=1)


class Preference(StrictRecord):
    """Weights of the losses of dpo (arXiv 2305.18290) and kto (arXiv 2402.01306).

    A larger `beta` keeps the policy closer to the reference. `label_smoothing` (dpo) is the assumed
    share of pairs in the wrong order. `desirable` and `undesirable` (kto) are the weights of the
    two kinds; choose them so that weight times number is about the same for both.
    """

    beta: float = Field(default=0.1, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    desirable: float = Field(default=1.0, gt=0)
    undesirable: float = Field(default=1.0, gt=0)


class PolicyLoss(StrictRecord):
    """The policy loss of grpo (arXiv 2402.03300) and distill on the samples' advantages.

    - `objective`: `ppo` clips each token's ratio (arXiv 1707.06347) to 1 - `clip_low` ..
      1 + `clip_high`; `cispo` clips the weight and keeps every token's gradient (arXiv 2506.13585);
      `gspo` takes the sequence's ratio, its geometric mean over tokens (arXiv 2507.18071), for
      which bounds near 3e-4 are usual. A `clip_low` of 1 or more is no lower bound.
    - `dual_clip`, for ppo: a token with a negative advantage A adds at most -`dual_clip` times A
      to the loss, however large its ratio (arXiv 1912.09729; verl's `clip_ratio_c`, 3 there).
      None: not bounded.
    - `normalization` of the sum over tokens: `token` divides by the batch's tokens (DAPO, arXiv
      2503.14476), `sequence` averages within each sequence first (GRPO), `constant` divides by the
      batch's sequences times `constant` (Dr. GRPO, arXiv 2503.20783). None: `token`; for gspo
      `sequence`, its only one.
    - `kl`: weight of the k3 estimate of the divergence from the reference, added to the loss.
    - `importance_cap` bounds the weight p_trainer / p_engine, which corrects numeric differences of
      the engine and tokens sampled by older versions. The KL is not weighted. None: not corrected.
    - `importance_mode`: the weight is the token's, or the product over its sequence (`token_`,
      `sequence_`); above the cap it is the cap, or the token or sequence is left out (`truncate`,
      `mask`). Named as in TRL; trainers/methods/grpo.py has formulas and sources.
    """

    objective: Literal["ppo", "cispo", "gspo"] = "ppo"
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    normalization: Literal["token", "sequence", "constant"] | None = None
    constant: int = Field(default=1024, gt=0)
    kl: float = Field(default=0.0, ge=0)
    importance_cap: float | None = Field(default=2.0, gt=0)
    importance_mode: ImportanceMode = "token_truncate"

    @property
    def normalized_by(self) -> Literal["token", "sequence", "constant"]:
        """The normalization in effect, also if none was chosen."""
        return self.normalization or ("sequence" if self.objective == "gspo" else "token")

    @model_validator(mode="after")
    def _check_dual_clip(self) -> Self:
        if self.dual_clip is not None and self.objective != "ppo":
            raise ValueError(f"dual_clip has no effect with {self.objective}: it is of ppo")
        return self

    @model_validator(mode="after")
    def _check_importance(self) -> Self:
        if self.importance_cap is None and self.importance_mode != "token_truncate":
            raise ValueError(
                f"importance_mode {self.importance_mode!r} has no effect without importance_cap"
            )
        return self

    @model_validator(mode="after")
    def _check_normalization(self) -> Self:
        if self.objective == "gspo" and self.normalized_by != "sequence":
            raise ValueError(f"gspo has no normalization {self.normalization!r}: it is 'sequence'")
        return self


class Policy(PolicyLoss):
    """A policy loss, and the `temperature` of the sampled runs, whose log-probabilities count."""

    temperature: float = Field(default=1.0, gt=0)


class TrainingSettings(StrictRecord):
    """Settings of the training jobs of all methods, but for the number of steps.

    `batch_size` counts sequences per optimizer step (dpo: pairs; of documents: contexts), over all
    ranks. A `learning_rate` that is not given follows from the model: see `usual_learning_rate`. At
    0 the weights do not change.

    With `init` `parent`, training continues from the parent's weights. With `random` it starts with
    seeded weights, and reads only the parent's config.json, in every backend. With `order` `epoch`,
    each epoch is a seeded permutation of the samples; of grpo those that begin with the same prompt
    follow each other, so that a step computes it once. With `weighted` each step draws samples with
    probability proportional to their weight. Both orders depend on `seed` and the step alone, so
    that a resumed job sees the same data as an undisturbed one. `weigh_loss` multiplies a sample's
    loss by its weight (sft). The schedule `wsd` is warm-up, stable, decay: constant until the last
    `decay_fraction` of the steps, then linear to the minimum.

    A job whose `dtype` was not given has bfloat16 on GPUs. On CPUs that multiply in it, a parent
    that is stored in it and has 30 million parameters or more does, too; all others float32. If
    `max_tokens_per_microbatch`, the tokens of a forward pass, was not given, it is 4,096 on CPUs.
    On GPUs it is as large as their memory allows, up to 65,536. A longer sequence is refused.

    `fp8` multiplies matrices in eight bits, with Transformer Engine's scaling of that name, and
    keeps weights and sums as `dtype` `bfloat16` has them. Other layers refuse it.

    The `backend` `megatron` trains Megatron's layers, in every layout, for the kinds of model that
    it has layers for. `transformers` trains transformers' own module, for every causal language
    model, with data parallelism alone. `megatron-bridge` trains Megatron's layers as
    Megatron-Bridge builds them, with tensor, pipeline and expert parallelism; it needs the extra
    `bridge`. None: `megatron` for its kinds, else `transformers`, or `megatron-bridge` where the
    layout splits the model and Megatron-Bridge is installed.
    """

    batch_size: int = Field(default=16, gt=0)
    learning_rate: float | None = Field(default=None, ge=0)
    min_learning_rate: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    decay_fraction: float = Field(default=0.1, gt=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, gt=0)
    order: Literal["epoch", "weighted"] = "epoch"
    weigh_loss: bool = False
    seed: int = Field(default=0, ge=0)
    max_tokens_per_microbatch: int = Field(default=MICROBATCH, gt=0)
    dtype: Dtype = "float32"
    fp8: Fp8 | None = None
    init: Literal["parent", "random"] = "parent"
    backend: Backend | None = None
    lora: Lora | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_older_backend(cls, values: Any, info: ValidationInfo) -> Any:
        """Read `way`, as older records, which are JSON, name `backend`. Refuse a user's."""
        if not isinstance(values, dict) or "way" not in values:
            return values
        if info.mode == "json":
            return with_backend_of_older(values)
        kept = {name: value for name, value in values.items() if name != "way"}
        return {**kept, "backend": values["way"]} if values["way"] in OLDER_BACKENDS else values

    @field_validator("backend", mode="before")
    @classmethod
    def _refuse_older_backend(cls, name: Any) -> Any:
        if isinstance(name, str) and name in OLDER_BACKENDS:
            raise ValueError(f"{name!r} is called {OLDER_BACKENDS[name]!r} now: write that")
        return name


def with_backend_of_older(settings: dict[str, Any]) -> dict[str, Any]:
    """Return recorded training settings with `backend`, where an older record calls it `way`."""
    way = settings.get("way")
    kept = {name: value for name, value in settings.items() if name != "way"}
    return kept if way is None else {**kept, "backend": OLDER_BACKENDS.get(way, way)}


class Hyperparameters(TrainingSettings):
    """Hyperparameters of a training job: its settings, its `steps`, and its method's own loss.

    A step takes `batch_size` samples, also where the set has fewer: then it has some twice. So each
    sample is seen steps * batch_size / samples times; above ten a warning says so.
    """

    steps: int = Field(gt=0)
    preference: Preference = Field(default_factory=Preference)
    policy: Policy = Field(default_factory=Policy)


def usual_learning_rate(width: int, method: MethodName, hyper: Hyperparameters) -> float:
    """Return the learning rate of a job that gives none, for a model of this hidden size.

    - Imitation with all weights of a pretrained model: 1e-5, whatever its size. TRL's and the
      alignment handbook's recipes take 5e-6 to 2e-5 from 1B to 70B. SmolLM2-135M, of width 576,
      keeps its knowledge at 1e-5 and loses it at 1e-3. Below 576 are toys, which start from noise
      and have nothing to lose: the rate rises to 2e-3 at width 128, as the cookbook's need it.
    - dpo, kto, grpo and distill: a tenth, for each step moves what the next samples come from.
      TRL's GRPO and DPO have 1e-6.
    - Adapters: ten times as much (Thinking Machines, LoRA Without Regret, 2025), at most 1e-2.
    - From scratch: 0.5 / width, near GPT-3's rates (arXiv 2005.14165, table 2.1): 6e-4 at width
      768, 1.2e-4 at 4096.
    """
    rate = max(1e-5, 2e-3 * (128 / width) ** 3.5) if hyper.init == "parent" else 0.5 / width
    rate = min(rate, 2e-3)
    if method != "sft":
        rate /= 10
    if hyper.lora is not None:
        rate = min(10 * rate, 1e-2)
    return float(f"{rate:.2g}")


def explain_learning_rate(width: int, method: MethodName, hyper: Hyperparameters) -> str:
    """Say in a few words where a job's learning rate comes from."""
    usual = usual_learning_rate(width, method, hyper)
    weights = "all weights" if hyper.lora is None else "adapters"
    start = " from scratch" if hyper.init == "random" else ""
    rule = f"{usual:g} for {method} of {weights}{start} at width {width}"
    if (given := hyper.learning_rate) in (None, usual):
        return f"by the rule {rule}"
    return f"{given:g} as given; the rule says {rule}"


class Layout(StrictRecord):
    """The number of ranks of a job along each dimension of parallelism.

    `interleave` counts model chunks per pipeline rank (virtual pipeline stages). `context` splits
    each sequence over ranks. `expert` parallelism divides the data ranks. `optimizer_instances`
    is the number of copies of the optimizer: each is spread over that part of the data and context
    ranks, neighbours, so that between parts only a sum of gradients travels (HSDP). It costs
    memory, and pays where the data ranks are on many nodes. `sharding` says what the data ranks
    divide: `optimizer`, its state alone (ZeRO-1, arXiv 1910.02054), or `full`, also weights and
    gradients (ZeRO-3, by Megatron's FSDP), for the backend `transformers`.
    """

    data: int = Field(default=1, gt=0)
    tensor: int = Field(default=1, gt=0)
    pipeline: int = Field(default=1, gt=0)
    interleave: int = Field(default=1, gt=0)
    context: int = Field(default=1, gt=0)
    expert: int = Field(default=1, gt=0)
    optimizer_instances: int = Field(default=1, gt=0)
    sharding: Sharding = "optimizer"
    sequence_parallel: bool = False

    @property
    def splits_model(self) -> bool:
        """True if a rank does not have the whole model, or not whole sequences."""
        whole = {"data", "optimizer_instances", "sharding"}
        return bool(self.model_dump(exclude_defaults=True, exclude=whole))

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    def chunk_layers(self, layers: int) -> tuple[int, ...]:
        """Return the layers of each of the pipeline * interleave chunks, in the forward pass.

        Where they do not divide, the first and the last chunk, which also have the embedding and
        the loss, get the fewest. Of the others the later ones get more: they hold fewer
        micro-batches.
        """
        chunks = self.pipeline * self.interleave
        each, more = divmod(layers, chunks)
        larger = range(chunks - 1 - more, chunks - 1)
        return tuple(each + (place in larger) for place in range(chunks))

    def stage_layers(self, layers: int) -> tuple[int, ...]:
        """Return the layers of each pipeline stage."""
        chunks = self.chunk_layers(layers)
        return tuple(sum(chunks[stage :: self.pipeline]) for stage in range(self.pipeline))


class PublishEvery(StrictRecord):
    """How often a job publishes its weights while it trains: every so many `steps`, or `minutes`.

    Each time they become the next version of `name`, without promotion. `prompts`: what these
    versions have beside the weights, by agent. Of a request with a parent `name@N` these are that
    version's, unless given.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    steps: int | None = Field(default=None, gt=0)
    minutes: float | None = Field(default=None, gt=0)
    prompts: dict[str, Prompt] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("say how often: give either `steps` or `minutes`")
        return self


class JobSpec(StrictRecord):
    """A training job. Two specs with the same id are the same job, also of different users.

    `dataset` is a dataset id. `parent` is the directory of a Hugging Face checkpoint,
    `parent_sha256` the hash of its weights, `parent_settings_sha256` the hash of its config,
    tokenizer and chat template (None in older jobs). `reference` is the checkpoint that dpo, kto
    and the KL of grpo and distill compare with; None: the parent. `teacher` is the checkpoint that
    judges the samples of distill, of any kind that can be trained; its tokens must be the parent's.
    `optimizer_from` names the job whose optimizer state is continued, with its master weights in
    float32 where these round to the parent's files, and with its adapters. `commands` names a run
    of a client's own commands, which take the place of `dataset` and `method` (see
    training_commands.py). `state_from` is the training state that it begins with: `job/number`, of
    a command of another run that kept it. Parent and hyperparameters must be that run's.

    These fields only decide how the job is run, and do not enter its id:

    - `layout` spreads it over ranks.
    - `save_every` is the number of steps between resume points. The last `keep` stay, and one when
      the job has succeeded.
    - `publish_every` publishes versions while it trains, in the background. None: its result alone.
    - `evaluate_every` is the number of steps between losses on the dataset's validation split, if
      it has one (None: before the first step and at the end).
    - `recompute` selects the activations to recompute: `none`, `full`, or modules joined by commas:
      `core_attn` (also called `selective`), `layernorm`, `mlp`; of mixtures `moe_act`, `moe`.
    - `session` names a training session: its jobs run one after the other on ranks that keep model
      and optimizer in memory. None: the job has processes of its own.
    - `changes_only` publishes what changed in the parent's weights, where that takes less than half
      the space: a delta checkpoint. The platform makes it whole before it is promoted.
    - `slurm_options` are options of sbatch for this job alone, such as `--partition=long`. They win
      over the site's. See `SLURM_PER_JOB` for those that there are.
    - `spare_nodes` are nodes that its Slurm job holds beside those that train: each takes the place
      of one that is lost, without another wait in the queue.
    - `oversubscribe` admits the job also if it takes more cores, memory or GPUs than there are.
    - `logprob_limit` bounds the difference between the trainer's and the engine's
      log-probabilities: the largest where both compute in float32 (None: 0.01), else the 99th
      percentile, and a fifth of it the mean (None: at most 0.5 and 0.1, less where the parent's job
      measured less; three times as much of an engine in FP8).
    - `engine_dtype` is what the engine that sampled computes in, if that rounds more than float32.
      A platform names its replicas'.
    """

    method: MethodName = "sft"
    dataset: str
    commands: str | None = Field(default=None, min_length=1)
    parent: str
    parent_sha256: str
    parent_settings_sha256: str | None = None
    reference: str | None = None
    reference_sha256: str | None = None
    teacher: str | None = None
    teacher_sha256: str | None = None
    optimizer_from: str | None = None
    state_from: str | None = Field(default=None, pattern=r"^job-[0-9a-f]+/[1-9][0-9]{0,8}$")
    hyperparameters: Hyperparameters
    code: str = ""
    layout: Layout = Field(default_factory=Layout)
    save_every: int = Field(default=50, gt=0)
    keep: int = Field(default=2, gt=0)
    publish_every: PublishEvery | None = None
    evaluate_every: int | None = Field(default=None, gt=0)
    recompute: Recompute = "none"
    logprob_limit: float | None = Field(default=None, gt=0)
    engine_dtype: Literal["bfloat16", "fp8"] | None = None
    session: str | None = Field(default=None, min_length=1)
    changes_only: bool = False
    oversubscribe: bool = False
    slurm_options: list[str] = Field(default_factory=list)
    spare_nodes: int = Field(default=0, ge=0)

    @field_validator("slurm_options")
    @classmethod
    def _check_slurm_options(cls, options: list[str]) -> list[str]:
        return check_options_of_job(options)

    @model_validator(mode="after")
    def _refuse_unused_options(self) -> Self:
        """Refuse an option of another method, which would have no effect."""
        hyper, method = self.hyperparameters, self.method
        unused = {
            "policy": method not in ON_POLICY and hyper.policy != Policy(),
            "preference": method not in ("dpo", "kto") and hyper.preference != Preference(),
            "weigh_loss": method != "sft" and hyper.weigh_loss,
            "reference": self.reference is not None
            and (method == "sft" or (method in ON_POLICY and not hyper.policy.kl)),
            "teacher": method != "distill" and self.teacher is not None,
        }
        if self.commands is not None and self.publish_every is not None:
            raise ValueError("publish_every has no effect with commands: one of these publishes")
        for name, wrong in unused.items():
            if wrong:
                without = " and policy.kl 0" if method in ON_POLICY else ""
                raise ValueError(
                    f"{name} has no effect with method {method!r}{without}: leave it out"
                )
        if self.session is not None and self.slurm_options:
            raise ValueError(
                "slurm_options are for a job with processes of its own: give those of sessions in"
                " cray-agents.toml, as session = [...] in the section [job.slurm_options]"
            )
        if self.session is not None and self.spare_nodes:
            raise ValueError(
                "spare_nodes are for a job with processes of its own: leave session out"
            )
        if method == "distill" and self.teacher is None:
            raise ValueError(
                "method 'distill' needs a teacher: name a version, such as 'big@3', or a directory"
            )
        if self.state_from is not None:
            if self.commands is None:
                raise ValueError("state_from is for a run by commands: name it with commands")
            if self.optimizer_from is not None:
                raise ValueError("state_from has the optimizer: leave optimizer_from out")
        if self.layout.sharding == "full" and hyper.lora is not None:
            raise ValueError(
                "layout.sharding 'full' divides the weights that a step changes, and with lora"
                " those are few: leave sharding out, or lora"
            )
        for role in ("reference", "teacher"):
            if (getattr(self, role) is None) != (getattr(self, f"{role}_sha256") is None):
                raise ValueError(f"{role} and {role}_sha256 go together")
        return self

    @property
    def id(self) -> str:
        """The text `job-` and a hash of every field that decides the resulting checkpoint."""
        decisive = self.model_dump(exclude=_EXECUTION_FIELDS, mode="json")
        if self.parent_settings_sha256 is None:  # jobs older than this field keep their ids
            del decisive["parent_settings_sha256"]
        for name in ("commands", "teacher_sha256", "state_from"):  # likewise
            if decisive[name] is None:
                del decisive[name]
        policy = decisive["hyperparameters"]["policy"]
        for name, since in (("dual_clip", None), ("importance_mode", "token_truncate")):  # likewise
            if policy[name] == since:
                del policy[name]
        if self.hyperparameters.fp8 is None:  # likewise
            del decisive["hyperparameters"]["fp8"]
        backend = decisive["hyperparameters"].pop("backend")
        if backend is not None:  # by its older name, likewise
            older = {name: way for way, name in OLDER_BACKENDS.items()}
            decisive["hyperparameters"]["way"] = older[backend]
        return f"job-{digest(decisive)}"


def with_dtype(spec: JobSpec, dtype: Dtype) -> JobSpec:
    """Return the spec with a dtype, unless its own was given. The id is the decided dtype's."""
    hyper = spec.hyperparameters
    if "dtype" in hyper.model_fields_set:
        return spec
    return spec.model_copy(update={"hyperparameters": hyper.model_copy(update={"dtype": dtype})})


_EXECUTION_FIELDS = {
    "layout",
    "save_every",
    "keep",
    "publish_every",
    "evaluate_every",
    "recompute",
    "logprob_limit",
    "engine_dtype",
    "session",
    "changes_only",
    "oversubscribe",
    "slurm_options",
    "spare_nodes",
    "parent",
    "reference",
    "teacher",
}


#: Places of a job's weights: in memory still, parked in host memory, or in files.
WeightsSource = Literal["memory", "parked", "files"]


class TakenUp(Record):
    """Place that a session started a job from: of its weights and optimizer, and the seconds."""

    source: WeightsSource
    seconds: float


class JobVersion(Record):
    """A version `name@N` that a job published after `step` steps, while it trained.

    `loss` is that step's, `validation_loss` the newest on the validation split, if there is one.
    `seconds` is what the publication took in the background. `time`: unix seconds.
    """

    version: str
    checkpoint: str
    step: int
    loss: float | None = None
    validation_loss: float | None = None
    seconds: float = 0.0
    time: float = 0.0


def versions_in(events: Iterable[dict[str, Any]]) -> list[JobVersion]:
    """Return the published versions among a job's events, each once, the oldest first."""
    found = (JobVersion(**event) for event in events if event["event"] == "version")
    return sorted({one.step: one for one in found}.values(), key=lambda one: one.step)


JobState = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]


class JobStatus(Record):
    """The state of a training job. `metrics` are the newest step's, by name.

    `taken_up`: its last start by a training session; None for a job of its own processes.
    `layers`: the layers and kernels that train it, with the reason, and how sequences are
    packed; "" before it starts. `offered`: its ranks send its weights to replicas while they
    write the files. `reason`: why a queued job waits, as the scheduler says it.
    `changed_share`: the share of the trained weights that the checkpoint's files changed in the
    parent's. `update_ratio`: the norm of that change, by that of the weights in float32; None where
    these did not move. `warnings`: what was lost, or is likely not meant, in sentences.
    `agreement`: the distance of trainer and engine before the first step, on at most 128 samples
    of the parent; None before it, and without such samples. `differences`: the tokens where it is
    largest: run, place in it, ours, theirs. `mean_metrics`: the method's measures, as means over
    the tokens that the job trained on: of grpo its ratios and the shares clipped. `versions`: those
    that it published while it trained, the oldest first; not the result.
    """

    id: str
    state: JobState
    scheduler: str = ""
    scheduler_job_id: str = ""
    step: int = 0
    steps: int = 0
    attempts: int = 0
    session: str = ""
    loss_first: float | None = None
    loss_last: float | None = None
    trained_tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, Any] = Field(default_factory=dict)
    taken_up: TakenUp | None = None
    layers: str = ""
    offered: bool = False
    reason: str = ""
    error: str | None = None
    changed_share: float | None = None
    update_ratio: float | None = None
    warnings: list[str] = Field(default_factory=list)
    agreement: LogprobDistance | None = None
    differences: list[tuple[str, int, float, float]] = Field(default_factory=list)
    mean_metrics: dict[str, float] = Field(default_factory=dict)
    versions: list[JobVersion] = Field(default_factory=list)
    checkpoint: str | None = None
