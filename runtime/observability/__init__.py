"""Observability: numbers, their history, boards, traces and timelines of a platform."""
