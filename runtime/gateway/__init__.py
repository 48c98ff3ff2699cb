"""The HTTP door: OpenAI-compatible, and ours."""
