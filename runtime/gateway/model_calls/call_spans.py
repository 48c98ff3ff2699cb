"""Call spans: begin and end the span of a model call, where spans are sent at all.

Called by answer.py. Read next: runtime/telemetry/live_traces.py.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.requests import Request

from cray_agents.errors import CrayError, NotFound
from cray_agents.records import Event
from cray_agents.runtime.gateway.model_calls.admission import Ticket
from cray_agents.runtime.gateway.model_calls.call import Call
from cray_agents.runtime.gateway.services import Services


def begin_span(services: Services, request: Request, call: Call, *, named: bool) -> None:
    """Give a call its place in a trace. `named`: the client named the run."""
    if services.traces is not None:
        traceparent = request.headers.get("traceparent")
        call.trace = services.traces.begin(traceparent, call.run_id, named=named)
        call.exchange.traceparent = call.trace.traceparent


def end_span(
    services: Services,
    call: Call,
    ticket: Ticket,
    event: Event | None = None,
    *,
    first: float | None = None,
    failure: str | None = None,
) -> None:
    """Send a call's spans. `event`: its record, if there is one; `failure`: the error's type."""
    if services.traces is None or call.trace is None:
        return
    from cray_agents.runtime.telemetry.live_traces import CUT, CallEnd

    exchange, job = call.exchange, None
    body = {
        "id": call.id,
        "run_id": call.run_id,
        "api": call.api.path,
        "model": exchange.version or exchange.request["model"],
        "started": call.started,
        "seconds": time.perf_counter() - call.clock,
    }
    if event is not None:
        body = services.store.redacted(event).body if services.traces.content else event.body
        failure = body["finish_reason"] if body["finish_reason"] in CUT else failure
    with suppress(NotFound):
        job = services.registry.resolve(str(body["model"])).job
    end = CallEnd(
        body,
        str(exchange.request["model"]),
        job=job,
        waited=ticket.waited,
        began=exchange.began,
        first=first,
        failure=None if failure is None else (failure, ""),
    )
    services.traces.end_call(call.trace, end)


@contextmanager
def failed_span(services: Services, call: Call, ticket: Ticket) -> Iterator[None]:
    """Send a call's spans if the block raises."""
    try:
        yield
    except BaseException as error:  # also of a client that leaves
        code = error.code if isinstance(error, CrayError) else None
        end_span(services, call, ticket, failure=code or type(error).__name__)
        raise
