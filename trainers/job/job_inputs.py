"""Job inputs: everything a job's ranks need, read and checked before they start.

The tokens of a dataset are numbers. Under another tokenizer they would be other texts, and training
would go on without an error. So samples are checked against the model, its tokenizer and the
settings. Called by job.py. Read next: data/packer.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.records import LogprobDistance
from cray_agents.runtime.accounting.ledger import LedgerFile
from cray_agents.runtime.datasets.reader import read_manifest as read_dataset_manifest
from cray_agents.runtime.disk.durable import LOCAL
from cray_agents.runtime.registry.checkpoints import (
    MANIFEST,
    config_sha256,
    read_manifest,
    settings_in,
    settings_sha256,
    verify_settings,
)
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.data.samples import Samples, read_samples
from cray_agents.trainers.data.stored_tokens import StoredTokens
from cray_agents.trainers.job.engine_agreement import places_of_parent
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import note_steps
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.megatron_bridge.bridged_kinds import check_bridged
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.layouts import check_layout, scoring_backend
from cray_agents.training_jobs import (
    MANY_EPOCHS,
    ON_POLICY,
    Hyperparameters,
    JobSpec,
    explain_learning_rate,
)

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class JobInputs:
    """A job's inputs. At most one of the three points to start from is set, with `at`.

    But adapters that resume are over the weights that `optimizer_from` led to, so it is set, too.
    """

    journal: JobJournal
    spec: JobSpec
    attempt: int
    parent: Path
    model: Architecture
    samples: Samples
    parent_places: list[int]  # of the versions with the parent's weights: engine_agreement.py
    parent_agreement: LogprobDistance | None = None  # as the job that made the parent measured it
    validation: Samples | None = None
    reference: Path | None = None  # None: the parent
    teacher: Path | None = None  # of distill
    resume_from: Path | None = None  # a point of this job: continue exactly
    optimizer_from: Path | None = (
        None  # a point of another job: take its optimizer, and its master weights
    )
    state_from: Path | None = None  # what another run by commands kept: begin with it

    @property
    def megatron(self) -> Path:
        """The folder of this job's resume points."""
        return self.journal.folder / "megatron"

    @property
    def points(self) -> tuple[str | None, str | None, str | None]:
        """The three points, as JSON can hold them."""
        points = (self.resume_from, self.optimizer_from, self.state_from)
        resume, optimizer, state = (None if point is None else str(point) for point in points)
        return resume, optimizer, state

    @property
    def folders(self) -> tuple[Path | None, ...]:
        """The folders that hosts read, each at its own pace, before their ranks can meet.

        The dataset's stands twice: it is hashed, and then read or copied.
        """
        home, before = self.journal.home, self.spec.optimizer_from
        points = (self.megatron, None if before is None else home.job(before) / "megatron")
        dataset = home.dataset(self.spec.dataset) if self.spec.dataset else None
        return (self.parent, self.reference, self.teacher, *points, dataset, dataset)

    def at(
        self,
        attempt: int,
        resume_from: Path | str | None,
        optimizer_from: Path | str | None,
        state_from: Path | str | None = None,
    ) -> "JobInputs":
        """Return the same inputs with another starting point."""
        return replace(
            self,
            attempt=attempt,
            resume_from=None if resume_from is None else Path(resume_from),
            optimizer_from=None if optimizer_from is None else Path(optimizer_from),
            state_from=None if state_from is None else Path(state_from),
        )


def read_inputs(journal: JobJournal, spec: JobSpec, attempt: int) -> JobInputs:
    """Read and check all inputs; write nothing. Raises BadInput, NotFound, Corrupt.

    Weights are checked by the ranks that load them: weights_check.py.
    """
    home, hyper = journal.home, spec.hyperparameters
    parent = home.root / spec.parent
    model = read_parent(parent, hyper.init, hyper.backend)
    check_layout(model, spec.layout)
    if model.backend == "megatron-bridge":
        check_bridged(hyper)
    if hyper.lora is not None and model.backend == "megatron":
        from cray_agents.trainers.models.lora import choose_targets  # it imports torch

        choose_targets(model, hyper.lora)
    if hyper.init == "random" and (sha256 := config_sha256(parent)) != spec.parent_sha256:
        message = other_weights(parent, sha256, spec.parent_sha256)
        raise BadInput(message, param="parent_sha256")
    settings = settings_sha256(settings_in(parent))
    if spec.parent_settings_sha256 not in (None, settings):
        raise BadInput(
            f"config, tokenizer and chat template in {parent} have hash {settings}, and the job was"
            f" made for {spec.parent_settings_sha256}: they were changed, or the path is wrong",
            param="parent_settings_sha256",
        )
    reference = _reference(spec, home, parent, model)
    if spec.commands is None:
        samples, validation = _samples(spec, home, parent, model)
    else:
        samples, validation = Samples.of([]), None
    teacher = None if spec.teacher is None else home.root / spec.teacher
    if teacher is not None:
        check_teacher(teacher, parent, [samples, *([validation] if validation else [])], spec)
    places = places_of_parent(samples, home, spec.parent_sha256)
    return JobInputs(
        journal,
        spec,
        attempt,
        parent,
        model,
        samples,
        places,
        _agreement_of(parent) if hyper.init == "parent" else None,
        validation,
        reference,
        teacher,
    )


def _reference(spec: JobSpec, home: Home, parent: Path, model: Architecture) -> Path | None:
    """Return the checkpoint that the job compares with; None means its parent."""
    if spec.reference is None or spec.reference_sha256 is None:
        return None
    reference = home.root / spec.reference
    other = read_parent(reference, backend=model.backend)
    if replace(other, dtype=model.dtype, init_std=model.init_std) != model:
        raise BadInput(
            f"the reference {reference} is another kind of model than {parent}", param="reference"
        )
    return reference


def _samples(
    spec: JobSpec, home: Home, parent: Path, model: Architecture
) -> tuple[Samples, Samples | None]:
    """Return the training and validation splits; None if there is no validation split."""
    folder, hyper = home.dataset(spec.dataset), spec.hyperparameters
    samples = read_samples(folder, spec.method)
    validation = read_samples(folder, spec.method, "validation")
    for split in (samples, validation) if len(validation) else (samples,):
        try:
            check_samples(split, model, hyper)
            check_routes(split, model, spec)
            check_tokenizer(split, folder, home, parent)
            if spec.method in ON_POLICY:
                check_temperature(split, hyper)
        except BadInput as problem:
            of = "" if split is samples else "the validation split does not fit: "
            raise BadInput(f"{of}{problem}", param=problem.param) from problem
    if not len(validation) and spec.evaluate_every is not None:
        raise BadInput(
            f"evaluate_every={spec.evaluate_every}, but dataset {spec.dataset} has no validation"
            " split: build it with validation=0.05, or leave evaluate_every out",
            param="evaluate_every",
        )
    return samples, validation if len(validation) else None


def _agreement_of(parent: Path) -> LogprobDistance | None:
    """Return what the job that made the parent measured; None for one made elsewhere."""
    return read_manifest(parent).agreement if (parent / MANIFEST).is_file() else None


def choose_start(
    work: JobInputs,
    on_cpu: bool,
    ledger: LedgerFile | None,
    *,
    optimizer_in_memory: bool = False,
    point_in_memory: str = "",
) -> JobInputs:
    """Choose the resume point to start from, sweep drafts, and write the event `started`.

    Called by one process, before the ranks start or by rank 0; Megatron must be loaded. `ledger`
    gets what the attempt before trained. With `optimizer_in_memory` the point of
    `optimizer_from` is not looked for. `point_in_memory`: see `resume.choose`. Raises NotFound,
    Corrupt, and BadInput for what these layers cannot do.
    """
    from cray_agents.trainers.checkpointing import resume
    from cray_agents.trainers.checkpointing.save import step_of
    from cray_agents.trainers.models.backends import choose_layers_of
    from cray_agents.trainers.models.layer_choice import check_layers

    spec, hyper = work.spec, work.spec.hyperparameters
    layers = choose_layers_of(work.model, spec.layout, hyper.dtype, on_cpu)
    check_layers(layers, hyper, spec.recompute, mixture=bool(work.model.experts))
    resume.sweep(work.megatron)
    resume.sweep(work.megatron, ".kept-*")
    resume.sweep(work.megatron, f".{LOCAL}*")
    final = work.journal.home.checkpoint(work.spec.id)
    resume.sweep(final.parent, f".{final.name}[.-]*")  # of its end, and of its publishes
    point, problems = resume.choose(work.megatron, point_in_memory, spec.layout)
    step = step_of(point) if point else 0
    source = None if optimizer_in_memory else work.spec.optimizer_from
    if point is None and spec.state_from is not None:
        state = resume.kept_point(work.journal.home.jobs, spec.state_from)
        work = work.at(work.attempt, None, None, state)
    elif source is not None and (point is None or hyper.lora is not None):
        before = resume.newest_point(work.journal.home.job(source) / "megatron", source)
        work = work.at(work.attempt, point, before)
    else:
        work = work.at(work.attempt, point, None)
    if ledger is not None:
        note_steps(ledger, work.journal)  # of the attempt before: a killed one has written nothing
    work.journal.rewind(-1 if work.resume_from is None else step)
    for problem in problems:
        print(f"{problem}; set aside, the one before it is used", flush=True)
        work.journal.event("corrupt", message=problem)
    work.journal.event(
        "started",
        attempt=work.attempt,
        from_step=step,
        left_out=work.samples.left_out,
        layout=spec.layout.model_dump(),
        layers=layers.text,
        learning_rate=explain_learning_rate(work.model.hidden, spec.method, hyper),
    )
    print(f"attempt {work.attempt} starts at step {step}", flush=True)
    if spec.commands is None and (remark := remark_on_epochs(hyper, len(work.samples.units))):
        print(f"warning: {remark}", flush=True)
        work.journal.event("warning", message=remark)
    return work


def remark_on_epochs(hyper: Hyperparameters, units: int) -> str:
    """Say that a job trains on each of its samples, or pairs, very often; "" if it does not."""
    epochs = hyper.steps * hyper.batch_size / units
    if epochs <= MANY_EPOCHS:
        return ""
    return (
        f"{hyper.steps} steps of {hyper.batch_size} train on each of {units} samples {epochs:.3g}"
        " times: so few are rather learned by heart. Give fewer steps, or more samples"
    )


# ---- samples against the model
def check_samples(samples: Samples, model: Architecture, hyper: Hyperparameters) -> None:
    """Raise BadInput if the model cannot read a sample or a micro-batch cannot hold a unit."""
    low, high = samples.token_range
    if high >= model.vocab or low < 0:
        bad = low if low < 0 else high
        place = next(place for place, ids in enumerate(samples.tokens) if bad in ids)
        raise BadInput(
            f"{_label(samples, place)} has token id {bad}, outside the model's vocabulary of"
            f" {model.vocab}: the dataset was made with another tokenizer",
            param="dataset",
        )
    place = int(samples.lengths.argmax()) if len(samples) else 0
    # the last token of a document's piece is only a target: the model does not read it
    only_target = isinstance(samples.tokens, StoredTokens)
    if len(samples) and (most := int(samples.lengths[place]) - only_target) > model.max_tokens:
        raise BadInput(
            f"{_label(samples, place)} has {most} tokens, and the model attends to"
            f" {model.max_tokens}: build the dataset with max_tokens {model.max_tokens}",
            param="dataset",
        )
    _check_room(samples, hyper.max_tokens_per_microbatch)
    for name, used in (("order", hyper.order == "weighted"), ("weigh_loss", hyper.weigh_loss)):
        weights = samples.weights
        if used and not (np.isfinite(weights).all() and weights.min() >= 0 < weights.sum()):
            raise BadInput(
                f"{name!r} needs weights that are numbers from 0 on, at least one above it",
                param=name,
            )


def check_routes(samples: Samples, model: Architecture, spec: JobSpec) -> None:
    """Raise BadInput if the experts that the engine chose cannot be replayed (router_replay.py)."""
    width = samples.routes[0].shape[1] if samples.routes else 0
    if not width:
        return
    problem = ""
    if model.backend != "megatron":
        problem = f"cannot be replayed by backend={model.backend}: take backend=megatron"
    elif width != model.layers * model.experts_per_token or model.experts is None:
        problem = f"are not of this model: {width} numbers a token"
    elif (most := max(int(rows.max()) for rows in samples.routes)) >= model.experts:
        problem = f"are not of this model: expert {most} of {model.experts}"
    elif spec.layout.pipeline > 1 and spec.recompute not in (None, "none"):
        problem = "cannot be replayed where stages of a pipeline recompute: take recompute=none"
    if problem:
        raise BadInput(
            f"the routes of the dataset's tokens {problem}. Or build it without router_replay: of a"
            " loop, start the platform without that setting",
            param="dataset",
        )


def _check_room(samples: Samples, room: int) -> None:
    costs = samples.unit_costs
    if not len(costs) or costs.max() <= room:
        return
    most = int(costs.argmax())
    first, *rest = samples.units[most]
    what = f"the pair of {_label(samples, first)}" if rest else _label(samples, first)
    if isinstance(samples.tokens, StoredTokens):
        what, rest = "a context of documents", []
    raise BadInput(
        f"{what} has {costs[most] + 1 + len(rest)} tokens: raise max_tokens_per_microbatch"
        f" ({room}) to at least {costs[most]}, or build the dataset with a smaller max_tokens",
        param="max_tokens_per_microbatch",
    )


def check_temperature(samples: Samples, hyper: Hyperparameters) -> None:
    """Raise BadInput unless every sample was sampled at `policy.temperature`."""
    wanted = hyper.policy.temperature
    for place, actual in enumerate(samples.temperatures):
        if not np.isclose(actual, wanted):
            at = "several temperatures, or not known which" if np.isnan(actual) else f"{actual:g}"
            raise BadInput(
                f"{_label(samples, place)} was sampled at temperature {at}, and policy.temperature"
                f" is {wanted:g}: the two must be the same",
                param="policy.temperature",
            )


def check_tokenizer(samples: Samples, folder: Path, home: Home, parent: Path) -> None:
    """Raise BadInput if a token of the samples is another text to the parent's tokenizer.

    Two kinds of tokenizers are compared with the parent's, if their files still exist: those of
    the versions that sampled the tokens, and the one that rendered conversations of the dataset in
    `folder`.
    """
    own = parent / TOKENIZER
    if not own.exists():
        return
    for name, path in _source_tokenizers(samples, folder, home).items():
        if not path.exists() or path.read_bytes() == own.read_bytes():
            continue
        verify_settings(path.parent)
        ours, theirs = _texts(own), _texts(path)
        low, high = samples.token_range
        known = (i for i in ours.keys() | theirs.keys() if low <= i <= high)
        other = [i for i in known if ours.get(i) != theirs.get(i)]
        if (token := _first_of(other, samples)) is not None:
            raise BadInput(
                f"the tokens of dataset {folder.name} were made by {name}, whose tokenizer is not"
                f" the one in {parent}: token {token} is {theirs.get(token)!r} in {path}, and"
                f" {ours.get(token)!r} in {own}",
                param="dataset",
            )


def check_teacher(teacher: Path, parent: Path, splits: Sequence[Samples], spec: JobSpec) -> None:
    """Raise BadInput unless the teacher can score the samples: their tokens must be its own.

    Every token of the parent's tokenizer must be the same text to the teacher's, which may have
    more. Where one has no tokenizer.json, the vocabularies must be of one size.
    """
    model = read_parent(teacher, backend=scoring_backend(spec.layout), layout=spec.layout)
    try:
        check_layout(model, spec.layout)
        for samples in splits:
            check_samples(samples, model, spec.hyperparameters)
    except BadInput as problem:
        raise BadInput(f"the teacher {teacher} does not fit: {problem}", param="teacher") from None
    own, foreign = parent / TOKENIZER, teacher / TOKENIZER
    if not (own.exists() and foreign.exists()):
        size = read_parent(parent, spec.hyperparameters.init).vocab
        if model.vocab == size:
            return
        ours, theirs = f"a vocabulary of {size}", f"one of {model.vocab}"
    elif own.read_bytes() == foreign.read_bytes():
        return
    else:
        verify_settings(teacher)
        texts, other = _texts(own), _texts(foreign)
        token = next((i for i in sorted(texts) if other.get(i) != texts[i]), None)
        if token is None:
            return
        ours, theirs = f"token {token} is {texts[token]!r}", f"it is {other.get(token)!r}"
    raise BadInput(
        f"the teacher's tokenizer is not the student's: in {parent} {ours}, and in {teacher}"
        f" {theirs}; distill needs a teacher with the student's tokens",
        param="teacher",
    )


def _first_of(ids: list[int], samples: Samples) -> int | None:
    """Return the first token of the samples that is in `ids`."""
    matches = (row[np.isin(row, ids)] for row in samples.tokens) if ids else iter(())
    return next((int(tokens[0]) for tokens in matches if len(tokens)), None)


def _source_tokenizers(samples: Samples, folder: Path, home: Home) -> dict[str, Path]:
    """Map each maker of tokens, by its display name, to its tokenizer file."""
    registry = Registry(home)
    tokenizers: dict[str, Path] = {}
    for version in samples.versions:
        try:
            checkpoint = registry.resolve(version).checkpoint
        except NotFound:  # imported runs may name models that this home does not have
            continue
        tokenizers[version] = home.checkpoint(checkpoint) / TOKENIZER
    manifest = read_dataset_manifest(folder)
    recipe = manifest.get("recipe", {})
    rendered_any = manifest.get("demonstrations") or manifest.get("documents")
    if recipe.get("tokenizer") and (rendered_any or recipe.get("render")):
        rendered = Path(recipe["tokenizer"])
        tokenizers[f"the tokenizer in {rendered}"] = rendered / TOKENIZER
    return tokenizers


def _texts(path: Path) -> dict[int, str]:
    """Map each token id of a tokenizer.json to its text."""
    content = orjson.loads(path.read_bytes())
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [text, score]
        texts = {number: text for number, (text, _) in enumerate(vocabulary)}
    else:
        texts = {number: text for text, number in vocabulary.items()}
    return texts | {token["id"]: token["content"] for token in content.get("added_tokens", [])}


def _label(samples: Samples, place: int) -> str:
    run_id = samples.run_ids[place]
    return f"sample {place} ({run_id})" if run_id else f"sample {place}"


def other_weights(checkpoint: Path, actual: str, expected: str) -> str:
    """Say that a checkpoint's weights are not the ones that a job was made for."""
    return (
        f"the weights in {checkpoint} have hash {actual}, and the job was made for {expected}: they"
        " were changed, or the path is wrong"
    )
