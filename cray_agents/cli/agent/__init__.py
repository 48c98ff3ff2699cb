"""`run`, `chat` and `mcp`."""
