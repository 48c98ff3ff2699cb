"""Job inputs: make a JobSpec from a fine-tuning job's training and validation files.

tuning_jobs.py starts a process, `python -m cray_agents.runtime.fine_tuning.job_inputs HOME JOB CODE
PID`. It needs no torch, which transformers would import into the gateway, and a few thousand
examples hold Python's lock for half a second at a time, which would delay every request. Where
torch is imported already, a thread calls `validate` for small files. Either way the result is a
file, written once.

Values of `"auto"`, for n examples (dpo: pairs) and a model of hidden size h:

    n_epochs                  3; more, up to 25, until 100 examples are seen in all; fewer, down to
                              1, so that at most 25,000 are seen
    batch_size                16
    learning_rate_multiplier  1, of the rate that every job without one has: see
                              `usual_learning_rate` in training_jobs.py
    beta                      0.1

The dtype is the trainer's: bfloat16 on GPUs, float32 on CPUs. So is the micro-batch, unless the
longest sample has more tokens. The request recorded both.
A batch_size above n becomes n, so that a step is at most an epoch, and the job shows it so.
The rate warms up over the first twentieth of the steps and falls to a tenth along a cosine. The
validation loss is computed after each epoch and at the end, over the whole file.
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.processes import die_with_parent, hide
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.datasets.demonstrations import Renderer, renderer_of
from cray_agents.runtime.datasets.reader import SplitName, shards
from cray_agents.runtime.datasets.run_samples import TokenSample
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.fine_tuning.examples import BadExamples, Example, bad_lines, read_examples
from cray_agents.runtime.fine_tuning.job_records import (
    Auto,
    Ended,
    TuningFolder,
    TuningRequest,
    Validated,
)
from cray_agents.runtime.registry.checkpoints import max_tokens
from cray_agents.runtime.registry.deltas import materialize
from cray_agents.runtime.registry.foreign_model import read_config
from cray_agents.runtime.store import Store
from cray_agents.training_jobs import (
    Hyperparameters,
    JobSpec,
    MethodName,
    Preference,
    PublishEvery,
    usual_learning_rate,
)

EPOCHS, MOST_EPOCHS = 3, 25
LEAST_SEEN, MOST_SEEN = 100, 25_000  # examples, counted in every epoch
BATCH, BETA = 16, 0.1


def validate(home: Home, job_id: str, code: str) -> None:
    """Write the JobSpec of a job's files, once. Bad files end the job."""
    folder = TuningFolder(home)
    if folder.read_validated(job_id) or folder.read_ended(job_id):
        return
    try:
        validated = Preparer(home, code).prepare(folder.read_request(job_id))
    except BadInput as error:
        param = "validation_file" if error.param == "validation_file" else "training_file"
        problem = {"code": f"invalid_{param}", "param": param}
        if error.param in ("tokenizer", "model"):  # not the files' fault
            problem = {"code": "unsupported_model", "param": "model"}
        folder.write_ended(job_id, Ended(state="failed", error={**problem, "message": str(error)}))
    else:
        folder.write_validated(job_id, validated)


class TrainingFile(NamedTuple):
    """A file's examples. `param` is the file's field in the request; `split` is the dataset's."""

    param: str
    split: SplitName
    examples: list[Example]


@dataclass(frozen=True)
class Preparer:
    """The preparation of jobs under a home. `code` goes into the JobSpec."""

    home: Home
    code: str

    def prepare(self, request: TuningRequest) -> Validated:
        """Check the files, build their dataset, choose the hyperparameters. Raises BadInput."""
        files = [self._read(request, request.training_file, "training_file", "train")]
        if request.validation_file is not None:
            file_id = request.validation_file
            files.append(self._read(request, file_id, "validation_file", "validation"))
        parent = materialize(self.home, self.home.checkpoint(request.parent))
        pairs = request.method == "dpo"
        manifest = self._build_dataset(request, files, parent)
        longest = max(self._longest_sample(manifest, file, parent) for file in files)
        n = manifest["splits"]["train"]["samples"] // (2 if pairs else 1)
        n_epochs = auto_epochs(n) if request.n_epochs == "auto" else request.n_epochs
        multiplier = _auto_or(request.learning_rate_multiplier, 1.0)
        batch_size = int(min(_auto_or(request.batch_size, BATCH), n))
        steps = math.ceil(n_epochs * n / batch_size)
        method: MethodName = "dpo" if pairs else "sft"
        rate = base_rate(read_config(parent), method) * multiplier
        spec = JobSpec(
            method=method,
            dataset=manifest["id"],
            parent=str(parent),
            parent_sha256=request.parent_sha256,
            parent_settings_sha256=request.parent_settings_sha256,
            hyperparameters=Hyperparameters(
                steps=steps,
                batch_size=batch_size,
                learning_rate=rate,
                min_learning_rate=rate / 10,
                warmup_steps=steps // 20,
                schedule="cosine",
                seed=request.seed,
                dtype=request.dtype,
                max_tokens_per_microbatch=max(request.microbatch, longest * (2 if pairs else 1)),
                preference=Preference(beta=_auto_or(request.beta, BETA)) if pairs else Preference(),
            ),
            code=self.code,
            publish_every=(
                None
                if request.publish_every == "auto"
                else PublishEvery(
                    name=request.name, steps=request.publish_every, prompts=request.prompts
                )
            ),
            evaluate_every=math.ceil(n / batch_size) if len(files) > 1 else None,
        )
        return Validated(
            spec=spec,
            n_epochs=n_epochs,
            learning_rate_multiplier=multiplier,
            examples=len(files[0].examples),
            losses=manifest.get("losses", {}),
            left_out=sum(len(file.examples) for file in files) - manifest["demonstrations"],
            samples=n,
            validation=sum(len(file.examples) for file in files[1:]),
        )

    def _read(
        self, request: TuningRequest, file_id: str, param: str, split: SplitName
    ) -> TrainingFile:
        try:
            path = Files(self.home).path(file_id)
            return TrainingFile(param, split, read_examples(path, request.method, param))
        except (NotFound, FileNotFoundError) as error:
            raise BadExamples(f"{file_id} was deleted before it was read", param=param) from error

    def _build_dataset(
        self, request: TuningRequest, files: list[TrainingFile], parent: Path
    ) -> dict[str, Any]:
        """Build the dataset and return its manifest. Raises BadInput, naming bad lines."""
        examples = [example for file in files for example in file.examples]
        recipe = DatasetRecipe(
            method="dpo" if request.method == "dpo" else "sft",
            loop="fine_tuning",
            iterations=[],  # these examples alone, no recorded runs
            demonstrations=[example.messages for example in examples],
            demonstrations_tools=[example.tools for example in examples],
            demonstrations_rejected=[e.rejected for e in examples if e.rejected is not None],
            demonstrations_splits=[file.split for file in files for _ in file.examples],
            tokenizer=str(parent),
        )
        try:
            manifest = build_dataset(Store(self.home), self.home, recipe)
        except BadInput as error:
            if error.param == "demonstrations":
                raise _find_bad_lines(files, parent, None) or error from error
            raise
        for file in files:
            if file.split not in manifest["splits"]:
                raise BadExamples(
                    f"none of its {len(file.examples)} examples is left to validate on: they are"
                    " in the training file too, or their answers are the same",
                    param=file.param,
                )
        return manifest

    def _longest_sample(self, manifest: dict[str, Any], file: TrainingFile, parent: Path) -> int:
        """Return the longest sample's tokens. Raises BadExamples if the model reads fewer."""
        import pyarrow.compute
        import pyarrow.parquet

        longest = 0
        for path in shards(self.home, manifest["id"], file.split):
            tokens = pyarrow.parquet.read_table(path, columns=["input_ids"])["input_ids"]
            lengths = pyarrow.compute.list_value_length(tokens)
            longest = max(longest, int(pyarrow.compute.max(lengths).as_py()))
        limit = max_tokens(read_config(parent))
        if longest > limit:
            message = f"a sample has {longest} tokens, and the model reads {limit}"
            error = BadExamples(message, param=file.param)
            raise _find_bad_lines([file], parent, limit) or error
        return longest


def _find_bad_lines(
    files: list[TrainingFile], parent: Path, limit: int | None
) -> BadExamples | None:
    """Return an error naming the lines that cannot be rendered or have more tokens than `limit`."""
    renderer = renderer_of(parent)
    for file in files:
        problems = []
        for example in file.examples:
            try:
                length = max(len(sample.input_ids) for sample in _render(renderer, example))
            except BadInput as error:
                problems.append(f"line {example.line}: {error}")
                continue
            if limit is not None and length > limit:
                problem = f"{length} tokens, and the model reads {limit}"
                problems.append(f"line {example.line}: {problem}")
        if problems:
            return bad_lines(problems, len(file.examples), file.param)
    return None


def _render(renderer: Renderer, example: Example) -> list[TokenSample]:
    """Return an example's token sequences. Raises BadInput."""
    if example.rejected is None:
        return renderer.samples(example.messages, example.tools)
    both = (example.messages, [*example.messages[:-1], example.rejected])
    return [renderer.answer(messages, example.tools) for messages in both]


def auto_epochs(examples: int) -> int:
    """Return the number of epochs for so many examples."""
    if examples * EPOCHS < LEAST_SEEN:
        return min(MOST_EPOCHS, math.ceil(LEAST_SEEN / examples))
    return max(1, min(EPOCHS, MOST_SEEN // examples))


def base_rate(config: dict[str, Any], method: MethodName) -> float:
    """Return the learning rate at multiplier 1, for a model's config.json. Raises BadInput."""
    hidden = config.get("hidden_size")
    if not isinstance(hidden, int) or hidden < 1:
        message = "the model's config.json has no hidden_size: it cannot be trained here"
        raise BadInput(message, param="model")
    return usual_learning_rate(hidden, method, Hyperparameters(steps=1))


def _auto_or(given: float | Auto, auto: float) -> float:
    return auto if given == "auto" else given


def main() -> None:
    """Validate a job in this process, which dies with the gateway and runs at a lower priority."""
    home, job_id, code, parent = sys.argv[1:]
    die_with_parent(int(parent))
    os.nice(10)
    hide("torch")  # tokenizers load in a third of the time, and in a fifth of the memory
    validate(Home(Path(home)), job_id, code)


if __name__ == "__main__":
    main()
