"""Recipe: check a recipe, make its query, and name its dataset by content.

An option without effect would misdescribe the dataset, so it is an error that names its field. A
dataset's name is a hash of its recipe and of every sample, in order. The paths of the tokenizer and
of documents are left out, since the samples contain their tokens. Repeated and reordered iterations
do not matter either. Called by build.py and, for recipes alone, by uses.py.
"""

import hashlib
import re
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.queries import DatasetRecipe, RunQuery
from cray_agents.records import canonical, digest
from cray_agents.runtime.datasets.reader import EARLIER_NAMES
from cray_agents.runtime.datasets.token_shards import SampleRow

LOOP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")  # safe as a folder name
DEMONSTRATIONS = (
    "demonstrations",
    "demonstrations_metadata",
    "demonstrations_tools",
    "demonstrations_rejected",
    "demonstrations_splits",
)
NEWER_BOUNDS = (
    *("min_seconds", "max_seconds", "min_turns", "max_turns", "min_tokens", "max_tokens"),
)
LARGE = (*DEMONSTRATIONS, "rewards")
OF_DOCUMENTS = (
    *("documents", "method", "tokenizer", "max_tokens", "split"),
    *("validation", "near_duplicates", "decontamination"),
)
EFFECTLESS = {
    "sft": ("min_margin", "normalize", "discount", "demonstrations_rejected"),
    "grpo": (
        *("min_reward", "best_of", "min_margin", "near_duplicates", "render"),
        *DEMONSTRATIONS,
    ),
    "dpo": ("best_of", "normalize", "discount"),
    "kto": ("best_of", "min_margin", "normalize", "discount", *DEMONSTRATIONS),
    "distill": (
        *("min_reward", "best_of", "min_margin", "normalize", "discount", "near_duplicates"),
        *("render", "rewards", "givers", *DEMONSTRATIONS),
    ),
}


def check(recipe: DatasetRecipe) -> None:
    """Check a recipe. Raises BadInput."""
    if recipe.split != "train":
        raise BadInput(
            f"split {recipe.split!r} never enters a training set: it is kept to judge by",
            param="split",
        )
    for name in EFFECTLESS[recipe.method]:
        if getattr(recipe, name) != DatasetRecipe.model_fields[name].get_default(
            call_default_factory=True
        ):
            raise BadInput(f"{name} has no effect with method {recipe.method!r}", param=name)
    if recipe.balance_power and recipe.balance_by is None:
        raise BadInput("balance_power has no effect without balance_by", param="balance_power")
    _check_step(recipe)
    _check_rendering(recipe)
    _check_documents(recipe)


def _check_step(recipe: DatasetRecipe) -> None:
    if recipe.max_uses is not None and recipe.step is None:
        raise BadInput(
            "max_uses counts the steps of a loop: give this dataset's step", param="max_uses"
        )
    if recipe.step is None:
        return
    if recipe.loop is None:
        raise BadInput("a step is one of a loop's: name the loop", param="step")
    if not LOOP.fullmatch(recipe.loop):
        raise BadInput(f"{recipe.loop[:200]!r} cannot be the name of a loop", param="loop")


def _check_documents(recipe: DatasetRecipe) -> None:
    if not recipe.documents:
        return
    if recipe.method != "sft":
        message = f"documents have no effect with method {recipe.method!r}: they are learnt by sft"
        raise BadInput(message, param="documents")
    for name, why in (("tokenizer", "that makes their tokens"), ("max_tokens", "of a context")):
        if getattr(recipe, name) is None:
            raise BadInput(f"documents need {name}, {why}", param=name)
    for name, field in DatasetRecipe.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if name not in OF_DOCUMENTS and getattr(recipe, name) != default:
            raise BadInput(f"{name} has no effect with documents, which have no runs", param=name)


def _check_rendering(recipe: DatasetRecipe) -> None:
    if recipe.demonstrations and not recipe.tokenizer:
        raise BadInput("demonstrations need a tokenizer to be rendered with", param="tokenizer")
    if recipe.render and not recipe.tokenizer:
        raise BadInput("render needs a tokenizer to render with", param="tokenizer")
    count = len(recipe.demonstrations)
    for name in DEMONSTRATIONS[1:]:
        values = getattr(recipe, name)
        if values and len(values) != count:
            message = f"{len(values)} {name} for {count} demonstrations: give one each"
            raise BadInput(message, param=name)
    if recipe.method == "dpo" and recipe.demonstrations:
        _check_pairs(recipe)


def _check_pairs(recipe: DatasetRecipe) -> None:
    if not recipe.demonstrations_rejected:
        raise BadInput(
            "dpo compares: give the message that each demonstration's last one is preferred to",
            param="demonstrations_rejected",
        )
    pairs = zip(recipe.demonstrations, recipe.demonstrations_rejected, strict=True)
    for number, (messages, rejected) in enumerate(pairs):
        for name, answers in (("demonstrations", messages[-1:]), (DEMONSTRATIONS[3], [rejected])):
            if [message.get("role") for message in answers] != ["assistant"]:
                message = f"{name}[{number}] must end with a message of the assistant"
                raise BadInput(message, param=name)


def query_of(recipe: DatasetRecipe) -> RunQuery | None:
    """Return the query for the runs to consider, or None if there can be none. Raises BadInput."""
    if recipe.documents:
        return None
    filters = recipe.where.model_dump() if recipe.where else {}
    if recipe.loop is not None and filters.get("loop") not in (None, recipe.loop):
        raise BadInput(
            f"loop is {recipe.loop!r}, and where.loop {filters['loop']!r}: no run is in both",
            param="where.loop",
        )
    if recipe.loop is not None:
        filters["loop"] = recipe.loop
    chosen = [set(g) for g in (recipe.iterations, filters.get("iterations")) if g is not None]
    if chosen:
        both = set.intersection(*chosen)
        if not both:
            return None
        filters["iterations"] = sorted(both)
    return RunQuery(**filters, order="task")


def recipe_name(recipe: DatasetRecipe) -> str:
    """Return the hash of a recipe: 64 hex digits."""
    return digest(defining_fields(recipe), 64)


def defining_fields(recipe: DatasetRecipe) -> dict[str, Any]:
    """Return the fields of a recipe that decide the content of its dataset."""
    fields = recipe.model_dump(mode="json", exclude={"tokenizer", "documents"})
    # iterations under their earlier name: so datasets older than this one keep their names
    del fields["iterations"]
    fields["generations"] = recipe.iterations and sorted(set(recipe.iterations))
    if not recipe.router_replay:
        del fields["router_replay"]
    if not recipe.with_findings:
        del fields["with_findings"]
    if recipe.discount == 1.0:
        del fields["discount"]
    # a missing key means `population`: so datasets older than this field keep their names
    if recipe.method != "grpo" or not recipe.normalize or recipe.deviation == "population":
        del fields["deviation"]
    # likewise the ranges that filters have since
    if fields.get("where"):
        for name, earlier in EARLIER_NAMES.items():
            fields["where"][earlier] = fields["where"].pop(name)
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
        if self._recipe.router_replay:
            self._hasher.update(sample.routes or b"")

    @property
    def name(self) -> str:
        """The name of the dataset: `ds-` and 16 hex digits."""
        return f"ds-{digest([defining_fields(self._recipe), self._hasher.hexdigest()])}"
