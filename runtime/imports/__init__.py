"""Conversations and runs from files, as runs of the store: start from what you have.

importing.py reads a file in one of its FORMATS and appends it. source.py finds the records of a
file; chats.py, sharegpt.py, atif.py and whole.py make runs of them, with making.py. Importing a
file twice imports it once: names come from contents. Called by `cray-agents import`.
"""

from cray_agents.runtime.imports.import_file import FORMATS, Imported, import_file
from cray_agents.runtime.imports.imported_run import Importing

__all__ = ["FORMATS", "Imported", "Importing", "import_file"]
