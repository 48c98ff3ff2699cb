"""Promotion: a paired sequential test of candidates, and the e-processes behind it."""
