"""From a training file to the JobSpec that trains on it.

jobs.py calls `validate`: in a thread if the file is small, else in a process of its own, started as
`python -m cray_agents.runtime.fine_tuning.preparing HOME JOB CODE PID`: a few thousand
examples would hold Python's lock for half a second at a time, and with it every request of the
gateway. Either way the result is a file, written once.

What `"auto"` means, for n examples and a model of hidden size h:

    n_epochs                  3; more, up to 25, until 100 examples are seen in all; fewer, down to
                              1, so that no more than 25,000 are
    batch_size                16, or n if that is less
    learning_rate_multiplier  1, of a base rate of 2e-3 * (128 / h)**1.5: 2e-3 for the cookbook's
                              tiny model, 1.1e-5 at h = 4096

The rate warms up over the first twentieth of the steps and falls to a tenth along a cosine.
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import BadInput, NotFound
from cray_agents.lifeline import die_with_parent
from cray_agents.paths import Home
from cray_agents.recipes import DatasetRecipe
from cray_agents.runtime.datasets import build_dataset, shards
from cray_agents.runtime.datasets.demonstrations import renderer_of
from cray_agents.runtime.files import Files
from cray_agents.runtime.fine_tuning.examples import BadExamples, Example, bad_lines, read_examples
from cray_agents.runtime.fine_tuning.records import Asked, Auto, Ended, Folder, Validated
from cray_agents.runtime.store import Store
from cray_agents.training import Hyperparameters, JobSpec

EPOCHS, MOST_EPOCHS = 3, 25
LEAST_SEEN, MOST_SEEN = 100, 25_000  # examples over all epochs
BATCH = 16
TINY_HIDDEN, TINY_RATE = 128, 2e-3
LEAST_MICROBATCH = 4096  # tokens


def validate(home: Home, job_id: str, code: str) -> None:
    """Write down what a job's file became, once; what is wrong with the file ends the job."""
    folder = Folder(home)
    if folder.validated(job_id) or folder.ended(job_id):
        return
    try:
        validated = Preparer(home, code).prepare(folder.asked(job_id))
    except BadInput as error:
        problem = {"code": "invalid_training_file", "param": "training_file"}
        if error.param in ("tokenizer", "model"):  # whatever file is given
            problem = {"code": "unsupported_model", "param": "model"}
        folder.end(job_id, Ended(state="failed", error={**problem, "message": str(error)}))
    else:
        folder.validate(job_id, validated)


@dataclass(frozen=True)
class Preparer:
    """What preparing needs. `code` goes into the JobSpec."""

    home: Home
    code: str

    def prepare(self, asked: Asked) -> Validated:
        """Check the file, build its dataset, settle the hyperparameters. Raises BadInput."""
        try:
            path = Files(self.home).path(asked.training_file)
            examples = read_examples(path)
        except (NotFound, FileNotFoundError) as error:
            message = f"{asked.training_file} was deleted before it was read"
            raise BadExamples(message, param="training_file") from error
        parent = self.home.checkpoint(asked.parent)
        manifest = self._dataset(examples, parent)
        longest = self._longest(manifest["id"], examples, parent)
        n = manifest["samples"]
        n_epochs = auto_epochs(n) if asked.n_epochs == "auto" else asked.n_epochs
        multiplier = _or(asked.learning_rate_multiplier, 1.0)
        batch_size = int(_or(asked.batch_size, min(BATCH, n)))
        steps = math.ceil(n_epochs * n / batch_size)
        rate = base_rate(_config(parent)) * multiplier
        spec = JobSpec(
            dataset=manifest["id"],
            parent=str(parent),
            parent_sha256=asked.parent_sha256,
            hyperparameters=Hyperparameters(
                steps=steps,
                batch_size=batch_size,
                learning_rate=rate,
                min_learning_rate=rate / 10,
                warmup_steps=steps // 20,
                schedule="cosine",
                seed=asked.seed,
                max_tokens_per_microbatch=max(LEAST_MICROBATCH, longest),
            ),
            code=self.code,
        )
        return Validated(
            spec=spec,
            n_epochs=n_epochs,
            learning_rate_multiplier=multiplier,
            examples=len(examples),
            left_out=len(examples) - manifest["demonstrations"],
            samples=n,
        )

    def _dataset(self, examples: list[Example], parent: Path) -> dict[str, Any]:
        recipe = DatasetRecipe(
            loop="fine_tuning",
            generations=[],  # these examples alone, whatever runs there are
            demonstrations=[example.messages for example in examples],
            demonstrations_tools=[example.tools for example in examples],
            tokenizer=str(parent),
        )
        try:
            return build_dataset(Store(self.home), self.home, recipe)
        except BadInput as error:
            if error.param == "demonstrations":
                raise (self._blame(examples, parent, None) or error) from error
            raise

    def _longest(self, dataset: str, examples: list[Example], parent: Path) -> int:
        """The tokens of the longest sample. Raises BadExamples if the model reads no more."""
        import pyarrow.compute
        import pyarrow.parquet

        longest = 0
        for path in shards(self.home, dataset):
            tokens = pyarrow.parquet.read_table(path, columns=["input_ids"])["input_ids"]
            lengths = pyarrow.compute.list_value_length(tokens)
            longest = max(longest, int(pyarrow.compute.max(lengths).as_py()))
        limit = _config(parent).get("max_position_embeddings")
        if isinstance(limit, int) and longest > limit:
            message = f"a sample has {longest} tokens, and the model reads {limit}"
            error = BadExamples(message, param="training_file")
            raise self._blame(examples, parent, limit) or error
        return longest

    def _blame(
        self, examples: list[Example], parent: Path, limit: int | None
    ) -> BadExamples | None:
        """Render line by line to name those that cannot be, or that have too many tokens."""
        renderer, problems = renderer_of(parent), []
        for example in examples:
            try:
                samples = renderer.samples(example.messages, example.tools)
            except BadInput as error:
                problems.append(f"line {example.line}: {error}")
                continue
            length = max(len(sample.input_ids) for sample in samples)
            if limit is not None and length > limit:
                what = f"{length} tokens, and the model reads {limit}"
                problems.append(f"line {example.line}: {what}")
        return bad_lines(problems, len(examples)) if problems else None


def auto_epochs(examples: int) -> int:
    """How often to go over so many examples."""
    if examples * EPOCHS < LEAST_SEEN:
        return min(MOST_EPOCHS, math.ceil(LEAST_SEEN / examples))
    return max(1, min(EPOCHS, MOST_SEEN // examples))


def base_rate(config: dict[str, Any]) -> float:
    """The learning rate whose multiplier is 1, for a model's config.json. Raises BadInput."""
    hidden = config.get("hidden_size")
    if not isinstance(hidden, int) or hidden < 1:
        message = "the model's config.json has no hidden_size: it cannot be trained here"
        raise BadInput(message, param="model")
    return float(TINY_RATE * (TINY_HIDDEN / hidden) ** 1.5)


def _config(parent: Path) -> dict[str, Any]:
    config: dict[str, Any] = orjson.loads((parent / "config.json").read_bytes())
    return config


def _or(given: float | Auto, auto: float) -> float:
    return auto if given == "auto" else given


def main() -> None:
    """The process: it dies with the gateway that started it, and gives way to it."""
    home, job_id, code, parent = sys.argv[1:]
    die_with_parent(int(parent))
    os.nice(10)
    validate(Home(Path(home)), job_id, code)


if __name__ == "__main__":
    main()
