"""Redaction: replace sensitive text in events before they are written, and count it.

redactor.py is the entry point, and sensitive.py has the patterns.
"""

from cray_agents.runtime.store.redaction.redactor import Redactor

__all__ = ["Redactor"]
