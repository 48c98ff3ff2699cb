"""03: an agent of smolagents, captured unmodified: all it knows of the gateway is `api_base`.

With a platform that runs (`cray-agents up --model DIR --name calc`), in an environment of its own:
    requirements/environment.sh foreign
    .venv-foreign/bin/python cookbook/03_any_framework/with_smolagents.py [--stream] [--run NAME]

It tells the model of earlier tool calls in plain text, and calls a tool for its answer too. Its
system prompt is long: the model needs a context of some thousand tokens (`max_model_len`).
"""

import sys
from operator import add, mul, sub

from captured import API_KEY, base_url, show
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> int:
    """Calculate with two numbers.

    Args:
        expression: such as '47 + 385'.
    """
    left, symbol, right = expression.split()
    return {"+": add, "-": sub, "*": mul}[symbol](int(left), int(right))


agent = ToolCallingAgent(
    tools=[calculator],
    model=OpenAIModel("calc", api_base=base_url(), api_key=API_KEY),
    stream_outputs="--stream" in sys.argv,
    verbosity_level=LogLevel.ERROR,
)

if __name__ == "__main__":
    print(agent.run("What is 47 + 385?"))
    show()
