"""The export formats whose files are JSON lines, by name.

`FORMATS["openai"].write_run(run)` gives a run's records and the codes of their losses, which LOSSES
explains. `line_of` makes a line of a record; `run_of_demonstration` makes a run of a dataset's
demonstration. Called by exporter.py, jsonl_files.py and dataset_source.py.
"""

from collections.abc import Mapping
from types import MappingProxyType

from cray_agents.runtime.exports.atif import ATIF
from cray_agents.runtime.exports.conversation import run_of_demonstration
from cray_agents.runtime.exports.export_format import LOSSES, LineFormat, Written, line_of
from cray_agents.runtime.exports.jsonl import JSONL
from cray_agents.runtime.exports.openai_lines import OPENAI, OPENAI_PREFERENCE
from cray_agents.runtime.exports.otel import OTEL
from cray_agents.runtime.exports.sharegpt import SHAREGPT
from cray_agents.runtime.exports.trl import TRL, TRL_PREFERENCE, TRL_PROMPT_COMPLETION

__all__ = ["FORMATS", "LOSSES", "LineFormat", "Written", "line_of", "run_of_demonstration"]

FORMATS: Mapping[str, LineFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            JSONL,
            OPENAI,
            OPENAI_PREFERENCE,
            TRL,
            TRL_PROMPT_COMPLETION,
            TRL_PREFERENCE,
            SHAREGPT,
            ATIF,
            OTEL,
        )
    }
)
