"""Commands that take an agent: `run`, `chat` and `mcp`."""
