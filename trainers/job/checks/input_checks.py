"""Input checks: prove that a job's samples fit its model, its tokenizer and its settings.

The tokens of a dataset are numbers. Under another tokenizer they would be other texts, and training
would go on without an error. Called by job.py. Read next: data/packer.py.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.datasets.reader import read_manifest
from cray_agents.runtime.registry.checkpoints import verify_settings
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.data.samples import Samples
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.layouts import check_layout, scoring_backend
from cray_agents.training_jobs import Hyperparameters, JobSpec

TOKENIZER = "tokenizer.json"


def check_samples(samples: Samples, model: Architecture, hyper: Hyperparameters) -> None:
    """Raise BadInput if the model cannot read a sample or a micro-batch cannot hold a unit."""
    for place, ids in enumerate(samples.tokens):
        low, high = ids.min(), ids.max()
        if high >= model.vocab or low < 0:
            bad = low if low < 0 else high
            raise BadInput(
                f"{_label(samples, place)} has token id {bad}, outside the model's vocabulary of"
                f" {model.vocab}: the dataset was made with another tokenizer",
                param="dataset",
            )
        if len(ids) > model.max_tokens:
            raise BadInput(
                f"{_label(samples, place)} has {len(ids)} tokens, and the model attends to"
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


def _check_room(samples: Samples, room: int) -> None:
    costs = [sum(samples.cost(i) for i in unit) for unit in samples.units]
    most = max(range(len(costs)), key=costs.__getitem__, default=None)
    if most is None or costs[most] <= room:
        return
    first, *rest = samples.units[most]
    what = f"the pair of {_label(samples, first)}" if rest else _label(samples, first)
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
        other = [i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)]
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
    manifest = read_manifest(folder)
    recipe = manifest.get("recipe", {})
    if recipe.get("tokenizer") and (manifest.get("demonstrations") or recipe.get("render")):
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
