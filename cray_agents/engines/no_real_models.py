"""Guard for tests: refuse requests to real models.

    no_real_models()                # in a conftest.py: from here on, in the whole process

    with no_real_models():          # or for as long as a block lasts
        ...

The guard is the environment variable CRAY_AGENTS_NO_REAL_MODELS, so it also covers other threads
and processes that a test starts. Setting it to 1 guards a whole test suite. Scripted and replayed
engines answer as before. Called by openai_engine.py.
"""

import os

from cray_agents.errors import RealModelCall

VARIABLE = "CRAY_AGENTS_NO_REAL_MODELS"


class no_real_models:  # noqa: N801 - it reads as a function
    """Make each request to a model server raise RealModelCall, which no run hides.

    As a context manager the guard ends with the block.
    """

    def __init__(self) -> None:
        self._before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "1"

    def __enter__(self) -> None:
        os.environ[VARIABLE] = "1"

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self._before


def check_real_model(server: str) -> None:
    """Raise RealModelCall if the guard is up. Called before each request to a model server."""
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        raise RealModelCall(
            f"a model at {server} was about to be asked, which {VARIABLE} forbids: give the agent "
            "another engine, as in agent.override(engine=ScriptedEngine([...]))"
        )
