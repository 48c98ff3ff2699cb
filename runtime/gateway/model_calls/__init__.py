"""A model call: admission, the sampling APIs, streams, idempotency."""
