"""Streams: the tokens of an interval share an event where the request allows it; none is lost."""

from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

STEP = 0.015  # seconds of a token, less than the interval
TEXT = "What is 47 + 385? It is 432, as 47 and 385 are 432."


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("merges", "streaming", "lengths"),
    [(True, 1, [1, 2]), (True, 32, [1, 3]), (True, 1000, [1, 7]), (False, 1000, [1, 1])],
)
def test_tokens_of_an_interval_share_an_event(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    merges: bool,
    streaming: int,
    lengths: list[int],
) -> None:
    from transformers import AutoTokenizer
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason, output_processor

    from cray_agents.runtime.vllm_plugins import capture

    clock = [100.0]
    monkeypatch.setattr(capture, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(output_processor, "LogprobsProcessor", capture._ProcessorFactory)
    monkeypatch.setattr(output_processor, "RequestState", capture.VersionedState)
    monkeypatch.setattr(capture._CapturedAnswer, "streaming", streaming)
    tokenizer = AutoTokenizer.from_pretrained(
        str(tiny_model(tmp_path / "model", tie=False, seed=1))
    )
    samples: list[capture.CapturedSequence] = []
    kind = RequestOutputKind.DELTA
    request = EngineCoreRequest(
        request_id="r", external_req_id="r", prompt_token_ids=[1, 2], mm_features=None,
        sampling_params=SamplingParams(output_kind=kind, max_tokens=100), pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    processor = output_processor.OutputProcessor(tokenizer, log_stats=False)
    queue = output_processor.RequestOutputCollector(kind, "r")

    def begin() -> None:
        capture._capture.set(samples)
        capture._merge.set(merges)
        processor.add_request(request, None, None, 0, queue)

    copy_context().run(begin)
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces: list[Any] = []
    for number, token in enumerate(ids, 1):
        reason = FinishReason.LENGTH if number == len(ids) else None
        processor.process_outputs([EngineCoreOutput("r", [token], finish_reason=reason)])
        if (output := queue.get_nowait()) is not None:
            pieces.append(output.outputs[0])
        clock[0] += STEP

    assert [len(piece.token_ids) for piece in pieces[:2]] == lengths
    assert {len(piece.token_ids) for piece in pieces[1:-1]} == {lengths[1]}
    assert [token for piece in pieces for token in piece.token_ids] == ids
    assert "".join(piece.text for piece in pieces) == TEXT
    assert pieces[-1].finish_reason == "length" and pieces[0].finish_reason is None
    (sample,) = samples
    assert sample.token_ids == ids and sample.finish_reason == "length"
