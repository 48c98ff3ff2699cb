"""A root with every kind of file in it, and every reader of it, for the bit-flip campaign."""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from cray_agents.cli import demo
from cray_agents.errors import Corrupt
from cray_agents.iteration import Iteration
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import canonical
from cray_agents.runtime.accounting.ledger import LedgerFile, read_ledger
from cray_agents.runtime.batches import chunks, validation
from cray_agents.runtime.batches.batch_records import BatchFolder
from cray_agents.runtime.batches.chunks import ResultWriter, fetch
from cray_agents.runtime.batches.queue import BatchQueue
from cray_agents.runtime.controller_lease import (
    ControllerLease,
    StandbyNote,
    end_for_good,
    holder_of,
    newest_term,
    standby_notes,
    was_ended_for_good,
)
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.datasets.decontamination import _journal_texts
from cray_agents.runtime.datasets.reader import (
    CARD,
    RECIPE,
    dataset_runs,
    file_in,
    list_datasets,
    shards,
)
from cray_agents.runtime.datasets.uses import _read as read_commit
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.files.uploads import UploadRequest, Uploads
from cray_agents.runtime.fine_tuning.job_records import (
    Ended,
    TuningFolder,
    TuningRequest,
    Validated,
)
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.routes import loops
from cray_agents.runtime.pool.golden_probe import LoadedVersion
from cray_agents.runtime.pool.job_lease import (
    JobLease,
    ReplicaSpec,
    new_attempt,
    read_lease,
    read_spec,
    write_lease,
)
from cray_agents.runtime.pool.published_replicas import PublishedPool, PublishedReplica
from cray_agents.runtime.pool.vllm_process import EngineSettings
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.canary import Canary
from cray_agents.runtime.registry.lineage import lineage_of
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.retention import reasons_to_keep
from cray_agents.runtime.scheduler.excluded_nodes import exclude_node, excluded_nodes
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.segments.reader import Damage, Segments
from cray_agents.runtime.telemetry.audit_log import AuditLog
from cray_agents.server import platform_process
from cray_agents.tasks.leakage import HeldOut
from cray_agents.trainers.checkpointing import resume
from cray_agents.trainers.checkpointing.save import POINT, SEAL
from cray_agents.trainers.data.samples import read_samples
from cray_agents.trainers.job import baselines
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.session_journal import SessionJournal, SessionSpec
from cray_agents.training_jobs import Hyperparameters, JobSpec
from tests.support.audit_lines import read_audit
from tests.support.scripted_platform import PROBE, bare_model
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.store.writer_process import events_of

NUMBERS = 16
DOWN = 7  # the term that `down` ended
Reader = Callable[[Home], Any]


def make(root: Path) -> Home:
    """All kinds of files, by the code that writes them."""
    home = Home(root)
    registry = Registry(home)
    registry.register("m", *registry.import_checkpoint(bare_model(root / "first")))
    registry.promote("m", 1)
    asyncio.run(_runs(home))
    _loop(home)
    registry.register("m", *registry.import_checkpoint(_trained(home, registry)))
    registry.start_canary("m", 2, who="t", reason="", numbers={})
    [start] = [e for e in registry.history("m") if e.kind == "canary_started"]
    durable.replace_file(home.canary("m", start.number), Canary(start).to_bytes())
    _files_and_batches(home)
    _jobs(home)
    _cluster(home)
    Keys(home).create("one", Role.train)
    Keys(home).create("two")
    Keys(home).revoke("two")
    audit = AuditLog(home.audit)
    audit.note(who="one", action="POST /v1/models/{name}/promote", status=200)
    audit.note(who="two", action="POST /v1/jobs", status=403)
    audit.close()
    demo.claim(root / "demo.json", {"seed": 1})
    info = {"url": "http://127.0.0.1:1", "pid": os.getpid(), "name": "m", "token": "secret"}
    lease = ControllerLease.take(home, info | {"host": "a", "lease": 12.0}, 1)
    assert lease is not None
    lease.renew()
    lease.give_back(hand_over=True)
    durable.write_file(home.platform, checksums.with_crc(json.dumps(info).encode()))
    return home


def _cluster(home: Home) -> None:
    """What controllers, standbys, replicas in Slurm and the ledger leave."""
    assert ControllerLease.take(home, {"host": "a", "pid": 1, "lease": 12.0}, 0) is not None
    StandbyNote(home, "b").beat(1)
    end_for_good(home, DOWN)
    replica = PublishedReplica(
        url="http://127.0.0.1:2", secret="s", names={"m@1": "m"}, expected=["m@1"], state="serving"
    )
    pool = PublishedPool(replicas=[replica], incumbent="m@1")
    home.replicas.mkdir()
    durable.write_file(home.serving, checksums.with_crc(pool.model_dump_json().encode()))
    order = ReplicaSpec(
        model="m", number=0, attempt=0, settings=EngineSettings(), gateway="a", package="1"
    )
    attempt = home.replicas / "0" / str(new_attempt(home.replicas / "0", order).attempt)
    write_lease(attempt, JobLease(address="127.0.0.1", port=3, host="a", pid=1, attempt=1))
    exclude_node(home.excluded_nodes, "n1", 60, "it failed", "job-1")
    file = LedgerFile(home.ledger, "platform")
    file.note(event="served", kind="platform", holder="platform", tokens=7)
    file.close()


async def _runs(home: Home) -> None:
    for first in (0, 20):
        store = Store(home)
        for number in range(first, first + 20):
            await store.append(events_of(f"run-{number}"))
        await store.close()


def _loop(home: Home) -> None:
    """What a loop keeps: a training set of a step, its journal, an iteration."""
    recipe = DatasetRecipe(loop="faults", step=1, validation=0.2)
    store = Store(home)
    build_dataset(store, home, recipe)
    asyncio.run(store.close())
    held = HeldOut(inputs=[("task t", "what is held out")])
    for place, record in {
        "journal/held-0123": held.model_dump(mode="json"),
        "journal/settings-1": {"staleness": 1},
        "generations/0": Iteration(
            iteration=0, holdout_success=0.5, holdout_tasks=1, version="m@1"
        ).model_dump(mode="json"),
    }.items():
        durable.create_file(home.loop("faults") / f"{place}.json", loops.text_of(record))


def _trained(home: Home, registry: Registry) -> Path:
    """A job, and the checkpoint that it made."""
    version = registry.resolve("m")
    [dataset] = list_datasets(home).rows
    spec = JobSpec(
        dataset=dataset["id"],
        parent=str(home.checkpoint(version.checkpoint)),
        parent_sha256=version.weights_sha256,
        hyperparameters=Hyperparameters(learning_rate=1e-3, steps=3),
    )
    ScriptedTrainer(home, probe=PROBE).submit(spec)
    return home.checkpoint(spec.id)


def _files_and_batches(home: Home) -> None:
    files = Files(home)
    uploads = Uploads(files)
    with files.blobs.draft() as draft:
        draft.write(b"some content\n" * 20)
        blob = draft.publish()
    kept = files.publish(blob, filename="a.txt", purpose="user_data")
    files.delete(files.publish(blob, filename="b.txt", purpose="user_data").id)
    for end in (True, False):
        wanted = UploadRequest(
            bytes=blob.size, filename=f"{end}.txt", mime_type="text/plain", purpose="user_data"
        )
        upload = uploads.create(wanted)
        part = uploads.add_part(upload["id"], blob)
        if end:
            uploads.complete(upload["id"], [part.id])
    assert kept.sha256 == blob.sha256
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    url = "/v1/chat/completions"
    lines = [
        {"custom_id": f"line {n}", "method": "POST", "url": url, "body": body} for n in range(30)
    ]
    with files.blobs.draft() as draft:
        draft.write(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        given = files.publish(draft.publish(), filename="in.jsonl", purpose="batch")
    queue = BatchQueue(home, files)
    asked = {"input_file_id": given.id, "endpoint": url, "completion_window": "24h"}
    batch = queue.create(asked)
    queue.cancel(queue.create(asked | {"metadata": {"other": "one"}}).id)
    folder, before = BatchFolder(home.batches / batch.id), validation.CHUNK_LINES
    validation.CHUNK_LINES = 10
    try:
        validation.validate(folder, folder.request())
    finally:
        validation.CHUNK_LINES = before
    for chunk, row in enumerate(validation.read_index(folder.index)[:2]):
        asyncio.run(_answer(folder, chunk, chunks.requests(folder, row)))
    assert chunks.seal(
        folder, 0, chunks.requests(folder, _row(folder, 0)), _results(folder, 0), None
    )


async def _answer(folder: BatchFolder, chunk: int, lines: list[chunks.RequestLine]) -> None:
    writer = ResultWriter(folder.results, f"{chunks.chunk_name(chunk)}.1")
    for number, _ in lines:
        said = {"choices": [{"text": f"answer {number}"}], "usage": {"total_tokens": number}}
        line, *_ = chunks.result_line(
            folder.id, number, f"line {number}", 200, "req", orjson.dumps(said)
        )
        await writer.submit(line)
    await writer.close()


def _row(folder: BatchFolder, chunk: int) -> validation.Row:
    accepted = folder.accepted()
    assert accepted is not None
    return validation.read_index(folder.index, accepted.index_sha256)[chunk]


def _results(folder: BatchFolder, chunk: int) -> dict[int, chunks.Result]:
    return chunks.results_so_far(folder, chunk)


def _jobs(home: Home) -> None:
    """What a job of the Megatron trainer leaves beside a scripted one's files; its fine-tuning."""
    [folder, *_] = sorted(home.jobs.iterdir())
    journal = JobJournal(home, folder.name)
    spec = journal.spec()
    other = spec.model_copy(update={"code": "another"})
    waiting = JobJournal(home, other.id)
    waiting.write_spec(other)
    waiting.claim_attempt()
    for step in range(1, 4):
        waiting.event("step", step=step, loss=1.0 / step, tokens=10, seconds=0.5)
    waiting.close()
    waiting.pause()
    waiting.resume()
    session = SessionSpec(name="faults")
    held = SessionJournal(home, session.id)
    held.write_spec(session)
    held.claim_attempt()
    held.hand_over(other.id)
    held.note_current(other.id)
    numbers = np.arange(NUMBERS, dtype=np.float32)
    (waiting.folder / "baselines").mkdir()
    baselines._keep(waiting.folder / "baselines" / "train-before", numbers)
    point = waiting.folder / "megatron" / "step-00000003"
    point.mkdir(parents=True)
    parts = {
        "rank-00000.bin": numbers.tobytes(),
        "rank-00000.json": canonical({"pieces": [], "adam_steps": 3}),
        POINT: canonical({"step": 3, "common": {}}),
    }
    for name, content in parts.items():
        durable.write_file(point / name, content)
    seal = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}
    durable.write_file(point / SEAL, canonical(seal))
    tuning = TuningFolder(home)
    asked = TuningRequest(
        model="m@1", name="m", parent="p", parent_sha256="0" * 64, training_file="file-1",
        training_sha256="0" * 64,
    )  # fmt: skip
    tuning.create(asked)
    validated = Validated(
        spec=spec, n_epochs=1, learning_rate_multiplier=1, examples=1, left_out=0, samples=1,
        validation=0,
    )  # fmt: skip
    tuning.write_validated(asked.id, validated)
    tuning.write_ended(asked.id, Ended(state="succeeded"))


def readers(home: Home) -> dict[str, Reader]:
    """Each reader of the root by what it reads, named once for the intact root."""
    found: dict[str, Reader] = {
        "versions": lambda h: [v.model_dump() for v in Registry(h).versions("m")],
        "history": lambda h: [e.model_dump() for e in Registry(h).history("m")],
        "lineage": lambda h: lineage_of(Registry(h), "m@1"),
        "needed": lambda h: reasons_to_keep(Registry(h), 2, []),
        "audit": lambda h: [line.model_dump() for line in read_audit(h.audit)],
        "keys": lambda h: [(record.model_dump(), ended) for record, ended in Keys(h).list()],
        "files": lambda h: [file.model_dump() for file in _whole(Files(h).list())],
        "contents": lambda h: [_read(Files(h).path(f.id)) for f in _whole(Files(h).list())],
        "deleted": lambda h: [
            Files(h)._find_even_deleted(p.stem).model_dump() for p in _in(h.files, "*.deleted")
        ],
        "datasets": lambda h: _whole(list_datasets(h)),
        "platform": lambda h: platform_process.owner(h),
        "terms": lambda h: [newest_term(h), _known(holder_of(h, 1)), holder_of(h, 2)],
        "standbys": lambda h: _all(standby_notes(h)),
        "down": lambda h: _all([DOWN] if was_ended_for_good(h, DOWN) else []),
        "serving": lambda h: checksums.read_record(PublishedPool, h.serving),
        "order of a replica": lambda h: _all(_some(read_spec(h.replicas / "0" / "1"))),
        "lease of a replica": lambda h: _all(_some(read_lease(h.replicas / "0" / "1"))),
        "excluded": lambda h: _all(excluded_nodes(h.excluded_nodes)),
        "ledger": lambda h: _all([one for lines in read_ledger(h.ledger) for one in lines]),
        "demo": lambda h: demo.claim(h.root / "demo.json", {"seed": 1}),
        "held out": lambda h: list(_journal_texts(h, "faults")),
        "iterations": lambda h: [
            checksums.read_json(p) for p in _in(h.loop("faults") / "generations", "*.json")
        ],
        "journal": lambda h: list(map(loops.recall, _in(h.loop("faults") / "journal", "*.json"))),
        "steps": lambda h: [
            read_commit(p) for p in [*_in(h.loop_datasets("faults"), "*.json"),
                                     *_in(h.loop_datasets("faults") / "commits", "*.json")]
        ],
        "fine-tuning": _fine_tuning,
        "batches": lambda h: _whole(BatchQueue(h, Files(h)).page(None, 9)),
        "segments": _segments,
    }  # fmt: skip
    for version in Registry(home).versions("m"):
        found[f"checkpoint {version.checkpoint}"] = _checkpoint(version.checkpoint)
    for manifest in list_datasets(home).rows:
        found[f"dataset {manifest['id']}"] = _dataset(manifest["id"])
    for path in _in(home.uploads, "upload_*"):
        found[f"upload {path.name}"] = _upload(path.name)
    for path in _in(home.jobs, "*"):
        found[f"job {path.name}"] = _job(path.name)
    for path in _in(home.sessions, "*"):
        found[f"session {path.name}"] = _session(path.name)
    for path in _in(home.batches, "batch_*"):
        found[f"batch {path.name}"] = _batch(path.name)
    for event in Registry(home).history("m"):
        if home.canary("m", event.number).exists():
            found["canary"] = lambda h, e=event: Canary.load(h, e).to_bytes()  # type: ignore[misc]
    return found


def _session(session_id: str) -> Reader:
    def read(home: Home) -> Any:
        session = SessionJournal(home, session_id)
        return [session.spec().model_dump(), session.current, session.queue(), session.attempts]

    return read


def _in(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _checkpoint(name: str) -> Reader:
    def read(home: Home) -> Any:
        folder = home.checkpoint(name)
        manifest = checkpoints.read_manifest(folder)
        held = asyncio.run(LoadedVersion.verify_and_create(folder, "m@1", manifest.probe or PROBE))
        return manifest, held.version, [_read(folder / file) for file in manifest.files]

    return read


def _dataset(name: str) -> Reader:
    def read(home: Home) -> Any:
        folder = home.dataset(name)
        samples = read_samples(folder)
        return (
            list(dataset_runs(home, name)),
            [_read(shard) for shard in shards(home, name)],
            [row.tolist() for row in samples.tokens],
            _read(file_in(folder, RECIPE)),
            _read(file_in(folder, CARD)),
        )

    return read


def _upload(name: str) -> Reader:
    return lambda home: {
        key: value for key, value in Uploads(Files(home)).show(name).items() if key != "expires_at"
    }


def _job(name: str) -> Reader:
    def read(home: Home) -> Any:
        journal = JobJournal(home, name)
        for point in journal.resume_points:
            resume.verify(point)
        flat = baselines._read(journal.folder / "baselines" / "train-before", NUMBERS)
        if flat is None and (journal.folder / "baselines").exists():
            raise Told("what was computed is not there any more: it is computed again")
        attempts = [
            checksums.read_json(path) for path in _in(journal.folder / "attempts", "[0-9]*")
        ]
        return journal.spec(), read_status(home, name), journal.events(), attempts, str(flat)

    return read


def _batch(name: str) -> Reader:
    def read(home: Home) -> Any:
        folder = BatchFolder(home.batches / name)
        accepted, found = folder.accepted(), []
        if accepted is None:
            return folder.request(), folder.cancelled_at()
        for chunk in range(accepted.chunks):
            results = _results(folder, chunk)
            lines = fetch([result.place for result in results.values()])
            found.append([chunks.requests(folder, _row(folder, chunk)), list(results), lines])
        seals = [chunks.verify_seal(path) for path in _in(folder.done, "*.jsonl")]
        return folder.request(), accepted, found, seals

    return read


def _whole(listing: checksums.Listing[Any]) -> list[Any]:
    """Return the records of a list that names no damaged one."""
    if listing.damaged:
        raise Corrupt(str(listing.damaged))
    return listing.rows


def _fine_tuning(home: Home) -> Any:
    tuning = TuningFolder(home)
    return [
        (asked, tuning.read_validated(asked.id), tuning.read_ended(asked.id))
        for asked in _whole(tuning.all())
    ]


def _segments(home: Home) -> Any:
    """The lines that are told; damage in their midst is told, too, and is logged here as that."""
    segments = Segments(home.segments)
    try:
        return [
            line
            for segment in segments.list()
            for line in _told(segments.read(segment.stem), segment.stem)
        ]
    finally:
        segments.close()


class Told(OSError):
    """A reader was told of damage, by what it got."""


def _all(found: list[Any]) -> list[Any]:
    """Return the one record of a kind, which is left out where it is damaged: see its reader."""
    if len(found) != 1:
        raise Told("a damaged record counts as one that is not there")
    return found


def _some(record: Any) -> list[Any]:
    return [] if record is None else [record]


def _known(holder: Any) -> Any:
    """Return the holder of a term that was not given back."""
    if holder == {"host": "", "pid": 0}:
        raise Told("a damaged term is of a process that may live anywhere")
    return holder


def _told(items: Iterator[Any], stem: str) -> Iterator[bytes]:
    for item in items:
        if isinstance(item, Damage):
            raise Told(f"{stem}: {item.message}")
        yield bytes(item.data)
