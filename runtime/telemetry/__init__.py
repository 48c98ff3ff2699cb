"""Telemetry: numbers, traces, an audit log and timelines."""
