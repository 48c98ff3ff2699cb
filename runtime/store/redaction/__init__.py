"""Redaction: replace sensitive text in events before they are written, and count it.

redactor.py is the entry point, sensitive.py has the patterns, and replies.py redacts recorded
answers, which are JSON or event streams in a string.
"""

from cray_agents.runtime.store.redaction.redactor import Redactor

__all__ = ["Redactor"]
