"""Outside benchmarks against the gateway, as docs/environments.md says: lm-eval, Inspect's tasks.

The data are local: CRAY_TEST_BENCHMARKS=1 makes the venvs. BFCL has a recipe of the cookbook.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from cray_agents.queries import RunQuery
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from tests.runtime.conftest import CALL, QUESTION
from tests.support.environments.pythons import venv
from tests.support.scripted_gateway import Gateway, served
from tests.support.vllm_pool import true_logprob

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked_servers"),
    pytest.mark.skipif(
        "CRAY_TEST_BENCHMARKS" not in os.environ, reason="CRAY_TEST_BENCHMARKS=1 makes the venvs"
    ),
]
CHOOSES = """
task: chooses
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["4", "432"]
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
"""
ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<never>"], max_gen_toks: 60}
metric_list: [{metric: exact_match}]
"""
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message

@task
def sums():
    samples = [Sample(id=1, input="What is 1 + 1?", target="2")]
    return Task(dataset=samples, solver=[system_message("Add."), generate()], scorer=includes())
"""


class Site(NamedTuple):
    gateway: Gateway
    model: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("gateway")
    model = tiny_model(folder / "model", tie=False, seed=1, teach=True)
    host = VllmProcess("calc", EngineSettings(kv_cache_gib=0.125), folder / "replica.log")
    async with served(folder, host=host, model=model) as gateway:
        yield Site(gateway, model)


async def run(*argv: str | Path, folder: Path, **variables: str) -> None:
    """Run a program in a folder; it is to end well."""
    process = await asyncio.create_subprocess_exec(
        *map(str, argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", **variables},
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said[-4000:]


async def lm_eval(folder: Path, task: str, site: Site, kind: str, *more: str) -> list[Any]:
    """Run a task of lm-eval on two questions; return its records of them, in their order."""
    rows = [
        {"question": "What is 2 + 2?", "right": 0, "answer": "4"},
        {"question": QUESTION, "right": 1, "answer": CALL},
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = task.splitlines()[1].removeprefix("task: ")
    (folder / "task.yaml").write_text(task.replace("DATA", str(folder / "data.jsonl")))
    route = "/v1/chat/completions" if "chat" in kind else "/v1/completions"
    where = f"base_url={site.gateway.url}{route},tokenizer={site.model},max_length=1024"
    python = venv("lm_eval") / "bin" / "python"
    await run(
        *(python, "-m", "lm_eval", "run", "--model", kind, "--model_args", f"model=calc,{where}"),
        *("--tasks", named, "--include_path", ".", *more),
        *("--output_path", "out", "--log_samples"),
        folder=folder,
        HF_DATASETS_CACHE=str(folder / "cache"),
    )
    (found,) = (folder / "out").rglob("samples_*.jsonl")
    return sorted(map(json.loads, found.read_text().splitlines()), key=lambda one: one["doc_id"])


async def test_lm_eval_reads_the_likelihoods_of_choices(site: Site, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(site.model)
    for sample in await lm_eval(tmp_path, CHOOSES, site, "local-completions"):
        question = sample["doc"]["question"]
        for choice, (given,) in zip((" 4", " 432"), sample["resps"], strict=True):
            whole = tokenizer(question + choice)["input_ids"]
            begin = len(tokenizer(question)["input_ids"])
            places = range(begin, len(whole))
            true = [true_logprob(site.model, whole[:at], whole[at]) for at in places]
            assert float(given[0]) == pytest.approx(sum(true), abs=1e-3)


async def test_lm_eval_reads_answers_of_a_chat(site: Site, tmp_path: Path) -> None:
    chat = ("local-chat-completions", "--apply_chat_template")
    for sample in await lm_eval(tmp_path, ANSWERS, site, *chat):
        asked: Any = [{"role": "user", "content": sample["doc"]["question"]}]
        fields: Any = {"max_tokens": 60, "temperature": 0, "stop": ["<never>"], "seed": 1234}
        reply = await site.gateway.ask(asked, **fields)
        said = reply.json["choices"][0]["message"]["content"]
        assert sample["resps"][0][0].strip() == said.strip()


async def test_inspect_runs_its_tasks(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(INSPECT)
    await run(
        *(venv("inspect") / "bin" / "inspect", "eval", "sums.py"),
        *("--model", "openai-api/cray/calc", "--max-tokens", "20", "--display", "none"),
        *("--log-dir", "logs", "--log-format", "json"),
        folder=tmp_path,
        CRAY_BASE_URL=f"{site.gateway.url}/v1",
        CRAY_API_KEY="none",
    )
    (log,) = (tmp_path / "logs").glob("*.json")
    told = json.loads(log.read_bytes())
    assert told["status"] == "success" and len(told["samples"]) == 1
    said = told["samples"][0]["output"]["choices"][0]["message"]["content"]
    runs = [run for run in site.gateway.store.runs(RunQuery()) if run.input == "What is 1 + 1?"]
    assert [run.output for run in runs] == [said]
    (call,) = site.gateway.calls(runs[0].id)
    assert len(call.token_ids) == len(call.logprobs) > 0
