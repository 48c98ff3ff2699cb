"""The shares of several gateways in what one alone may let in."""

import pytest

from cray_agents.runtime.gateway import gateway_shares
from cray_agents.runtime.gateway.gateway_shares import GatewayShares


def test_alone_a_gateway_has_all() -> None:
    assert GatewayShares().own(0) == GatewayShares().own(1000) == 1.0


def test_shares_are_as_demands_and_never_more_than_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = GatewayShares()
    shares.note("a", 89)
    shares.note("b", 0)
    assert shares.of("a", 8) == 0.9
    assert shares.own(8) == 0.09
    assert shares.of("a", 8) + shares.of("b", 8) + shares.own(8) == pytest.approx(1.0)
    assert shares.demand == 89
    shares.note("a", 0)
    assert shares.of("a", 0) == shares.of("b", 0) == shares.own(0) == pytest.approx(1 / 3)
    monkeypatch.setattr(gateway_shares, "FORGOTTEN", 0.0)
    assert (shares.demand, shares.own(5)) == (0, 1.0)
