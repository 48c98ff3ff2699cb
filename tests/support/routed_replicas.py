"""A router without a pool over given engines, and a call of a conversation."""

from collections.abc import Sequence
from typing import Any

from cray_agents.ports import Engine
from cray_agents.runtime.background import ChangeNotifier
from cray_agents.runtime.pool.request_router import InFlightRequests, RequestRouter
from tests.support.scripted_gateway import says
from tests.support.scripted_pool import exchange


async def ask(pool: Any, conversation: str, version: str = "m@1", begin: str = "") -> None:
    asked = exchange(user=conversation, messages=says(begin or conversation))
    asked.conversation = conversation
    _ = [piece async for piece in pool.answer(version, asked)]


class Named:
    """A replica of a router without a pool."""

    losses, why_lost, contents = 0, "", ""

    def __init__(self, engine: Any) -> None:
        self.requests = InFlightRequests(ChangeNotifier())
        self.versions = ["m@1"]
        self._engine = engine

    @property
    def in_flight(self) -> int:
        return self.requests.total

    def engine(self, version: str) -> Engine:
        engine: Engine = self._engine
        return engine

    async def wait_for_loss(self, since: int, seconds: float) -> bool:
        return False


def routed(engines: Sequence[Any], *, shared: bool = True) -> tuple[RequestRouter, list[Any]]:
    replicas: list[Any] = [Named(engine) for engine in engines]
    router = RequestRouter(replicas, ChangeNotifier(), 60.0)
    router.shared = shared
    return router, replicas
