"""A guard for tests: nobody asks a real model by mistake.

    @pytest.fixture(autouse=True)
    def guarded():
        with no_real_models():
            yield

It is the environment variable CRAY_AGENTS_NO_REAL_MODELS, so that it also holds in other threads
and in processes that a test starts; setting it to 1 guards a whole test suite. Scripted and
replayed engines answer as before. Asked by openai_engine.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from cray_agents.errors import RealModelCall

VARIABLE = "CRAY_AGENTS_NO_REAL_MODELS"


@contextmanager
def no_real_models() -> Iterator[None]:
    """Within the block a request to a model server raises RealModelCall, out of the run too."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def check_real_model(server: str) -> None:
    """Raise RealModelCall if the guard is up. Called before each request to a model server."""
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        raise RealModelCall(
            f"a model at {server} was about to be asked, which {VARIABLE} forbids: give the agent "
            "another engine, as in agent.override(engine=ScriptedEngine([...]))"
        )
