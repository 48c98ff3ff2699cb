"""Retention: find versions that something still refers to, and delete the others' weights."""
