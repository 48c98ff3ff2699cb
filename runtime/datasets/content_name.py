"""The name of a dataset: a hash of its recipe and of every sample, in order.

Where the tokenizer lies does not matter, for its work is in the samples; nor does how often, or in
which order, a generation is named. Called by making.py and, for recipes alone, by uses.py.
"""

import hashlib
from typing import Any

from cray_agents.queries import DatasetRecipe
from cray_agents.records import canonical, digest
from cray_agents.runtime.datasets.recipe_checks import DEMONSTRATIONS
from cray_agents.runtime.datasets.token_shards import SampleRow

LARGE = (*DEMONSTRATIONS, "rewards")


def recipe_name(recipe: DatasetRecipe) -> str:
    """What tells a recipe from another: 64 hex digits."""
    return digest(essence(recipe), 64)


def essence(recipe: DatasetRecipe) -> dict[str, Any]:
    """A recipe without what decides nothing."""
    what = recipe.model_dump(mode="json", exclude={"tokenizer"})
    what["generations"] = recipe.generations and sorted(set(recipe.generations))
    if recipe.discount == 1.0:
        del what["discount"]
    # without the key it is the population's: what was made before there was a choice keeps its name
    if recipe.method != "grpo" or not recipe.normalize or recipe.deviation == "population":
        del what["deviation"]
    if recipe.givers is None:
        del what["givers"]
    else:
        what["givers"] = sorted(set(recipe.givers))
    return what


def brief(recipe: DatasetRecipe) -> dict[str, Any]:
    """A recipe as manifests show it; the parts that grow with the data are in recipe.json."""
    return recipe.model_dump(mode="json", exclude=set(LARGE))


class Naming:
    """Takes in the rows in their order, and makes the name."""

    def __init__(self, recipe: DatasetRecipe) -> None:
        self._recipe = recipe
        self._hasher = hashlib.sha256()

    def add(self, split: str, row: SampleRow) -> None:
        """Take a row in: all that is in its shard, and its group of balance for its weight."""
        sample = row.sample
        about = [split, *row[1:-1], sample.spans, sample.versions, len(sample.input_ids)]
        about += [sample.temperature, sample.shaped, *row.advantages]
        self._hasher.update(canonical(about))
        self._hasher.update(sample.input_ids.tobytes())
        self._hasher.update(sample.logprobs.tobytes())

    @property
    def name(self) -> str:
        """`ds-` and 16 hex digits."""
        return f"ds-{digest([essence(self._recipe), self._hasher.hexdigest()])}"
