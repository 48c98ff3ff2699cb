"""Scaling: who has the nodes, serving or training; simulated on traces, and written in a ledger."""
