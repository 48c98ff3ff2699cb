"""Engines of the pool: vLLM servers of this host, their HTTP, and the seam before all engines."""
