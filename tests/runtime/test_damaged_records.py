"""Damaged files are named with their place, and rebuilt where their content is elsewhere too."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import Corrupt, NewerFormat, SetupError, SwapError
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import Record
from cray_agents.runtime import fsck
from cray_agents.runtime.accounting.ledger import LedgerFile, LedgerLine, read_ledger
from cray_agents.runtime.batches import chunks, validation
from cray_agents.runtime.batches.batch_records import BatchFolder
from cray_agents.runtime.controller_lease import ClaimWatch
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.datasets.reader import dataset_runs, shards
from cray_agents.runtime.disk import checksums, journal
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.files.uploads import Uploads
from cray_agents.runtime.fine_tuning.job_records import TuningFolder
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.tinker.training_runs import TinkerFiles, TinkerModel
from cray_agents.runtime.pool.golden_probe import LoadedVersion
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.telemetry.audit_log import AuditLog
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import Hyperparameters, JobSpec
from tests.support import flipped_root
from tests.support.command_line import cli
from tests.support.scripted_gateway import Gateway, checkpoint, served
from tests.support.scripted_platform import bare_model


class Note(Record):
    text: str
    number: int


def flip(path: Path, at: int, bit: int = 1) -> None:
    """A new file in its place, so that no hard link to it changes."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.unlink()
    path.write_bytes(data)


def test_no_flipped_bit_of_a_record_is_read(tmp_path: Path) -> None:
    path, note = tmp_path / "note.json", Note(text='say "crc"', number=7)
    for indent in (None, 1):
        whole = checksums.with_crc(note.model_dump_json(indent=indent).encode()) + b"\n"
        path.write_bytes(whole)
        assert checksums.read_record(Note, path) == note
        assert checksums.read_json(path) == note.model_dump()
        for at in range(len(whole)):
            for bit in range(8):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
                with pytest.raises(Corrupt, match=r"note\.json"):
                    checksums.read_json(path)
        for end in range(len(whole) - 1):
            path.write_bytes(whole[:end])
            with pytest.raises(Corrupt, match=r"note\.json"):
                checksums.read_json(path)


def test_records_from_before_there_were_checksums_are_read(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    for text in (b'{"text":"x","number":7}', b'{"text":"x","number":7}\n'):
        path.write_bytes(text)
        assert checksums.read_record(Note, path) == Note(text="x", number=7)
    path.write_bytes(b'{"text":"x"}')
    with pytest.raises(Corrupt, match=r"note\.json cannot be read: number"):
        checksums.read_record(Note, path)
    assert checksums.with_crc(b"{}") == b"{}" and checksums.with_crc(b"[1]") == b"[1]"


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with Files(home).blobs.draft() as draft:
        file = Files(home).publish(draft.publish(), filename="a", purpose="batch")
    path = home.files / f"{file.id}.json"
    record = json.loads(path.read_text())
    assert record.pop("format") == 1 and "format" not in file.to_openai()
    del record["crc"]
    path.write_text(json.dumps(record))  # as older versions wrote it
    assert Files(home).get(file.id) == file
    newer = json.dumps({"format": 2, "of": "a later version"})
    folders = {home.batches / "batch_1": "batch.json", home.uploads / "upload_1": "upload.json"}
    folders |= {
        home.fine_tuning: "ftjob-1.json",
        home.models / "m": "1.json",
        home.tinker / "models" / "s": "model.json",
        home.root: home.platform.name,
        path.parent: path.name,
    }
    for folder, name in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(newer)
    ledger = LedgerFile(home.ledger, "a")
    ledger.note(event="leave", kind="job", holder="job-1")
    AuditLog(home.audit).note(who="ann", action="keys create")
    for written in (*home.ledger.iterdir(), *home.audit.iterdir()):
        assert json.loads(written.read_text())["format"] == 1
    (home.ledger / "a.jsonl").write_text(f"{newer}\n")
    reads: list[Callable[[], object]] = [
        lambda: Files(home).get(file.id),
        lambda: BatchFolder(home.batches / "batch_1").request(),
        lambda: Uploads(Files(home)).show("upload_1"),
        lambda: TuningFolder(home).read_request("ftjob-1"),
        lambda: Registry(home).resolve("m"),
        lambda: TinkerFiles(home).model("s"),
        lambda: ClaimWatch(home, 10.0).look(),
        lambda: list(journal.read(home.ledger / "a.jsonl", LedgerLine)),
    ]
    for read in reads:
        with pytest.raises(NewerFormat, match="has format 2"):
            read()
    assert "has format 2" in Files(home).list().damaged[0]["reason"]
    assert [line.holder for lines in read_ledger(home.ledger) for line in lines] == ["job-1"]


def test_the_line_of_a_journal_that_is_damaged_is_named(tmp_path: Path) -> None:
    spec = JobSpec(
        dataset="d", parent="p", parent_sha256="0" * 64, hyperparameters=Hyperparameters(steps=3)
    )
    journal = JobJournal(Home(tmp_path), spec.id)
    journal.write_spec(spec)
    for step in (1, 2, 3):
        journal.event("step", step=step, loss=1.0)
    journal.close()
    first, second, third = journal.events_file.read_bytes().splitlines(keepends=True)
    journal.events_file.write_bytes(first + second.replace(b"1.0", b"3.0") + third)
    with pytest.raises(Corrupt, match=r"events\.jsonl: line 2 is damaged"):
        journal.events()
    [finding] = fsck.check(Home(tmp_path))
    assert finding.path == str(journal.events_file) and "line 2" in finding.message
    journal.rewind(3)  # a job goes on: the line is dropped, and that is told
    assert [e.get("step") for e in journal.events()] == [1, 3, None]
    assert "line 2 is damaged" in journal.events()[-1]["message"]


def test_what_is_removed_while_fsck_looks_is_no_damage(tmp_path: Path) -> None:
    points = [Home(tmp_path).job("job-1") / f"megatron/step-{number}" for number in (1, 2)]
    for point in points:
        point.mkdir(parents=True)
    found = fsck.check(Home(tmp_path))
    assert next(found).path == str(points[0])
    points[1].rmdir()
    assert not list(found)


def test_no_flipped_bit_of_a_journal_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [checksums.with_crc(b'{"number":%d}' % number) + b"\n" for number in (1, 2)]
    whole = b"".join(lines)
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(Corrupt, match=r"lines\.jsonl: line"):
                list(journal.read(path))
    for cut in range(len(lines[1])):  # but what a crash left unfinished is no damage
        path.write_bytes(whole[: len(lines[0]) + cut])
        assert list(journal.read(path)) == [{"number": 1}]


def test_a_damaged_dataset_is_not_read_and_is_made_anew(tmp_path: Path) -> None:
    home, recipe = Home(tmp_path), DatasetRecipe(loop="faults")
    asyncio.run(flipped_root._runs(home))
    store = Store(home)
    name = build_dataset(store, home, recipe)["id"]
    [shard] = shards(home, name)
    whole, runs = shard.read_bytes(), home.dataset(name) / "runs.parquet"
    flip(shard, len(whole) // 2)
    with pytest.raises(Corrupt, match=f"{shard} is damaged"):
        shards(home, name)
    flip(runs, 1000)
    with pytest.raises(Corrupt, match=f"{runs} is damaged"):
        next(dataset_runs(home, name))
    assert build_dataset(store, home, recipe)["id"] == name
    assert [path.read_bytes() for path in shards(home, name)] == [whole]
    assert list(home.datasets.glob(f".{name}.damaged_*")), "the damaged one is kept"
    assert not list(fsck.check(home))
    asyncio.run(store.close())


def test_a_damaged_seal_is_set_aside_and_its_lines_are_asked_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    flipped_root._files_and_batches(home)
    [folder] = [f for f in map(BatchFolder, home.batches.glob("batch_*")) if f.accepted()]
    accepted = folder.accepted()
    assert accepted is not None and accepted.chunks == 3
    rows = validation.read_index(folder.index, accepted.index_sha256)
    asyncio.run(flipped_root._answer(folder, 2, chunks.requests(folder, rows[2])))
    for chunk in (1, 2):
        found = chunks.results_so_far(folder, chunk)
        assert chunks.seal(folder, chunk, chunks.requests(folder, rows[chunk]), found, None)
    damaged = chunks.seal_path(folder, 1)
    flip(damaged, damaged.stat().st_size // 2)
    assert chunks.finish(folder, folder.request(), accepted, Files(home)) == [1]
    assert folder.end() is None and not damaged.exists()
    results = next(folder.results.glob("00000001.*"))
    flip(results, 200)
    found = chunks.results_so_far(folder, 1)
    assert len(found) == 9, "one result is damaged, and has to be asked again"
    flip(results, 200)
    chunks.seal(folder, 1, chunks.requests(folder, rows[1]), chunks.results_so_far(folder, 1), None)
    assert chunks.finish(folder, folder.request(), accepted, Files(home)) == []
    end = folder.end()
    assert end is not None and end.output_file_id and end.counts.completed == 30
    assert len(Files(home).path(end.output_file_id).read_bytes().splitlines()) == 30


def test_a_damaged_input_is_not_asked(tmp_path: Path) -> None:
    home = Home(tmp_path)
    flipped_root._files_and_batches(home)
    [folder] = [f for f in map(BatchFolder, home.batches.glob("batch_*")) if f.accepted()]
    row = validation.read_index(folder.index)[1]
    flip(folder.input, row[0] + 20)
    with pytest.raises(Corrupt, match=r"input\.jsonl is damaged: bytes"):
        chunks.requests(folder, row)
    with pytest.raises(Corrupt, match=r"input\.jsonl is damaged"):
        validation.validate(folder, folder.request())


async def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    home = Home(tmp_path)
    name, _ = Registry(home).import_checkpoint(bare_model(tmp_path / "model"))
    weights = home.checkpoint(name) / "model.safetensors"
    flip(weights, 0)
    with pytest.raises(SwapError, match=r"m@1 was not loaded: .*model\.safetensors is damaged"):
        await LoadedVersion.verify_and_create(home.checkpoint(name), "m@1", [])


def test_a_damaged_claim_on_the_root_lets_no_second_platform_in(tmp_path: Path) -> None:
    from cray_agents.server import platform_process

    home = Home(tmp_path)
    home.platform.write_bytes(checksums.with_crc(b'{"url":"http://127.0.0.1:1","pid":1}'))
    flip(home.platform, 10)
    pattern = r"platform\.json is damaged.*agents up --home .*` replaces it"
    with pytest.raises(SetupError, match=pattern):
        platform_process.owner(home)


#: Each kind of record that is listed: the list, how a good record's file lies under the root, and
#: the folder or file that becomes a damaged one beside it, by whose name it is asked for.
LISTED = {
    "batches": ("/v1/batches", "batches/batch_*/batch.json", "batches/batch_bad"),
    "files": ("/v1/files", "files/file-*.json", "files/file-bad.json"),
    "tuning": ("/v1/fine_tuning/jobs", "fine_tuning/ftjob-*.json", "fine_tuning/ftjob-bad.json"),
    "datasets": ("/v1/datasets", "datasets/*/manifest.json", "datasets/bad"),
    "jobs": ("/v1/jobs", "jobs/job-*/spec.json", "jobs/job-bad"),
    "iterations": ("/v1/loops/faults/iterations", "loops/faults/generations/0.json",
                    "loops/faults/generations/9.json"),
    "models": ("/v1/models", "models/m/1.json", "models/bad"),
    "keys": ("/v1/keys", "keys/key_*.json", "keys/key_bad.json"),
    "runs of scripts": ("/api/v1/training_runs", "tinker/models/s:train:0/model.json",
                        "tinker/models/bad"),
}  # fmt: skip
#: Lists that are made of the same records.
MADE_OF_THEM = ("/v1/loops", "/v1/models/lineage", "/v1/cost?by=loop", "/v1/health/warnings")
COMMANDS = {"datasets": "dataset", "jobs": "jobs", "models": "models", "keys": "keys"}


def damaged_beside_good_ones(home: Home) -> dict[str, Path]:
    """Put a damaged record of each kind beside the good ones; return them by their list."""
    made = {}
    for path, good, bad in LISTED.values():
        whole, target = next(home.root.glob(good)), home.root / bad
        if not target.suffix:
            target.mkdir()
            target /= whole.name
        shutil.copy(whole, target)
        flip(target, len(target.read_bytes()) // 2)
        made[path] = target
    return made


def test_a_damaged_record_is_named_by_its_list_and_ends_none(tmp_path: Path) -> None:
    """All kinds at once: each list gives the others, whatever else is damaged."""
    home = flipped_root.make(tmp_path / "home")
    registry = Registry(home)
    registry.register("calc", *registry.import_checkpoint(checkpoint(tmp_path / "calc")))
    registry.promote("calc", 1)
    TinkerFiles(home).add_model(
        TinkerModel(id="s:train:0", job="j", base="calc@1", base_model="calc")
    )
    made = damaged_beside_good_ones(home)
    _, secret = Keys(home).create("boss", Role.admin)
    asyncio.run(look_at_lists(tmp_path, made, {"authorization": f"Bearer {secret}"}, secret))
    found = tuple(each.path for each in fsck.check(home))  # a file, or the folder it is in
    assert all(any(map(str(path).startswith, found)) for path in made.values())
    for kind, command in COMMANDS.items():
        done = cli(command, "list", "--json", "--home", home.root, cwd=tmp_path)
        assert done.returncode == 0 and json.loads(done.stdout), done.stderr
        assert str(made[LISTED[kind][0]]) in done.stderr


async def look_at_lists(
    folder: Path, made: dict[str, Path], headers: dict[str, str], secret: str
) -> None:
    async with served(folder) as gateway:
        for path, file in made.items():
            status, answer = await gateway.call("GET", path, headers=headers)
            assert status == 200, answer
            rows = answer["training_runs"] if "training_runs" in answer else answer["data"]
            [damaged] = answer["damaged"]
            assert rows and damaged["id"] in (file.stem, file.parent.name, file.name)
            assert f"{file.name} is damaged" in damaged["reason"]
            assert str(folder) not in damaged["reason"]
            await check_pages(gateway, path, headers, [row.get("id") for row in rows])
        for path in MADE_OF_THEM:
            status, answer = await gateway.call("GET", path, headers=headers)
            assert status == 200, answer
        _, loops = await gateway.call("GET", "/v1/loops", headers=headers)
        assert loops["damaged"][0]["id"] == "faults/9"
        # the record itself says what it is
        for path in ("/v1/batches/batch_bad", "/v1/files/file-bad", "/v1/datasets/bad",
                     "/v1/fine_tuning/jobs/ftjob-bad", "/v1/models/bad", "/v1/jobs/job-bad",
                     "/v1/loops/faults/iterations/9"):  # fmt: skip
            status, answer = await gateway.call("GET", path, headers=headers)
            assert (status, answer["error"]["code"]) == (422, "corrupt"), path
            assert path.rpartition("/")[2] in answer["error"]["message"]
        async with gateway.client(key=secret) as client:
            assert {job.id async for job in client.fine_tuning.jobs.list(limit=1)}
            assert len([batch async for batch in client.batches.list(limit=1)]) == 2
            assert {"m", "calc@1"} <= {model.id async for model in client.models.list()}
            assert len([file async for file in client.files.list(limit=1)]) > 1


async def check_pages(gateway: Gateway, path: str, headers: dict[str, str], ids: list[Any]) -> None:
    """Walk a list record by record: the same ones come, in the same order."""
    if path in ("/v1/models", "/api/v1/training_runs", "/v1/loops/faults/iterations"):
        return
    walked, after = [], ""
    while True:
        query = f"{path}?limit=1{after}"
        answer = (await gateway.call("GET", query, headers=headers))[1]
        walked += [row["id"] for row in answer["data"]]
        if not answer["has_more"] or not answer["data"]:
            break
        after = f"&after={answer['last_id']}"
    assert walked == ids, path
