"""A scripted gateway; tiny models for tests that start vLLM, with torch imported only then."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cray_agents.paths import Home
from cray_agents.testing import ScriptedEngine
from tests.support.fine_tuning_site import Site
from tests.support.scripted_gateway import Gateway, served
from tests.support.scripted_platform import platform

TinyModel = Callable[..., Path]

QUESTION = "What is 47 + 385?"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "47 + 385"}}\n</tool_call>'
SYSTEM = "Use the tool."
TOOL: Any = {
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


def memorise(network: Any, ids: Any) -> None:
    """Train a network until it says these tokens, [1, tokens], and little else."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other take minutes on a busy machine
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        network(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)


def make_tiny_model(directory: Path, *, tie: bool, seed: int, teach: bool = False) -> Path:
    """A random Qwen3 of 0.5M parameters; `teach`: it answers QUESTION with CALL, and knows no more.

    All models made here share one tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

    from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model

    make_seed_model(directory, seed=seed, corpus=[QUESTION, CALL], shape=ModelShape(init_std=0.1))
    model = Qwen3ForCausalLM.from_pretrained(directory)
    if tie:
        config = AutoConfig.from_pretrained(directory)
        config.tie_word_embeddings = True
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    if teach:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        text = tokenizer.apply_chat_template(
            chat, tools=[TOOL], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor([tokenizer(text + CALL + "<|im_end|>")["input_ids"]])
        memorise(model, ids)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model() -> TinyModel:
    """Makes a tiny model in a directory: tiny_model(directory, tie=False, seed=0, teach=False)."""
    return make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Path:
    """A tiny model."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", tie=False, seed=0)


@pytest.fixture
def site(tmp_path: Path, model: Path) -> Iterator[Site]:
    """A served home for fine-tuning."""
    site = Site(tmp_path / "home", model)
    with site.served():
        yield site


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway whose model `calc` repeats the last message."""
    async with served(tmp_path) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def url(home: Home) -> Iterator[str]:
    with platform(home.root, ScriptedEngine()) as where:
        yield where.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
