"""Whether samples fit the model that is to learn from them, and the job; called by job.py.

The tokens of a dataset are numbers: under another tokenizer they would be other texts, and training
on them would go on without a complaint. Read next: packing.py.
"""

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
from cray_agents.training_jobs import Hyperparameters

TOKENIZER = "tokenizer.json"


def check_samples(samples: Samples, model: Architecture, hyper: Hyperparameters) -> None:
    """Raises BadInput when the model cannot read a sample, or a micro-batch cannot hold a unit."""
    for place, ids in enumerate(samples.tokens):
        low, high = ids.min(), ids.max()
        if high >= model.vocab or low < 0:
            bad = low if low < 0 else high
            raise BadInput(
                f"{_named(samples, place)} has token id {bad}, outside the model's vocabulary of"
                f" {model.vocab}: the dataset was made with another tokenizer",
                param="dataset",
            )
        if len(ids) > model.max_tokens:
            raise BadInput(
                f"{_named(samples, place)} has {len(ids)} tokens, and the model attends to"
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
    first, *others = samples.units[most]
    what = f"the pair of {_named(samples, first)}" if others else _named(samples, first)
    raise BadInput(
        f"{what} has {costs[most] + 1 + len(others)} tokens: raise max_tokens_per_microbatch"
        f" ({room}) to at least {costs[most]}, or build the dataset with a smaller max_tokens",
        param="max_tokens_per_microbatch",
    )


def check_temperature(samples: Samples, hyper: Hyperparameters) -> None:
    """For grpo. Raises BadInput unless all was sampled at the temperature that the policy names."""
    wanted = hyper.policy.temperature
    for place, found in enumerate(samples.temperatures):
        if not np.isclose(found, wanted):
            at = "several temperatures, or not known which" if np.isnan(found) else f"{found:g}"
            raise BadInput(
                f"{_named(samples, place)} was sampled at temperature {at}, and policy.temperature"
                f" is {wanted:g}: the two must be the same",
                param="policy.temperature",
            )


def check_tokenizer(samples: Samples, folder: Path, home: Home, parent: Path) -> None:
    """Raises BadInput when a token of the samples is another text to the parent's tokenizer.

    Looked at are the tokenizers of the versions that sampled the tokens, and the one with which
    conversations of the dataset (in `folder`) were rendered, where these are still here.
    """
    here = parent / TOKENIZER
    if not here.exists():
        return
    for name, there in _makers(samples, folder, home).items():
        if not there.exists() or there.read_bytes() == here.read_bytes():
            continue
        verify_settings(there.parent)
        ours, theirs = _texts(here), _texts(there)
        other = [i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)]
        if (token := _first_of(other, samples)) is not None:
            raise BadInput(
                f"the tokens of dataset {folder.name} were made by {name}, whose tokenizer is not"
                f" the one in {parent}: token {token} is {theirs.get(token)!r} in {there}, and"
                f" {ours.get(token)!r} in {here}",
                param="dataset",
            )


def _first_of(ids: list[int], samples: Samples) -> int | None:
    """The first token of the samples that is one of these."""
    found = (row[np.isin(row, ids)] for row in samples.tokens) if ids else iter(())
    return next((int(tokens[0]) for tokens in found if len(tokens)), None)


def _makers(samples: Samples, folder: Path, home: Home) -> dict[str, Path]:
    """The tokenizer of each that made tokens, by what it is called."""
    registry = Registry(home)
    found: dict[str, Path] = {}
    for version in samples.versions:
        try:
            checkpoint = registry.resolve(version).checkpoint
        except NotFound:  # imported runs name models of elsewhere
            continue
        found[version] = home.checkpoint(checkpoint) / TOKENIZER
    manifest = read_manifest(folder)
    recipe = manifest.get("recipe", {})
    if recipe.get("tokenizer") and (manifest.get("demonstrations") or recipe.get("render")):
        rendered = Path(recipe["tokenizer"])
        found[f"the tokenizer in {rendered}"] = rendered / TOKENIZER
    return found


def _texts(path: Path) -> dict[int, str]:
    """What each token of a tokenizer.json stands for."""
    content = orjson.loads(path.read_bytes())
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [text, score]
        texts = {number: text for number, (text, _) in enumerate(vocabulary)}
    else:
        texts = {number: text for text, number in vocabulary.items()}
    return texts | {token["id"]: token["content"] for token in content.get("added_tokens", [])}


def _named(samples: Samples, place: int) -> str:
    run_id = samples.run_ids[place]
    return f"sample {place} ({run_id})" if run_id else f"sample {place}"
