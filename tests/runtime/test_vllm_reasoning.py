"""Thoughts over a real vLLM with a reasoning parser: apart from answers, in every record."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cray_agents import Agent
from cray_agents.agent import OpenAIEngine, StopReason
from cray_agents.env_worker.adapters import Rollout
from cray_agents.env_worker.chat import ModelConversation
from cray_agents.runtime.exports.chat_messages import chats_of
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from tests.runtime.conftest import memorise
from tests.support.scripted_gateway import Gateway, served

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked_servers"),
]

QUESTION, THOUGHT, ANSWER = "What is 47 + 385?", "47 + 385 = 432", "It is 432."
SAID = f"<think>{THOUGHT}</think>{ANSWER}<|im_end|>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("thinking")
    model = taught(tiny_model(folder / "model", tie=False, seed=1))
    settings = EngineSettings(kv_cache_gib=0.125, reasoning_parser="qwen3")
    host = VllmProcess("calc", settings, folder / "replica.log")
    async with served(folder, host=host, model=model) as gateway:
        yield gateway


def taught(model: Path) -> Path:
    """The model, which knows one question now, and thinks before it answers it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(model)
    ask = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(ask, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(prompt + SAID, add_special_tokens=False)["input_ids"]])
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert int(ids.max()) < network.config.vocab_size
    memorise(network, ids)
    network.save_pretrained(model)
    return model


def agent(gateway: Gateway, **options: Any) -> Agent:
    return Agent(
        "a", model="calc", engine=OpenAIEngine(f"{gateway.url}/v1"), temperature=0.0, **options
    )


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_a_thought_is_no_part_of_the_answer(gateway: Gateway, streams: bool) -> None:
    if streams:
        events = [event async for event in agent(gateway).stream(QUESTION)]
        run = events[-1].run
    else:
        run = await agent(gateway).run(QUESTION)
    assert (run.output, run.stop_reason) == (ANSWER, StopReason.completed), run.error
    assert run.trajectory.messages[-1]["reasoning"] == THOUGHT
    (call,) = gateway.calls(run.id)
    assert call.message["content"] == ANSWER and call.message["reasoning"] == THOUGHT
    assert len(call.token_ids) == len(call.logprobs) > 0
    (exported,) = chats_of(run)
    assert [*exported.reasoning.values()] == [THOUGHT]
    assert THOUGHT not in str([message["content"] for message in exported.messages])


async def test_a_cut_thought_is_no_answer_and_a_cut_answer_is_not_completed(
    gateway: Gateway,
) -> None:
    whole = gateway.calls((await agent(gateway).run(QUESTION)).id)[0]
    for tokens, thought_is_whole in ((3, False), (len(whole.token_ids) - 2, True)):
        run = await agent(gateway, max_tokens=tokens).run(QUESTION)
        assert run.stop_reason == StopReason.max_tokens
        assert ANSWER.startswith(run.output) and bool(run.output) == thought_is_whole
        assert gateway.calls(run.id)[0].finish_reason == "length"
        # ... and a client that is no agent of ours
        reply = await gateway.client().chat.completions.create(
            model="calc",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=tokens,
            temperature=0,
            extra_headers={"x-run-id": f"foreign-{tokens}"},
        )
        assert reply.choices[0].finish_reason == "length"
        status, stored = await gateway.call("GET", f"/v1/trajectories/foreign-{tokens}")
        assert (status, stored["stop_reason"]) == (200, "max_tokens")


async def test_an_environments_conversation_keeps_thoughts_and_tells_cut_answers(
    gateway: Gateway,
) -> None:
    def talk(tokens: int) -> tuple[str, dict[str, Any]]:
        rollout = Rollout(
            run_id=f"worker-{tokens}",
            base_url=f"{gateway.url}/runs/worker-{tokens}/v1",
            api_key="none",
            model="calc",
            seconds=600,
            sampling={"max_tokens": tokens, "temperature": 0},
            task={},
        )
        conversation = ModelConversation(rollout, [{"role": "user", "content": QUESTION}], [])
        return conversation.go_on(lambda call: None, 2), conversation.messages[-1]

    stop, message = await asyncio.to_thread(talk, 200)
    assert stop == "completed"
    assert (message["content"], message["reasoning"]) == (ANSWER, THOUGHT)
    assert (await asyncio.to_thread(talk, 3))[0] == "max_tokens"
