"""Code that runs inside a vLLM server, and imports nothing else of this package."""
