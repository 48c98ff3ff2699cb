"""Of every test: an index cache of its own, the usual umask, and the mark `slow` of the slow ones.

`slow_tests.txt` names the tests that took longer than SLOW seconds in a whole run on two cores.
`pytest --note-slow` on the whole suite writes it anew.
"""

import atexit
import functools
import gc
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


SLOW = 1.0  # seconds of a test function, all its parameters and fixtures together
SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--note-slow", action="store_true", help="write tests/slow_tests.txt anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(SLOW_TESTS.read_text().splitlines())
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)
    # files without a slow test come last: they fill the time until the last long file has ended
    long = {name.partition("::")[0] for name in slow}
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in long)


def pytest_collection_finish() -> None:
    gc.freeze()  # or each process that is forked of this one copies all of it to look through it
    gc.enable()
    atexit.register(gc.unfreeze)  # what is imported is torn down as usual, after pytest's own look


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--note-slow"):
        seconds: defaultdict[str, float] = defaultdict(float)
        for report in (each for kind in terminalreporter.stats.values() for each in kind):
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("[")[0]] += report.duration
        slow = sorted(name for name, taken in seconds.items() if taken > SLOW)
        SLOW_TESTS.write_text("".join(f"{name}\n" for name in slow))


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
