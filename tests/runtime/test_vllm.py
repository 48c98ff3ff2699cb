"""The pool around a real vLLM on CPU: exact tokens, proven swaps, nothing lost or left behind."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cray_agents.errors import EngineError, SwapError
from cray_agents.lifeline import alive
from cray_agents.ports import Exchange, Sampled
from cray_agents.records import ProbePrompt, new_id
from cray_agents.runtime.pool import Pool
from cray_agents.runtime.replica import EngineSettings, Replica
from cray_agents.runtime.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [300, 20, 21, 22, 4]]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "What is 47 + 385?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
GREEDY = {"messages": CHAT, "temperature": 0, "max_tokens": 60}


@dataclass
class Serving:
    """A pool of one replica, and the checkpoints it can be given."""

    pool: Pool
    models: dict[str, Path]

    async def swap(self, name: str) -> None:
        await self.pool.swap(self.models[name], name, golden_probe(self.models[name]))

    async def chat(self, version: str, request: dict[str, Any]) -> tuple[dict[str, Any], Sampled]:
        """The answer, with vLLM's own word on what was sampled, and what was captured."""
        told = {"return_token_ids": True, "logprobs": True}
        exchange = Exchange("/v1/chat/completions", request | told, new_id("x")[2:])
        (body,) = [piece async for piece in self.pool.answer(version, exchange)]
        answer, (sample,) = json.loads(body), exchange.samples
        assert answer["model"] == exchange.version == version
        assert answer["id"] == f"chatcmpl-{exchange.id}"
        assert answer["prompt_token_ids"] == sample.prompt_token_ids
        choice = answer["choices"][0]
        assert choice["token_ids"] == sample.token_ids
        assert [at["logprob"] for at in choice["logprobs"]["content"]] == sample.logprobs
        return answer, sample

    async def score(self) -> list[list[float]]:
        engine = VllmEngine(f"http://127.0.0.1:{self.pool.status()[0]['port']}", "m")
        try:
            return await engine.score(PROMPTS)
        finally:
            await engine.close()

    @property
    def pid(self) -> int:
        return int(self.pool.status()[0]["pid"])


def truth(checkpoint: Path) -> list[list[float]]:
    """The logprobs that transformers gives for PROMPTS."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    scores = []
    for prompt in PROMPTS:
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        scores.append([float(logits[i, token]) for i, token in enumerate(prompt[1:])])
    return scores


def golden_probe(checkpoint: Path) -> list[ProbePrompt]:
    scores = truth(checkpoint)
    return [ProbePrompt(token_ids=p, logprobs=s) for p, s in zip(PROMPTS, scores, strict=True)]


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    return max(
        abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Any
) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("vllm")
    models = {
        "m@1": tiny_model(folder / "m1", tie=False, seed=1, teach=True),
        "m@2": tiny_model(folder / "m2", tie=False, seed=2),
        "m@3": tiny_model(folder / "m3", tie=True, seed=3),
        "m@4": tiny_model(folder / "m4", tie=True, seed=4),
    }
    pool = Pool([Replica("m", EngineSettings(), folder / "replica.log")])
    await pool.start(models["m@1"], "m@1", golden_probe(models["m@1"]))
    yield Serving(pool, models)
    await pool.stop()


async def test_a_tool_call_is_parsed_and_the_next_turn_extends_its_tokens(serving: Serving) -> None:
    request = GREEDY | {"tools": [TOOL]}
    first, told = await serving.chat("m@1", request)
    choice = first["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"expression": "47 + 385"}
    assert len(told.token_ids) == first["usage"]["completion_tokens"]

    answered = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "432"},
    ]
    _, second = await serving.chat("m@1", request | {"messages": answered})
    before = told.prompt_token_ids + told.token_ids
    assert second.prompt_token_ids[: len(before)] == before


async def test_a_stream_samples_the_same_tokens_and_parses_the_same_call(serving: Serving) -> None:
    request = GREEDY | {"tools": [TOOL]}
    _, whole = await serving.chat("m@1", request)
    exchange = Exchange("/v1/chat/completions", request | {"stream": True}, new_id("x")[2:])
    events = b"".join([piece async for piece in serving.pool.answer("m@1", exchange)])
    *chunks, done = [line[6:] for line in events.decode().split("\n") if line]
    parts = [json.loads(chunk)["choices"][0] for chunk in chunks]
    calls = [call for part in parts for call in part["delta"].get("tool_calls") or []]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(arguments) == {"expression": "47 + 385"}
    assert (parts[-1]["finish_reason"], done) == ("tool_calls", "[DONE]")
    (sample,) = exchange.samples
    assert sample.token_ids == whole.token_ids
    assert sample.prompt_token_ids == whole.prompt_token_ids
    assert sample.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_recorded_logprobs_are_of_the_policy_that_was_sampled_from(serving: Serving) -> None:
    raw = {"messages": CHAT, "max_tokens": 1, "seed": 7, "temperature": 1.0}
    hot, _ = await serving.chat("m@1", raw | {"temperature": 2.0, "top_logprobs": 5})
    _, greedy = await serving.chat("m@1", raw | {"top_k": 1})
    assert greedy.logprobs == pytest.approx([0.0])
    top = best_two(hot)
    plain, _ = await serving.chat("m@1", raw | {"top_logprobs": 5})
    best = best_two(plain)
    assert top[0] - top[1] == pytest.approx((best[0] - best[1]) / 2, rel=1e-3)


async def test_a_refusal_keeps_vllms_status_and_message(serving: Serving) -> None:
    with pytest.raises(EngineError, match="maximum context length is 1024") as caught:
        long = [{"role": "user", "content": "1" * 2000}]
        await serving.chat("m@1", {"messages": long})
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(EngineError, match="temperature") as caught:
        await serving.chat("m@1", GREEDY | {"temperature": -1})
    assert (caught.value.status, caught.value.param) == (400, "temperature")


async def test_an_untied_swap_in_place_has_the_new_weights_and_no_old_cache(
    serving: Serving,
) -> None:
    # longer than a KV block of 128 tokens, so that the prefix cache holds it
    long = {"messages": [{"role": "user", "content": "1 2 3 4 " * 40}], "max_tokens": 2}
    request = long | {"temperature": 0}
    old = await serving.score()
    _, before = await serving.chat("m@1", request)
    pid = serving.pid
    await serving.swap("m@2")
    _, after = await serving.chat("m@2", request)
    assert serving.pid == pid  # the same process: in place
    new = await serving.score()
    assert distance(new, truth(serving.models["m@2"])) < 1e-4
    assert distance(new, old) > 0.1
    truly = true_next_logprob(serving.models["m@2"], after)
    assert after.logprobs[0] == pytest.approx(truly, abs=1e-4)
    assert before.logprobs[0] != pytest.approx(after.logprobs[0], abs=1e-2)
    assert len(before.prompt_token_ids) > 256
    await serving.swap("m@1")
    assert distance(await serving.score(), old) < 1e-5


async def test_a_wrong_probe_is_caught_and_the_old_version_serves_on(serving: Serving) -> None:
    wrong = golden_probe(serving.models["m@1"])  # the probe of other weights
    with pytest.raises(SwapError, match="m@1 serves on"):
        await serving.pool.swap(serving.models["m@2"], "m@2", wrong)
    assert distance(await serving.score(), truth(serving.models["m@1"])) < 1e-4
    assert serving.pool.status()[0]["state"] == "serving"


async def test_a_killed_server_takes_its_engine_along_and_no_request_is_lost(
    serving: Serving,
) -> None:
    request = {"messages": CHAT, "max_tokens": 600, "ignore_eos": True}
    traffic = [asyncio.create_task(serving.chat("m@1", request)) for _ in range(24)]
    await asyncio.sleep(0.4)
    assert not any(task.done() for task in traffic)
    pid = serving.pid
    engine = children(pid)
    assert engine
    os.kill(pid, signal.SIGKILL)
    answers = await asyncio.gather(*traffic)
    assert [len(sample.token_ids) for _, sample in answers] == [600] * 24
    assert serving.pid != pid and not any(map(alive, [pid, *engine]))
    assert serving.pool.status()[0]["restarts"] == 1


async def test_tied_weights_another_shape_starts_anew_and_then_in_place(serving: Serving) -> None:
    pid = serving.pid
    await serving.swap("m@3")
    assert serving.pid != pid  # tied, untied: another shape
    pid, old = serving.pid, await serving.score()
    await serving.swap("m@4")
    assert serving.pid == pid
    new = await serving.score()
    assert distance(new, truth(serving.models["m@4"])) < 1e-4
    assert distance(new, old) > 0.1
    _, sample = await serving.chat("m@4", GREEDY | {"max_tokens": 1})
    truly = true_next_logprob(serving.models["m@4"], sample)
    assert sample.logprobs[0] == pytest.approx(truly, abs=1e-4)


async def test_a_killed_platform_leaves_no_vllm_behind(serving: Serving, tmp_path: Path) -> None:
    script = [sys.executable, "-c", PLATFORM, str(serving.models["m@1"]), str(tmp_path / "log")]
    platform = await asyncio.create_subprocess_exec(*script, stdout=asyncio.subprocess.PIPE)
    assert platform.stdout is not None
    pid = int(await platform.stdout.readline())
    everything = [pid, *children(pid)]
    assert len(everything) >= 2 and all(map(alive, everything))
    platform.kill()
    async with asyncio.timeout(5):
        while any(map(alive, everything)):  # noqa: ASYNC110 - they are not our children
            await asyncio.sleep(0.05)
    await platform.wait()


PLATFORM = """
import asyncio, sys
from pathlib import Path
from cray_agents.runtime.replica import EngineSettings, Replica

async def main():
    replica = Replica("m", EngineSettings(), Path(sys.argv[2]))
    await replica.start(Path(sys.argv[1]), "m@1")
    print(replica.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def best_two(answer: dict[str, Any]) -> list[float]:
    """The two highest logprobs; vLLM puts the sampled token first, whatever its rank."""
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return sorted((entry["logprob"] for entry in top), reverse=True)[:2]


def true_next_logprob(checkpoint: Path, sample: Sampled) -> float:
    """What transformers gives for the first sampled token after the same prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([sample.prompt_token_ids])).logits[0, -1].log_softmax(-1)
    return float(logits[sample.token_ids[0]])
