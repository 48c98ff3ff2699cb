"""03: an agent of pydantic-ai, captured unmodified: all it knows of the gateway is `base_url`.

With a platform that runs (`cray-agents up --model DIR --name calc`), in an environment of its own:
    requirements/environment.sh foreign
    .venv-foreign/bin/python cookbook/03_any_framework/with_pydantic_ai.py [--stream] [--run NAME]
"""

import asyncio
import sys
from operator import add, mul, sub

from captured import API_KEY, base_url, show
from pydantic_ai import Agent, PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=base_url(), api_key=API_KEY)
agent = Agent(
    OpenAIChatModel("calc", provider=provider),
    instructions="Use the calculator. Answer with the number.",
)


@agent.tool_plain
def calculator(expression: str) -> int:
    """Calculate with two numbers.

    Args:
        expression: such as '47 + 385'.
    """
    left, symbol, right = expression.split()
    return {"+": add, "-": sub, "*": mul}[symbol](int(left), int(right))


async def ask_streaming(question: str) -> None:
    """Print the answer as it comes."""
    async with agent.run_stream_events(question) as events:
        async for event in events:
            match event:
                case PartStartEvent(part=TextPart(content=text)):
                    print(text, end="", flush=True)
                case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
                    print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    if "--stream" in sys.argv:
        asyncio.run(ask_streaming("What is 47 + 385?"))
    else:
        print(agent.run_sync("What is 47 + 385?").output)
    show()
