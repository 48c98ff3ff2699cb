"""View records: the JSON of the routes that show runs, loops, jobs and the platform to people.

Made by the other modules of this folder, sent by gateway/routes/, typed for clients by
/openapi.json. Times are unix seconds, durations seconds. A figure that is not known is None, which
is not zero.
"""

from typing import Any, Literal

from pydantic import Field

from cray_agents.iteration import Iteration
from cray_agents.promotion.sequential_test import Decision, RunPair
from cray_agents.records import Message, Record, Redaction, Reward, ToolCall, WeightChange


class QueueClass(Record):
    """Requests of one class: `inside` are at the engines, `waiting` have no slot yet."""

    inside: int
    waiting: int


class KeyDemand(Record):
    """The waiting requests of one API key; "" is this host itself."""

    key: str
    name: str
    waiting: int


class QueueState(Record):
    """The wait queue. `capacity`: requests that the engines take; `limit`: with those that wait.

    `parked`: waiting requests whose version no replica holds now; they count in their class too.
    `keys`: the waiting requests by key, most first; callers below `admin` see their own key only.
    """

    capacity: int
    reserve: int
    limit: int
    remaining: int
    mean_seconds: float
    interactive: QueueClass
    batch: QueueClass
    parked: int
    keys: list[KeyDemand]


class HoldoutPoint(Record):
    """A point of a loop's curves: held-out success, and `test`, that on test tasks if measured."""

    iteration: int
    success: float
    test: float | None = None
    tasks: int
    version: str
    promoted: bool


class LoopSummary(Record):
    """A loop: its last iteration, and its held-out success by iteration (at most 200 points).

    `iterations` counts the finished ones. `updated` is the time of its last record.
    """

    id: str
    iterations: int
    updated: float
    last: Iteration | None
    holdout: list[HoldoutPoint]


class WealthCurve(Record):
    """The wealth of the bets that the candidate is better, after so many pairs; it starts at 1.

    The candidate is promoted where the wealth reaches `limit`, which is 1 / `alpha`, if no guard
    fails. `planned`: the most pairs that the decision could have. Of many `points` some are shown.
    """

    limit: float
    alpha: float
    planned: int
    points: list[tuple[int, float]]


class ShownDecision(Record):
    """A decision on a candidate. `numbers` are null where they are no loop's."""

    kind: Literal["promoted", "rejected"]
    who: str
    time: float
    reason: str
    numbers: Decision | None


class IterationDetail(Record):
    """An iteration of a loop with the decision on its candidate, `record.version`.

    `ended`: the time of its record. `incumbent`, `pairs` and `curve` are null where no pairs are
    noted: nothing was compared, or an older version compared it.
    """

    loop: str
    record: Iteration
    ended: float
    decision: ShownDecision | None
    incumbent: str | None
    pairs: int | None
    curve: WealthCurve | None


PairOutcome = Literal["won", "lost", "even"]


class ShownPair(RunPair):
    """A pair of runs of one held-out task: `n` counts from 1, in the order of evaluation.

    `outcome` is the candidate's; `wealth` that after this pair. A run of the candidate that could
    not be scored has the least reward.
    """

    n: int
    outcome: PairOutcome
    wealth: float


class PairPage(Record):
    """Pairs of a decision. `total`: those of this outcome. `next`: where to go on, or null."""

    total: int
    data: list[ShownPair]
    next: int | None


class UsageRow(Record):
    """The usage of a key, a model or a bucket of time, or of a group of these.

    `key` is the id of the API key that began the runs, "" without one; `name` is its name. `model`
    is the version that ended a run, and gets all of its tokens. `time` is the bucket's beginning,
    `last` the start of the newest run.
    """

    key: str | None = None
    name: str | None = None
    model: str | None = None
    time: float | None = None
    runs: int
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    seconds: float
    errors: int
    last: float


class UsageTable(Record):
    """Usage by group, in the order of time, then most tokens first. `bucket`: seconds, or None."""

    by: list[str]
    bucket: float | None
    data: list[UsageRow]
    has_more: bool


class ShownKey(Record):
    """An API key without its secret."""

    id: str
    name: str
    role: Literal["use", "train", "admin"]
    created: float
    revoked: bool


class NewKey(ShownKey):
    """A key just made. `secret` is shown this once and stored nowhere."""

    secret: str


class StatsRow(Record):
    """Figures of a group of runs. `success`: share of the rewarded runs with a reward of 1 or more.

    `last` is the start of the newest run. It has the fields that it is grouped by beside these;
    `time` is a bucket's beginning, `input` the head of one run's in the first row of a task.
    """

    runs: int
    rewarded: int
    success: float | None
    mean_reward: float | None
    min_reward: float | None
    max_reward: float | None
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    errors: int
    infrastructure: int
    mean_seconds: float | None
    last: float
    p50_seconds: float | None = None
    p95_seconds: float | None = None
    agent: str | None = None
    model: str | None = None
    loop: str | None = None
    iteration: int | None = None
    split: str | None = None
    stop_reason: str | None = None
    error: str | None = None
    task: str | None = None
    input: str | None = None
    day: str | None = None
    time: float | None = None


class Facet(Record):
    """A value of a field, and how many of the matching runs have it."""

    value: str | int | None
    runs: int


class Histogram(Record):
    """Counts of values: `counts[i]` are in [edges[i], edges[i + 1]), the last edge included.

    `missing` counts what has no value. Without any value both lists are empty. With `every` 10 it
    counted every tenth run. The last edge may lie beyond `most`, the largest value.
    """

    edges: list[float]
    counts: list[int]
    missing: int = 0
    every: int = 1
    least: float | None = None
    most: float | None = None


class RunStats(Record):
    """Statistics of the matching runs: `total` of them, by group, by facet, and as histograms."""

    total: int
    data: list[StatsRow]
    has_more: bool
    facets: dict[str, list[Facet]]
    histograms: dict[str, Histogram]


class TurnMark(Record):
    """A turn in an outline, at most 200 bytes. Fields that say nothing (0, empty, null) are absent.

    `bytes`: of the messages that are new in the turn, with the answer and the tools' results.
    `at`: its start, in seconds since the run's. `seams`: positions of sampled tokens where the
    weights changed. `tools`: names, the first three; `calls`: how many tools were called. `errors`:
    how many of these failed. `model` is absent where it is the run's. `reward`: the sum of the
    rewards of this turn. `missing`: the model call is not recorded, or not any more.
    """

    n: int
    call_id: str
    model: str | None = None
    at: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    prompt: int = 0
    sampled: int = 0
    messages: int = 0
    calls: int = 0
    tools: list[str] = Field(default_factory=list)
    errors: int = 0
    seams: list[int] = Field(default_factory=list)
    finish: str | None = None
    reward: float | None = None
    missing: bool = False


class RunOutline(Record):
    """A run without its messages: facts, rewards, its task's target, and a mark for each turn."""

    id: str
    run: dict[str, Any]
    rewards: list[Reward]
    target: Any
    metadata: dict[str, Any]
    error: dict[str, Any] | None
    turns: int
    bytes: int
    data: list[TurnMark]
    has_more: bool


class ShownTurn(Record):
    """A turn with its messages.

    `skipped`: how many messages the call began with that the turn before had already; `messages`
    are those after. `answer` is the model's. `tools`: the definitions, null where they are those of
    the turn before.
    """

    n: int
    call_id: str
    model: str | None
    started: float
    seconds: float
    api: str
    skipped: int
    messages: list[Message]
    answer: Message | None
    tool_calls: list[ToolCall]
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    finish_reason: str | None
    prompt_tokens: int
    sampled_tokens: int
    seams: list[WeightChange]
    rewards: list[Reward]
    tags: list[str]
    redacted: list[Redaction]
    owner: str


class TurnWindow(Record):
    """Turns of a run in order. `total`: turns of the run. `next`: where to go on, null at the end.

    `closing`: the messages of the run after its last turn, given with the last turn only.
    """

    id: str
    total: int
    data: list[ShownTurn]
    next: int | None
    closing: list[Message]


class TurnTokens(Record):
    """Tokens of a turn, in order: the prompt's first `prompt` of `total`, then those sampled.

    The lists are of the tokens from `first` on. `texts` joined are the text. A token that ends or
    begins within a character has U+FFFD for it in its text; `bytes` has, by the index in this
    answer, the base64 of its exact bytes. `logprobs` are null in the prompt. `trained`: has a loss
    when this run is trained on, which sampled tokens have. `seams`: indexes in the whole list at
    which other weights go on, with their version. `exact`: false where the tokenizer has no exact
    bytes of a token, and texts are what it decodes alone.
    """

    id: str
    n: int
    model: str
    tokenizer: str
    first: int
    prompt: int
    total: int
    ids: list[int]
    texts: list[str]
    bytes: dict[str, str]
    logprobs: list[float | None]
    trained: list[bool]
    seams: list[WeightChange]
    exact: bool


class TopToken(Record):
    """A likely token at a place, with its exact rank (1 is the likeliest)."""

    id: int
    text: str
    logprob: float
    rank: int


class TurnScore(Record):
    """The sampled tokens of a turn under another version: logprobs[i] is of the i-th of them.

    `recorded` are those of the version that sampled it. `top[i]`: the likeliest tokens there.
    `entropy[i]`: nats, of the top tokens and the rest taken as one token: a lower bound of the
    whole distribution's.
    """

    id: str
    n: int
    model: str
    sampled_by: str
    ids: list[int]
    logprobs: list[float | None]
    recorded: list[float | None]
    top: list[list[TopToken]]
    entropy: list[float | None]


class TurnPair(Record):
    """Turns of two runs side by side; one of them may be missing. Turns count from 0.

    `differs` names what differs: answer, reasoning, tool_calls, results, rewards, model.
    """

    one: int | None
    other: int | None
    same: bool
    differs: list[str]


class RunDifferences(Record):
    """Differences of two runs. Lists are in the order of the runs.

    `turns`: all turns, aligned. `first`: the index in `turns` of the first pair that differs.
    """

    one: str
    other: str
    fields: list[dict[str, Any]]
    rewards: list[dict[str, Any]]
    tokens: dict[str, Any] | None
    turns: list[TurnPair]
    first: int | None


class JobSeries(Record):
    """Measures of a job by step. `series[name]` are [step, value] in order of the step.

    A series of many values is thinned by LTTB, which keeps peaks, first and last. `names` are all
    that the job measured.
    """

    id: str
    names: list[str]
    series: dict[str, list[tuple[float, float]]]


class LineExample(Record):
    """A line of a batch that failed."""

    custom_id: str | None
    message: str


class FailedLines(Record):
    """Failed lines of a batch with one code, and the first of them."""

    code: str
    status: int | None
    lines: int
    examples: list[LineExample]


class BatchErrors(Record):
    """Failed lines of a batch by code, most frequent first. `lines`: all that have a result."""

    id: str
    lines: int
    failed: int
    data: list[FailedLines]


class HealthWarning(Record):
    """A failure that raises no error: `kind` names the rule, `count` of `of` met it.

    Kinds: no_rewards, equal_rewards, zero_variance, failed_runs, unparsed_tool_calls,
    unparsed_thoughts, damage, version_not_served, failed_task, failed_job.
    `query`: parameters of /v1/trajectories that list the runs behind it. `job`: the failed one.
    """

    kind: str
    level: Literal["warning", "error"]
    message: str
    count: int
    of: int
    loop: str | None = None
    job: str | None = None
    query: dict[str, Any] = Field(default_factory=dict)


class WarningList(Record):
    """Warnings, errors first. `since`: the beginning of the runs that were looked at."""

    since: float
    data: list[HealthWarning]


class WhoAmI(Record):
    """The caller's key, null without one, and the platform; `home` is for admins alone."""

    key: str | None
    name: str
    role: Literal["use", "train", "admin"]
    home: str | None
    version: str | None
    features: list[Literal["keys", "score"]]


class ReplicaLease(Record):
    """A replica that serves `version` for `holder`, in the place of `displaced`."""

    holder: str
    version: str
    displaced: list[str]
    seconds_left: float


class ReplicaList(Record):
    """The replicas, those that were started on demand, and the lease of one."""

    data: list[dict[str, Any]]
    spares: list[dict[str, Any]]
    lease: ReplicaLease | None
    turns: dict[str, Any] = Field(default_factory=dict)
