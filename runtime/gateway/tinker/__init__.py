"""Tinker's wire API: the requests of the `tinker` client, and their records."""
