"""KV tier: keep the KV of prompts in files that several servers share, each checked before use.

vLLM's tiered offloading copies blocks of the KV cache to memory of the host, and from there to
`CheckedFiles`. runtime/pool/vllm_process.py names both in vLLM's command line. scheduler.py says
whose weights compute a request's blocks, by their hash: TIER in its `kv_transfer_params`. Without
it a request neither loads nor stores.

    FOLDER/<hash of weights>/<hash of what else decides>/<2 digits>/<key>.kv

A file is a block, and a page that names what decides its content, its key and the CRC of its bytes.
If anything differs, the file is removed, and the block is computed. Threads do all input and
output. A file system that is full, missing or slow costs hits: the tier rests for a while, and is
never waited for longer than PATIENCE. Hosts share a folder without a lock: a file appears whole,
loads touch it, and whoever has written a share of the quota removes what was not used for longest.
"""

import errno
import hashlib
import json
import mmap
import os
import secrets
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingWorker,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.fs.io import probe_o_direct
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from cray_agents.runtime.vllm_plugins.wire import TIER, TIER_MARK

PATIENCE = 5.0  # seconds for a lookup, or for the transfer of a request's blocks
REST = 60.0  # seconds without the tier after it has failed; also between two lines in the log
PAGE = mmap.PAGESIZE
_LOADERS, _STORERS = 8, 4  # threads
_FEWEST = 16  # blocks that the quota must hold
_LOOK_SHARE, _KEPT_SHARE = 1 / 20, 0.9  # of the quota: written before a look; left by an eviction
_USED_AGAIN = 60.0  # seconds until another use is noted
_ABANDONED = 3600.0  # seconds after which a draft is nobody's
_COUNTERS = {
    "loaded_blocks": "Blocks that were loaded from the KV tier's files",
    "loaded_bytes": "Bytes of blocks that were loaded from the KV tier's files",
    "stored_bytes": "Bytes that this server wrote to the KV tier's files",
    "evicted_bytes": "Bytes of the KV tier's files that this server removed to keep the quota",
    "damaged_blocks": "Files of the KV tier that were not what their name and checksum say",
    "failures": "Reads and writes of the KV tier's files that the file system refused",
}
_METRIC = "cray_kv_tier_"

log = init_logger(__name__)


class _Job:
    """A transfer of blocks by several threads. The scheduler may end it before they do.

    Threads touch the host's memory under `lock`, and only while the job is not `over`.
    """

    def __init__(self, transfer: Any, blocks: int) -> None:
        self.id, self.keys, self.loads = transfer.job_id, transfer.keys, transfer.is_promotion
        self.lock, self.began = threading.Lock(), time.monotonic()
        self.left = blocks
        self.good: list[bytes] = []  # keys
        self.over = False


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Looks for files, in a thread of its own."""

    def __init__(self, tier: "CheckedFiles") -> None:
        self._tier = tier
        super().__init__(tier.tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return [os.access(self._tier.path(key, req_context), os.R_OK) for key in keys]


class CheckedFiles(SecondaryTierManager):  # type: ignore[misc]
    """The files below vLLM's memory tier. vLLM's scheduler calls it, and is never held up.

    `up` makes `folder`. `quota`: bytes of all that share it. `computes`: a hash of the settings
    that decide what a block holds. Raises ValueError for a quota that holds almost nothing.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        folder: str,
        quota: int,
        computes: str,
    ) -> None:
        _unlink_memory(offloading_spec)  # also if the rest fails
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._folder, self._quota, self._size = Path(folder), quota, self.block_size_bytes
        if quota < _FEWEST * (self._size + PAGE):
            raise ValueError(
                f"kv_tier_gib: {quota / 2**30:.3g} GiB hold fewer than {_FEWEST} blocks of "
                f"{self._size / 2**20:.3g} MiB, which this model has: give it more"
            )
        self._place = _place(offloading_spec, computes, self._size)
        self._memory = primary_kv_view.cast("B")
        self._most = len(primary_kv_view) // 2  # blocks that wait to be written; vLLM pins them
        self._direct = os.O_DIRECT if probe_o_direct(folder) else 0
        self._own = secrets.token_hex(4)  # in the names of drafts
        self._lock = threading.Lock()  # of the three below
        self._queued, self._unseen = 0, 0  # blocks to write; bytes since the last look at the quota
        self._counts: Counter[str] = Counter()
        self._full = False
        self._spoke = self._rest_until = self._no_stores_until = -REST
        self._jobs: dict[int, _Job] = {}
        self._ended: deque[_Job] = deque()
        self._waiting: dict[str, float] = {}  # since when, by request
        self._thread = threading.local()
        self._loaders = ThreadPoolExecutor(_LOADERS, "kv-tier-load")
        self._storers = ThreadPoolExecutor(_STORERS, "kv-tier-store")
        self._lookups = _Lookups(self)
        self._look = threading.Event()
        self._look.set()
        threading.Thread(target=self._keep_quota, name="kv-tier-quota", daemon=True).start()

    def path(self, key: bytes, req_context: Any) -> Path:
        """Return the file of a block of a request."""
        name = key.hex()
        place = f"{_weights(req_context)}/{self._place[:16]}/{name[:2]}/{name}.kv"
        return self._folder / place

    # ---- what vLLM's scheduler calls
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._waiting.pop(req_context.req_id, None)
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Say whether a block has a file; RETRY until that is known, for PATIENCE at most."""
        now = time.monotonic()
        if not _weights(req_context) or now < self._rest_until:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            if now - self._waiting.setdefault(req_context.req_id, now) <= PATIENCE:
                return LookupResult.RETRY
            self._rest(f"does not answer within {PATIENCE:g} s")
        self._waiting.pop(req_context.req_id, None)
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        self._begin(job_metadata, len(job_metadata.keys), self._loaders, self._load)

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to write blocks; those that do not fit the queue are left out."""
        rests = time.monotonic() < max(self._rest_until, self._no_stores_until)
        with self._lock:
            count = max(0, min(self._most - self._queued, len(job_metadata.keys)))
            if rests or not _weights(job_metadata.req_context):
                count = 0
            self._queued += count
        self._begin(job_metadata, count, self._storers, self._store)

    def get_finished_jobs(self) -> Iterator[JobResult]:
        """Yield the jobs that have ended; end those that take too long."""
        now = time.monotonic()
        for job in self._jobs.values():
            if now - job.began > PATIENCE and self._end(job) and job.loads:
                self._rest(f"takes more than {PATIENCE:g} s for {len(job.keys)} blocks")
        while self._ended:
            job = self._ended.popleft()
            del self._jobs[job.id]
            good = set(job.good)
            if job.loads:
                self._lookups.mark_miss([key for key in job.keys if key not in good])
            yield JobResult(
                job_id=job.id,
                success=len(good) == len(job.keys),
                successful_keys=tuple(good) or None,
                transfer_time=now - job.began,
                transfer_bytes=len(good) * self._size,
            )

    def drain_jobs(self) -> None:
        """End all jobs: no thread touches the host's memory for them any more."""
        for job in self._jobs.values():
            self._end(job)

    def shutdown(self) -> None:
        """End all jobs; a thread that hangs is left to the end of the process."""
        self.drain_jobs()
        for pool in (self._loaders, self._storers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._lookups._lookup_queue.put(None)
        self._memory.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {_METRIC + name: OffloadingCounterMetadata(t) for name, t in _COUNTERS.items()}

    def get_stats(self) -> OffloadingConnectorStats:
        """Return and reset the counts."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        stats = OffloadingConnectorStats()
        for name, number in counts.items():
            stats.increase_counter(_METRIC + name, number)
        return stats

    # ---- jobs
    def _begin(
        self, transfer: Any, count: int, pool: ThreadPoolExecutor, work: Callable[..., bool]
    ) -> None:
        job = self._jobs[transfer.job_id] = _Job(transfer, count)
        if not count:
            self._end(job)
        context = transfer.req_context
        blocks = [*zip(transfer.keys, transfer.chunk_ids, strict=True)]
        # what comes first in the prompt is of use without the rest
        blocks.sort(key=lambda block: context.get_offload_key_position(block[0]) or 0)
        for key, chunk in blocks[:count]:
            path = self.path(key, context)
            pool.submit(self._run, work, job, path, key, int(chunk) * self._size)

    def _end(self, job: _Job) -> bool:
        """End a job; return False if it was over."""
        with job.lock:
            if job.over:
                return False
            job.over = True
            self._ended.append(job)
            return True

    def _run(self, work: Callable[..., bool], job: _Job, path: Path, key: Any, at: int) -> None:
        """In a thread: transfer a block between its file and the host's memory, and note it."""
        good = False
        try:
            good = not job.over and work(job, path, key, slice(at, at + self._size))
        except OSError as error:
            self._note(error, job)
        if not job.loads:
            with self._lock:
                self._queued -= 1
        with job.lock:
            if good:
                job.good.append(key)
            job.left -= 1
        if job.left == 0:
            self._end(job)

    def _load(self, job: _Job, path: Path, key: bytes, at: slice) -> bool:
        content = self._buffer()
        block, seal = content[: self._size], content[self._size :]
        try:
            file = os.open(path, os.O_RDONLY | self._direct)
        except FileNotFoundError:
            return False
        try:
            read, status = os.readv(file, [content]), os.fstat(file)
            if time.time() - status.st_mtime > _USED_AGAIN:
                with suppress(OSError):  # a read-only file system
                    os.utime(file)
        finally:
            os.close(file)
        if not read == status.st_size == len(content) or seal != self._seal(key, block):
            path.unlink(missing_ok=True)
            self._count(damaged_blocks=1)
            return False
        with job.lock:
            if job.over:
                return False
            self._memory[at] = block
        self._count(loaded_blocks=1, loaded_bytes=self._size)
        return True

    def _store(self, job: _Job, path: Path, key: bytes, at: slice) -> bool:
        if path.exists():
            return True
        content = self._buffer()
        block = content[: self._size]
        with job.lock:
            if job.over:
                return False
            block[:] = self._memory[at]
        content[self._size :] = self._seal(key, block)
        draft = path.with_suffix(f".{self._own}-{threading.get_ident():x}.tmp")
        file = self._create(draft)
        try:
            try:
                if os.write(file, content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
        self._count(stored_bytes=len(content))
        with self._lock:
            self._unseen += len(content)
            if self._unseen > _LOOK_SHARE * self._quota:
                self._look.set()
        return True

    def _create(self, draft: Path) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._direct
        try:
            return os.open(draft, flags, 0o600)
        except FileNotFoundError:
            (self._folder / TIER_MARK).stat()  # raises where the disk is not mounted
            draft.parent.mkdir(0o700, parents=True, exist_ok=True)
            return os.open(draft, flags, 0o600)

    def _buffer(self) -> memoryview:
        """Return this thread's memory for a file's content, aligned for direct I/O."""
        if not hasattr(self._thread, "content"):
            self._thread.content = memoryview(mmap.mmap(-1, self._size + PAGE))
        content: memoryview = self._thread.content
        return content

    def _seal(self, key: bytes, block: memoryview) -> bytes:
        """Return the page behind a block."""
        about = ("cray-agents kv 1", self._place, str(self._size), key.hex())
        return "\n".join((*about, f"{zlib.crc32(block):08x}\n")).encode().ljust(PAGE, b"\0")

    # ---- failures and quota
    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def _note(self, error: OSError, job: _Job) -> None:
        self._count(failures=1)
        if job.loads:
            self._say(f"does not give a block: {error.strerror}")
            return
        self._no_stores_until = time.monotonic() + REST
        self._say(f"takes no blocks for {REST:g} s: {error.strerror}")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._full = True
            self._look.set()

    def _rest(self, why: str) -> None:
        self._rest_until = time.monotonic() + REST
        self._say(f"{why}, and is not used for {REST:g} s")

    def _say(self, what: str) -> None:
        if time.monotonic() - self._spoke > REST:
            self._spoke = time.monotonic()
            log.warning("the KV tier at %s %s. It costs hits, and nothing else", self._folder, what)

    def _keep_quota(self) -> None:
        """In a thread: look at the quota at the start, and whenever a share of it was written."""
        while True:
            self._look.wait()
            self._look.clear()
            with self._lock:
                self._unseen = 0
            try:
                self._evict()
            except OSError as error:
                self._say(f"cannot be looked through: {error.strerror}")

    def _evict(self) -> None:
        """Remove what was not used for longest, beyond the quota or where the disk is full."""
        files, total, long_ago = [], 0, time.time() - _ABANDONED
        for folder, _, names in os.walk(self._folder):
            for path in (Path(folder, name) for name in names if name.endswith((".kv", ".tmp"))):
                with suppress(FileNotFoundError):  # another host was faster
                    status = path.stat()
                    if path.suffix == ".tmp" and status.st_mtime < long_ago:
                        path.unlink()
                        continue
                    files.append((status.st_mtime, status.st_size, path))
                    total += status.st_size
        full, self._full = self._full, False
        if total <= self._quota and not full:
            return
        wanted = _KEPT_SHARE * min(self._quota, total)
        for used, size, path in sorted(files):
            if total <= wanted:
                return
            with suppress(FileNotFoundError):
                if path.stat().st_mtime > used:  # since it was looked at
                    continue
                path.unlink()
                self._count(evicted_bytes=size)
            total -= size


def _weights(req_context: Any) -> str:
    """Return the hash of the weights that compute a request's blocks; "": they are not kept."""
    return str((req_context.kv_transfer_params or {}).get(TIER, ""))


def _place(spec: Any, computes: str, size: int) -> str:
    """Return a hash of what decides a block's bytes, beside weights and tokens."""
    about = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk).get_run_config()
    del about["model_name"]  # a path, which replicas of the same weights need not share
    about |= {"vllm": vllm.__version__, "computes": computes, "size": size}
    about |= {"layout": spec.config.kv_cache_layout, "device": current_platform.get_device_name()}
    if current_platform.is_cpu():  # its attention packs keys by the instructions that there are
        about["cpu"] = torch.backends.cpu.get_cpu_capability()
        about["amx"] = torch.cpu._is_amx_tile_supported()
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _unlink_memory(spec: Any) -> None:
    """Remove the name of the memory tier in /dev/shm, which vLLM leaves there when it is killed.

    The workers have opened it before the scheduler; so it goes with the processes.
    """
    region = getattr(spec, "_scheduler_mmap", None)
    if region is not None and not region._creator:
        Path(region.mmap_path).unlink(missing_ok=True)


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiered offloading where it computes on the CPU, which its own spec refuses."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> "HostCopies":
        """Return what copies between vLLM's KV cache and the memory tier. Raises ValueError."""
        if self._worker is None:
            if not self.num_chunks:
                raise ValueError("kv_tier_memory_gib holds no block of this model: give it more")
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            region._creator = False  # else it looks for the name that _unlink_memory has removed
            self._worker = HostCopies(kv_caches, region)
        worker: HostCopies = self._worker
        return worker


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks within this host's memory, between two steps of the model."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region, self._groups = region, kv_caches.group_data_refs
        self._done: list[TransferResult] = []
        # [blocks, bytes], in vLLM's cache and in the memory tier
        self._tensors = [
            (cache.tensor, region.create_next_worker_view(cache.page_size_bytes))
            for cache in kv_caches.tensors
        ]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, stores=True)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, stores=False)

    def _copy(self, job_id: int, cache: Any, memory: Any, *, stores: bool) -> bool:
        """Copy between the blocks of vLLM's cache, listed group by group, and those of memory."""
        began, copied, first = time.perf_counter(), 0, 0
        for refs, size in zip(self._groups, cache.group_sizes, strict=True):
            part, first = slice(first, first + size), first + size
            ids, kept_ids = (
                torch.from_numpy(one.block_ids[part].astype(np.int64)) for one in (cache, memory)
            )
            for ref in refs:
                tensor, kept = self._tensors[ref.tensor_idx]
                if stores:
                    kept[kept_ids] = tensor[ids]
                else:
                    tensor[ids] = kept[kept_ids]
                copied += size * tensor.shape[1]
        seconds = time.perf_counter() - began
        self._done.append(TransferResult(job_id, True, copied, seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: each copy is whole when it was submitted."""

    def shutdown(self) -> None:
        self._tensors.clear()
        self._region.cleanup()
