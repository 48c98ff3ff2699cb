"""Records: plain immutable data of runs and models that goes to disk and over HTTP as JSON.

    Task -> Run -> Trajectory(Turn(ModelCall, ToolCall...)...) -> Reward
    queries.DatasetRecipe -> dataset;  JobSpec -> training job -> checkpoint -> ModelVersion

All other modules import this one; it imports messages.py alone. Times are unix seconds,
durations seconds.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import to_json
from typing_extensions import TypeVar

from cray_agents.cell_html import run_html
from cray_agents.messages import Input as Input
from cray_agents.messages import Message as Message
from cray_agents.messages import read_input, text_of_input

ITERATION = AliasChoices("iteration", "generation")  # the latter in runs of earlier versions
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # a whole number that the index can hold
#: The type of an agent's answers: its `output_type`, and the `output` of its runs.
Output = TypeVar("Output", default=Any)


def canonical(value: Any) -> bytes:
    """Return JSON with sorted keys and no spaces: equal values give equal bytes on any machine."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(value: Any, length: int = 16) -> str:
    """Return the first `length` hex digits of the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()[:length]


def new_id(prefix: str) -> str:
    """Return a fresh name such as `run_018f...`. Names made later sort later."""
    return f"{prefix}_{int(time.time() * 1000):011x}{os.urandom(7).hex()}"


class Record(BaseModel):
    """Immutable data. Unknown fields are ignored, so that an older reader can read a newer file."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StrictRecord(Record):
    """Immutable data written by hand. An unknown field, infinity or NaN is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StopReason(StrEnum):
    """The reason why a run ended. `max_tokens`: those of the run, or of its last answer."""

    completed = "completed"
    max_turns = "max_turns"
    max_tokens = "max_tokens"
    timeout = "timeout"
    error = "error"
    cancelled = "cancelled"
    unanswered = "unanswered"  # captured: its last call asks for tools, and no result came (yet)


Split = Literal["train", "holdout", "test"]


def task_id(data: Mapping[str, Any]) -> str:
    """Return the default id of a task with these fields."""
    known = [read_input(data["input"]), data.get("target")]
    identity, metadata = data.get("identity"), data.get("metadata")
    if isinstance(identity, Sequence) and isinstance(metadata, Mapping) and identity:
        known.append(world_of(metadata, identity))
    return digest(known)


def world_of(metadata: Mapping[str, Any], identity: Sequence[str]) -> str:
    """Return a hash of the values of the keys `identity` in a task's metadata."""
    return digest({key: metadata.get(key) for key in identity}, 32)


class Task(StrictRecord):
    """An input to an agent. The id defaults to a hash of input and target.

    The input is a text, or a list of messages as OpenAI, TRL and verifiers have them. It ends with
    a message of the user or of a tool; `text` is then the text of its user's last message. A system
    message may stand first: it follows the agent's instructions, in one system message with them.

    `identity` names the keys of the metadata that distinguish tasks with the same input:
    `Task(input="Find the way out.", metadata={"maze": 7}, identity=["maze"])`. Their values enter
    the id, and such tasks are compared by them. A held-out maze then keeps that maze out of
    training, not all mazes.
    """

    input: str | list[Message]
    target: Any = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    split: Split = "train"
    id: str = ""
    identity: list[str] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _set_default_id(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("id") and "input" in data:
            with suppress(TypeError, ValueError):  # the checks of the fields say what is wrong
                return {**data, "id": task_id(data)}
        return data

    @model_validator(mode="after")
    def _check_identity(self) -> "Task":
        if missing := [key for key in self.identity if key not in self.metadata]:
            have = ", ".join(map(repr, self.metadata)) or "none"
            raise ValueError(f"identity: {missing[0]!r} is no key of the metadata; there is {have}")
        if not self.id:
            raise ValueError(f"identity: JSON cannot hold the values of {self.identity}")
        return self

    @field_validator("input", mode="before")
    @classmethod
    def _read_input(cls, value: Any) -> Any:
        return read_input(value)

    @field_validator("target", "metadata")
    @classmethod
    def _check_json(cls, value: Any, field: ValidationInfo) -> Any:
        try:  # a task goes to disk and over HTTP, and its id may be a hash of the target
            canonical(value) if field.field_name == "target" else to_json(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"JSON cannot hold it: {error}") from None
        return value

    @property
    def text(self) -> str:
        """The text that stands for the input: itself, or that of its user's last message."""
        return text_of_input(self.input)

    @property
    def world(self) -> str | None:
        """A hash of the values that `identity` names; None if the input alone makes the task."""
        return world_of(self.metadata, self.identity) if self.identity else None


class Usage(Record):
    """Tokens, summed over the model calls of a run."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0


class Redaction(Record):
    """A count of pieces of one kind that were removed from a record before it was written."""

    kind: str
    count: int


class WeightChange(Record):
    """A change of weights: `model` (`name@version`) sampled a call's tokens from index `at` on."""

    at: int
    model: str


class Routes(Record):
    """The experts of a mixture that each token of a call was sent to, but for its last one.

    `data`: base64 of zlib of [tokens, layers, experts] in 16 bits, little-endian. `experts`: those
    of a token. Layers without experts have any numbers.
    """

    layers: int = Field(gt=0)
    experts: int = Field(gt=0)
    data: str


class ModelCall(Record):
    """One request to a model, with the exact tokens it read and sampled.

    `token_ids` and `logprobs` are parallel: [sampled]. `logprobs` are of the distribution that was
    sampled from. `model` is `name@version`. `api` is the path of the API that the request came
    through; the messages have the shape of chat completions for any API. `seams` list the changes
    of weights during the answer; `model` sampled the tokens before the first. If something was
    `redacted` from its texts, the three token lists are empty, as they would reveal it. `owner` is
    the id of the request's API key, if it had one. `retry`: the client's library said that it sends
    the request again. `error` is what broke the answer off. `routes`: of replicas that return them.
    `cached_tokens`: of the prompt, which the replica's KV cache had.
    """

    id: str
    run_id: str
    model: str
    api: str = "/v1/chat/completions"
    messages: list[Message]
    message: Message
    tools: list[dict[str, Any]] = Field(default_factory=list)
    prompt_token_ids: list[int] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)
    sampling: dict[str, Any] = Field(default_factory=dict)
    finish_reason: str | None = None
    started: float = 0.0
    seconds: float = 0.0
    tags: list[str] = Field(default_factory=list)
    redacted: list[Redaction] = Field(default_factory=list)
    seams: list[WeightChange] = Field(default_factory=list)
    owner: str = ""
    retry: bool = False
    error: str = ""
    routes: Routes | None = None
    cached_tokens: int = 0


class ToolCall(Record):
    """One tool call: the model's request and its result.

    `shown` is the text that the model read, if that is not the whole result.
    """

    id: str
    name: str
    arguments: str
    result: Any = None
    error: str | None = None
    seconds: float = 0.0
    shown: str | None = None


class Turn(Record):
    """One model call and the tool calls that it requested. The store joins in `call`."""

    call_id: str
    tool_calls: list[ToolCall] = Field(default_factory=list)
    call: ModelCall | None = None


class Trajectory(Record):
    """The messages and turns of a run, in order.

    `tools` are the definitions that came with an imported conversation. Recorded calls have their
    own.
    """

    messages: list[Message] = Field(default_factory=list)
    turns: list[Turn] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)


class Reward(Record):
    """A named number on a run, with its origin. `turn` (from 0) is set if it is for one turn.

    A reward replaces an earlier one of the same source, name and turn. The client chooses `source`;
    `scan:NAME` is the finding of a scanner, which counts in no sum.
    The gateway sets `giver` to the name of the API key used: "" is the platform's host itself, or
    a time without keys.
    """

    name: str
    value: float
    source: str = "function"
    turn: Int64 | None = None
    comment: str | None = None
    time: float = Field(default_factory=time.time)
    giver: str = ""


SCAN = "scan:"  # begins the source of a scanner's finding, and the tag of a run with one
CLEAR = "clear:"  # begins the tag of a run in which a scanner found nothing
#: Begins the source that says that a judge gave no verdict on a run, and the tag of such a run.
UNJUDGED = "unjudged:"
OUTCOMES = (UNJUDGED, CLEAR, SCAN)  # of a scanner on a run; of several the last one counts
EVALUATION = "evaluation"  # the tag of a run that measures, and is never trained on
#: The tag of a run whose texts spell control tokens of its model, which vLLM made tokens of.
CONTROL_TOKENS = "control-tokens"


def is_finding(source: str) -> bool:
    """Tell whether a reward of this source is a scanner's finding, which no sum counts."""
    return source.startswith((SCAN, UNJUDGED))


def scanned_tags(
    tags: Iterable[str], findings: Iterable[tuple[str, float, float]], ended: float = -math.inf
) -> list[str]:
    """Return a run's tags, sorted, with those that its scanners' findings give it.

    `findings` are (source, value, time), `ended` is the time at which the run's last call ended. A
    run is tagged `scan:NAME` if the scanner NAME gave it or one of its turns a number that is not
    0, else `clear:NAME`, or `unjudged:NAME` if there was no verdict. A run that went on after the
    last two has them no more: it is to be scanned again. Nobody else can give such a tag.
    """
    outcomes: dict[str, str] = {}
    for source, value, when in findings:
        judged, name = source.startswith(SCAN), source.partition(":")[2]
        outcome = UNJUDGED if not judged else SCAN if value else CLEAR
        if outcome == SCAN or when >= ended:
            outcomes[name] = max(outcomes.get(name, outcome), outcome, key=OUTCOMES.index)
    others = {tag for tag in tags if not tag.startswith(OUTCOMES)}
    return sorted(others | {kind + name for name, kind in outcomes.items()})


# name, source, value, turn, giver, time
GivenReward = tuple[str, str, float, int | None, str, float]
# name, source, value, turn
CountedReward = tuple[str, str, float, int | None]


def rewards_of_givers(
    given: Iterable[Sequence[Any]], givers: Collection[str]
) -> tuple[CountedReward, ...]:
    """Select the rewards that the platform's host and these givers gave.

    Returns the newest of each name, source and turn, sorted by these.
    """
    kept: dict[tuple[str, str, int], tuple[CountedReward, tuple[float, float]]] = {}
    for name, source, value, turn, giver, when in given:
        key = (name, source, -1 if turn is None else turn)
        counts = giver == "" or giver in givers
        if counts and (key not in kept or (when, value) >= kept[key][1]):
            kept[key] = (name, source, value, turn), (when, value)
    return tuple(kept[key][0] for key in sorted(kept))


def reward_of_givers(
    reward: float | None, given: Sequence[Sequence[Any]], givers: Collection[str] | None
) -> float | None:
    """Return a run's reward if only these givers count, None if they gave none.

    `reward` is the sum over all givers. `given` is empty where no giver has a key. With `givers`
    None all count.
    """
    if reward is None or givers is None or not given:
        return reward
    counted = rewards_of_givers(given, givers)
    return sum(value for _, _, value, _ in counted) if counted else None


UNSCORED = "RewardError"  # the type of a RunError of a reward, not of the run
REWARD_REFUSED = "reward_refused"  # code of the error for a reward beyond the platform's limit


class RunError(Record):
    """The failure of a run or of one of its rewards. Infrastructure failures never become rewards.

    Type `RewardError` is the failure of a reward. The run is then whole, and may be scored again;
    one whose environment gave the reward (`infrastructure`) is run again.
    """

    type: str
    message: str
    infrastructure: bool = False


class Run(Record, Generic[Output]):
    """One execution of an agent on an input. It always ends with a trajectory and a reason.

    `input` is a text, also where the task's is a list of messages: `Task.text`.

    For type checkers `Run[int]` is a run whose `output` is an int, or None if it has no output.

    `imported` names the format of a conversation that this platform did not record. `owner` is the
    id of the API key that began the run, "" if none did. `cost`: of its calls, by the price of a
    model elsewhere.
    """

    id: str
    agent: str
    model: str
    input: str
    output: Output | None = None
    stop_reason: StopReason
    error: RunError | None = None
    trajectory: Trajectory = Field(default_factory=Trajectory)
    rewards: list[Reward] = Field(default_factory=list)
    task: Task | None = None
    loop: str | None = None
    iteration: Int64 | None = Field(default=None, validation_alias=ITERATION)
    attempt: Int64 | None = None
    started: float = 0.0
    seconds: float = 0.0
    tags: list[str] = Field(default_factory=list)
    redacted: list[Redaction] = Field(default_factory=list)
    imported: str | None = None
    owner: str = ""
    cost: float | None = Field(default=None, exclude_if=lambda cost: cost is None)

    @property
    def reward(self) -> float | None:
        """The sum of the rewards; None while there are none, or one of them failed.

        The findings of scanners (source `scan:NAME`) are not rewards of the work.
        """
        counted = [r.value for r in self.rewards if not is_finding(r.source)]
        if not counted or (self.error is not None and self.error.type == UNSCORED):
            return None
        return sum(counted)

    def unscored(self, problem: str, *, repeat: bool = False) -> "Run[Output]":
        """Return the run as one whose reward is a problem, and not a number.

        `repeat`: its environment gave that reward, so that it is to be run, not only scored, again.
        """
        own = self.error if self.error is not None and self.error.type != UNSCORED else None
        of_run = "" if own is None else f" (the run: {own.type}: {own.message})"
        error = RunError(type=UNSCORED, message=problem + of_run, infrastructure=repeat)
        return self.model_copy(update={"rewards": [], "error": error})

    @property
    def target(self) -> Any:
        """The target of the run's task; None without a task or a target."""
        return None if self.task is None else self.task.target

    @property
    def calls(self) -> list[ModelCall]:
        """The known model calls, in order."""
        return [turn.call for turn in self.trajectory.turns if turn.call is not None]

    @property
    def usage(self) -> Usage:
        """Token counts over the known model calls."""
        calls = self.calls
        return Usage(
            prompt_tokens=sum(len(c.prompt_token_ids) for c in calls),
            completion_tokens=sum(len(c.token_ids) for c in calls),
            calls=len(calls),
        )

    def _repr_html_(self) -> str:
        return run_html(self)


EventKind = Literal["call", "run", "reward", "forget"]


class Event(Record):
    """One line of the store. The same id twice is the same event: appending is idempotent.

    `body` is a ModelCall, a Run whose turns name their calls by id only, a Reward, or for `forget`
    {"reason"}. A `forget` removes the run's events up to its time from every answer, and from the
    disk when the segments are next compacted.
    """

    id: str
    run_id: str
    kind: EventKind
    body: dict[str, Any]
    time: float = Field(default_factory=time.time)


class ProbePrompt(Record):
    """A prompt of a probe. `logprobs[i]` is of `token_ids[i + 1]` given the tokens before it.

    `top[i]` is the most likely token there; probes of older releases have none.
    """

    token_ids: list[int]
    logprobs: list[float]
    top: list[int] = Field(default_factory=list)


class LogprobDistance(Record):
    """The distribution of |difference| between two programs' logprobs of the same tokens, nats.

    `equal_argmax`: the share of places where both name the same most likely token; None where less
    than a hundred are known.

    Of tokens that the other program drew: `kl`, the k3 estimate of ours from theirs (the mean of
    r - 1 - log r, r = p_ours / p_theirs); `tokens_above`, `sequences_above`, the shares of tokens
    and of sequences whose r, or its product, is above 2: what an `importance_cap` of 2 changes.
    """

    tokens: int
    mean: float
    p99: float  # the 99th percentile
    max: float
    equal_argmax: float | None = None
    kl: float | None = None
    tokens_above: float | None = None
    sequences_above: float | None = None
    worst: tuple[str, int, float, float] | None = None  # `max`: run, place in it, ours, theirs


class DeltaOf(Record):
    """The checkpoint that a delta checkpoint changes, and its files of changes: name -> sha256."""

    parent: str
    parent_weights_sha256: str
    files: dict[str, str]


class Manifest(Record):
    """The contents and origin of a checkpoint, published last, beside the weights.

    `files`: the hash of each file by its name. A plain hex number is a SHA-256. In version 2 the
    files of weights have `blake3:` and 64 hex digits.

    `base`: the checkpoint that the adapters are over, if they are all that this one holds: see
    runtime/registry/adapters.py. `base_sha256`: the weights that the adapters are over, also where
    merged ones are beside them. None: those of `parent_sha256`; or there are no adapters.

    `delta`: the weights can be rebuilt from another checkpoint, and may not be there themselves.

    `agreement`: the trainer's distance from the engine for the parent's weights, before the first
    step. Recorded where training was in bfloat16.

    `dtype`: what the job that trained these weights, and scored `probe`, computed in.
    """

    version: Literal[1, 2] = 1
    files: dict[str, str]
    weights_sha256: str
    parent_sha256: str | None = None
    base: str | None = None
    base_sha256: str | None = None
    job: str | None = None
    dataset: str | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    probe: list[ProbePrompt] = Field(default_factory=list)
    agreement: LogprobDistance | None = None
    dtype: str | None = None
    delta: DeltaOf | None = None
    created: float = Field(default_factory=time.time)


class Prompt(Record):
    """What stands before an agent's input, and its tools' descriptions by name.

    `instructions` None: those of the agent's own function.
    """

    instructions: str | None
    examples: list[Message] = Field(default_factory=list)
    tools: dict[str, str] = Field(default_factory=dict)

    @property
    def id(self) -> str:
        """The hash of it all."""
        return digest(self.model_dump(mode="json"), 16)


class ModelVersion(Record):
    """A model version `name@number`: immutable weights, and the prompts learned for agents by name.

    An agent without a prompt here goes by its own: see Agent.at.
    """

    name: str
    number: int
    checkpoint: str
    weights_sha256: str
    job: str | None = None
    prompts: dict[str, Prompt] = Field(default_factory=dict)
    created: float = Field(default_factory=time.time)

    @property
    def id(self) -> str:
        """The string `name@number` that is recorded with every token."""
        return f"{self.name}@{self.number}"


class ProbeReport(Record):
    """The distance of a replica's logprobs on a version's probe from the trainer's.

    `tolerance` limits the maximum in float32, and the 99th percentile in 16 bits. `load_note` says
    why weights that were to come from the trainer directly were read from files, or why tries
    before this one failed.
    """

    version: str
    prompts: int
    tokens: int
    max_logprob_diff: float
    mean_logprob_diff: float = 0.0
    p99_logprob_diff: float = 0.0
    equal_argmax: float | None = None  # see LogprobDistance
    tolerance: float
    passed: bool
    # pause, load, prove, resume; transfer: the part of load in which weights came directly
    seconds: dict[str, float] = Field(default_factory=dict)
    load_note: str = ""
