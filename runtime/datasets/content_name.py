"""Content name of a dataset: a hash of its recipe and of every sample, in order.

The path of the tokenizer is left out, since the samples contain its tokens. Repeated and reordered
generations do not matter either. Called by draft.py and, for recipes alone, by uses.py.
"""

import hashlib
from typing import Any

from cray_agents.queries import DatasetRecipe
from cray_agents.records import canonical, digest
from cray_agents.runtime.datasets.recipe_checks import DEMONSTRATIONS
from cray_agents.runtime.datasets.samples.token_shards import SampleRow

NEWER_BOUNDS = (
    *("min_seconds", "max_seconds", "min_turns", "max_turns", "min_tokens", "max_tokens"),
)
LARGE = (*DEMONSTRATIONS, "rewards")


def recipe_name(recipe: DatasetRecipe) -> str:
    """Return the hash of a recipe: 64 hex digits."""
    return digest(defining_fields(recipe), 64)


def defining_fields(recipe: DatasetRecipe) -> dict[str, Any]:
    """Return the fields of a recipe that decide the content of its dataset."""
    fields = recipe.model_dump(mode="json", exclude={"tokenizer"})
    fields["generations"] = recipe.generations and sorted(set(recipe.generations))
    if recipe.discount == 1.0:
        del fields["discount"]
    # a missing key means `population`: so datasets older than this field keep their names
    if recipe.method != "grpo" or not recipe.normalize or recipe.deviation == "population":
        del fields["deviation"]
    # likewise the ranges that filters have since
    if fields.get("where"):
        unset = [name for name in NEWER_BOUNDS if fields["where"][name] is None]
        for name in unset:
            del fields["where"][name]
    if recipe.givers is None:
        del fields["givers"]
    else:
        fields["givers"] = sorted(set(recipe.givers))
    return fields


def manifest_recipe(recipe: DatasetRecipe) -> dict[str, Any]:
    """Return a recipe for the manifest. Fields that grow with the data are only in recipe.json."""
    return recipe.model_dump(mode="json", exclude=set(LARGE))


class Naming:
    """A running hash of all rows, in order, that becomes the name."""

    def __init__(self, recipe: DatasetRecipe) -> None:
        self._recipe = recipe
        self._hasher = hashlib.sha256()

    def add(self, split: str, row: SampleRow) -> None:
        """Add a row: all its columns except the weight, which the balance group stands for."""
        sample = row.sample
        values = [split, *row[1:-1], sample.spans, sample.versions, len(sample.input_ids)]
        values += [sample.temperature, sample.shaped, *row.advantages]
        self._hasher.update(canonical(values))
        self._hasher.update(sample.input_ids.tobytes())
        self._hasher.update(sample.logprobs.tobytes())

    @property
    def name(self) -> str:
        """The name of the dataset: `ds-` and 16 hex digits."""
        return f"ds-{digest([defining_fields(self._recipe), self._hasher.hexdigest()])}"
