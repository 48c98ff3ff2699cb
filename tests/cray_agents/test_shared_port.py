"""Several processes of one root at one port, and none of another root."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from cray_agents.cli.platform.gateways.shared_port import listen_together
from cray_agents.cli.platform.gateways.sockets import listen
from cray_agents.errors import SetupError
from cray_agents.paths import Home

HOST = "127.0.0.1"


def test_processes_of_a_root_share_a_port_that_no_other_gets(tmp_path: Path) -> None:
    mine, other = Home(tmp_path / "mine"), Home(tmp_path / "other")
    for home in (mine, other):
        home.root.mkdir()
    with ExitStack() as stack:

        def join(home: Home, port: int) -> int:
            listener, seat = listen_together(home, HOST, port)
            stack.enter_context(seat)
            return int(stack.enter_context(listener).getsockname()[1])

        port = join(mine, 0)
        assert join(mine, port) == join(mine, port) == port
        for refused in (lambda: join(other, port), lambda: listen(HOST, port)):
            with pytest.raises(SetupError, match="cannot listen"):
                refused()
    assert join(other, port) == port
    stack.close()
