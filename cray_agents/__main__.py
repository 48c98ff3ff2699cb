"""`python -m cray_agents` is `cray-agents`."""

from cray_agents.cli import main

main()
