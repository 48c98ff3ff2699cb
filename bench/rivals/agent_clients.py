"""One conversation with a tool in a framework, and in a bare loop of the openai client.

`python agent_clients.py FRAMEWORK URL ROUNDS TURNS` prints pairs of seconds: {"wall-clock": [[bare,
framework], ...], "processor": ...}. It runs in the framework's own environment, so it imports no
more than it must. Started by agent_overhead.py.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

Conversation = Callable[[], Awaitable[Any]]
INSTRUCTIONS = "Use the tool. Answer with the number."
QUESTION = "What is 47 + 385?"


async def add(left: int, right: int) -> int:
    """Add two numbers.

    Args:
        left: the first number.
        right: the second number.
    """
    return left + right


NUMBER = {"type": "integer", "description": "a number"}
PARAMETERS = {
    "type": "object",
    "properties": {"left": NUMBER, "right": NUMBER},
    "required": ["left", "right"],
}
TOOL = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


def bare(client: AsyncOpenAI) -> Conversation:
    """What any agent loop does at least."""
    tools: Any = [{"type": "function", "function": TOOL}]

    async def converse() -> str:
        messages: list[Any] = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": QUESTION},
        ]
        while True:
            completion = await client.chat.completions.create(
                model="m", messages=messages, tools=tools
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = await add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})

    return converse


def engine_alone(url: str) -> Conversation:
    """The same, of our engine."""
    from cray_agents.agent import OpenAIEngine

    engine = OpenAIEngine(url)
    tools = [{"type": "function", "function": TOOL}]

    async def converse() -> str:
        messages: list[Any] = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": QUESTION},
        ]
        while True:
            request = {"model": "m", "messages": messages, "tools": tools}
            message = (await engine.chat(request))["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            for call in message["tool_calls"]:
                result = await add(**json.loads(call["function"]["arguments"]))
                messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": str(result)}
                )

    return converse


def cray_agents(url: str, client: AsyncOpenAI, turns: int) -> Conversation:
    """Ours."""
    from cray_agents import Agent
    from cray_agents.agent import OpenAIEngine

    agent = Agent(
        name="a", model="m", instructions=INSTRUCTIONS, tools=[add],
        engine=OpenAIEngine(url), max_turns=turns,
    )  # fmt: skip

    async def converse() -> str:
        return str((await agent.run(QUESTION)).output)

    return converse


def openai_agents(url: str, client: AsyncOpenAI, turns: int) -> Conversation:
    """Without tracing, which would send what was said to OpenAI."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("m", openai_client=client)
    agent = Agent(name="a", instructions=INSTRUCTIONS, tools=[function_tool(add)], model=model)

    async def converse() -> str:
        return str((await Runner.run(agent, QUESTION, max_turns=turns)).final_output)

    return converse


def pydantic_ai(url: str, client: AsyncOpenAI, turns: int) -> Conversation:
    """Its limit of requests is 50 by default."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, instructions=INSTRUCTIONS)
    agent.tool_plain(add)

    async def converse() -> str:
        return str((await agent.run(QUESTION)).output)

    return converse


FRAMEWORKS = {
    "cray-agents": cray_agents,
    "cray-agents, loop alone": cray_agents,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
}


async def main(name: str, url: str, rounds: int, turns: int) -> dict[str, list[list[float]]]:
    """Both conversations in turn, after a warm-up."""
    client = AsyncOpenAI(base_url=url, api_key="none")
    base = engine_alone(url) if "alone" in name else bare(client)
    conversations = [base, FRAMEWORKS[name](url, client, turns)]
    for converse in conversations * 5:
        assert await converse() == "432"
    measured: dict[str, list[list[float]]] = {"wall-clock": [], "processor": []}
    for _ in range(rounds):
        wall, processor = [], []
        for converse in conversations:
            begun, used = time.perf_counter(), time.process_time()
            await converse()
            wall.append(time.perf_counter() - begun)
            processor.append(time.process_time() - used)
        measured["wall-clock"].append(wall)
        measured["processor"].append(processor)
    return measured


if __name__ == "__main__":
    which, at, count, length = sys.argv[1:]
    print(json.dumps(asyncio.run(main(which, at, int(count), int(length)))))
