"""Scheduler: key vLLM's prefix cache by the weights, and send what is captured in few pieces.

runtime/pool/vllm_process.py starts vLLM with the factory `scheduler`. All scheduling stays
vLLM's.

Weights: runtime/pool/vllm_engine.py announces each change as a weight version. From then on
only probes are computed until `/resume`. The keys of the prefix cache contain the version, so a
block is only reused under the weights that computed it. That holds in memory, in caches that
outlive a process, and for requests in flight during a change. Where blocks are kept in files
(kv_tier.py) an adapter counts by its hash, not by the name of its one load, so that a later process
finds them. A probe shares its blocks with nobody: it may have computed them with wrong weights.

Pieces: vLLM sends every token on its own, with three small arrays for its logprob. Its server's
work for that, in the one process that all requests share, costs more than a small model. For
requests that capture.py marked, logprobs are kept here and sent every `EVERY` tokens, at the end,
and when capture.py asks for them before it aborts a request. Where nobody reads the answer before
its end, the tokens wait as well, after the first one; before the weights change they are sent.
"""

import functools
import hashlib
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from cray_agents.runtime.vllm_plugins.wire import PROBE, TIER

MARK = "cray_agents_capture"  # in a request's extra_args: True if its tokens may wait, too
EVERY = 64  # tokens
#: What an output has beside its tokens that must not wait; the statistics come with the first one.
_AT_ONCE = ("prefill_stats", "events", "routed_experts", "new_sampling_mask")
COMPILERS = 16  # threads; vLLM has one per two cores, and one slow schema held up all others


def scheduler(**arguments: Any) -> Scheduler:
    """Make a LeanScheduler of the kind that vLLM's configuration asks for."""
    _extend_engine_core()
    arguments["structured_output_manager"].executor = ThreadPoolExecutor(COMPILERS)
    config = arguments["vllm_config"].scheduler_config
    kind = AsyncLeanScheduler if config.async_scheduling else LeanScheduler
    return kind(**arguments)


def _extend_engine_core() -> None:
    """Make the engine core pass weight versions and requests for logprobs on to its scheduler."""
    original = EngineCore.set_weight_version

    @functools.wraps(original)
    def set_weight_version(core: EngineCore, weight_version: str) -> None:
        for client, outputs in core.scheduler.take_tokens().items():
            outputs.weight_version = core.get_weight_version()
            core.output_queue.put_nowait((client, outputs))
        original(core, weight_version)
        core.scheduler.change_weights(weight_version)

    EngineCore.set_weight_version = set_weight_version
    EngineCore.send_logprobs = lambda core, ids: core.scheduler.send_logprobs(ids)


class _Columns:
    """A stand-in for a step's logprobs, whose slices are indexes: vLLM need not copy arrays."""

    def __init__(self, whole: LogprobsLists) -> None:
        self.whole = whole

    def slice_request(self, index: int, count: int) -> tuple[int, int]:
        return index, count


@dataclass
class _Kept:
    """What a marked request has sampled and the server does not have; `waits`: see MARK."""

    waits: bool
    logprobs: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class LeanScheduler(Scheduler):  # type: ignore[misc]
    """Scheduler that batches outputs of marked requests, and runs only probes on new weights."""

    waiting: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._kept: dict[str, _Kept] = {}  # by id of a marked request
        self._awaited: set[str] = set()  # of those, requests whose logprobs are no longer kept
        self._label, self._key = "", _hash("")
        offloads = type(self.connector).__name__ == "OffloadingConnector"
        self._tier: Any = self.connector.connector_scheduler if offloads else None
        self._postponed: Any = None  # a queue while the weights are unproven, else None

    def change_weights(self, weights: str) -> None:
        """Key the cache by new weights, and postpone all but probes until `/resume`."""
        if self.running or self.kv_holding_waiting:  # paused requests have kept their blocks
            self.reset_prefix_cache(reset_running_requests=True)
        self._label, self._key = weights, _hash(weights)
        for request in self.requests.values():
            self._set_salt(request, request.cache_salt[len(self._key) :])
        self._postponed = self._postponed or create_request_queue(self.policy)
        for request in self.waiting:
            self._postponed.add_request(request)
        self.waiting = create_request_queue(self.policy)
        super().set_pause_state(PauseState.UNPAUSED)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause; or resume, with the postponed requests, once the weights are proven."""
        if pause_state is PauseState.UNPAUSED and self._postponed is not None:
            postponed, self._postponed = self._postponed, None
            for request in postponed:
                self.waiting.add_request(request)
        super().set_pause_state(pause_state)

    def _set_salt(self, request: Any, client_salt: str) -> None:
        """Key a request's blocks by the weights and the client's own salt."""
        request.cache_salt = self._key + client_salt
        if self._tier is not None:
            self._set_tier(request)
        request.block_hashes = []
        request.update_block_hashes()

    def _set_tier(self, request: Any) -> None:
        """Say by whose weights a request's blocks in files are; forget keys of former weights."""
        adapter = request.lora_request
        name = adapter.lora_name if adapter else self._label
        known = "" if PROBE in _extra_args(request) else _weights_in(name)
        state = self._tier._req_status.get(request.request_id)
        if state is None:
            request.kv_transfer_params = {TIER: known}
            if adapter and known:
                request._block_hasher = _by_content(request._block_hasher, name)
            return
        request.kv_transfer_params[TIER] = known
        for group in state.group_states:
            group.offload_keys.clear()
            group.next_stored_chunk_idx = 0

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Free all blocks; also those that were loaded for a request that has not begun.

        vLLM fails if there are any of the latter.
        """
        if reset_running_requests:
            for request in [*self.kv_holding_waiting]:
                if request.request_id in self.finished_recving_kv_req_ids:
                    self._unload(request)
        return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))

    def _unload(self, request: Any) -> None:
        self.kv_holding_waiting.remove_request(request)
        self.deferred_waiting.discard(request)
        self.finished_recving_kv_req_ids.discard(request.request_id)
        self.failed_recving_kv_req_ids.discard(request.request_id)
        self._inflight_prefills.discard(request)
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        begun = request.num_preemptions
        request.status = RequestStatus.PREEMPTED if begun else RequestStatus.WAITING
        self.waiting.prepend_request(request)

    def add_request(self, request: Any) -> None:
        """Queue a request; postpone it while the weights are unproven, unless it is a probe."""
        extra = _extra_args(request)
        if MARK in extra:
            self._kept[request.request_id] = _Kept(extra[MARK])
        alone = secrets.token_hex(8) if PROBE in extra else ""
        self._set_salt(request, (request.cache_salt or "") + alone)
        super().add_request(request)
        if self._postponed is not None and PROBE not in extra:
            self.waiting.remove_request(request)
            self._postponed.add_request(request)

    def has_finished_requests(self) -> bool:
        """Tell whether finished requests are to be cleared; vLLM takes postponed ones for such."""
        live = sum(self.get_request_counts()) + len(self._postponed or ())
        left = self.connector is not None and len(self.requests) > live
        return bool(self.finished_req_ids) or left

    def send_logprobs(self, request_ids: list[str]) -> None:
        """Send the kept logprobs of these requests with their next tokens, and keep no more."""
        self._awaited.update(self._kept.keys() & set(request_ids))

    def take_tokens(self) -> dict[int, EngineCoreOutputs]:
        """Return the tokens that wait, for each of the engine core's clients."""
        taken: dict[int, EngineCoreOutputs] = {}
        for request_id, kept in self._kept.items():
            if kept.tokens:
                client = self.requests[request_id].client_index
                tokens, kept.tokens = kept.tokens, []
                outputs = taken.setdefault(client, EngineCoreOutputs(outputs=[])).outputs
                outputs.append(EngineCoreOutput(request_id, tokens))
        return taken

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End aborted requests, and drop what was kept of them."""
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._kept.pop(request.request_id, None)
            self._awaited.discard(request.request_id)
        if self._postponed is not None:
            self._postponed.remove_requests(finished)
        return finished

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Process a step's output; keep or send what marked requests sampled."""
        whole = model_runner_output.logprobs
        if whole is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.logprobs = _Columns(whole)
        clients = super().update_from_output(scheduler_output, model_runner_output)
        starts, column = whole.cu_num_generated_tokens, whole.logprobs[:, 0].tolist()
        for client in clients.values():
            sent = []
            for output in client.outputs:
                kept = self._kept.get(output.request_id)
                if output.new_logprobs is not None:
                    index, count = output.new_logprobs
                    if kept is None:
                        output.new_logprobs = whole.slice_request(index, count)
                    else:
                        output.new_logprobs = None
                        start = starts[index] if starts is not None else index
                        kept.logprobs += column[start : start + count]
                if kept is None or self._add_kept(output, kept):
                    sent.append(output)
            client.outputs = sent
        return clients

    def _add_kept(self, output: EngineCoreOutput, kept: _Kept) -> bool:
        """Add to a marked request's output what is due; return False if it can wait as a whole."""
        last = output.finish_reason is not None or output.request_id in self._awaited
        if last or len(kept.logprobs) >= EVERY:
            output.new_logprobs = _pack(kept.logprobs) if kept.logprobs else None
            kept.logprobs = []
        elif kept.waits and not any(getattr(output, name) is not None for name in _AT_ONCE):
            kept.tokens += output.new_token_ids
            return False
        output.new_token_ids = kept.tokens + output.new_token_ids
        kept.tokens = []
        if last:
            del self._kept[output.request_id]
            self._awaited.discard(output.request_id)
        return True


class AsyncLeanScheduler(LeanScheduler, AsyncScheduler):  # type: ignore[misc]
    """LeanScheduler over vLLM's scheduler that runs a step ahead."""


def _extra_args(request: Any) -> dict[str, Any]:
    params = request.sampling_params
    return (params and params.extra_args) or {}


def _weights_in(label: str) -> str:
    """Return the hash of the weights in a label `name@N hash ...`; "": it has none."""
    found = re.fullmatch(r"\S+ ([0-9a-f]{64})( \S+)?", label)
    return found[1] if found else ""


def _by_content(hasher: Any, name: str) -> Any:
    """Make vLLM's hasher of blocks count an adapter by version and hash; each load has a name."""
    counted = SimpleNamespace(lora_name=" ".join(name.split()[:2]), lora_path="")

    def hash_blocks(request: Any) -> Any:
        loaded, request.lora_request = request.lora_request, counted
        try:
            return hasher(request)
        finally:
            request.lora_request = loaded

    return hash_blocks


def _hash(weights: str) -> str:
    return hashlib.sha256(weights.encode()).hexdigest()[:32]


def _pack(logprobs: list[float]) -> LogprobsLists:
    """Pack logprobs of sampled tokens as [tokens, 1], with empty token ids and ranks."""
    column = np.array(logprobs, dtype=np.float32)[:, None]
    empty = np.empty(0, dtype=np.int32)
    return LogprobsLists(empty, column, empty)
