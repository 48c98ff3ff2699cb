"""Sends the logprobs of captured requests from vLLM's engine core in few large pieces.

replica.py has vLLM make its scheduler by `scheduler`. vLLM itself sends three small arrays per
request and step, which cost more to pack and unpack than all else that is sent; those of a request
that vllm_capture.py marked are kept here and sent every `EVERY` tokens and at its end. Requests
without the mark, and all scheduling, stay vLLM's.
"""

from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

MARK = "cray_agents_capture"  # in a request's extra_args
EVERY = 64  # tokens; what a request that is aborted may lack at its end


def scheduler(**parts: Any) -> Scheduler:
    """The scheduler that vLLM would have made, with sparing logprobs."""
    config = parts["vllm_config"].scheduler_config
    kind = AsyncSparing if config.async_scheduling else Sparing
    return kind(**parts)


class _Columns:
    """Stands for a step's logprobs while vLLM cuts them up: a cut is remembered, not made."""

    def __init__(self, whole: LogprobsLists) -> None:
        self.whole = whole

    def slice_request(self, index: int, count: int) -> tuple[int, int]:
        return index, count


class Sparing(Scheduler):  # type: ignore[misc]
    """Keeps back the logprobs of marked requests."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._kept: dict[str, list[float]] = {}

    def add_request(self, request: Any) -> None:
        """A request comes in."""
        params = request.sampling_params
        if params is not None and MARK in (params.extra_args or ()):
            self._kept[request.request_id] = []
        super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Requests are aborted."""
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._kept.pop(request.request_id, None)
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


class AsyncSparing(Sparing, AsyncScheduler):  # type: ignore[misc]
    """The same over vLLM's scheduler that runs a step ahead."""


def _packed(logprobs: list[float]) -> LogprobsLists:
    """Of the sampled tokens alone, [tokens, 1]: their ids and ranks are not looked at."""
    column = np.array(logprobs, dtype=np.float32)[:, None]
    nothing = np.empty(0, dtype=np.int32)
    return LogprobsLists(nothing, column, nothing)
