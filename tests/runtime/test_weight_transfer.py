"""Weights from the trainer's ranks to a replica: whole, proven, and from files if that fails."""

import hashlib
import inspect
import json
import socket
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from cray_agents.errors import EngineError, SetupError, SwapError
from cray_agents.paths import Home
from cray_agents.records import Manifest, ProbePrompt, ProbeReport
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool import weight_transfer
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.weight_transfer import OfferedTensor, check_transfer, in_chunks
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.weight_offers import find_offers
from cray_agents.runtime.vllm_plugins.worker import Extension
from cray_agents.trainers.checkpointing import weight_sender
from cray_agents.trainers.checkpointing.weight_sender import NcclLink, WeightSender
from tests.support.scripted_pool import until
from tests.support.scripted_vllm import ScriptedVllm, Tensors, gloo_link, logprobs, scripted_host

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]
FILE = "model.safetensors"
TRANSFER = ["gpu_uuid", *["init_weight_transfer_engine", "hold_sender"] * 2, "start_weight_update"]


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def tensors(seed: int) -> Tensors:
    """A model of two layers, in two types."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (8, 4), "norm.weight": (3,)}
    shapes |= {f"layers.{n}.{w}": (4, 5) for n in range(12) for w in ("q", "up")}
    return {
        name: torch.randn(shape, generator=random).to(
            torch.float32 if "norm" in name else torch.bfloat16
        )
        for name, shape in shapes.items()
    }


def checkpoint(home: Home, name: str, weights: Tensors) -> Path:
    directory = home.checkpoint(name)
    directory.mkdir(parents=True)
    content = {"config.json": b"{}", FILE: save(weights)}
    for file, data in content.items():
        (directory / file).write_bytes(data)
    files = {file: hashlib.sha256(data).hexdigest() for file, data in content.items()}
    probe = [ProbePrompt(token_ids=ids, logprobs=logprobs(weights, ids)) for ids in PROMPTS]
    manifest = Manifest(
        files=files, weights_sha256=checkpoints.weights_sha256(files), job="job-1", probe=probe
    )
    text = checksums.with_crc(manifest.model_dump_json().encode())
    (directory / checkpoints.MANIFEST).write_bytes(text)
    return directory


class Ranks:
    """Two ranks that keep a checkpoint's weights, each the half of every layer."""

    def __init__(self, home: Home, weights: Tensors, link: Any = gloo_link, job: str = "") -> None:
        session = home.sessions / "session-1"
        dtypes = {name: tensor.dtype for name, tensor in weights.items()}
        self.senders = [WeightSender(session, rank, 2, link, early=True) for rank in range(2)]
        for rank, sender in enumerate(self.senders):
            share = {n: t.clone() for i, (n, t) in enumerate(weights.items()) if i % 2 == rank}
            kept = list(sender.keep(iter(share.items()), dtypes, job))
            assert [name for name, _ in kept] == list(share)
            for tensor in share.values():
                tensor.zero_()  # training goes on

    def offer(self, directory: Path) -> None:
        """Offer the weights as those of a published checkpoint."""
        for sender in self.senders:
            sender.offer(checkpoints.read_manifest(directory).weights_sha256)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@contextmanager
def offered(home: Home, directory: Path, weights: Tensors, link: Any = gloo_link) -> Iterator[None]:
    """Two ranks offer a checkpoint's weights."""
    with closing(Ranks(home, weights, link)) as ranks:
        ranks.offer(directory)
        yield
    assert list(home.sessions.glob("*/offers/*")) == []


async def swap(
    tmp_path: Path, link: Any = gloo_link, faults: Collection[str] = (), **lie: Tensors
) -> tuple[ProbeReport, ScriptedVllm, Tensors]:
    """Serve one version, and swap to the next, which a session offers (or `lie` in its place)."""
    home = Home(tmp_path)
    before, after = tensors(1), tensors(2)
    old, new = checkpoint(home, "c1", before), checkpoint(home, "c2", after)
    async with scripted_host(home.sessions, faults) as host:
        pool = Pool([host])
        await pool.start(old, "m@1", checkpoints.read_manifest(old).probe)
        assert host.vllm.calls.pop(0) == "boot"
        host.vllm.calls.clear()
        with offered(home, new, lie.get("weights", after), link):
            report = await pool.swap(new, "m@2", checkpoints.read_manifest(new).probe)
        (status,) = pool.status()
        assert (status["state"], status["version"]) == ("serving", "m@2")
        assert ProbeReport.model_validate(status["probe"]) == report
        assert_equal(host.vllm.weights, after)
        await pool.stop()
        return report, host.vllm, after


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    """The bytes that the manifest has the hash of."""
    assert hashlib.sha256(save(actual)).hexdigest() == hashlib.sha256(save(expected)).hexdigest()


# ---- a whole transfer
async def test_each_tensor_comes_once_and_no_file_is_read(tmp_path: Path) -> None:
    report, vllm, after = await swap(tmp_path)
    assert report.load_note == "" and report.seconds["transfer"] <= report.seconds["load"]
    assert sorted(vllm.came) == sorted(after)
    assert "reload_weights" not in vllm.calls and "boot" not in vllm.calls
    calls = [call for call in vllm.calls if call not in ("use_sender", "update_weights")]
    assert calls == [
        *("pause", *TRANSFER, "finish_weight_update", "release_senders"),
        *("reset_prefix_cache", "update_weight_version", "v1/completions", "resume"),
    ]
    # layer after layer, so that the replica need not keep what has come
    layers = [int(name.split(".")[1]) for name in vllm.came if name.startswith("layers")]
    assert layers == sorted(layers)


async def test_without_an_offer_files_are_read_and_that_is_no_failure(tmp_path: Path) -> None:
    home = Home(tmp_path)
    old, new = checkpoint(home, "c1", tensors(1)), checkpoint(home, "c2", tensors(2))
    async with scripted_host(home.sessions) as host:
        await host.start(old, "m@1")
        seconds = await host.engine.load(new, "m@2")
        assert "transfer" not in seconds and host.load_note == ""
        assert "reload_weights" in host.vllm.calls and "gpu_uuid" not in host.vllm.calls


# ---- failures
async def test_a_tensor_that_the_replica_lost_is_found_by_the_probe(tmp_path: Path) -> None:
    report, vllm, after = await swap(tmp_path, faults={"drop"})
    assert sorted(vllm.came) == sorted(after), "the second try does not fetch again"
    assert "failed the logprob check" in report.load_note and "reload_weights" in vllm.calls
    assert "boot" not in vllm.calls


async def test_a_replica_that_dies_half_way_starts_again_from_files(tmp_path: Path) -> None:
    _, vllm, after = await swap(tmp_path, faults={"die"})
    assert "boot" in vllm.calls and "finish_weight_update" not in vllm.calls
    assert 0 < len(vllm.came) < len(after)


class TornLink(NcclLink):
    """A link that breaks when it has sent once."""

    pushes = 0

    def push(self, batch: Any) -> None:
        type(self).pushes += 1
        if type(self).pushes % 3 == 2:
            raise RuntimeError("CUDA error: unspecified launch failure")
        super().push(batch)


def torn_link(gpus: Sequence[str]) -> TornLink:
    return TornLink(gpus, **gloo_link.keywords)


async def test_a_rank_that_fails_half_way_leaves_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TornLink, "pushes", 0)
    report, vllm, after = await swap(tmp_path, torn_link)
    assert "unspecified launch failure" in report.load_note and "rank" in report.load_note
    assert 0 < len(vllm.came) < len(after)
    # what came is given up, before files are read into the same process
    order = [c for c in vllm.calls if c in ("abandon_update", "reload_weights", "boot")]
    assert order == ["abandon_update", "reload_weights"]


async def test_a_replica_that_waits_for_a_lost_rank_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "GRACE", 0.05)
    monkeypatch.setattr(TornLink, "pushes", 0)
    _, vllm, _ = await swap(tmp_path, torn_link, faults={"hang"})
    assert "boot" in vllm.calls
    assert "abandon_update" not in vllm.calls and "reload_weights" not in vllm.calls


class LostLink(NcclLink):
    """A link whose first replica never joins, or receives, as NCCL waits for one that is gone."""

    lost, calls, end, closed = "join", 0, threading.Event(), threading.Semaphore(0)

    def join(self) -> None:
        self._wait("join")

    def push(self, batch: Any) -> None:
        self._wait("push")

    def _wait(self, step: str) -> None:
        if step == self.lost:
            type(self).calls += 1
            if self.calls == 1:
                self.end.wait()

    def close(self) -> None:
        self.closed.release()


@pytest.mark.parametrize("gone", [True, False], ids=["hangs up", "is silent"])
@pytest.mark.parametrize("lost", ["join", "push"])
def test_a_replica_that_never_joins_or_receives_holds_up_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool, lost: str
) -> None:
    monkeypatch.setattr(LostLink, "lost", lost)
    monkeypatch.setattr(LostLink, "calls", 0)
    monkeypatch.setattr(LostLink, "end", threading.Event())
    monkeypatch.setattr(LostLink, "closed", threading.Semaphore(0))
    if not gone:
        monkeypatch.setattr(weight_sender, lost.upper(), 0.05)
    home, weights = Home(tmp_path), tensors(2)
    directory = checkpoint(home, "c2", weights)
    sha256 = checkpoints.read_manifest(directory).weights_sha256

    def link(gpus: Sequence[str]) -> LostLink:
        return LostLink(gpus, **gloo_link.keywords)

    with offered(home, directory, weights, link):
        offer = find_offers(home.sessions, sha256)[0]
        for attempt in range(2):
            with (
                closing(socket.create_connection((offer.host, offer.port), 60)) as peer,
                peer.makefile("rwb") as lines,
            ):
                hello = json.dumps({"token": offer.token, "gpus": ["a"]}).encode() + b"\n"
                lines.write(hello)
                lines.flush()
                assert json.loads(lines.readline())["tensors"]
                joins = lost == "push" or attempt == 1
                ask = [{"join": True}, {"send": []}] if joins else [{"join": True}]
                lines.write(b"".join(json.dumps(one).encode() + b"\n" for one in ask))
                lines.flush()
                if joins:
                    assert json.loads(lines.readline()) == {"update": {}}
                if attempt == 1:
                    pass
                elif not gone:
                    why = "did not join" if lost == "join" else "did not receive"
                    assert why in json.loads(lines.readline())["error"]
                    monkeypatch.setattr(weight_sender, lost.upper(), 60.0)  # the second one may
                else:
                    peer.shutdown(socket.SHUT_RDWR)
        assert LostLink.closed.acquire(timeout=60)  # of the second one
        LostLink.end.set()  # the thread that joined after all leaves the group
        assert LostLink.closed.acquire(timeout=60)


async def test_other_tensors_than_the_checkpoint_has_are_refused(tmp_path: Path) -> None:
    lie = tensors(2)
    lie["layers.3.q"] = lie["layers.3.q"].float()
    del lie["layers.5.up"]
    report, vllm, _ = await swap(tmp_path, weights=lie)
    assert "layers.3.q, layers.5.up" in report.load_note
    assert vllm.came == [] and "start_weight_update" not in vllm.calls


async def test_an_offer_whose_rank_is_gone_costs_nothing_but_a_look(tmp_path: Path) -> None:
    home, weights = Home(tmp_path), tensors(2)
    directory = checkpoint(home, "c2", weights)
    async with scripted_host(home.sessions) as host:
        await host.start(checkpoint(home, "c1", tensors(1)), "m@1")
        with offered(home, directory, weights):
            kept = {path: path.read_bytes() for path in home.sessions.glob("*/offers/*")}
        for path, content in kept.items():  # as after kill -9
            path.write_bytes(content)
        await host.engine.load(directory, "m@2")
        assert "cannot be reached" in host.load_note
        assert_equal(host.vllm.weights, weights)
        # half of the ranks' offers are none
        await host.engine.resume()
        next(iter(kept)).unlink()
        await host.engine.load(directory, "m@2")
        assert host.load_note == ""


# ---- before the files are whole
JOB = "job-1"


@asynccontextmanager
async def early_pool(tmp_path: Path, faults: Collection[str] = ()) -> AsyncIterator[Any]:
    """A home, a pool whose replica serves m@1, and that replica's vLLM."""
    home = Home(tmp_path)
    old = checkpoint(home, "c1", tensors(1))
    async with scripted_host(home.sessions, faults) as host:
        pool = Pool([host])
        await pool.start(old, "m@1", checkpoints.read_manifest(old).probe)
        host.vllm.calls.clear()
        yield home, pool, host.vllm
        await pool.stop()


async def publish(home: Home, pool: Pool, ranks: Ranks, weights: Tensors) -> ProbeReport:
    """Publish what the ranks hold, and serve it."""
    new = checkpoint(home, "c2", weights)
    ranks.offer(new)
    report = await pool.swap(new, "m@2", checkpoints.read_manifest(new).probe)
    (status,) = pool.status()
    assert (status["state"], status["versions"]) == ("serving", ["m@2"])
    return report


async def test_weights_come_while_their_files_are_written(tmp_path: Path) -> None:
    after = tensors(2)
    async with early_pool(tmp_path) as (home, pool, vllm):
        with closing(Ranks(home, after, job=JOB)) as ranks:
            assert await pool.receive(JOB, displace=True)
            assert pool.status()[0]["state"] == "unproven" and not pool.serves("m@1")
            assert_equal(vllm.weights, after)
            assert "resume" not in vllm.calls
            vllm.calls.clear()
            report = await publish(home, pool, ranks, after)
        assert sorted(vllm.came) == sorted(after), "each tensor came once"
        assert vllm.calls == [
            *("pause", "reset_prefix_cache", "update_weight_version", "v1/completions", "resume")
        ]
        assert report.seconds["early"] > 0 and "transfer" not in report.seconds
        assert report.load_note == ""


async def test_a_trainer_that_dies_before_it_publishes_leaves_the_former_version(
    tmp_path: Path,
) -> None:
    async with early_pool(tmp_path) as (home, pool, vllm):
        with closing(Ranks(home, tensors(2), job=JOB)):
            assert await pool.receive(JOB, displace=True)
            kept = {path: path.read_bytes() for path in home.sessions.glob("*/offers/*")}
        for path, content in kept.items():  # as after kill -9
            path.write_bytes(content)
        await until(lambda: pool.serves("m@1"))
        assert_equal(vllm.weights, tensors(1))
        assert "reload_weights" in vllm.calls and "boot" not in vllm.calls
        assert not await pool.receive(JOB, displace=True)  # nobody is there
        assert pool.serves("m@1")


async def test_what_another_attempt_published_is_fetched_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    old, new = checkpoint(home, "c1", tensors(1)), checkpoint(home, "c2", tensors(3))
    async with scripted_host(home.sessions) as host:
        await host.start(old, "m@1")
        with closing(Ranks(home, tensors(2), job=JOB)):
            await host.engine.receive(JOB, old)
        with closing(Ranks(home, tensors(3), job=JOB)) as ranks:
            ranks.offer(new)
            seconds = await host.engine.load(new, "m@2")
        assert_equal(host.vllm.weights, tensors(3))
        assert "transfer" in seconds and host.load_note == ""


async def test_received_weights_that_the_probe_refuses_are_read_from_files(tmp_path: Path) -> None:
    async with early_pool(tmp_path, {"drop"}) as (home, pool, vllm):
        with closing(Ranks(home, tensors(2), job=JOB)) as ranks:
            assert await pool.receive(JOB, displace=True)
            report = await publish(home, pool, ranks, tensors(2))
        assert_equal(vllm.weights, tensors(2))
        assert "failed the logprob check" in report.load_note and "reload_weights" in vllm.calls


async def test_weights_that_do_not_come_whole_leave_the_former_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TornLink, "pushes", 0)
    other = tensors(2)
    del other["layers.5.up"]
    tries = [(tensors(2), torn_link, "unspecified launch failure"), (other, gloo_link, "5.up")]
    async with early_pool(tmp_path) as (home, pool, vllm):
        for weights, link, why in tries:
            refused = pytest.raises(SwapError, match=f"{why}.* m@1 was loaded again")
            with closing(Ranks(home, weights, link, JOB)), refused:
                await pool.receive(JOB, displace=True)
            assert pool.serves("m@1")
            assert_equal(vllm.weights, tensors(1))


def test_unpublished_weights_are_taken_back_and_published_ones_are_not(tmp_path: Path) -> None:
    home, weights = Home(tmp_path), tensors(2)
    with closing(Ranks(home, weights, job=JOB)) as ranks:
        (tokens,) = {tuple(o.token for o in find_offers(home.sessions, JOB))}
        ranks.offer(directory := checkpoint(home, "c2", weights))
        for sender in ranks.senders:
            sender.take_back_unpublished()
        sha256 = checkpoints.read_manifest(directory).weights_sha256
        assert tuple(o.token for o in find_offers(home.sessions, sha256)) == tokens
    with closing(Ranks(home, weights, job=JOB)) as ranks:
        assert tuple(o.token for o in find_offers(home.sessions, JOB)) != tokens
        ranks.senders[1].take_back_unpublished()
        assert find_offers(home.sessions, JOB) == []


# ---- who may do what
async def test_weights_are_sent_to_the_holder_of_the_token_alone(tmp_path: Path) -> None:
    home, weights = Home(tmp_path), tensors(2)
    directory = checkpoint(home, "c2", weights)
    with offered(home, directory, weights):
        offers = find_offers(home.sessions, checkpoints.read_manifest(directory).weights_sha256)
        for token in ("", offers[1].token):
            with (
                closing(socket.create_connection((offers[0].host, offers[0].port))) as peer,
                peer.makefile("rwb") as lines,
            ):
                lines.write(json.dumps({"token": token, "gpus": [""]}).encode() + b"\n")
                lines.flush()
                assert "not offered" in json.loads(lines.readline())["error"]
                assert lines.readline() == b""
        (mode,) = {p.stat().st_mode & 0o007 for p in home.sessions.glob("*/offers/*")}
        assert mode == 0


async def test_a_replica_takes_weights_from_its_platform_alone(tmp_path: Path) -> None:
    directory = checkpoint(Home(tmp_path), "c2", tensors(2))
    async with scripted_host(Home(tmp_path).sessions, secret="guess") as host:
        with pytest.raises(EngineError, match="not yours"):
            await host.start(directory, "m@1")


# ---- the order of chunks
def test_chunks_are_of_one_rank_and_aligned() -> None:
    offers = [
        OfferedTensor(0, "layers.10.q", "bfloat16", (3,)),
        OfferedTensor(1, "layers.2.q", "bfloat16", (3,)),
        OfferedTensor(0, "layers.2.up", "bfloat16", (5,)),
        OfferedTensor(0, "layers.2.norm", "float32", (2,)),
        OfferedTensor(0, "embed", "bfloat16", (40,)),
        OfferedTensor(1, "empty", "bfloat16", (0,)),
    ]
    names = [[one.name for one in chunk] for chunk in in_chunks(offers, 30)]
    assert names == [
        *(["embed"], ["empty"]),  # larger than a chunk; another rank's
        *(["layers.2.norm", "layers.2.up"], ["layers.2.q"], ["layers.10.q"]),
    ]
    everything = in_chunks([one for one in offers if one.sender == 0], 1000)
    assert [[one.name for one in chunk] for chunk in everything] == [
        ["embed"],  # the next one has larger elements
        ["layers.2.norm", "layers.2.up", "layers.10.q"],
    ]


# ---- settings
@pytest.mark.parametrize(
    ("wanted", "place", "why"),
    [
        ("nccl", {"gpu": False, "turns": False, "here": True}, "computes on the CPU"),
        ("ipc", {"gpu": False, "turns": True, "here": True}, "computes on the CPU"),
        ("ipc", {"gpu": True, "turns": False, "here": True}, "set 'nccl'"),
        ("nccl", {"gpu": True, "turns": True, "here": True}, "set 'ipc'"),
        ("nccl", {"gpu": True, "turns": False, "here": False}, None),
        ("ipc", {"gpu": True, "turns": True, "here": True}, None),
        ("files", {"gpu": False, "turns": False, "here": True}, None),
    ],
)
def test_an_engine_that_cannot_work_here_is_refused(
    wanted: str, place: dict[str, bool], why: str | None
) -> None:
    if why is None:
        check_transfer(wanted, **place)
    else:
        with pytest.raises(SetupError, match=why):
            check_transfer(wanted, **place)


# ---- inside vLLM
def test_handles_are_plain_numbers_until_they_are_in_the_replica() -> None:
    """In the order in which torch takes them; it was read from torch, and not run on a GPU."""
    updates: list[dict[str, Any]] = []
    worker = Extension()
    worker.update_weights = updates.append
    numbers = {"size": 96, "offset": 0, "storage_bytes": 512, "storage_offset": 64}
    numbers |= {"counter_offset": 3, "event_sync": True}
    handle = numbers | {"handle": "00ff", "counter": "0102", "event": "03"}
    update = {"names": ["x"], "ipc_handles": {"GPU-1": handle}, "tensor_sizes": [96]}
    worker.load_handles(json.loads(json.dumps(update)))
    (given,) = updates
    assert given["names"] == ["x"] and given["tensor_sizes"] == [96]
    bound = inspect.signature(rebuild_cuda_tensor).bind(*given["ipc_handles"]["GPU-1"])
    assert bound.arguments == {
        "tensor_cls": torch.Tensor,
        "tensor_size": (96,),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": type(torch.empty(1)._typed_storage()),
        "dtype": torch.uint8,
        "storage_device": 0,
        "storage_handle": b"\x00\xff",
        "storage_size_bytes": 512,
        "storage_offset_bytes": 64,
        "requires_grad": False,
        "ref_counter_handle": b"\x01\x02",
        "ref_counter_offset": 3,
        "event_handle": b"\x03",
        "event_sync_required": True,
    }
