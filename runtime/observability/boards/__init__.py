"""Boards and alerts for Prometheus and Grafana, described once in Python."""
