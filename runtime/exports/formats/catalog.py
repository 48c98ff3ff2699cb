"""The export formats by name. Called by exporter.py; an added format is listed here."""

from cray_agents.runtime.exports.export_files import TableFormat
from cray_agents.runtime.exports.export_format import LineFormat
from cray_agents.runtime.exports.formats.atif import ATIF
from cray_agents.runtime.exports.formats.fine_tuning_lines import (
    OPENAI,
    OPENAI_PREFERENCE,
    TRL,
    TRL_PREFERENCE,
    TRL_PROMPT_COMPLETION,
)
from cray_agents.runtime.exports.formats.html import HTML
from cray_agents.runtime.exports.formats.huggingface import HUGGINGFACE
from cray_agents.runtime.exports.formats.inspect_eval import EVAL
from cray_agents.runtime.exports.formats.jsonl import JSONL, OPENENV
from cray_agents.runtime.exports.formats.otel import OTEL
from cray_agents.runtime.exports.formats.sharegpt import SHAREGPT
from cray_agents.runtime.exports.formats.tokens import TOKENS
from cray_agents.runtime.exports.formats.verl import VERL

_LINES = (JSONL, OPENAI, OPENAI_PREFERENCE, TRL, TRL_PROMPT_COMPLETION, TRL_PREFERENCE, SHAREGPT,
          ATIF, OTEL, OPENENV, EVAL)  # fmt: skip
_TABLES = (TOKENS, VERL, HUGGINGFACE)

LINE_FORMATS = {each.name: each for each in _LINES}
FORMATS: dict[str, LineFormat | TableFormat] = {
    **LINE_FORMATS,
    **{each.name: each for each in _TABLES},
    HTML.name: HTML,
}
