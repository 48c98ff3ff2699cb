"""Outside benchmarks against the gateway, by the lines of docs/environments.md: lm-eval, Inspect.

Tasks and data are local: CRAY_TEST_BENCHMARKS=1 makes the venvs. BFCL has a recipe of the cookbook.
"""

import asyncio
import json
import os
import re
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
from tests.test_docs import ROOT, blocks

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked_servers"),
    pytest.mark.skipif(
        "CRAY_TEST_BENCHMARKS" not in os.environ, reason="CRAY_TEST_BENCHMARKS=1 makes the venvs"
    ),
]
COMMANDS = "".join(blocks(ROOT / "docs" / "environments.md", "")).splitlines()
TASK = """
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: "{{question}}"
"""
CHOOSES = """
output_type: multiple_choice
doc_to_choice: ["4", "432"]
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
"""
ANSWERS = """
output_type: generate_until
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


async def follow(name: str, site: Site, folder: Path, asked: str, more: str, **reader: str) -> None:
    """Run the line of the page that asks for this, as a reader fills it in; it is to end well."""
    [line] = [line for line in COMMANDS if asked in line]
    own = {"MODEL": "calc", "DIR": str(site.model), "KEY": "none", **reader}
    line = re.sub(rf"\b({'|'.join(own)})\b", lambda found: own[found[0]], line)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-ec", line.replace("http://127.0.0.1:8000", site.gateway.url) + more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "PATH": f"{venv(name)}/bin:{os.environ['PATH']}",
             "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"),
             "OPENAI_API_KEY": "none"},
    )  # fmt: skip
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said[-4000:]


async def lm_eval(folder: Path, task: str, site: Site, asked: str) -> list[Any]:
    """Run a task of lm-eval on two questions; return its records of them, in their order."""
    rows = [
        {"question": "What is 2 + 2?", "right": 0, "answer": "4"},
        {"question": QUESTION, "right": 1, "answer": CALL},
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(TASK.replace("DATA", str(folder / "data.jsonl")) + task)
    more = ",max_length=1024 --include_path . --output_path out --log_samples"  # the model's length
    await follow("lm_eval", site, folder, asked, more, hellaswag="own", gsm8k="own")
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
    for sample in await lm_eval(tmp_path, ANSWERS, site, "local-chat-completions"):
        asked: Any = [{"role": "user", "content": sample["doc"]["question"]}]
        fields: Any = {"max_tokens": 60, "temperature": 0, "stop": ["<never>"], "seed": 1234}
        reply = await site.gateway.ask(asked, **fields)
        said = reply.json["choices"][0]["message"]["content"]
        assert sample["resps"][0][0].strip() == said.strip()


async def test_inspect_runs_its_tasks(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(INSPECT)
    more = " --max-tokens 20 --display none --log-dir logs --log-format json"
    await follow("inspect", site, tmp_path, "inspect eval", more, TASK="sums")
    (log,) = (tmp_path / "logs").glob("*.json")
    told = json.loads(log.read_bytes())
    assert told["status"] == "success" and len(told["samples"]) == 1
    said = told["samples"][0]["output"]["choices"][0]["message"]["content"]
    runs = [run for run in site.gateway.store.runs(RunQuery()) if run.input == "What is 1 + 1?"]
    assert [run.output for run in runs] == [said]
    (call,) = site.gateway.calls(runs[0].id)
    assert len(call.token_ids) == len(call.logprobs) > 0
