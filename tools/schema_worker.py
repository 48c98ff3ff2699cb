"""Checks values against JSON schemas, in a process that ends when a check takes too long.

Started by schema_checks.py; imports nothing of this package. It reads lines of JSON, `[schema]` or
`[schema, value]`, the schema as text, and answers each with a line of JSON: null, or what is wrong
with the schema, or with the value.
"""

import functools
import json
import resource
import signal
import sys
from typing import Any

import jsonschema
import referencing
from jsonschema.validators import validator_for

SAID = 300  # characters of a message
MEMORY = 1 << 29  # bytes


def main() -> None:
    """Serve until the pipe is closed. `argv[1]`: seconds of processor time for a check."""
    seconds = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody catches its signal: the end
        schema, *value = json.loads(line)
        found = wrong_value(schema, value[0]) if value else wrong_schema(schema)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), flush=True)


def wrong_schema(text: str) -> str | None:
    """What is wrong with a schema."""
    schema = json.loads(text)
    try:
        validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        return str(error.message)[:SAID]
    return None


def wrong_value(text: str, value: Any) -> str | None:
    """What is wrong with a value by a schema, in words for a model."""
    try:
        error = jsonschema.exceptions.best_match(validator_of(text).iter_errors(value))
    except referencing.exceptions.Unresolvable as unresolved:
        return f"its schema refers to {unresolved.ref!r}, which is not in it"
    if error is None:
        return None
    place = "".join(f"{part}: " for part in error.absolute_path)
    return f"{place}{error.message[:SAID]}"


@functools.lru_cache(maxsize=64)
def validator_of(text: str) -> Any:
    """The validator of a schema; references out of it are not followed."""
    schema = json.loads(text)
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, registry=referencing.Registry())


if __name__ == "__main__":
    main()
