"""The HTTP client of a running platform."""
