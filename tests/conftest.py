"""An index cache of its own for every test, used by the processes it starts too."""

import os
import signal
from collections.abc import Iterator

import pytest

os.environ.pop("COLUMNS", None)  # before the consoles are made: tables are as wide as in a log
# a shell starts what runs in the background deaf to Ctrl-C, and so would be all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """What most people have; a command that ran in the test's process leaves a stricter one."""
    os.umask(0o022)
    yield
    os.umask(0o022)


@pytest.fixture(scope="session", autouse=True)
def index_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRAY_AGENTS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
