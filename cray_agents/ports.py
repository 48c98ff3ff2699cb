"""The seams: small Protocols with two used implementations each.

    ChatEngine   answers chat requests          OpenAIEngine | ScriptedEngine
    Engine       answers requests of any kind
                 and takes new weights          VllmEngine (HTTP) | ScriptedEngine
    Scheduler    runs a command somewhere       Slurm | LocalProcesses
    Trainer      turns a JobSpec into weights   MegatronTrainer | ScriptedTrainer

Requests, completions and stream chunks are dicts in the shapes of OpenAI's chat completions.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from cray_agents.records import ProbePrompt, Record, WeightChange
from cray_agents.training_jobs import JobSpec, JobStatus


class ChatEngine(Protocol):
    """What an agent needs of a model."""

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat completion request. Raises EngineError and its kinds."""
        ...

    def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer as chat completion chunks. Raises as `chat` does, also in mid-stream."""
        ...


@dataclass(slots=True)
class SampledSequence:
    """One sampled sequence: `token_ids` and `logprobs` are parallel, [sampled].

    `logprobs` may be shorter where a request was cut off. `name` tells the sequences of one
    request with several prompts apart: it ends in `-<place of the prompt>`. `version` sampled the
    first token, and what `seams` tell those after it; empty: the exchange's did.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    name: str = ""
    version: str = ""
    seams: list[WeightChange] = field(default_factory=list)


@dataclass(slots=True)
class EngineCall:
    """One request to an engine on its way, and what is learned of it.

    `path` says which API it speaks, such as `/v1/chat/completions`; `request` is its JSON body;
    `id` names it at the engine and in the answer. `version` is the `name@N` that answers: the pool
    sets it, and the engine, if weights changed before the first token. `samples` are complete when
    the answer has ended: a sequence per choice.
    """

    path: str
    request: dict[str, Any]
    id: str
    version: str = ""
    samples: list[SampledSequence] = field(default_factory=list)
    capture: bool = True

    @property
    def streams(self) -> bool:
        """Whether the client wants server-sent events."""
        return bool(self.request.get("stream"))


class Engine(Protocol):
    """What the pool needs of a replica's engine."""

    def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        """The answer's bytes: whole JSON in one piece, or whole server-sent events as they come.

        Its `model` is the exchange's version. Raises EngineError and its kinds, also in mid-stream.
        Who is cancelled while reading it ends the request at the engine; of a stream the samples
        are then what was sampled until then.
        """
        ...

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        """Put a checkpoint's weights in the place of the present ones; no cache outlives it.

        From then on `score` alone is answered, until `resume`. The caller has drained all requests;
        or, to `keep` them, they stand still and go on under the new weights. Returns seconds by
        phase: pause, load. Raises SwapError.
        """
        ...

    async def resume(self) -> None:
        """The weights last loaded are proven: answer requests under them."""
        ...

    async def score(self, prompts: list[list[int]]) -> list[list[float]]:
        """Logprobs of each prompt's tokens but its first, under the weights now loaded."""
        ...


class Command(Record):
    """A command for a scheduler. `name` is unique for ever: the same name is the same job.

    `ranks` processes' worth of `cpus_per_rank` cores (and a GPU each, if `gpus`) are reserved on
    `nodes` nodes; the command itself is started once per node.
    """

    name: str
    argv: list[str]
    directory: str
    log: str
    environment: dict[str, str] = Field(default_factory=dict)
    nodes: int = 1
    ranks: int = 1
    cpus_per_rank: int = 1
    gpus: bool = False
    minutes: int | None = None


CommandState = Literal["queued", "running", "succeeded", "failed", "cancelled", "unknown"]


class CommandStatus(Record):
    """What a scheduler says of a command. `unknown`: it never had it, or has forgotten it."""

    state: CommandState
    id: str = ""
    exit_code: int | None = None
    reason: str = ""


class Scheduler(Protocol):
    """Where commands run. Names make submission idempotent, also across restarts and crashes."""

    name: str

    def submit(self, command: Command) -> str:
        """Queue a command, or find it when its name is live already; returns the scheduler's id.

        A name whose command ended before is queued anew. Raises SchedulerError.
        """
        ...

    def status(self, name: str) -> CommandStatus:
        """Where the newest command of that name stands."""
        ...

    def cancel(self, name: str) -> None:
        """End the command: SIGTERM, then SIGKILL after a grace period. Not an error if it ended."""
        ...


class Trainer(Protocol):
    """Where training jobs run. A job's id is the hash of its spec: submitting twice is once."""

    def submit(self, spec: JobSpec) -> JobStatus:
        """Start the job, or find it; a finished job is returned as it is.

        Raises JobError, and BadInput or NotFound for what cannot be trained.
        """
        ...

    def status(self, job_id: str) -> JobStatus:
        """Where it stands; restarts a job whose process died, up to a limit. Raises NotFound."""
        ...

    def cancel(self, job_id: str) -> JobStatus:
        """End it for good: a cancelled job is never started again."""
        ...

    def pause(self, job_id: str) -> JobStatus:
        """Let it save where it stands and end its processes; it stays so until `resume`.

        It is `running` until they have ended, then `paused`. Pausing twice is once. Raises
        BadInput, code `job_ended`, when there is nothing left to pause.
        """
        ...

    def resume(self, job_id: str) -> JobStatus:
        """Go on from where it was paused. Raises BadInput, code `job_not_paused`."""
        ...


def golden(probe: list[ProbePrompt]) -> list[list[int]]:
    """The token ids of a probe's prompts, as `Engine.score` takes them."""
    return [prompt.token_ids for prompt in probe]
