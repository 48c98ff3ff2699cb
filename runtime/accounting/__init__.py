"""Accounting: who held which devices, and what requests, keys and loops cost."""
