"""Training sessions: jobs trained one after the other in memory end as jobs trained alone."""

import asyncio
import itertools
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.records import Manifest
from cray_agents.runtime.accounting.holdings import goodput
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool.pool import Pool
from cray_agents.trainers.checkpointing import hf_export
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.checkpointing.weight_files import in_file_order, write_files
from cray_agents.trainers.checkpointing.weight_sender import LINKS
from cray_agents.trainers.job import rank as rank_module
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.session import resident
from cray_agents.training_commands import Save
from cray_agents.training_jobs import Layout
from tests.support.scripted_pool import until
from tests.support.scripted_vllm import gloo_link, scripted_host
from tests.support.trainers.command_client import Client
from tests.support.trainers.running_session import RunningSession, children_of
from tests.support.trainers.tiny_families import FAMILIES, write_parent

pytestmark = pytest.mark.megatron


def chain(lab: Any, layout: dict[str, int], hyper: dict[str, Any], train: Any) -> list[Any]:
    """Three jobs, each with the checkpoint of the one before; the third without its optimizer."""
    lab.dataset()
    lab.dataset("other", ids=[[i, i + 1, i + 2, i + 3, i + 4, i + 7] for i in range(3, 40)])
    parent, before, results = lab.models("qwen3"), None, []
    for number in range(3):
        spec = lab.spec(
            parent,
            dataset="ds" if number != 1 else "other",
            layout=layout,
            hyper={**hyper, "steps": 4, "seed": number},
            optimizer_from=before if number == 1 else None,
        )
        job = train(spec)
        status = job.status()
        assert status is not None and status.state == "succeeded", (status, job.log_tail())
        parent, before = lab.home.checkpoint(spec.id), spec.id
        results.append(outcome(lab.home, job))
    return results


ALONE: dict[str, tuple[list[Any], list[Any]]] = {}  # results and goodput, by layout and settings


def chain_alone(
    lab: Any, folder: Path, layout: dict[str, int], hyper: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """The same jobs, each with processes of its own; trained once for all tests."""
    key = repr((layout, hyper))
    if key not in ALONE:
        alone = type(lab)(Home(folder / "alone"), lab.models)
        results = chain(alone, layout, hyper, lambda spec: alone.run(spec).journal)
        ALONE[key] = results, goodput(alone.home)
    return ALONE[key]


def outcome(home: Home, job: JobJournal) -> Any:
    manifest = checksums.read_record(Manifest, home.checkpoint(job.job_id) / "manifest.json")
    steps = [e for e in job.events() if e["event"] == "step"]
    numbers = [(e["step"], e["loss"], e["grad_norm"]) for e in steps]
    names_parent = "adapter/adapter_config.json"  # by its path, which is another in each home
    files = {name: sha256 for name, sha256 in manifest.files.items() if name != names_parent}
    return files, manifest.probe, numbers


@pytest.mark.parametrize(
    ("layout", "hyper"),
    [
        ({}, {}),
        ({"data": 2}, {"dtype": "bfloat16"}),
        ({"tensor": 2}, {}),
        ({}, {"lora": {"rank": 2}}),
        ({}, {"backend": "transformers"}),
    ],
    ids=["one rank", "data, bfloat16", "tensor", "lora", "transformers"],
)
def test_jobs_in_memory_end_as_jobs_of_their_own(
    lab: Any, tmp_path: Path, layout: dict[str, int], hyper: dict[str, Any]
) -> None:
    session = RunningSession(lab.home, Layout(**layout))
    in_session = chain(lab, layout, hyper, session.train)
    assert session.end() == 0, session.log
    alone, account = chain_alone(lab, tmp_path, layout, hyper)
    assert alone == in_session
    steps = [{row["name"]: row["steps"] for row in each} for each in (goodput(lab.home), account)]
    total = sum(len(numbers) for _, _, numbers in in_session)
    assert steps == [{"session": total, "total": total}, {"job": total, "total": total}]


def test_a_session_takes_jobs_of_other_kinds_too(lab: Any, tmp_path: Path) -> None:
    """Another method, another model, another dtype: built anew, with the same results as alone."""

    def jobs(lab: Any, train: Any) -> list[Any]:
        lab.dataset()
        lab.dataset("pairs", method="dpo")
        lab.dataset("policy", method="grpo")
        specs = [
            lab.spec("qwen3", hyper={"steps": 2}),
            lab.spec("qwen3", dataset="policy", method="grpo", hyper={"steps": 2}),
            lab.spec("llama-tied", hyper={"steps": 2}),
            lab.spec("qwen3", dataset="pairs", method="dpo", hyper={"steps": 2}),
            lab.spec("qwen3", hyper={"steps": 2, "dtype": "bfloat16", "lora": {"rank": 2}}),
        ]
        return [outcome(lab.home, train(spec)) for spec in specs]

    session = RunningSession(lab.home, Layout())
    in_session = jobs(lab, session.train)
    assert session.end() == 0, session.log
    alone = type(lab)(Home(tmp_path / "alone"), lab.models)
    assert jobs(alone, lambda spec: alone.run(spec).journal) == in_session


def test_a_bad_job_fails_and_the_next_is_trained(lab: Any) -> None:
    lab.dataset()
    lab.dataset("empty", ids=[[1, 2, 3]], masks=[[0, 0, 0]])
    session = RunningSession(lab.home, Layout(data=2))
    lost = session.train(lab.spec("qwen3", dataset="gone", layout={"data": 2}))
    assert lost.status().state == "failed" and "gone" in lost.status().error
    wild = lab.spec("qwen3", layout={"data": 2}, hyper={"learning_rate": 1e30, "warmup_steps": 0})
    exploded = session.train(wild)
    assert exploded.status().state == "failed" and "lower the learning rate" in (
        exploded.status().error
    )
    client = Client(lab, session)
    client.do(Save())
    damaged = client.job.folder / "commands" / "2"
    damaged.write_bytes((client.job.folder / "commands" / "1").read_bytes()[:-2])
    while client.job.status() is None:
        session.journal.hand_over(client.job.job_id)
        session.check()
        time.sleep(0.01)
    assert client.job.status().state == "failed" and str(damaged) in client.job.status().error
    torn = lab.home.job("job-torn")
    torn.mkdir()
    (torn / "spec.json").write_text("{")
    for unreadable in ("job-torn", "job-nowhere"):
        session.journal.hand_over(unreadable)
    whole = session.train(lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2}))
    assert whole.status().state == "succeeded", session.log
    session.until(lambda: session.journal.queue() == [])  # the others may come after it
    assert session.journal.attempts == 1
    assert "job-torn cannot be read" in session.log
    assert session.end() == 0, session.log


@pytest.mark.parametrize("ranks", [1, 2])
def test_whatever_a_job_is_refused_for_its_session_lives(
    lab: Any, tmp_path: Path, ranks: int
) -> None:
    """Each refused job says why, and the processes that refused it train the next one."""
    lab.dataset()
    damaged = lab.home.dataset(lab.dataset("damaged")) / "train-00000.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    lab.dataset("distilled", method="distill")
    others = {kind: tmp_path / kind for kind in ("mamba2", "deepseek_v4")}
    for kind, folder in others.items():
        write_parent(folder, FAMILIES[kind](), dtype=torch.float32)
    nan, lying, cut = (tmp_path / name for name in ("nan", "lying", "cut"))
    for folder in (nan, lying, cut):
        shutil.copytree(lab.models("qwen3"), folder)
    weights = load_file(nan / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, nan / "model.safetensors", {"format": "pt"})
    config = (lying / "config.json").read_text()
    (lying / "config.json").write_text(config.replace('"intermediate_size": 96', '"x": 1'))
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(2000)

    def spec(parent: Any = "qwen3", **changes: Any) -> Any:
        hyper = {"steps": 2, "backend": "transformers", **changes.pop("hyper", {})}
        return lab.spec(parent, layout={"data": ranks}, hyper=hyper, **changes)

    teacher = {"teacher": str(nan), "teacher_sha256": weights_sha256(nan)}
    teacher |= {"dataset": "distilled", "method": "distill"}
    megatron, fc2 = {"backend": "megatron"}, {"targets": ["fc2"]}
    session = RunningSession(lab.home, Layout(data=ranks))
    while len(pids := children_of(session.pid)) < ranks:
        session.check()
    first = session.train(spec())
    assert first.status().state == "succeeded", session.log
    refused = [
        ("is damaged", spec(dataset="damaged")),
        ("config.json implies", spec(lying, hyper={"seed": 1})),
        ("config.json", spec(lying, hyper=megatron)),
        ("safetensors", spec(cut)),
        ("no config.json", spec(tmp_path / "gone", parent_sha256="0" * 64)),
        ("has infinite numbers or NaN", spec(nan)),
        ("the loss is nan", spec(nan, hyper=megatron)),
        ("the loss is nan", spec(**teacher)),
        ("has no linear layer of these names", spec(others["mamba2"], hyper={"lora": fc2})),
        ("the rank can be 64 at most", spec(hyper={"lora": {"rank": 65}})),
        ("ask for dtype=float32", spec(others["deepseek_v4"], hyper={"dtype": "bfloat16"})),
        ("ask for recompute=full", spec(recompute="mlp", hyper={"seed": 2})),
        ("an optimizer goes on only with", spec(hyper={"lora": {}}, optimizer_from=first.job_id)),
    ]
    for why, bad in refused if ranks > 1 else refused[::4]:  # alone, a rank need not ask others
        status = session.train(bad).status()
        assert status.state == "failed" and why in status.error, status
    last = session.train(spec(hyper={"seed": 3}))
    assert last.status().state == "succeeded", session.log
    assert children_of(session.pid) == pids
    assert session.end() == 0 and session.journal.attempts == 1, session.log
    assert [e["loss"] for e in last.events() if e["event"] == "step"]


@pytest.mark.parametrize("when", ["before the others", "after the others"])
def test_a_job_that_one_rank_refuses_ends_the_session_and_not_the_queue(
    lab: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The other rank waits in a collective: nobody can tell it, so both end."""
    build = rank_module.build

    def build_but_on_rank_1(work: Any, *arguments: Any, **options: Any) -> Any:
        if torch.distributed.get_rank() == 1 and work.spec.hyperparameters.seed == 5:
            if when == "after the others":
                build(work, *arguments, **options)
            raise BadInput("rank 1 alone cannot read it")
        return build(work, *arguments, **options)

    monkeypatch.setattr(rank_module, "build", build_but_on_rank_1)
    monkeypatch.setattr(resident, "ALL_REFUSE", 0.5)
    lab.dataset()
    session = RunningSession(lab.home, Layout(data=2))
    odd = session.start(lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2, "seed": 5}))
    waiting = session.start(lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2}))
    assert session.wait() == 1
    status = odd.status()
    assert status is not None and status.state == "failed"
    assert status.error == "rank 1 alone cannot read it"
    assert session.journal.queue() == [waiting.job_id] and not waiting.ended
    again = RunningSession(lab.home, Layout(data=2))
    again.until(lambda: waiting.ended)
    assert again.end() == 0 and waiting.status().state == "succeeded", again.log


def test_a_job_is_paused_and_cancelled_without_its_session(lab: Any) -> None:
    lab.dataset()
    session = RunningSession(lab.home, Layout())
    long = session.start(lab.spec("qwen3", hyper={"steps": 5000}))
    session.until(lambda: long.step >= 5)
    long.pause()
    session.until(lambda: session.journal.current is None)
    assert long.status() is None and session.journal.queue() == []
    short = session.train(lab.spec("qwen3", hyper={"steps": 2}))
    assert short.status().state == "succeeded"
    paused_at = long.step
    long.resume()
    session.journal.hand_over(long.job_id)
    session.until(lambda: long.step >= paused_at + 5)
    long.cancel()
    session.until(lambda: long.job_id not in session.journal.queue())
    assert [e["from_step"] for e in long.events() if e["event"] == "started"] == [0, paused_at]
    assert session.end() == 0, session.log


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked"])
def test_a_session_that_ended_in_a_job_goes_on_with_it(
    lab: Any, undisturbed: Any, hold: Any, how: signal.Signals
) -> None:
    (calm, whole), gate = undisturbed, hold(4)
    lab.dataset()
    first = RunningSession(lab.home, Layout())
    job = first.start(lab.spec("qwen3"))
    first.until(lambda: job.step >= 4)
    os.kill(first.pid, how)
    assert first.wait() == (-how if how == signal.SIGKILL else 75), first.log
    assert job.status() is None and first.journal.queue() == [job.job_id]
    gate.unlink()
    second = RunningSession(lab.home, Layout())
    second.until(lambda: job.ended)
    assert second.end() == 0
    assert outcome(lab.home, job) == outcome(calm.home, whole.journal)
    assert second.journal.attempts == 2 and job.attempts == 2


@pytest.mark.parametrize(
    ("layout", "hyper"),
    [({"data": 2}, {"dtype": "bfloat16"}), ({}, {"lora": {"rank": 2}})],
    ids=["data, bfloat16", "lora"],
)
def test_jobs_that_leave_the_gpu_between_them_end_as_jobs_of_their_own(
    lab: Any, tmp_path: Path, layout: dict[str, int], hyper: dict[str, Any]
) -> None:
    """Weights and optimizer go to host memory after each job, and come back for the next."""
    session = RunningSession(lab.home, Layout(**layout), turns=True)
    journal, spans = session.journal, []

    def train(spec: Any) -> JobJournal:
        job = session.start(spec)
        time.sleep(0.15)  # longer than the session's longest wait
        assert job.attempts == 0 and journal.current is None  # it waits for its turn
        journal.give_turn()
        session.until(lambda: not journal.has_turn)
        assert job.ended
        spans.append(journal.turn_seconds)
        return job

    bad = train(lab.spec("qwen3", dataset="gone", layout=layout)).status()
    assert bad.state == "failed" and spans.pop()["offload"] > 0
    in_session = chain(lab, layout, hyper, train)
    journal.give_turn()  # for a job that was taken back
    session.until(lambda: not journal.has_turn)
    assert session.end() == 0, session.log
    assert [sorted(each) for each in spans] == [["offload", "onload"]] * 3
    assert all(each["offload"] > 0 for each in spans) and spans[2]["onload"] > 0
    freed = re.findall(r"left the GPU: ([\d.]+) MiB of rank 0", session.log)
    assert len(freed) == 4 and all(float(mib) > 0 for mib in freed[1:])
    assert chain_alone(lab, tmp_path, layout, hyper)[0] == in_session


def test_an_idle_session_ends(lab: Any) -> None:
    assert RunningSession(lab.home, Layout(), idle_seconds=0.2).wait() == 0


async def test_a_sessions_ranks_send_what_they_published(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs, of two tensor ranks; each checkpoint's files could be made of what arrived."""
    monkeypatch.setitem(LINKS, "gloo", gloo_link)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    lab.dataset()
    parent = lab.models("qwen3")
    session = RunningSession(lab.home, Layout(tensor=2), weight_transfer="gloo")
    async with scripted_host(lab.home.sessions) as host:
        await host.start(parent, "m@0")
        for number in range(2):
            spec = lab.spec(parent, layout={"tensor": 2}, hyper={"steps": 2, "seed": number})
            job = await asyncio.to_thread(session.train, spec)
            assert job.status().state == "succeeded", session.log
            parent = lab.home.checkpoint(spec.id)
            host.vllm.came.clear()
            await host.engine.load(parent, f"m@{number + 1}")
            assert host.load_note == "" and host.vllm.calls.count("reload_weights") == 0
            assert len(host.vllm.came) == len(set(host.vllm.came)) == len(host.vllm.weights)
            assert_hashes(host.vllm.weights, parent, tmp_path / str(number))
    assert session.end() == 0, session.log
    assert list(session.journal.folder.glob("offers/*")) == []


async def test_a_sessions_ranks_send_while_they_write_and_may_be_killed_there(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs, of two tensor ranks, whose files wait; the second one's are never written."""
    monkeypatch.setitem(LINKS, "gloo", gloo_link)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    held = tmp_path / "held"

    def late(folder: Path, files: Any, shapes: Any, dtypes: Any, tensors: Any, *more: Any) -> Any:
        first = list(itertools.islice(tensors, 1))
        while held.exists():
            time.sleep(0.01)
        return write_files(folder, files, shapes, dtypes, itertools.chain(first, tensors), *more)

    monkeypatch.setattr(hf_export, "write_files", late)
    lab.dataset()
    parent = lab.models("qwen3")
    session = RunningSession(lab.home, Layout(tensor=2), weight_transfer="gloo")
    specs = [
        lab.spec(parent, layout={"tensor": 2}, hyper={"steps": 1, "seed": number})
        for number in range(2)
    ]
    async with scripted_host(lab.home.sessions) as host:
        pool = Pool([host])
        await pool.start(parent, "m@0", [])
        before = dict(host.vllm.weights)

        async def receive(job: str) -> None:
            await until(lambda: session.check() or read_status(lab.home, job).offered)
            assert await pool.receive(job, displace=True)
            assert not lab.home.checkpoint(job).exists() and not pool.serves("m@0")

        held.touch()
        job = session.start(specs[0])
        await receive(job.job_id)
        held.unlink()
        trained = lab.home.checkpoint(job.job_id)
        await until(lambda: session.check() or job.ended)
        seconds = await host.engine.load(trained, "m@1")
        assert seconds["early"] > 0 and host.load_note == ""
        assert len(host.vllm.came) == len(set(host.vllm.came)) == len(host.vllm.weights)
        assert_hashes(host.vllm.weights, trained, tmp_path / "sent")

        held.touch()  # m@0 is served again as soon as the next job's weights take their place
        session.start(specs[1])
        await until(lambda: session.check() or pool.serves("m@0"))
        await receive(specs[1].id)
        os.kill(session.pid, signal.SIGKILL)
        session.wait()
        await until(lambda: pool.serves("m@0"))
        assert before.keys() == host.vllm.weights.keys()
        assert all(torch.equal(before[name], host.vllm.weights[name]) for name in before)
        assert not lab.home.checkpoint(specs[1].id).exists()
        await pool.stop()


def assert_hashes(weights: dict[str, torch.Tensor], checkpoint: Path, scratch: Path) -> None:
    """Files made of these tensors have the hashes of the manifest."""
    scratch.mkdir()
    manifest = checksums.read_record(Manifest, checkpoint / "manifest.json")
    for file in checkpoint.glob("*.safetensors"):
        shapes = {name: tuple(weights[name].shape) for name in load_file(file)}
        dtypes = {name: weights[name].dtype for name in shapes}
        names = in_file_order(dtypes)
        tensors = ((name, weights[name]) for name in names)
        hashes = write_files(scratch, {file.name: names}, shapes, dtypes, tensors)
        assert hashes == {file.name: manifest.files[file.name]}
