"""03: an agent of openai-agents, captured unmodified: all it knows of the gateway is `base_url`.

With a platform that runs (`cray-agents up --model DIR --name calc`), in an environment of its own:
    requirements/environment.sh foreign
    .venv-foreign/bin/python cookbook/03_any_framework/with_openai_agents.py [--stream] [--run NAME]
"""

import asyncio
import sys
from operator import add, mul, sub

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from captured import API_KEY, base_url, show
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

set_tracing_disabled(True)  # else the framework sends its traces to OpenAI


@function_tool
def calculator(expression: str) -> int:
    """Calculate with two numbers.

    Args:
        expression: such as '47 + 385'.
    """
    left, symbol, right = expression.split()
    return {"+": add, "-": sub, "*": mul}[symbol](int(left), int(right))


client = AsyncOpenAI(base_url=base_url(), api_key=API_KEY)
agent = Agent(
    name="calc",
    instructions="Use the calculator. Answer with the number.",
    tools=[calculator],
    model=OpenAIChatCompletionsModel("calc", openai_client=client),
)


async def ask_streaming(question: str) -> None:
    """Print the answer as it comes."""
    async for event in Runner.run_streamed(agent, question).stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            print(event.data.delta, end="", flush=True)
    print()


if __name__ == "__main__":
    if "--stream" in sys.argv:
        asyncio.run(ask_streaming("What is 47 + 385?"))
    else:
        print(Runner.run_sync(agent, "What is 47 + 385?").final_output)
    show()
