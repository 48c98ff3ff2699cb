"""Samples: a dataset on disk, read and checked once by job/job.py before the ranks start.

The columns are described in runtime/datasets/token_shards.py. A sample's arrays are views
into flat buffers, of 18 bytes per token for grpo and 14 for the other methods. Those of documents
stay on disk, and are read as steps take them (stored_tokens.py). No torch. Read next:
job/job_inputs.py, which checks samples against a model; packer.py, which packs them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.runtime.datasets.reader import MANIFEST, SplitName, read_manifest, shards_in
from cray_agents.trainers.data.stored_tokens import Contexts, Repeated, StoredTokens, store_tokens
from cray_agents.training_jobs import ON_POLICY, MethodName

Ints = npt.NDArray[np.signedinteger[Any]]
Floats = npt.NDArray[np.float32]

LEAST_SHARED = 16  # tokens of a prompt; with less nothing is gained
COLUMNS = ("input_ids", "loss_mask", "weight")
OF_SAMPLING = ("run_id", "reward", "logprobs", "version_index", "versions", "temperature", "shaped")
ROUTES = "routes"
OF_METHOD: dict[MethodName, tuple[str, ...]] = {  # columns that a method requires
    "sft": (),
    "dpo": ("pair", "chosen"),
    "kto": ("chosen",),
    "grpo": ("logprobs", "version_index", "advantages"),
    "distill": ("logprobs", "version_index"),
}


@dataclass(frozen=True)
class Samples:
    """A dataset's sequences with something to learn, in file order.

    Lists are by sample, their arrays [length], one number per token. `units` are the samples that a
    step takes together: pairs (dpo; the better one first), pieces of documents that fill a context,
    else single samples. They follow each other.
    """

    tokens: Sequence[Ints]
    masks: Sequence[Floats]  # 1: predict this token
    sampled: Sequence[Floats]  # the engine's log-probability; 0 for tokens that it did not sample
    advantages: Sequence[Floats]  # 0 off the mask
    sampled_by: Sequence[Ints]  # place in `versions`; -1: not sampled, or by an unknown version
    versions: list[str]  # `model@version`
    weights: npt.NDArray[np.float64]  # [samples]
    chosen: Floats  # [samples]: 1 better or desirable, 0 worse or undesirable
    rewards: npt.NDArray[np.float64]  # [samples]; nan: unknown
    temperatures: npt.NDArray[np.float64]  # [samples]; nan: not sampled, or several
    shaped: npt.NDArray[np.bool_]  # [samples]: sampled with more than a temperature (top_p, ...)
    run_ids: Sequence[str]  # "": unknown
    units: Sequence[Sequence[int]]
    routes: list[Ints] = field(default_factory=list)  # [length, numbers]; -1: unknown; or none
    groups: Ints | None = None  # [units]: numbers, equal for those that an epoch takes together
    left_out: int = 0  # samples without a trainable token, and their partners in pairs

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def lengths(self) -> Ints:
        """The number of tokens of each sample, [samples]."""
        if isinstance(self.tokens, StoredTokens):
            return self.tokens.lengths
        return np.array([len(ids) for ids in self.tokens], np.int64)

    @cached_property
    def token_range(self) -> tuple[int, int]:
        """The lowest and the highest token id."""
        if isinstance(self.tokens, StoredTokens):
            return self.tokens.lowest, self.tokens.highest
        bounds = [(int(ids.min()), int(ids.max())) for ids in self.tokens if len(ids)]
        return min((low for low, _ in bounds), default=0), max((h for _, h in bounds), default=0)

    @cached_property
    def marks(self) -> Ints:
        """The number of trained tokens of each sample, [samples]."""
        if isinstance(self.masks, Repeated):
            return self.lengths - 1
        return np.array([int((mask[1:] > 0).sum()) for mask in self.masks])

    @cached_property
    def unit_weights(self) -> npt.NDArray[np.float64]:
        """The weights with which `order` 'weighted' draws units, [units]."""
        return self.weights[self._unit_starts]

    @cached_property
    def unit_costs(self) -> Ints:
        """The tokens that each unit adds to a micro-batch, [units]."""
        if not len(self.units):
            return np.zeros(0, np.int64)
        costs: Ints = np.add.reduceat(self.lengths.astype(np.int64) - 1, self._unit_starts)
        return costs

    @cached_property
    def _unit_starts(self) -> Ints:
        if isinstance(self.units, Contexts):
            return self.units.starts
        return np.array([unit[0] for unit in self.units], np.int64)

    def cost(self, index: int) -> int:
        """Return the tokens that a sample adds to a micro-batch; its last one is only a target."""
        return int(self.lengths[index]) - 1

    def prompt(self, index: int) -> Ints:
        """Return the first tokens of a sample, which others may share; none if they are few.

        They end before the token that predicts the first trained one: its labels differ. Recorded
        routes differ, too.
        """
        if self.routes or isinstance(self.masks, Repeated):  # the latter: all tokens are trained
            return np.zeros(0, np.int64)
        trained = np.flatnonzero(self.masks[index][1:] > 0)
        size = int(trained[0]) if len(trained) else 0
        return self.tokens[index][: size if size >= LEAST_SHARED else 0]

    def grouped(self) -> Self:
        """Return the samples, each a unit, with those that share a prompt as groups."""
        known: dict[bytes, int] = {}
        prompts = (self.prompt(i).tobytes() or str(i).encode() for i in range(len(self)))
        numbers = [known.setdefault(prompt, len(known)) for prompt in prompts]
        return replace(self, groups=np.array(numbers, np.int64))

    def only(self, indices: Sequence[int]) -> Self:
        """Return some of the samples, each a unit of its own."""
        wanted = list(indices)
        return replace(
            self,
            tokens=[self.tokens[i] for i in wanted],
            masks=[self.masks[i] for i in wanted],
            sampled=[self.sampled[i] for i in wanted],
            advantages=[self.advantages[i] for i in wanted],
            sampled_by=[self.sampled_by[i] for i in wanted],
            weights=self.weights[wanted],
            chosen=self.chosen[wanted],
            rewards=self.rewards[wanted],
            temperatures=self.temperatures[wanted],
            shaped=self.shaped[wanted],
            run_ids=[self.run_ids[i] for i in wanted],
            units=[[i] for i in range(len(wanted))],
            routes=[self.routes[i] for i in wanted] if self.routes else [],
            groups=None,
        )

    @classmethod
    def of(
        cls, sequences: Sequence[Sequence[int] | Ints], masks: list[Floats] | None = None
    ) -> Self:
        """Make samples of sequences that no engine sampled; default masks mark all tokens but one.

        The first token of a sequence is never predicted.
        """
        tokens: list[Ints] = [np.asarray(sequence, np.int32) for sequence in sequences]
        count, longest = len(tokens), max(map(len, tokens), default=0)

        def filled(value: int, dtype: type[np.generic]) -> list[npt.NDArray[Any]]:
            row = np.full(longest, value, dtype)
            return [row[: len(ids)] for ids in tokens]

        return cls(
            tokens=tokens,
            masks=filled(1, np.float32) if masks is None else masks,
            sampled=filled(0, np.float32),
            advantages=filled(0, np.float32),
            sampled_by=filled(-1, np.int16),
            versions=[],
            weights=np.ones(count),
            chosen=np.zeros(count, np.float32),
            rewards=np.full(count, np.nan),
            temperatures=np.full(count, np.nan),
            shaped=np.zeros(count, bool),
            run_ids=[""] * count,
            units=[[i] for i in range(count)],
        )


def read_samples(folder: Path, method: MethodName = "sft", split: SplitName = "train") -> Samples:
    """Read a split of a published dataset; a validation split may be empty or missing.

    Raises NotFound, Corrupt, or BadInput when the method cannot use it.
    """
    manifest = _manifest(folder, method)
    if (recipe := manifest.get("recipe") or {}).get("documents"):
        stored = store_tokens(folder, manifest, split)
        return Samples.of([]) if stored is None else _of_documents(stored, recipe["max_tokens"])
    shards = shards_in(folder, manifest, split)
    versions: dict[str, int] = {}  # version -> place
    tables = [
        _samples_of(table, method, versions, path)
        for path in shards
        for table in _tables(path, method)
    ]
    if not tables:
        if split == "train":
            raise BadInput(f"dataset {folder.name} is empty", param="dataset")
        return Samples.of([])
    rows = _join(tables, list(versions))
    units = _pairs(shards, rows) if method == "dpo" else rows.units
    samples = _with_a_target(rows, units)
    if split == "train":
        _check_signal(samples, method, folder.name)
    return samples.grouped() if method == "grpo" else samples


def _of_documents(tokens: StoredTokens, context: int) -> Samples:
    """Return the samples of documents, of whose tokens all but the first are learnt."""
    count, lengths = len(tokens), tokens.lengths

    def rows(value: int, dtype: type[np.generic]) -> Repeated:
        return Repeated(np.full(lengths.max(initial=0), value, dtype), count, lengths)

    def numbers(value: float, dtype: type[np.generic]) -> Any:
        return np.broadcast_to(np.array(value, dtype), count)  # one number in memory

    return Samples(
        tokens=tokens,
        masks=rows(1, np.float32),
        sampled=rows(0, np.float32),
        advantages=rows(0, np.float32),
        sampled_by=rows(-1, np.int16),
        versions=[],
        weights=numbers(1, np.float64),
        chosen=numbers(0, np.float32),
        rewards=numbers(np.nan, np.float64),
        temperatures=numbers(np.nan, np.float64),
        shaped=numbers(0, np.bool_),
        run_ids=Repeated("", count),
        units=Contexts(lengths - 1, context),
    )


def _manifest(folder: Path, method: MethodName) -> dict[str, Any]:
    """Return the manifest of a dataset for a method. Raises NotFound, BadInput, Corrupt."""
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError as problem:
        raise NotFound(
            f"no dataset at {folder}: it has no {MANIFEST}", param="dataset"
        ) from problem
    if (made_for := manifest.get("method", "sft")) != method:
        raise BadInput(
            f"dataset {folder.name} is made for {made_for}, and this job is to train with"
            f" {method}: build a dataset with method {method!r}, or train with {made_for!r}",
            param="dataset",
        )
    return manifest


def _tables(path: Path, method: MethodName) -> Iterator[Any]:
    """Yield a shard's columns for a method, about a thousand rows at a time. Raises Corrupt."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            required = {*COLUMNS, *OF_METHOD[method]}
            wanted = sorted(present & {*required, *OF_SAMPLING, ROUTES})
            if lacking := required - present:
                raise Corrupt(
                    f"{path} lacks {', '.join(sorted(lacking))}, which {method} needs: build the"
                    " dataset again"
                )
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns=wanted)
    except (pa.ArrowInvalid, FileNotFoundError) as problem:
        raise Corrupt(f"cannot read {path}: {problem}") from problem


def _samples_of(table: Any, method: MethodName, versions: dict[str, int], path: Path) -> Samples:
    """Convert a table's rows; new versions get a place in `versions`. Raises Corrupt, BadInput."""
    rows, has = table.num_rows, set(table.column_names)
    lengths = _lengths(table, "input_ids")
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()

    def numbers(name: str, dtype: type[np.generic]) -> list[npt.NDArray[Any]]:
        if name not in has:
            zeros = np.zeros(lengths.max(initial=0), dtype)
            return [zeros[:length] for length in lengths]
        if (uneven := np.flatnonzero(_lengths(table, name) != lengths)).size:
            raise Corrupt(f"{path}: the lengths of input_ids and {name} differ in row {uneven[0]}")
        flat = _flat(table, name).astype(dtype)
        return [flat[start:end] for start, end in pairwise(bounds)]

    def column(name: str, missing: Any) -> Any:
        return _values(table[name].combine_chunks()) if name in has else np.full(rows, missing)

    samples = Samples(
        tokens=numbers("input_ids", np.int32),
        masks=numbers("loss_mask", np.float32),
        sampled=numbers("logprobs", np.float32),
        advantages=numbers("advantages", np.float32),
        sampled_by=_sampling_versions(table, lengths, versions),
        versions=[],
        weights=column("weight", 1.0).astype(np.float64),
        chosen=column("chosen", 0.0).astype(np.float32),
        rewards=column("reward", np.nan).astype(np.float64),
        temperatures=column("temperature", np.nan).astype(np.float64),
        shaped=column("shaped", False).astype(bool),
        run_ids=table["run_id"].to_pylist() if "run_id" in has else [""] * rows,
        units=[[i] for i in range(rows)],
        routes=_routes(table, lengths, path) if ROUTES in has else [],
    )
    if method in ("dpo", "kto") and np.isnan(samples.chosen).any():
        raise Corrupt(f"{path} has rows of which 'chosen' does not say which kind they are")
    if method in ON_POLICY:
        _check_sampled(samples, method)
    return samples


def _sampling_versions(table: Any, lengths: Ints, versions: dict[str, int]) -> list[Ints]:
    """Return the version that sampled each token, as places in `versions`, which may grow."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    if not {"version_index", "versions"} <= set(table.column_names):
        flat = np.full(bounds[-1], -1, np.int16)
    else:
        names = table["versions"].combine_chunks().flatten().to_pylist()
        places = [versions.setdefault(name, len(versions)) for name in names]
        counts = _lengths(table, "versions")
        first = np.repeat(np.cumsum(counts) - counts, lengths)  # of each token's row, in `names`
        index = _flat(table, "version_index").astype(np.int64)
        picked = np.where(index < 0, -1, first + index)  # -1 picks the last element, which is -1
        flat = np.array([*places, -1], np.int16)[picked]
    return [flat[start:end] for start, end in pairwise(bounds)]


def _routes(table: Any, lengths: Ints, path: Path) -> list[Ints]:
    """Return each row's routes, [length, numbers of a token]; with no numbers if unknown."""
    found: list[Ints] = []
    for row, (text, length) in enumerate(zip(table[ROUTES].to_pylist(), lengths, strict=True)):
        if text is not None and len(text) % (2 * int(length)):
            raise Corrupt(f"{path}: the routes of row {row} are not of its {length} tokens")
        numbers = np.frombuffer(text or b"", "<u2").reshape(int(length), -1).astype(np.int32)
        found.append(np.where(numbers == 0xFFFF, -1, numbers))
    widest = max((each.shape[1] for each in found), default=0)
    return [
        each if each.shape[1] == widest else np.full((len(each), widest), -1, np.int32)
        for each in found
    ]


def _flat(table: Any, name: str) -> npt.NDArray[Any]:
    """Return all numbers of a column of lists, row after row."""
    return _values(table[name].combine_chunks().flatten())


def _lengths(table: Any, name: str) -> Ints:
    """Return the length of each row of a column of lists."""
    lengths: Ints = _values(table[name].combine_chunks().value_lengths())
    return lengths.astype(np.int64)


def _values(array: Any) -> npt.NDArray[Any]:
    """Return the numbers or truth values of an Arrow array; nan where one is missing.

    Arrow's own conversion imports pandas where it is installed, for 0.3 s of every job's start.
    """
    import pyarrow as pa

    if pa.types.is_boolean(array.type):
        array = array.cast(pa.float32())
    buffers = [None, array.buffers()[1]]
    plain = pa.Array.from_buffers(array.type, len(array), buffers, offset=array.offset)
    numbers: npt.NDArray[Any] = np.from_dlpack(plain)
    if array.null_count:
        present = np.from_dlpack(array.is_valid().cast(pa.uint8())) == 1
        numbers = np.where(present, numbers, np.nan)
    return numbers


def _join(tables: Sequence[Samples], versions: list[str]) -> Samples:
    def rows(name: str) -> list[Any]:
        return [row for table in tables for row in getattr(table, name)]

    def array(name: str) -> Any:
        return np.concatenate([getattr(table, name) for table in tables])

    per_token = ("tokens", "masks", "sampled", "advantages", "sampled_by", "run_ids", ROUTES)
    per_sample = ("weights", "chosen", "rewards", "temperatures", "shaped")
    fields: dict[str, Any] = {name: rows(name) for name in per_token}
    fields |= {name: array(name) for name in per_sample}
    return Samples(**fields, versions=versions, units=[[i] for i in range(len(fields["tokens"]))])


def _pairs(paths: Sequence[Path], rows: Samples) -> list[list[int]]:
    """Return the places of the better and the worse sample of each pair. Raises Corrupt."""
    import pyarrow.parquet as pq

    columns = (pq.read_table(path, columns=["pair"])["pair"] for path in paths)
    names = [name for column in columns for name in column.to_pylist()]
    units = [[i, i + 1] for i in range(0, len(rows), 2)]
    for i, j in units:
        together = j < len(rows) and names[i] is not None and names[i] == names[j]
        if not together or (rows.chosen[i], rows.chosen[j]) != (1, 0):
            raise Corrupt(
                f"{paths[0].parent}: row {i} of its shards and the next are not the better and the"
                " worse one of a pair; build the dataset again"
            )
    return units


def _with_a_target(rows: Samples, units: Sequence[Sequence[int]]) -> Samples:
    """Keep the units whose every sample has a token to learn."""
    useful = [unit for unit in units if all(rows.masks[i][1:].any() for i in unit)]
    kept = [i for unit in useful for i in unit]
    size = len(units[0])
    together = [list(range(start, start + size)) for start in range(0, len(kept), size)]
    return replace(rows.only(kept), units=together, left_out=len(rows) - len(kept))


def _check_sampled(samples: Samples, method: MethodName) -> None:
    """Raise BadInput if a trained token has no recorded log-probability."""
    for row, (mask, by) in enumerate(zip(samples.masks, samples.sampled_by, strict=True)):
        if ((mask > 0) & (by < 0) & (samples.sampled[row] == 0)).any():
            raise BadInput(
                f"{method} needs the log-probabilities that its tokens were sampled with, and those"
                f" of {samples.run_ids[row]} were not recorded: build the dataset of recorded runs",
                param="dataset",
            )


def _check_signal(samples: Samples, method: MethodName, name: str) -> None:
    """Raise BadInput if there is nothing to learn."""
    problem = None
    if not len(samples):
        problem = (
            f"has zero trainable tokens in {samples.left_out} samples: no loss_mask marks a token"
            " after the first"
        )
    elif method == "grpo" and not any(row.any() for row in samples.advantages):
        problem = "has no reward signal: all its advantages are 0"
    elif method == "kto" and len(kinds := np.unique(samples.chosen)) < 2:
        lacks, reason = ("un", "below") if kinds[0] else ("", "of at least")
        problem = (
            f"has no {lacks}desirable sample, and kto needs both kinds: take in runs with a reward"
            f" {reason} min_reward, or move it"
        )
    if problem is not None:
        raise BadInput(f"dataset {name} {problem}", param="dataset")
