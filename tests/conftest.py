"""Of every test: an index cache of its own, and the usual umask.

A test that takes more than a second bears the mark `slow`; `make test-fast` leaves it out, and
names those of the others that took as long.
"""

import atexit
import functools
import gc
import os
import signal
from collections.abc import Iterator

import httpcore2
import httpx._transports.default as httpx_transport
import pytest
from hypothesis import HealthCheck, settings

from tests.support.import_server import forking

gc.disable()  # until all tests are collected: a third of the time, for all that is imported stays
os.environ["CRAY_AGENTS_KV_CACHE_GIB"] = "0.125"  # vLLM zeroes it at each start: 0.6 s a GiB
os.environ.pop("COLUMNS", None)  # before the consoles are made: tables are as wide as in a log
# a shell starts what runs in the background deaf to Ctrl-C, and so would be all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
# each of the tests' many HTTP clients would read all authorities' certificates: 25 ms
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
httpx_transport.create_ssl_context = functools.cache(  # type: ignore[attr-defined]
    httpx_transport.create_ssl_context  # type: ignore[attr-defined]
)
# no test fails because the machine is slow
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


LONG = ("vllm", "slurm", "megatron", "slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files without a slow test come last: they fill the time until the last long one ends."""
    long = {item.path for item in items if any(item.get_closest_marker(name) for name in LONG)}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    gc.freeze()  # or each process that is forked of this one copies all of it to look through it
    gc.enable()
    atexit.register(gc.unfreeze)  # what is imported is torn down as usual, after pytest's own look


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


@pytest.fixture(scope="module")
def forked_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork vLLM's servers from a process that has imported it: a sixth of the time of a start.

    It is for tests that need a server, and not for those about its process.
    """
    with forking(tmp_path_factory):
        yield


@pytest.fixture(scope="module")
def forked_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork the launchers of jobs and sessions likewise, for tests that are not about them."""
    with forking(tmp_path_factory, "jobs"):
        yield
