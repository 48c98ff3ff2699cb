"""Imports of conversations and runs from files into the store.

import_file.py reads a file in one of its FORMATS and appends its runs. Its records are read by
cray_agents/tasks/record_source.py; import_file.py, sharegpt.py, atif.py and whole_runs.py turn
them into runs, with imported_run.py. Ids are hashes of contents, so a file imported twice adds
nothing the second time. Called by `cray-agents import`.
"""

from cray_agents.runtime.imports.import_file import FORMATS, Imported, import_file
from cray_agents.runtime.imports.imported_run import Importing

__all__ = ["FORMATS", "Imported", "Importing", "import_file"]
