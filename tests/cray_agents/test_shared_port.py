"""Several processes of one root at one port, and none of another root."""

import os
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cray_agents.errors import SetupError
from cray_agents.paths import Home, host_cache
from cray_agents.server.gateway_ports import listen, listen_together
from tests.support.strangers import as_stranger, listeners, needs_root, taker

HOST = "127.0.0.1"


def test_processes_of_a_root_share_a_port_that_no_other_gets(tmp_path: Path) -> None:
    mine, other = Home(tmp_path / "mine"), Home(tmp_path / "other")
    for home in (mine, other):
        home.root.mkdir()
    with ExitStack() as stack:

        def join(home: Home, port: int) -> int:
            listener, seat = listen_together(home, HOST, port)
            stack.callback(seat.close)
            return int(stack.enter_context(listener).getsockname()[1])

        port = join(mine, 0)
        assert join(mine, port) == join(mine, port) == port
        for refused in (lambda: join(other, port), lambda: listen(HOST, port)):
            with pytest.raises(SetupError, match="cannot listen"):
                refused()
    assert join(other, port) == port
    stack.close()


@needs_root
def test_another_user_takes_neither_the_port_nor_its_lock(tmp_path: Path) -> None:
    home = Home(tmp_path)
    listener, seat = listen_together(home, HOST, 0)
    with listener, closing(seat):
        assert as_stranger(os.access, host_cache() / "locks", os.F_OK) is False
        port = listener.getsockname()[1]
        with taker(tmp_path, (HOST, port)) as stranger:
            again, other_seat = listen_together(home, HOST, port)
            again.close()
            other_seat.close()
        assert stranger.taken() == []
        assert [one for one in listeners(os.getpid()) if str(one.place).startswith("\0")] == []
