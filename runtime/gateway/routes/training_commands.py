"""Training commands: a client's own training loop, one command after the other.

The client numbers its commands. The Trainer writes them into their job's folder, and keeps the job
running while one waits for its result.
"""

import asyncio
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.bodies import (
    answer_read,
    json_response,
    number,
    path_id,
    path_number,
    read_record,
)
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import COUNT, TEXT, Described, count_up_to, object_of
from cray_agents.runtime.gateway.services import Services
from cray_agents.training_commands import CommandRequest, CommandResult
from cray_agents.training_jobs import JobState

LONGEST_WAIT = 30  # seconds that a question for a result is held
LOOK = 0.005  # seconds between two looks for it

router = Router("Training")


@router.post(
    "/v1/jobs/{job_id}/commands",
    Role.train,
    body=CommandRequest,
    answer=object_of({"job_id": TEXT, "sequence": COUNT}),
    fails="404 not_found, 400 invalid_value",
)
async def send_training_command(services: Services, request: Request) -> Response:
    """Add the next command of a job that trains by commands.

    `sequence` counts a job's commands from 1. Sending the same command again changes nothing.
    Another command under a number that is taken is refused: a second client writes to the job.
    """
    job_id = path_id(request, "job_id", "job")
    sent = await read_record(CommandRequest, request, services.max_body)
    await asyncio.to_thread(services.trainer.command, job_id, sent.sequence, sent.command)
    return json_response({"job_id": job_id, "sequence": sent.sequence})


@router.get(
    "/v1/jobs/{job_id}/commands",
    Role.train,
    answer=object_of({"job_id": TEXT, "last": COUNT}),
    fails="404 not_found",
)
async def count_training_commands(services: Services, request: Request) -> Response:
    """Return the number of a job's newest command, 0 without one."""
    job_id = path_id(request, "job_id", "job")
    last = await asyncio.to_thread(services.trainer.last_command, job_id)
    return json_response({"job_id": job_id, "last": last})


@router.get(
    "/v1/jobs/{job_id}/commands/{sequence}",
    Role.train,
    query={"wait": Described(count_up_to(LONGEST_WAIT), "Seconds to wait for the result.")},
    answer=object_of({"state": TEXT, "result": {"anyOf": [CommandResult, {"type": "null"}]}}),
    fails="404 not_found",
)
async def read_training_result(services: Services, request: Request) -> Response:
    """Return the result of a command, null while there is none, and the job's state."""
    job_id = path_id(request, "job_id", "job")
    sequence = path_number(request, "sequence", "command")
    wait = number(query(request), "wait", 0, LONGEST_WAIT)
    state, result = await await_result(services, job_id, sequence, wait)
    if result is None:
        return json_response({"state": state, "result": None})
    dump = partial(result.model_dump, mode="json")
    return await answer_read(request, lambda: {"state": state, "result": dump()})


async def await_result(
    services: Services, job_id: str, sequence: int, seconds: float
) -> tuple[JobState, CommandResult | None]:
    """Return a job's state, and a command's result if it comes in time. Raises NotFound."""
    end, trainer = time.monotonic() + seconds, services.trainer
    state = (await asyncio.to_thread(trainer.status, job_id)).state  # starts what died
    while (result := await asyncio.to_thread(trainer.result, job_id, sequence)) is None:
        if time.monotonic() > end:
            break
        await asyncio.sleep(LOOK)
    return state, result
