"""Observability: numbers, traces, an audit log and timelines of a platform."""
