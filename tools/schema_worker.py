"""Schema worker: a script that checks values against JSON schemas, each with a time limit.

Started by schema_checks.py; imports nothing of this package. It reads lines of JSON, `[schema]` or
`[schema, value]`, with the schema as text. It answers each with a line of JSON: null, or the
problem of the schema or of the value.
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

MAX_MESSAGE = 300  # characters
MEMORY = 1 << 29  # bytes


def main() -> None:
    """Serve until the pipe is closed. `argv[1]`: seconds of processor time for a check."""
    seconds = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends this process
        schema, *value = json.loads(line)
        problem = value_problem(schema, value[0]) if value else schema_problem(schema)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(problem), flush=True)


def schema_problem(text: str) -> str | None:
    """Return the problem of a schema, or None."""
    schema = json.loads(text)
    try:
        validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        return str(error.message)[:MAX_MESSAGE]
    return None


def value_problem(text: str, value: Any) -> str | None:
    """Return the problem of a value under a schema in words for a model, or None."""
    try:
        error = jsonschema.exceptions.best_match(validator_of(text).iter_errors(value))
    except referencing.exceptions.Unresolvable as unresolved:
        return f"its schema refers to {unresolved.ref!r}, which is not in it"
    if error is None:
        return None
    place = "".join(f"{part}: " for part in error.absolute_path)
    return f"{place}{error.message[:MAX_MESSAGE]}"


@functools.lru_cache(maxsize=64)
def validator_of(text: str) -> Any:
    """Return the validator of a schema, which follows no references out of the schema."""
    schema = json.loads(text)
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, registry=referencing.Registry())


if __name__ == "__main__":
    main()
