"""Ports: small Protocols between packages, each with two implementations in use.

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

from cray_agents.config.job_section import JobKind
from cray_agents.records import ProbePrompt, Record, WeightChange
from cray_agents.training_commands import CommandResult, TrainingCommand
from cray_agents.training_jobs import Dtype, JobSpec, JobStatus


class ChatEngine(Protocol):
    """A model as an agent uses it."""

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat completion request. Raises EngineError and its subclasses."""
        ...

    def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer as chat completion chunks. Raises as `chat` does, also in mid-stream."""
        ...


@dataclass(slots=True)
class SampledSequence:
    """One sampled sequence: `token_ids` and `logprobs` are parallel, [sampled].

    `logprobs` may be shorter where a request was cut off. `name` distinguishes the sequences of one
    request with several prompts; it ends in `-<place of the prompt>`. `version` sampled the first
    token (empty: the version of the exchange); `seams` list later changes of weights. `routes` and
    `cached_tokens`: as of ModelCall.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    name: str = ""
    version: str = ""
    seams: list[WeightChange] = field(default_factory=list)
    routes: dict[str, Any] | None = None
    cached_tokens: int = 0


@dataclass(slots=True)
class EngineCall:
    """A request in flight to an engine, with its results.

    `path` is the path of its API, such as `/v1/chat/completions`. `request` is its JSON body. `id`
    names it at the engine and in the answer. `version` is the `name@N` that answers: the pool sets
    it, and the engine changes it if weights changed before the first token. `samples` are complete
    when the answer has ended: one sequence per choice. `traceparent` is the W3C header for the
    engine; "" for none. `began` is when a replica was picked for it last, in Unix seconds. `size`:
    about the bytes of the request. `conversation`: calls of one share their beginning, and go to
    one replica; "": the call stands alone.
    """

    path: str
    request: dict[str, Any]
    id: str
    version: str = ""
    samples: list[SampledSequence] = field(default_factory=list)
    capture: bool = True
    traceparent: str = ""
    began: float = 0.0
    size: int = 0
    conversation: str = ""

    @property
    def streams(self) -> bool:
        """True if the client wants server-sent events."""
        return bool(self.request.get("stream"))


@dataclass(frozen=True, slots=True)
class PromptScore:
    """An engine's view of a prompt's tokens but the first: logprobs, and the likeliest tokens.

    `top` is empty where the engine does not tell.
    """

    logprobs: list[float]
    top: list[int] = field(default_factory=list)


class Engine(Protocol):
    """A replica's engine as the pool uses it.

    `load_note` says why the last load read files, where weights were to come directly; "": no
    reason.
    """

    load_note: str

    def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        """Yield the answer's bytes: the JSON in one piece, or whole server-sent events.

        The answer's `model` is the exchange's version. Raises EngineError and its subclasses, also
        in mid-stream. Cancelling the reader ends the request at the engine; a stream's samples are
        then the tokens sampled until then.
        """
        ...

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        """Replace the present weights by a checkpoint's, and drop every cache.

        From then on the engine answers `score` alone, until `resume`. The caller has drained all
        requests. With `keep` requests are paused instead, and go on under the new weights. Returns
        seconds by phase: pause, load. Raises SwapError.
        """
        ...

    async def is_offered(self, job: str) -> bool:
        """Tell whether a training job offers its weights, which it has not published yet."""
        ...

    async def receive(self, job: str, like: Path) -> None:
        """Take the weights that a job offers before it publishes them, and answer nothing.

        The caller has drained all requests. `like`: a checkpoint with the same tensors. A `load` of
        what the job publishes then reads no files, and says as `early` how many seconds this took.
        Raises SwapError, with unknown weights in place.
        """
        ...

    async def resume(self) -> None:
        """Answer requests under the weights last loaded, which are checked now."""
        ...

    async def admit(self, version: str) -> None:
        """Answer requests that expect a version, from whichever gateway. Raises EngineError."""
        ...

    async def refuse(self, version: str = "") -> dict[str, int]:
        """Begin no more answers with a version ("": with any); those under way go on.

        Returns the requests under way by version, of all gateways; empty where the caller is the
        only one that can send any. May be repeated, to see if they have ended. Raises EngineError.
        """
        ...

    async def score(self, prompts: list[list[int]]) -> list[PromptScore]:
        """Score each prompt's tokens except its first, under the loaded weights."""
        ...

    async def sleep(self, level: int) -> None:
        """Give the GPU's memory back; the caller has drained all requests.

        At level 1 the weights are kept in host memory, at level 2 they are dropped: after `wake`
        they must be loaded. Raises EngineError.
        """
        ...

    async def wake(self, checkpoint: Path, version: str) -> None:
        """Take the GPU's memory again; from then on answer `score` alone, until `resume`.

        `checkpoint` and `version` are those that were loaded. Raises EngineError.
        """
        ...

    async def load_adapter(self, adapter: Path, name: str) -> "Engine":
        """Load an adapter beside the weights; return the engine that answers with it.

        `adapter` is the folder of a checkpoint with PEFT's files. `name` begins with the version
        and was never used before. Raises EngineError.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that has no request in flight. Raises EngineError."""
        ...


class Command(Record):
    """A command for a scheduler. `name` is unique for ever: the same name is the same job.

    The scheduler reserves `ranks` times `cpus_per_rank` cores (and with `gpus` a GPU per rank) on
    `nodes` nodes. It starts the command once per node, or once per rank if the site's settings say
    so. `slurm_options` are this command's own, for sbatch. `notice_seconds` is the time before its
    limit at which it gets SIGTERM; None: a minute. `exclude` are nodes to leave out, the most
    important first, as far as enough others are left. `spare_nodes` are held beside `nodes`; the
    command starts on them, too, and outlives the loss of a node.
    """

    name: str
    argv: list[str]
    directory: str
    log: str
    environment: dict[str, str] = Field(default_factory=dict)
    nodes: int = 1
    spare_nodes: int = 0
    ranks: int = 1
    cpus_per_rank: int = 1
    gpus: bool = False
    minutes: int | None = None
    kind: JobKind = "training"
    slurm_options: list[str] = Field(default_factory=list)
    notice_seconds: int | None = Field(None, gt=0)
    exclude: list[str] = Field(default_factory=list)


CommandState = Literal["queued", "running", "succeeded", "failed", "cancelled", "unknown"]


class CommandStatus(Record):
    """A scheduler's report on a command. `unknown`: it never had the command, or forgot it.

    `reason`: why it waits, or how it ended. `node`: the one where it ended, if it is known.
    """

    state: CommandState
    id: str = ""
    exit_code: int | None = None
    reason: str = ""
    node: str = ""


class Scheduler(Protocol):
    """A runner of commands. Names make submission idempotent, also across restarts and crashes."""

    name: str

    def submit(self, command: Command) -> str:
        """Queue a command, unless one of its name is live; return the scheduler's id.

        A name whose command ended before is queued anew. Raises SchedulerError.
        """
        ...

    def status(self, name: str) -> CommandStatus:
        """Return the status of the newest command of that name."""
        ...

    def cancel(self, name: str) -> None:
        """End the command by SIGTERM, then SIGKILL after a grace period. It may have ended."""
        ...


class Trainer(Protocol):
    """A runner of training jobs. A job's id is the hash of its spec: submitting twice is once."""

    def dtype(self, parent: Path) -> Dtype:
        """Return the dtype of a parent's jobs whose spec gives none."""
        ...

    def microbatch(self, parent: Path) -> int:
        """Return the tokens of a micro-batch that suit all weights of a parent, in that dtype."""
        ...

    def submit(self, spec: JobSpec) -> JobStatus:
        """Start the job, unless it is running or finished; return its status.

        A missing dtype or micro-batch is decided first, so the status may have another id than
        `spec`. Raises JobError, and BadInput or NotFound for a spec that cannot be trained.
        """
        ...

    def status(self, job_id: str) -> JobStatus:
        """Return a job's status; restart it if its process died, up to a limit. Raises NotFound."""
        ...

    def unchanged(self) -> set[str]:
        """Return jobs that `status` would do nothing for: they wait or run as it saw them last.

        It reads no file of theirs. Raises SchedulerError.
        """
        ...

    def cancel(self, job_id: str) -> JobStatus:
        """End a job for good. A cancelled job is never started again."""
        ...

    def pause(self, job_id: str) -> JobStatus:
        """Let a job save its state and end its processes, until `resume`.

        The job is `running` until its processes have ended, then `paused`. Pausing twice is once.
        Raises BadInput, code `job_ended`, when there is nothing left to pause.
        """
        ...

    def resume(self, job_id: str) -> JobStatus:
        """Continue a paused job. Raises BadInput, code `job_not_paused`."""
        ...

    def command(self, job_id: str, sequence: int, command: TrainingCommand) -> None:
        """Add a command to a job that trains by commands; the same one again changes nothing.

        Raises NotFound, and BadInput for a job of another kind or a number that is taken or too
        high.
        """
        ...

    def last_command(self, job_id: str) -> int:
        """Return the number of the newest command; 0 without one. Raises NotFound, BadInput."""
        ...

    def result(self, job_id: str, sequence: int) -> CommandResult | None:
        """Return a command's result; None if it has none yet. Raises NotFound."""
        ...


def probe_token_ids(probe: list[ProbePrompt]) -> list[list[int]]:
    """Return the token ids of a probe's prompts, as `Engine.score` takes them."""
    return [prompt.token_ids for prompt in probe]
