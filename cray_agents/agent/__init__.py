"""An agent and one run of it: turns, tools, hooks, handoffs, sessions. Start at agent.py."""
