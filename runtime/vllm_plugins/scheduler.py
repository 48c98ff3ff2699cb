"""What vLLM's scheduler lacks: it knows which weights there are, and sends logprobs in few pieces.

replica.py has vLLM make its scheduler by `scheduler`; all scheduling stays vLLM's.

Weights: each change is told to vLLM as a weight version (vllm_engine.py). From then on nothing but
probes is computed until `/resume`, and the prefix cache's keys are made of the version: no block,
in memory or in what outlives a process, is found under other weights than it was made by, even
those of requests that a change of weights came upon.

Logprobs: vLLM sends three small arrays per request and step, which cost more to pack and unpack
than all else that is sent. Those of a request that vllm_capture.py marked are kept here and sent
every `EVERY` tokens and at its end.
"""

import functools
import hashlib
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

MARK = "cray_agents_capture"  # in a request's extra_args
PROBE = "cray_agents_probe"  # likewise; vllm_engine.py names the same
EVERY = 64  # tokens; what a request that is aborted may lack at its end


def scheduler(**parts: Any) -> Scheduler:
    """The scheduler that vLLM would have made, with what it lacks."""
    _tell_of_weights()
    config = parts["vllm_config"].scheduler_config
    kind = AsyncLeanScheduler if config.async_scheduling else LeanScheduler
    return kind(**parts)


def _tell_of_weights() -> None:
    """Have the engine core tell its scheduler of the weight version, which it alone is told."""
    told = EngineCore.set_weight_version

    @functools.wraps(told)
    def set_weight_version(core: EngineCore, weight_version: str) -> None:
        told(core, weight_version)
        core.scheduler.renew(weight_version)

    EngineCore.set_weight_version = set_weight_version


class _Columns:
    """Stands for a step's logprobs while vLLM cuts them up: a cut is remembered, not made."""

    def __init__(self, whole: LogprobsLists) -> None:
        self.whole = whole

    def slice_request(self, index: int, count: int) -> tuple[int, int]:
        return index, count


class LeanScheduler(Scheduler):  # type: ignore[misc]
    """Keeps back the logprobs of marked requests, and all but probes while weights are unproven."""

    waiting: Any

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._kept: dict[str, list[float]] = {}
        self._key = _key("")
        self._held: Any = None  # a queue, while the weights are unproven

    def renew(self, weights: str) -> None:
        """Other weights are in place; until `/resume` they answer to probes alone."""
        if self.running:  # whoever paused has left them their blocks
            self.reset_prefix_cache(reset_running_requests=True)
        self._key = _key(weights)
        for request in self.requests.values():
            self._salt(request, request.cache_salt[len(self._key) :])
        self._held = self._held or create_request_queue(self.policy)
        for request in self.waiting:
            self._held.add_request(request)
        self.waiting = create_request_queue(self.policy)
        super().set_pause_state(PauseState.UNPAUSED)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause, or go on: the weights are proven."""
        if pause_state is PauseState.UNPAUSED and self._held is not None:
            held, self._held = self._held, None
            for request in held:
                self.waiting.add_request(request)
        super().set_pause_state(pause_state)

    def _salt(self, request: Any, asked: str) -> None:
        """Key its blocks by the weights and what the client `asked` for."""
        request.cache_salt = self._key + asked
        request.block_hashes = []
        request.update_block_hashes()

    def add_request(self, request: Any) -> None:
        """A request comes in."""
        params = request.sampling_params
        extra = (params and params.extra_args) or ()
        if MARK in extra:
            self._kept[request.request_id] = []
        self._salt(request, request.cache_salt or "")
        super().add_request(request)
        if self._held is not None and PROBE not in extra:
            self.waiting.remove_request(request)
            self._held.add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Requests are aborted."""
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._kept.pop(request.request_id, None)
        if self._held is not None:
            self._held.remove_requests(finished)
        return finished

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """A step has been computed."""
        whole = model_runner_output.logprobs
        if whole is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.logprobs = _Columns(whole)
        clients = super().update_from_output(scheduler_output, model_runner_output)
        starts, column = whole.cu_num_generated_tokens, whole.logprobs[:, 0].tolist()
        for client in clients.values():
            for output in client.outputs:
                if output.new_logprobs is None:
                    continue
                index, count = output.new_logprobs
                kept = self._kept.get(output.request_id)
                if kept is None:
                    output.new_logprobs = whole.slice_request(index, count)
                    continue
                start = starts[index] if starts is not None else index
                kept += column[start : start + count]
                ended = output.finish_reason is not None
                output.new_logprobs = _packed(kept) if ended or len(kept) >= EVERY else None
                if ended:
                    del self._kept[output.request_id]
                elif output.new_logprobs is not None:
                    kept.clear()
        return clients


class AsyncLeanScheduler(LeanScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same over vLLM's scheduler that runs a step ahead."""


def _key(weights: str) -> str:
    return hashlib.sha256(weights.encode()).hexdigest()[:32]


def _packed(logprobs: list[float]) -> LogprobsLists:
    """Of the sampled tokens alone, [tokens, 1]: their ids and ranks are not looked at."""
    column = np.array(logprobs, dtype=np.float32)[:, None]
    nothing = np.empty(0, dtype=np.int32)
    return LogprobsLists(nothing, column, nothing)
