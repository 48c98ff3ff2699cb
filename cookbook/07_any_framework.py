"""07: agents of other frameworks, recorded as they are, and trained without a changed line.

With a platform that runs (`cray-agents up --model DIR --name calc`), in an environment of its own:
    requirements/environment.sh foreign
    .venv-foreign/bin/python cookbook/07_any_framework.py FRAMEWORK [--stream] [--run NAME]
FRAMEWORK is openai_agents, pydantic_ai or smolagents. All that each knows of the gateway is a base
URL. With `--run NAME` its calls belong to the run of that name; without, each conversation becomes
a run of its own, found by how its messages begin.

Train the agent of openai-agents, in the platform's environment:
    python cookbook/07_any_framework.py --train [--seed N]
It asks, rewards, builds a training set of the runs that were right, trains, compares and decides,
as 03_loop_by_hand.py does. The model must be right now and then: take one of 02_calculator_loop.py.

smolagents tells the model of earlier tool calls in plain text, and calls a tool for its answer too.
Its system prompt is long: the model needs a context of some thousand tokens (`max_model_len`).
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from operator import add, mul, sub
from pathlib import Path
from typing import Any

GATEWAY = os.environ.get("CRAY_AGENTS_URL", "http://127.0.0.1:8000").rstrip("/")
API_KEY = os.environ.get("CRAY_AGENTS_API_KEY", "none")
PYTHON = Path(__file__).resolve().parents[1] / ".venv-foreign" / "bin" / "python"
MODEL, INSTRUCTIONS = "calc", "Use the calculator. Answer with the number."

Ask = Callable[[str], Awaitable[Any]]  # from a question to an answer


def calculator(expression: str) -> int:
    """Calculate with two numbers.

    Args:
        expression: such as '47 + 385'.
    """
    left, symbol, right = expression.split()
    return {"+": add, "-": sub, "*": mul}[symbol](int(left), int(right))


# ---- the agents, as their frameworks' documentation writes them; `stream` prints as it comes


def openai_agents(url: str, model: str, stream: bool) -> Ask:
    """Make an agent of openai-agents."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from agents.exceptions import AgentsException
    from openai import AsyncOpenAI
    from openai.types.responses import ResponseTextDeltaEvent

    set_tracing_disabled(True)  # else the framework sends its traces to OpenAI
    client = AsyncOpenAI(base_url=url, api_key=API_KEY)
    agent = Agent(
        name="calc",
        instructions=INSTRUCTIONS,
        tools=[function_tool(calculator)],
        model=OpenAIChatCompletionsModel(model, openai_client=client),
    )

    async def ask(question: str) -> Any:
        if not stream:
            try:
                return (await Runner.run(agent, question, max_turns=3)).final_output
            except AgentsException:  # no answer within its turns, a tool that is not there
                return None
        running = Runner.run_streamed(agent, question)
        async for event in running.stream_events():
            if isinstance(getattr(event, "data", None), ResponseTextDeltaEvent):
                print(event.data.delta, end="", flush=True)
        return ""

    return ask


def pydantic_ai(url: str, model: str, stream: bool) -> Ask:
    """Make an agent of pydantic-ai."""
    from pydantic_ai import Agent, PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key=API_KEY)
    agent = Agent(
        OpenAIChatModel(model, provider=provider), instructions=INSTRUCTIONS, tools=[calculator]
    )

    async def ask(question: str) -> Any:
        if not stream:
            return (await agent.run(question)).output
        async with agent.run_stream_events(question) as events:
            async for event in events:
                match event:
                    case PartStartEvent(part=TextPart(content=text)):
                        print(text, end="", flush=True)
                    case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
                        print(text, end="", flush=True)
        return ""

    return ask


def smolagents(url: str, model: str, stream: bool) -> Ask:
    """Make an agent of smolagents."""
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

    agent = ToolCallingAgent(
        tools=[tool(calculator)],
        model=OpenAIModel(model, api_base=url, api_key=API_KEY),
        stream_outputs=stream,
        verbosity_level=LogLevel.ERROR,
    )

    async def ask(question: str) -> Any:
        return await asyncio.to_thread(agent.run, question)

    return ask


FRAMEWORKS = {make.__name__: make for make in (openai_agents, pydantic_ai, smolagents)}

# ---- what the gateway recorded of them


def show(since: float) -> None:
    """Print the newest runs that began since then, with what was sampled at each turn."""
    runs = get("/v1/trajectories?limit=100&order=newest")["data"]
    for listed in runs:
        if listed["started"] < since or listed["agent"]:
            continue
        run = get(f"/v1/trajectories/{listed['id']}")
        turns, tokens = run["trajectory"]["turns"], run["usage"]["completion_tokens"]
        print(f"run {run['id']}: {len(turns)} turns, {tokens} tokens sampled")
        for call in (turn["call"] for turn in turns):
            read, sampled = len(call["prompt_token_ids"]), len(call["token_ids"])
            print(f"  {call['model']}: {read} tokens read, {sampled} sampled: {said(call)}")


def said(call: dict[str, Any]) -> str:
    """Return what the model answered, in short."""
    calls = [tool["function"] for tool in call["message"].get("tool_calls") or []]
    words = [f"{function['name']}({function['arguments']})" for function in calls]
    return " ".join([*words, call["message"].get("content") or ""]).strip()


def get(path: str) -> dict[str, Any]:
    """Return the gateway's answer to a GET."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    with urllib.request.urlopen(urllib.request.Request(GATEWAY + path, headers=headers)) as answer:
        return dict(json.load(answer))


# ---- the loop: their agent answers in their environment, everything else happens in ours


async def answer_all(make: Callable[..., Ask], model: str, questions: list[str]) -> list[Any]:
    """Return their agent's answers, 16 at a time; None where it came to none."""
    ask, places = make(f"{GATEWAY}/v1", model, False), asyncio.Semaphore(16)

    async def answer(question: str) -> Any:
        async with places:
            return await ask(question)

    return await asyncio.gather(*map(answer, questions))


async def asked(url: str, model: str, tasks: list[Any]) -> list[Any]:
    """Let their agent answer the tasks' questions as a version, in a process of theirs."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, __file__, "openai_agents", "--answer", model),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "CRAY_AGENTS_URL": url},
    )
    questions = json.dumps([task.input for task in tasks]).encode()
    answers, _ = await process.communicate(questions)
    if process.returncode != 0:
        sys.exit("their program failed; see above")
    return list(json.loads(answers))


def question(draw: random.Random, split: str) -> Any:
    """Draw a question. Held-out ones have a first number that no other has: one that ends in 7."""
    from cray_agents import Task

    left = draw.choice([n for n in range(10, 100) if (n % 10 == 7) == (split == "holdout")])
    right, operator = draw.randrange(10, 100), draw.choice("+-*")
    expression = f"{left} {operator} {right}"
    return Task(input=f"What is {expression}?", target=str(eval(expression)), split=split)


async def train(platform: Any, seed: int, iterations: int, count: int, steps: int) -> None:
    """Ask, reward, train, compare, decide; again and again."""
    from cray_agents import PromotionTest
    from cray_agents.loop import Pair, decide
    from cray_agents.training import DatasetRecipe, Hyperparameters, RunFilter

    draw, begun = random.Random(seed), time.time()
    held_out = [question(draw, "holdout") for _ in range(120)]
    serving = await platform.promoted(MODEL)
    before = await asked(platform.url, serving.id, held_out)
    for number in range(1, iterations + 1):
        tasks = {task.text: task for task in (question(draw, "train") for _ in range(count))}
        since = time.time()
        await asked(platform.url, serving.id, list(tasks.values()))
        where = RunFilter(since=begun, model=MODEL)
        right = 0
        async for run in platform.runs(since=since, model=MODEL):
            if run.input in tasks:
                value = float(run.output == tasks[run.input].target)
                await platform.reward(run.id, value, name="right", who="recipe 07")
                right += value == 1
        recipe = DatasetRecipe(where=where, min_reward=1.0, tokenizer=MODEL)
        dataset = await platform.build_dataset(recipe)
        hyper = Hyperparameters(steps=steps, learning_rate=1e-3, seed=1000 * seed + number)
        job = await platform.submit_job(
            dataset=dataset["id"], parent=serving.id, hyperparameters=hyper
        )
        job = await platform.wait_for(job, lambda status: None)
        candidate = await platform.register(MODEL, str(job.checkpoint))
        async with platform.staged(candidate, holder="recipe 07"):
            after = await asked(platform.url, candidate.id, held_out)
            pairs = [
                Pair(task=task.id, incumbent=old == task.target, candidate=new == task.target)
                for task, old, new in zip(held_out, before, after, strict=True)
            ]
            test, planned = PromotionTest(hidden=0), {None: len(pairs)}
            decision = decide(pairs, test, planned=planned, exhausted=True)
            better = decision.verdict == "promote"
            settle = platform.promote if better else platform.reject
            await settle(candidate, who="recipe 07", reason=decision.reason)
        print(f"{candidate.id}: {right} of {len(tasks)} runs were right")
        success = f"{decision.incumbent:.3f} -> {decision.candidate:.3f}"
        print(f"  held out {success}: {decision.verdict}, {decision.reason}", flush=True)
        serving, before = (candidate, after) if better else (serving, before)
    await platform.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("framework", nargs="?", choices=list(FRAMEWORKS), default="openai_agents")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--run")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answer", help="used by --train: answer the questions of standard input")
    given = parser.parse_args()
    if given.train:
        from cray_agents import Platform

        asyncio.run(train(Platform(GATEWAY), given.seed, iterations=4, count=384, steps=120))
    elif given.answer:
        make = FRAMEWORKS[given.framework]
        print(json.dumps(asyncio.run(answer_all(make, given.answer, json.load(sys.stdin)))))
    else:
        begun = time.time()
        url = f"{GATEWAY}/runs/{given.run}/v1" if given.run else f"{GATEWAY}/v1"
        ask = FRAMEWORKS[given.framework](url, MODEL, given.stream)
        print(asyncio.run(ask("What is 47 + 385?")))
        show(begun)
