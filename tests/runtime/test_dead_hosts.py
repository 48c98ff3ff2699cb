"""A host that is gone refuses nothing: connections hang, and its lease is what tells."""

import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineUnavailable
from cray_agents.ports import EngineCall
from cray_agents.runtime.pool import job_lease, request_router, vllm_http
from cray_agents.runtime.pool.job_lease import JobLease, LapseClock, write_lease
from cray_agents.runtime.pool.replica_certificates import make_authority
from cray_agents.runtime.pool.vllm_http import Http, client_context
from tests.support.routed_replicas import ask, routed


@contextmanager
def place(waiting: int) -> Iterator[str]:
    """A port where nobody answers; with some waiting, its kernel takes no more connections."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0 if waiting else 8)
        for _ in range(waiting):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("scheme", "waiting", "limit"),
    [("http", 8, "CONNECT"), ("https", 8, "CONNECT"), ("https", 0, "HANDSHAKE")],
)
async def test_a_connection_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, waiting: int, limit: str
) -> None:
    assert vllm_http.CONNECT <= 2
    monkeypatch.setattr(vllm_http, limit, 0.0625)
    make_authority(tmp_path / "tls")
    tls = client_context(tmp_path / "tls" / "ca.pem") if scheme == "https" else None
    with place(waiting) as address:
        http = Http(f"{scheme}://{address}", "s3cret", 600, tls)
        with pytest.raises(EngineUnavailable, match=r"no connection within 0\.0625 s") as raised:
            async with http.answer("GET", "/"):
                pass
        await http.close()
    assert isinstance(raised.value.__cause__, TimeoutError)  # by which upkeep and router know it


class Unreachable:
    """No connection to it stands."""

    def __init__(self) -> None:
        self.asked = 0

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        self.asked += 1
        raise EngineUnavailable("no connection") from TimeoutError()
        yield b""


async def test_a_host_that_takes_no_connection_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other call would wait for the same, until the lease of the host lapses."""
    monkeypatch.setattr(request_router, "_SILENT", 600.0)
    gone, engine = Unreachable(), ScriptedEngine(lambda request: "yes")
    router, replicas = routed([gone, engine], shared=False)
    for number in range(20):
        await ask(router, f"run-{number}")
    assert (gone.asked, len(engine.requests)) == (1, 20)
    replicas[1].versions = []  # where no other is left, it is asked again
    router.wait_timeout = 0.0
    with pytest.raises(EngineUnavailable):
        await ask(router, "run")
    assert gone.asked == 2


class Clock:
    """In place of `time`, where a lease is read."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_lease_lapses_from_the_last_answer_or_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Clock()
    monkeypatch.setattr(job_lease, "time", time)
    lease = JobLease(address="127.0.0.1", port=1, host="h", pid=1, attempt=1, beat=7)
    write_lease(tmp_path, lease)
    clock = LapseClock(30)  # it has just answered

    def lapsed(now: float) -> bool:
        time.now = now
        return clock.lapsed(tmp_path)

    assert not lapsed(100) and clock.left == 10  # this process stood still, not the other
    time.now = 0
    clock = LapseClock(30)
    assert not lapsed(20) and clock.left == 10  # the first look tells no heartbeat's time
    assert not lapsed(29) and lapsed(31)
    write_lease(tmp_path, lease.model_copy(update={"beat": 8}))
    assert not lapsed(40) and clock.left == 30
    assert lapsed(71)
    for beat in range(9, 20):  # a supervisor that renews its lease and never answers
        write_lease(tmp_path, lease.model_copy(update={"beat": beat}))
        assert lapsed(10.0 * beat) is (10.0 * beat > 120)
