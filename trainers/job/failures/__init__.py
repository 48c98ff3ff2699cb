"""Failures: the verdict on a job that ended or hangs, and what keeps bad nodes out of it."""
