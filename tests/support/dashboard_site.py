"""Dashboard site: a platform with runs of real agents and hostile ones, for tests in a browser.

`python -m tests.support.dashboard_site HOME` serves it until Ctrl-C, to look at by hand.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from cray_agents import GRPO, Agent, OutsideModel, Platform, PromotionTest, Task, evaluate, reward
from cray_agents.config.settings import PriceSettings
from cray_agents.iteration import Iteration
from cray_agents.paths import Home
from cray_agents.records import Manifest
from cray_agents.runtime.accounting.ledger import HeldDevices, LedgerFile, LedgerLine, keep_ledger
from cray_agents.runtime.batches.worker import run_worker
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.registry.registry import Registry
from cray_agents.tools.calculator import calculator
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.training import DatasetRecipe, Hyperparameters
from cray_agents.training_jobs import JobSpec, JobStatus
from tests.runtime.views.test_run_views import Scoring, model_with_tokenizer
from tests.support.killable_loop import lucky, site_loop, some_tasks
from tests.support.scripted_platform import platform

#: Texts that try to be markup, to hide, to reorder, or to be too much for a browser.
HOSTILE = {
    "script": "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>",
    "link": "[click](javascript:window.broken=1) ![x](https://elsewhere.test/x.png)",
    "svg": "<svg onload=window.broken=1><use href='data:image/svg+xml,x'/></svg>",
    "template": "${window.broken = 1} {{constructor.constructor('window.broken=1')()}}",
    "bidi": "access granted \u202e)nimda( \u2066\u200f\u061c end",
    "ansi": "\x1b[31mred\x1b[0m \x1b]8;;https://elsewhere.test\x07link\x1b]8;;\x07 \x00\x7f\x9b",
    "long_line": "a" * 1_000_000,
    "many_lines": "line\n" * 20_000,
    "combining": "Z" + "\u0301" * 2000,
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467 " * 50,
    "prototype": '{"__proto__": {"broken": 1}, "constructor": null, "toString": []}',
}
LONG_RUN, LONG_TURNS = "run-long", 120
LOOP = "lucky"  # of two iterations: the first promotes, the second does not
DEEP = "support-agent", 18  # a name, and its versions, each trained from the one before
BATCH_LINES, BAD_LINES = 12, 2
CHAT = "/v1/chat/completions"


def answer(request: dict[str, Any]) -> Any:
    """A tool call first where there are tools, then the result; else the last message again."""
    messages = request["messages"]
    last = messages[-1]
    if request.get("tools") and last["role"] == "user":
        return {"id": "call_0", "name": "calculator", "arguments": {"expression": last["content"]}}
    if last["role"] == "tool":
        wrong = "7" in str(last["content"])
        return f"<think>The tool says so.</think>It is {'0' if wrong else last['content']}."
    return str(last["content"])


async def _runs(site: Platform) -> None:
    await asyncio.gather(_agents(site), _hostile(site), _long(site))


async def _rest(site: Platform, home: Path) -> None:
    await _demonstrations(site, home.parent / "seed")
    await _train(site, Home(home))
    await _batch(site, home)
    _deep(Home(home))
    await _evaluation(site)
    for number, loop in enumerate(("sums",) * 3 + ("shuffled",) * 3):
        number %= 3
        record = Iteration(iteration=number, holdout_tasks=50, version="m@1", runs=16, wall=20.0,
                           control="shuffled-rewards" if loop == "shuffled" else None,
                           accepted_runs=8 + number, seconds={"collect": 4.0, "train": 9.0},
                           holdout_success=0.2 + 0.3 * number * (loop == "sums"))  # fmt: skip
        await site.finish_iteration(loop, number, record.model_dump(mode="json"))


async def _agents(site: Platform) -> None:
    """Runs of an agent with a tool on eight tasks, two attempts each, scored."""
    agent = Agent(name="clerk", instructions="Use the tool.", tools=[calculator], model="m",
                  engine=site.engine(), max_turns=3)  # fmt: skip
    for number in range(8):
        question, target = f"{number} + {number + 1}", str(2 * number + 1)
        task = Task(input=question, target=target, metadata={"level": number})
        for attempt in range(2):
            run = await agent.run(task, run_id=f"run-{number}-{attempt}", loop="sums",
                                  iteration=number % 3, attempt=attempt)  # fmt: skip
            right = f" {task.target}." in str(run.output)
            value = float(right and attempt == 0)
            await site.reward(run.id, value, name="correct", comment=f"expected {task.target}")


async def _demonstrations(site: Platform, tokenizer: Path) -> None:
    """A dataset of a demonstration alone, rendered with a tokenizer that its recipe names."""
    said = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    make_seed_model(tokenizer, seed=0, corpus=["system user assistant What is 2 + 2? 4"] * 3)
    recipe = DatasetRecipe(demonstrations=[said], iterations=[], tokenizer=str(tokenizer))
    await site.build_dataset(recipe)


async def _train(site: Platform, home: Home) -> None:
    """A dataset of good runs, and jobs on it: one that is done, one for each other state."""
    dataset = await site.build_dataset(DatasetRecipe(method="sft", loop="sums"))
    await site.build_dataset(DatasetRecipe(method="sft", loop="sums", iterations=[0, 1]))
    steps = Hyperparameters(steps=3)
    job = await site.submit_job(dataset=dataset["id"], parent="m@1", hyperparameters=steps)
    await site.wait_for(job, lambda status: None)
    _sample_hardware(home, job.id)
    spec = JobJournal(home, job.id).spec()
    _, running, failed = (_job(home, spec, steps) for steps in (4, 40, 5))
    _run_for_a_while(running, (await site.views.outline("run-3-0"))["data"][0]["prompt"])
    error = "the loss is nan after 1 whole steps"
    failed.write_status(JobStatus(id=failed.job_id, state="failed", steps=5, error=error))


def _job(home: Home, spec: JobSpec, steps: int) -> JobJournal:
    """A job like that of `spec` that nobody has begun."""
    longer = spec.hyperparameters.model_copy(update={"steps": steps})
    journal = JobJournal(home, spec.model_copy(update={"hyperparameters": longer}).id)
    journal.write_spec(spec.model_copy(update={"hyperparameters": longer}))
    return journal


def _run_for_a_while(journal: JobJournal, place: int) -> None:
    """Ten steps of a job, which first compared its log-probabilities with the engine's."""
    about = {"kind": "job", "holder": journal.job_id, "attempt": journal.claim_attempt()}
    ledger = LedgerFile(journal.home.ledger, journal.job_id)
    now = time.time()
    held = {"node": "n1", "cores": 2, "state": "training"}
    ledger.write([LedgerLine.model_validate(about | held | {"time": now - 60, "event": "hold"})])
    journal.event("started", attempt=1, from_step=0, left_out=0)
    journal.event("agreement", tokens=120, max_difference=0.004, mean_difference=1e-5,
                  p99_difference=1e-3, kl=1e-6, limit=0.01, run_id="run-3-0", place=place,
                  largest=[("run-3-0", place, -1.0, -1.004), ("run-4-0", place + 1, -2.0, -2.0)],
                  ours=-1.0, theirs=-1.004)  # fmt: skip
    for step in range(1, 11):
        journal.event("step", step=step, loss=2 - step / 10, tokens=64, tokens_per_second=32.0,
                      seconds=2.0)  # fmt: skip
    done = {"first": 0, "last": 10, "seconds": 20.0, "tokens": 640}
    ledger.write([LedgerLine.model_validate(about | done | {"time": now, "event": "steps"})])
    ledger.close()
    journal.close()


def _sample_hardware(home: Home, job_id: str) -> None:
    """Write what samplers of two nodes would, one of them without GPUs, and a straggler."""
    gpu = {"gpu": "0", "name": "NVIDIA H100"}
    for node, gpus in (("n1", [gpu]), ("n2", [])):
        lines: list[dict[str, Any]] = [{"event": "node", "time": 100.0, "gpus": gpus}]
        for number in range(30):
            busy = {"gpu0.utilization": 0.75, "gpu0.power_watts": 512.0 + number,
                    "gpu0.slowed_by": HOSTILE["script"]}  # fmt: skip
            port = {"mlx5_0:1.up": 1, "mlx5_0:1.sent_bytes_per_second": 2048.0 * number}
            load = {"event": "sample", "time": 1.7e9 + 10 * number, "host.load": 1.0 + number}
            lines.append(load | (busy | port if gpus else {}))
        texts = [checksums.with_crc(json.dumps(line).encode()) + b"\n" for line in lines]
        (home.job(job_id) / f"hardware.{node}.jsonl").write_bytes(b"".join(texts))
    journal = JobJournal(home, job_id)
    journal.event("straggler", rank=3, node="n2", seconds=3.0, median=1.0, steps=50, after_step=3)
    journal.close()


def _loop(site: Platform) -> None:
    """Two iterations of a loop with a real decision each."""
    test = PromotionTest(hidden=0.2, batch=16, guard="kind")
    tasks = some_tasks(train=24)
    for number, task in enumerate(tasks):
        task.metadata["kind"] = "even" if number % 2 else "odd"
    loop = site_loop(platform=site, name=LOOP, tasks=tasks, method=GRPO, group_size=2,
                     rewards=[lucky], promotion=test, target=0.95)  # fmt: skip
    list(loop.run_sync(2))


def _deep(home: Home) -> None:
    name, count = DEEP
    for n in range(count):
        made = Manifest(files={}, weights_sha256=f"{n}", parent_sha256=f"{n - 1}")
        (folder := home.checkpoint(f"{name}-{n}")).mkdir()
        (folder / "manifest.json").write_bytes(checksums.record_text(made))
        Registry(home).register(name, folder.name, made)


async def _evaluation(site: Platform) -> None:
    """An outside model, which answers all, beside a version that answers half."""
    big = OutsideModel(model="m", base_url=site.url, prompt_price=2000, sampled_price=8000)
    tasks = [Task(input=str(number)) for number in range(8)]
    half = reward(name="half")(lambda run: float(run.model == big.id or int(run.output) % 2))
    await evaluate(Agent(name="echo", model="m"), tasks, [half], models=["m@1", big], platform=site)


async def _batch(site: Platform, home: Path) -> None:
    """A batch that is answered, with lines that fail."""
    client = openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": HOSTILE["script"]}]
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": CHAT,
         "body": {"model": "absent" if n < BAD_LINES else "m", "messages": messages}}
        for n in range(BATCH_LINES)
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, lines)).encode()
    worker = asyncio.create_task(run_worker(Home(home), site.url, window=4))
    try:
        file = await client.files.create(file=("lines.jsonl", text), purpose="batch")
        wanted: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        batch = await client.batches.create(**wanted)
        for _ in range(1000):
            if (await client.batches.retrieve(batch.id)).status == "completed":
                break
            await asyncio.sleep(0.2)
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    note = {"note": HOSTILE["script"], "long": "x" * 500}
    await client.batches.create(**wanted, metadata=note)
    await client.close()


async def _hostile(site: Platform) -> None:
    client = openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    for name, text in HOSTILE.items():
        headers = {"X-Run-Id": f"hostile-{name}", "X-Run-Tags": "hostile, <b>x</b>"}
        said: Any = [{"role": "user", "content": text}]
        await client.chat.completions.create(model="m", messages=said, extra_headers=headers)
        await site.reward(f"hostile-{name}", 0.5, name="<img src=x onerror=1>", comment=text[:5000])
    await client.close()


async def _long(site: Platform) -> None:
    """A run of many turns."""
    client = openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = []
    ask, headers = client.chat.completions.create, {"X-Run-Id": LONG_RUN}
    for number in range(LONG_TURNS):
        messages.append({"role": "user", "content": f"turn {number}: " + "word " * 20})
        reply = await ask(model="m", messages=messages, extra_headers=headers)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    await client.close()


@contextmanager
def site(home: Path, *, whole: bool = True) -> Iterator[Platform]:
    """The platform, with its runs recorded, and a ledger of its replica's two cores.

    If not `whole`, there are no jobs and batches, and only the datasets of a loop.
    """
    model = model_with_tokenizer(home.parent / f"{home.name}-model")
    prices = PriceSettings(core_hour=1.5, currency="EUR")

    async def keep(pool: Pool) -> None:
        file = LedgerFile(Home(home).ledger, "platform")
        await keep_ledger(file, pool.status, lambda: 0, [HeldDevices(cores=2)], every=0.2, beat=1.0)

    log = Home(home).logs / "replica-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("the engine has started\n")
    with platform(home, Scoring(answer), model=model, beside=keep, prices=prices) as served:
        asyncio.run(_runs(served))
        if whole:
            asyncio.run(_rest(served, home))
        _loop(served)
        yield served


if __name__ == "__main__":
    with site(Path(sys.argv[1])) as served:
        print(served.url, flush=True)
        threading.Event().wait()
