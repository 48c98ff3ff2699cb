"""A real HTTP server with OpenAI's API that misbehaves on demand."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.scripted_services import server_of


class Server:
    """A real HTTP server with OpenAI's API whose behaviour a test sets.

    `answer(body)` returns a starlette Response, or a completion's dict. `gateway`: whether it is a
    platform's: then it also takes the records of runs, unless `record_status` says otherwise.
    """

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: {}
        self.gateway = True
        self.record_status = 200
        self.requests: list[dict[str, Any]] = []
        self.ports: list[int] = []  # of the clients' ends
        self.headers: list[Headers] = []
        self.request: Request | None = None  # the newest
        self.events: list[dict[str, Any]] = []
        self.url = ""

    @property
    def run_ids(self) -> list[str | None]:
        return [headers.get("x-run-id") for headers in self.headers]

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.ports.append(request.client.port if request.client else 0)
        self.headers.append(request.headers)
        self.request = request
        reply = self.answer(body)
        if hasattr(reply, "__await__"):
            reply = await reply
        return reply if isinstance(reply, Response) else JSONResponse(reply)

    async def platform(self, request: Request) -> Response:
        return JSONResponse({}, 200 if self.gateway else 404)

    async def record(self, request: Request) -> Response:
        if self.record_status == 200:
            self.events += (await request.json())["events"]
        return JSONResponse({}, self.record_status)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/platform", self.platform),
                Route("/v1/trajectories/{run_id}/events", self.record, methods=["POST"]),
            ]
        )


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    web = server_of(server.app(), timeout_keep_alive=600)
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    thread = threading.Thread(target=web.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    yield server
    web.should_exit = web.force_exit = True
    thread.join(10)
