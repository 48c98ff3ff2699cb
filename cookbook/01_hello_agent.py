"""01: an agent with one tool.

With a platform that runs (`cray-agents up --model DIR --name calc`), or any server with OpenAI's
API at $CRAY_AGENTS_URL:    python cookbook/01_hello_agent.py
With no model at all, its part read from a script:    python cookbook/01_hello_agent.py --scripted
"""

import sys

from cray_agents import Agent
from cray_agents.testing import ScriptedEngine, tool_call
from cray_agents.tools.calculator import calculator

agent = Agent(
    name="calc",
    instructions="Use the calculator. Answer with the number.",
    tools=[calculator],
    model="calc",
    output_type=int,
)

if __name__ == "__main__":
    if "--scripted" in sys.argv:
        says = ScriptedEngine([tool_call("calculator", expression="47 + 385"), "432"])
        agent = agent.override(engine=says)

    run = agent.run_sync("What is 47 + 385?")

    for turn in run.trajectory.turns:
        for call in turn.tool_calls:
            print(call.name, call.arguments, "->", call.error or call.result)
    print(run.model, run.stop_reason, "output:", run.output)
    if run.error:
        sys.exit(f"{run.error.type}: {run.error.message}")
