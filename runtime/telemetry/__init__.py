"""Telemetry: numbers, traces, an audit log, timelines and the load of devices."""
