"""Export: publish trained weights as a Hugging Face directory with a manifest.

Every rank writes its share of the tensors into safetensors files of its own, and hashes them as it
writes; nothing is gathered on one rank. Each tensor is written whole by one of the ranks that hold
it (`plan_export`). Of adapters over a checkpoint of this root only they are written
(peft_adapter.py), else the weights with the adapters merged in. Rank 0 adds the parent's config,
tokenizer and chat template, the golden probe and all hashes, and renames the folder into place.
Weights keep the parent's stored types, and the probe scores the weights as stored, or adapters
beside theirs (see RankTraining.as_stored). Called by job/rank.py, and while training goes on by
job/job_versions.py. Read next: weight_files.py.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from cray_agents.errors import NotFound, StoreError
from cray_agents.paths import Home
from cray_agents.records import DeltaOf, LogprobDistance, Manifest, ProbePrompt
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints, foreign_model
from cray_agents.runtime.registry.checkpoints import DELTA
from cray_agents.runtime.registry.deltas import Parent
from cray_agents.runtime.registry.foreign_model import CONFIG, TIED, changed_settings, read_config
from cray_agents.trainers.checkpointing.peft_adapter import stage_adapter
from cray_agents.trainers.checkpointing.weight_files import (
    LARGEST_SHARE,
    DeltaFile,
    in_file_order,
    write_files,
)
from cray_agents.trainers.data.samples import Samples
from cray_agents.trainers.models.backends import config_of, plan_files
from cray_agents.trainers.models.lora import merged_weight, without_adapters
from cray_agents.trainers.models.weights import SHARE_BYTES, FilePlan, whole_tensors
from cray_agents.trainers.training.parallel_groups import (
    broadcast_from_rank0,
    gather_from_ranks,
    is_rank0,
    write_together,
)
from cray_agents.trainers.training.train_step import RankTraining
from cray_agents.training_jobs import JobSpec


def weights_sha256(checkpoint: Path) -> str:
    """Return the hash that names a checkpoint directory's weights (`JobSpec.parent_sha256`).

    Computed from the files; a manifest says by which kind of hash. Raises NotFound without
    safetensors.
    """
    if checkpoints.base_of(checkpoint) is not None:
        return checkpoints.verify(checkpoint).weights_sha256
    like = checkpoints.stated_hashes(checkpoint)
    weights = sorted(checkpoint.glob("*.safetensors"))
    files = {path.name: checksums.hash_of(path, like.get(path.name, "")) for path in weights}
    if not files:
        raise NotFound(f"{checkpoint} holds no *.safetensors: give a Hugging Face checkpoint")
    return checkpoints.weights_sha256(files)


def parent_sha256(checkpoint: Path, init: str) -> str:
    """Return `JobSpec.parent_sha256`: of the weights, or of the config if they start at random."""
    return checkpoints.config_sha256(checkpoint) if init == "random" else weights_sha256(checkpoint)


FILE_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"
_COPIED = checkpoints.SUFFIXES - {".safetensors"}
_OURS = {checkpoints.MANIFEST, _INDEX}


def export_weights(
    training: RankTraining, folder: Path, file_bytes: int = FILE_BYTES, share: int = SHARE_BYTES
) -> dict[str, str]:
    """Write the weights as safetensors into an existing folder; return each file's hash.

    They are rounded to the parent's types, with adapters merged in, one tensor after the other: the
    model's own stay. `share`: see `plan_export`. Collective.
    """
    return export(training, folder, file_bytes, share, changes=False)[0]


def export(
    training: RankTraining,
    folder: Path,
    file_bytes: int,
    share: int,
    *,
    changes: bool,
    job: str = "",
) -> tuple[dict[str, str], dict[str, str]]:
    """Do as `export_weights`; return also the SHA-256 of each file of changes, as it is stored.

    With `changes` only the elements that differ from the parent's are written, unless that takes
    more than half the space of the full files, which are then written instead. With `job` replicas
    may receive the weights meanwhile: see WeightSender.keep.
    """
    with _file_plan(training, share) as plan:
        return _export(training, folder, file_bytes, plan, changes=changes, job=job)


@contextmanager
def _file_plan(training: RankTraining, share: int) -> Iterator[FilePlan]:
    """Divide what is written of the weights among the ranks, with adapters merged in."""
    with without_adapters(training.chunks) as around:

        def written(weight: torch.Tensor) -> torch.Tensor:
            adapter = around.get(weight)
            return weight.detach() if adapter is None else merged_weight(adapter)

        chunks, model, source = training.chunks, training.model, training.source
        yield plan_files(chunks, model, source, in_file_order, share, written)


def _files_of(plan: FilePlan, file_bytes: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return this rank's files, and those of all ranks: name -> its tensors. Collective."""
    each = [json.loads(names) for names in gather_from_ranks(json.dumps(plan.mine).encode())]
    groups = [cut(names, plan.sizes, file_bytes) for names in each]
    files = name_files(list(chain.from_iterable(groups)))
    rank = torch.distributed.get_rank()
    first = sum(map(len, groups[:rank]))
    return dict(islice(files.items(), first, first + len(groups[rank]))), files


def _write_index(folder: Path, files: Mapping[str, Sequence[str]], sizes: dict[str, int]) -> None:
    """Write on rank 0 which tensor is in which file, where there are several."""
    if is_rank0() and len(files) > 1:
        file_of = {tensor: name for name, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        durable.replace_file(folder / _INDEX, json.dumps(index, indent=1).encode())


def _export(
    training: RankTraining,
    folder: Path,
    file_bytes: int,
    plan: FilePlan,
    *,
    changes: bool,
    job: str,
) -> tuple[dict[str, str], dict[str, str]]:
    shapes, dtypes, sizes = plan.shapes, plan.dtypes, plan.sizes
    own, files = _files_of(plan, file_bytes)
    hashes: dict[str, str] = {}
    packed: dict[str, str] = {}

    def whole() -> Iterator[tuple[str, torch.Tensor]]:
        exported = whole_tensors(plan.tensors(), shapes)
        return exported if training.sender is None else training.sender.keep(exported, dtypes, job)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return plan.tensors() if training.sender is None else whole()

    if changes:
        hashes, packed, size = write_together(
            "the checkpoint",
            lambda: _write_changes(training.parent, folder, own, shapes, dtypes, whole()),
        )
        packed_size = sum(int(one) for one in gather_from_ranks(str(size).encode()))
        changes = packed_size <= LARGEST_SHARE * sum(sizes.values())
    if not changes:
        packed = {}
        if is_rank0():
            shutil.rmtree(folder / DELTA, ignore_errors=True)
        hashes = write_together(
            "the checkpoint", lambda: write_files(folder, own, shapes, dtypes, tensors())
        )

    write_together("the checkpoint", lambda: _write_index(folder, files, sizes))
    written = [json.loads(one) for one in gather_from_ranks(json.dumps([hashes, packed]).encode())]
    full = {file: sha256 for one, _ in written for file, sha256 in one.items()}
    return full, {file: sha256 for _, one in written for file, sha256 in one.items()}


def _write_changes(
    parent: Path,
    folder: Path,
    files: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> tuple[dict[str, str], dict[str, str], int]:
    """Write this rank's files of changes; return both kinds of hashes, and the bytes written."""
    opened: dict[str, DeltaFile] = {}
    with Parent(parent) as base:

        def open_file(path: Path) -> DeltaFile:
            opened[path.name] = DeltaFile(path, base.tensors)
            return opened[path.name]

        hashes = write_files(folder, files, shapes, dtypes, tensors, open_file)
    size = sum(file.size for file in opened.values())
    return hashes, {name: file.packed_sha256 for name, file in opened.items()}, size


def copy_settings(
    parent: Path, folder: Path, *, tied: bool, config: dict[str, Any] | None = None
) -> None:
    """Copy config, tokenizer and chat template; correct the config's word on tied embeddings.

    `config` takes the place of the parent's, if it is given.
    """
    parent = parent.resolve()
    for name in foreign_model.names_in(parent, _COPIED):
        if name not in _OURS:
            with foreign_model.open_file(parent, name) as old, (folder / name).open("wb") as new:
                shutil.copyfileobj(old, new)
    for name, changed in changed_settings(parent).items():
        durable.write_file(folder / name, json.dumps(changed, indent=2).encode())
    own = read_config(parent)
    content = own if config is None else config
    if bool(content.get(TIED)) != tied:
        content = {**content, TIED: tied}
    if content != own:
        durable.write_file(folder / CONFIG, json.dumps(content, indent=2).encode())


def cut(names: Sequence[str], sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Divide one rank's tensors, in order, into files of at most `limit` bytes.

    A larger tensor gets its own file.
    """
    files: list[list[str]] = []
    room = 0
    for name in names:
        if not files or sizes[name] > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= sizes[name]
    return files


def name_files(files: Sequence[list[str]]) -> dict[str, list[str]]:
    """Name files as transformers does: file name -> its tensors."""
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": f for n, f in enumerate(files, 1)}


@contextmanager
def draft_of(home: Home, name: str, attempt: int) -> Iterator[Path]:
    """Give the folder that an attempt writes a checkpoint in; a StoreError removes it."""
    draft = home.checkpoint(f".{name}.{attempt}")
    try:
        yield draft
    except StoreError:
        if is_rank0():
            shutil.rmtree(draft, ignore_errors=True)
        raise


def published_base(training: RankTraining, home: Home) -> Path | None:
    """Return the checkpoint of this root that adapters are published over.

    None: weights are published, since all are trained, or those below the adapters are not kept
    here: random ones, files outside of the root, or an adapter version's, merged in memory.
    """
    if training.base is None:
        return None
    base = home.root / training.base.path
    kept = checkpoints.is_ours(home, base) and (base / checkpoints.MANIFEST).is_file()
    return base if kept else None


#: Called with what writes a rank's files, and what publishes them: see `publish`.
Aside = Callable[[Callable[[], dict[str, str]], Callable[[dict[str, str]], str]], None]


def publish(
    training: RankTraining,
    spec: JobSpec,
    prompts: Sequence[list[int]],
    metrics: dict[str, Any],
    agreement: LogprobDistance | None,
    home: Home,
    draft: Path,
    final: Path,
    *,
    share: int = SHARE_BYTES,
    aside: Aside | None = None,
) -> None:
    """Export, probe and publish as `final`, unless that exists. Collective.

    Adapters alone, where `published_base` names a checkpoint. With `spec.changes_only` a delta
    checkpoint, where the parent is one of this root.
    Weights, adapters and optimizer stay as they are: training may go on. Raises StoreError on every
    rank if one of them cannot write.

    With `aside` nothing is written yet, but copied to host memory, whole. `aside` gets a function
    that writes this rank's files and returns their hashes, and one that publishes on rank 0 with
    those of all ranks. Both raise OSError, and neither is collective.
    """
    main, sender = is_rank0(), training.sender if aside is None else None
    if sender is not None:
        sender.begin()

    def make_draft() -> None:
        if main:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)

    if aside is None:
        write_together("the checkpoint", make_draft)
    over, base = training.base, published_base(training, home)
    below = checkpoints.base_of(training.parent)
    write_adapter: Callable[[], None] | None = None
    if (lora := training.hyper.lora) is not None and (base is not None or below is None):
        place, name = draft / checkpoints.ADAPTER, spec.parent if over is None else over.path
        write_adapter = stage_adapter(training.chunks, training.model, lora, name, place)
        if aside is None:
            write_together("the checkpoint", write_adapter)
    ours = training.parent.resolve().parent == final.parent.resolve() and below is None
    config = config_of(training.parent, training.source)
    # a parent that was dequantised has no such tensors
    same = training.hyper.init != "random" and config == read_config(training.parent)
    changes = spec.changes_only and ours and same
    job = spec.id if training.hyper.lora is None else ""  # replicas load adapters from files
    hashes: dict[str, str] = {}
    packed: dict[str, str] = {}
    write_weights: Callable[[], dict[str, str]] | None = None
    with training.as_stored(merged=base is None):
        if base is None and aside is not None:
            write_weights = _stage_weights(training, draft)
        elif base is None:
            hashes, packed = export(training, draft, FILE_BYTES, share, changes=changes, job=job)
        scores, tops = training.score_with_top(Samples.of(prompts), temperature=1.0)

    source, tied = training.parent, training.model.tied  # training may have gone on

    def finish(hashes: dict[str, str]) -> str:
        own = config if base is None else None  # what the adapter is over stays as it is stored
        copy_settings(source, draft, tied=tied, config=own)
        files = checkpoints.hash_files(draft, hashes)
        files = {name: files[name] for name in files if not name.startswith(f"{DELTA}/")}
        parent, sha256 = source.name, spec.parent_sha256
        delta = DeltaOf(parent=parent, parent_weights_sha256=sha256, files=packed)
        manifest = Manifest(
            version=2,
            files=files,
            weights_sha256=checkpoints.weights_sha256(
                files, over.sha256 if base and over else None
            ),
            parent_sha256=spec.parent_sha256,
            base=None if base is None else base.name,
            base_sha256=None if over is None else over.sha256,
            job=spec.id,
            dataset=spec.dataset or None,
            metrics=metrics,
            probe=[
                ProbePrompt(token_ids=prompt, logprobs=logprobs.tolist(), top=top.tolist())
                for prompt, logprobs, top in zip(prompts, scores, tops, strict=True)
            ],
            agreement=agreement,
            dtype=spec.hyperparameters.dtype,
            delta=delta if packed else None,
        )
        text = checksums.with_crc(manifest.model_dump_json(indent=1).encode())
        durable.replace_file(draft / "manifest.json", text)
        if not checkpoints.publish_folder(draft, final):
            shutil.rmtree(draft)
        return manifest.weights_sha256

    def write() -> dict[str, str]:
        draft.mkdir(parents=True, exist_ok=True)
        if write_adapter is not None:
            write_adapter()
        return {} if write_weights is None else write_weights()

    if aside is not None:
        aside(write, finish)
        return
    sha256 = write_together("the checkpoint", lambda: finish(hashes) if main else "")
    if sender is not None and base is None:
        sender.offer(broadcast_from_rank0(sha256))
        torch.distributed.barrier()  # when the job has ended, all ranks offer its weights


def _stage_weights(training: RankTraining, folder: Path) -> Callable[[], dict[str, str]]:
    """Copy this rank's share of the weights; return what writes it into a folder. Collective."""
    with _file_plan(training, SHARE_BYTES) as plan:
        own, files = _files_of(plan, FILE_BYTES)
        types, shapes, sizes = plan.dtypes, plan.shapes, plan.sizes
        kept = [(name, one.to("cpu", types[name], copy=True)) for name, one in plan.tensors()]

    def write() -> dict[str, str]:
        _write_index(folder, files, sizes)
        return write_files(folder, own, shapes, types, iter(kept))

    return write


PROBE_PROMPTS = 8
PROBE_TOKENS = 64


def probe_prompts(samples: Samples) -> list[list[int]]:
    """Return a dataset's golden prompts: starts and ends, by turns, of its first samples.

    The first samples often start alike (a system prompt), but end differently.
    """
    prompts: list[list[int]] = []
    for number, ids in enumerate(samples.tokens):
        window = ids[-PROBE_TOKENS:] if number % 2 else ids[:PROBE_TOKENS]
        prompt = [int(token) for token in window]
        if prompt not in prompts:
            prompts.append(prompt)
        if len(prompts) == PROBE_PROMPTS:
            break
    return prompts
