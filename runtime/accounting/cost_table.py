"""Cost table: rows of cost by key, model, loop, iteration, job or use, for the API and the command.

Called by gateway/routes/keys.py and `cray-agents usage cost`. Read next: cost_account.py, which
gives time to requests and jobs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cray_agents.config.settings import PriceSettings
from cray_agents.errors import BadInput, CrayError, NotFound
from cray_agents.iteration import Iteration, promoted_holdout_success
from cray_agents.paths import Home
from cray_agents.queries import RunFilter
from cray_agents.records import ModelVersion, Record
from cray_agents.runtime.accounting.cost_account import (
    Amount,
    CostAccount,
    CostAmount,
    CostUse,
    account_of,
    sum_of,
    token_rows,
    weight,
)
from cray_agents.runtime.accounting.holdings import HOUR, read_holdings
from cray_agents.runtime.disk import checksums, paging
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.loop_records import LoopRecords

POINT = 0.01  # a point of held-out success


class LoopStep(NamedTuple):
    """A loop and its iteration; None: of no iteration, as in live traffic."""

    loop: str
    iteration: int | None


NO_LOOP = LoopStep("", None)
Records = list[Iteration | None]  # of a loop's iterations; None for a damaged one


@dataclass
class LoopGains:
    """Held-out success of a loop: that of each iteration's candidate, and what each one added."""

    success: dict[int, float] = field(default_factory=dict)
    gain: dict[int, float] = field(default_factory=dict)

    @property
    def whole_gain(self) -> float | None:
        """The promoted version's success less that of the first one; None without an iteration."""
        return sum(self.gain.values()) if self.gain else None


def progress_of(records: Records) -> LoopGains:
    """Return the progress of a loop, by its records in order.

    An iteration adds the success of the version that is promoted after it, less that of the one
    before; one whose candidate was rejected adds nothing.
    """
    done = [record for record in records if record is not None]
    progress = LoopGains()
    before: float | None = None
    for count, record in enumerate(done, 1):
        progress.success[record.iteration] = record.holdout_success
        if not any(each.promoted for each in done[:count]):
            continue
        after = promoted_holdout_success(done[:count])
        progress.gain[record.iteration] = 0.0 if before is None else after - before
        before = after
    return progress


def iteration_of_version(records: Records, version: str) -> int:
    """Return the iteration of a version, and so of the runs that evaluate it: they name none.

    A version is of the iteration whose candidate it was. One before the first iteration's is of
    its warm-up, and so of iteration 0. Any other is the candidate of the iteration under way.
    """
    done = [record for record in records if record is not None]
    for record in done:
        if record.version == version:
            return record.iteration
    name, number = _split(version)
    if done and name == _split(done[0].version)[0] and number < _split(done[0].version)[1]:
        return 0
    return len(records)


def iteration_of_job(records: Records, job: str) -> int | None:
    """Return the iteration whose record names a job; None if no record does."""
    return next((r.iteration for r in records if r is not None and r.job == job), None)


def training_by_loop(
    home: Home, trained: dict[str, Amount], loops: dict[str, Records]
) -> dict[LoopStep, Amount]:
    """Return what jobs took by the loop and iteration that they trained; ("", None): no loop's.

    A job is of the iteration whose record names it, or of that of its version, if its session
    has the loop's name. Iteration 0 may begin with a version that was trained elsewhere, so a job
    that only its record names is not its own.
    """
    amounts: dict[LoopStep, Amount] = defaultdict(Amount)
    versions: dict[str, str] | None = None
    for job, amount in trained.items():
        loop = _session_of(home, job)
        if loop not in loops:
            named = ((name, iteration_of_job(records, job)) for name, records in loops.items())
            step = next((LoopStep(name, number) for name, number in named if number), NO_LOOP)
        else:
            number = iteration_of_job(loops[loop], job)
            if number is None:
                versions = _versions_by_job(home) if versions is None else versions
                number = iteration_of_version(loops[loop], versions.get(job, ""))
            step = LoopStep(loop, number)
        amounts[step].add(amount)
    return amounts


def _versions_by_job(home: Home) -> dict[str, str]:
    """Return the first version that each job made."""
    versions: dict[str, str] = {}
    for path in sorted(home.models.glob("*/*.json"), key=lambda path: path.stem.zfill(9)):
        try:
            version = checksums.read_record(ModelVersion, path)
        except CrayError:
            continue  # the registry says so
        if version.job is not None:
            versions.setdefault(version.job, version.id)
    return versions


def _split(version: str) -> tuple[str, int]:
    """Return name and number of a version."""
    name, _, number = version.partition("@")
    return name, int(number) if number.isdecimal() else 0


def _session_of(home: Home, job: str) -> str:
    """Return the session that a job's spec names, which has its loop's name; "" without one."""
    try:
        return str(checksums.read_json(home.job(job) / "spec.json").get("session") or "")
    except (OSError, CrayError):
        return ""


class CostRow(Record):
    """The cost of a key, a model, a loop, an iteration, a job or a use, or in a bucket of time.

    `key` is an id, "" without one, and `name` its name. `serving` is for the tokens of its runs,
    `training` for the kept steps of its jobs, `spent` both. `succeeded`: runs with a reward of 1 or
    more; `per_success`: `spent` for each of them. `gain`: what an iteration, or all, added to the
    held-out success of the promoted version; `per_point`: `spent` for each hundredth of it, null
    where nothing was gained.
    """

    id: str
    use: CostUse | None = None
    key: str | None = None
    name: str | None = None
    model: str | None = None
    loop: str | None = None
    iteration: int | None = None
    job: str | None = None
    time: float | None = None
    runs: int = 0
    succeeded: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    spent: CostAmount
    serving: CostAmount
    training: CostAmount
    per_success: CostAmount | None = None
    holdout_success: float | None = None
    gain: float | None = None
    per_point: CostAmount | None = None


class CostRequest(Record):
    """A model call of a run, with its share of what the run took."""

    id: str
    model: str
    time: float
    prompt_tokens: int
    sampled_tokens: int
    spent: CostAmount


class CostTable(Record):
    """Cost by group, from `since` to `until`, in whole hours.

    `total` is all that was held in that time, `uses` by what came of it: they add up to it.
    `unattributed` is time of replicas that answered no stored run. `unpriced`: types of devices
    without a price, where others have one. `whole`: all rows of a loop or a key as one. `requests`:
    of a single run.
    """

    by: str
    bucket: float | None
    since: float
    until: float
    currency: str | None
    unpriced: list[str]
    total: CostAmount
    uses: dict[CostUse, CostAmount]
    whole: CostRow | None
    data: list[CostRow]
    requests: list[CostRequest] | None
    has_more: bool
    first_id: str | None
    last_id: str | None


GROUPS = ("use", "key", "model", "loop", "iteration", "job")
PAGE = 1000  # rows


@dataclass(frozen=True)
class CostQuery:
    """The question that a cost table answers.

    by: what the rows are of, one of GROUPS. bucket: seconds, whole hours, by which keys and models
    are divided further. key: an id; loop: a name. owner: the key whose runs alone may be seen;
    None: all. since, until: unix seconds, rounded to whole hours.
    """

    by: str = "use"
    bucket: float | None = None
    key: str | None = None
    loop: str | None = None
    since: float = 0.0
    until: float | None = None
    owner: str | None = None
    after: str | None = None
    limit: int = PAGE


_COUNTS = ("runs", "succeeded", "prompt_tokens", "sampled_tokens")  # of a row


@dataclass
class _Sum:
    """The sums of a row. `labels`: its fields that say of what it is."""

    name: str
    labels: dict[str, Any]
    serving: Amount = field(default_factory=Amount)
    training: Amount = field(default_factory=Amount)
    runs: int = 0
    succeeded: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def spent(self) -> Amount:
        return sum_of([self.serving, self.training])

    def count(self, row: dict[str, Any], account: CostAccount) -> None:
        """Add runs of one hour and version."""
        prompt, sampled = row["prompt_tokens"] or 0, row["sampled_tokens"] or 0
        self.serving.add(account.spent_on(row["model"], row["time"], prompt, sampled))
        self.runs += row["runs"]
        self.succeeded += row["succeeded"]
        self.prompt_tokens += prompt
        self.sampled_tokens += sampled


def cost_table(
    home: Home, store: Store, prices: PriceSettings, query: CostQuery, names: dict[str, str]
) -> CostTable:
    """Return the table. `names`: of keys, by id. Raises BadInput."""
    check(query)
    account = account_of(read_holdings(home), store, prices, query.since, query.until)
    if query.by == "use":
        return _table(account, query, None, _use_rows(account), more=False)
    sums = _sums(home, store, account, query, names)
    rows = [_row(each, account) for each in sums]
    whole: CostRow | None = None
    if query.key is not None or query.loop is not None:
        whole = _row(_merged(sums, query, names), account)
    listed, more = paging.after(rows, lambda row: row.id, query.after, query.limit, "row")
    return _table(account, query, whole, listed, more=more)


def cost_rows(
    home: Home, store: Store, account: CostAccount, query: CostQuery, names: dict[str, str]
) -> list[CostRow]:
    """Return all rows of a query that is not `by` use."""
    return [_row(each, account) for each in _sums(home, store, account, query, names)]


def _sums(
    home: Home, store: Store, account: CostAccount, query: CostQuery, names: dict[str, str]
) -> list[_Sum]:
    if query.by == "job":
        return _job_sums(account)
    if query.by in ("loop", "iteration"):
        return _loop_sums(home, store, account, query)
    return _request_sums(store, account, query, names)


def run_cost(
    home: Home, store: Store, prices: PriceSettings, run_id: str, names: dict[str, str]
) -> CostTable:
    """Return the cost of a run, and of each of its requests. Raises NotFound.

    The account is of the hour in which the run began.
    """
    run, facts = store.run(run_id), store.run_facts(run_id)
    since = facts.started // HOUR * HOUR
    account = account_of(read_holdings(home), store, prices, since, since + HOUR)
    prompt, sampled = facts.prompt_tokens, facts.sampled_tokens
    spent = account.spent_on(facts.model, facts.started, prompt, sampled)
    succeeded = run.reward is not None and run.reward >= 1
    labels = {
        "key": run.owner,
        "name": names.get(run.owner, run.owner),
        "model": facts.model,
        "loop": run.loop,
        "iteration": run.iteration,
        "time": facts.started,
    }
    sums = _Sum(run_id, labels, spent, Amount(), 1, int(succeeded), prompt, sampled)
    tokens = [(len(call.prompt_token_ids), len(call.token_ids)) for call in run.calls]
    whole = sum(weight(*each) for each in tokens)
    requests = [
        CostRequest(
            id=call.id,
            model=call.model,
            time=call.started,
            prompt_tokens=read,
            sampled_tokens=written,
            spent=spent.to_record(prices, weight(read, written) / whole if whole else 0.0),
        )
        for call, (read, written) in zip(run.calls, tokens, strict=True)
    ]
    table = _table(account, CostQuery(), None, [_row(sums, account)], more=False)
    return table.model_copy(update={"by": "run", "requests": requests})


def check(query: CostQuery) -> None:
    """Raise BadInput for a question that has no answer."""
    if query.by not in GROUPS:
        raise BadInput(f"by {query.by[:50]!r}: give {', '.join(GROUPS)}", param="by")
    if query.bucket is not None and (query.bucket % HOUR or query.by not in ("key", "model")):
        raise BadInput("bucket: whole hours, as 1h or 1d, and only by key or model", param="bucket")
    if query.by == "iteration" and query.loop is None:
        raise BadInput("by iteration: name the loop, too", param="loop")
    if query.by in ("use", "job") and (query.key is not None or query.loop is not None):
        raise BadInput(
            f"by {query.by} is of all that was held: give by=model, or by=iteration for a loop",
            param="by",
        )
    if query.key is not None and query.by in ("loop", "iteration"):
        raise BadInput("a key has no loop's training: give by=key or by=model", param="by")


def _use_rows(account: CostAccount) -> list[CostRow]:
    """Return a row for each use, which add up to all that was held."""
    nothing = Amount().to_record(account.prices)
    rows = []
    for use, amount in account.uses().items():
        spent = amount.to_record(account.prices)
        serving, training = (spent if use == each else nothing for each in ("requests", "training"))
        rows.append(CostRow(id=use, use=use, spent=spent, serving=serving, training=training))
    return rows


def _job_sums(account: CostAccount) -> list[_Sum]:
    """Return the sums of the jobs whose steps were kept, by what was spent."""
    sums = [_Sum(job, {"job": job}, training=each) for job, each in account.trained.items()]
    return sorted(sums, key=lambda each: (-each.spent.gpu_seconds, -each.spent.core_seconds))


def _request_sums(
    store: Store, account: CostAccount, query: CostQuery, names: dict[str, str]
) -> list[_Sum]:
    """Return the sums of keys or models: by time, then by what was spent."""
    sums: dict[tuple[str, float | None], _Sum] = {}
    owner = query.key if query.owner is None else query.owner
    if query.key is not None and owner != query.key:
        return []
    runs = RunFilter(since=account.since, until=account.until, loop=query.loop)
    for row in token_rows(store, runs, [query.by], owner):
        value = row[query.by] or ""
        when = None if query.bucket is None else row["time"] // query.bucket * query.bucket
        if (value, when) not in sums:
            labels: dict[str, Any] = {query.by: value, "time": when}
            if query.by == "key":
                labels["name"] = names.get(value, value)
            name = (value or "none") + ("" if when is None else f":{when:.0f}")
            sums[value, when] = _Sum(name, labels)
        sums[value, when].count(row, account)

    def order(each: _Sum) -> tuple[float, float, float, str]:
        spent = each.spent
        return each.labels["time"] or 0.0, -spent.gpu_seconds, -spent.core_seconds, each.name

    return sorted(sums.values(), key=order)


def _loop_sums(home: Home, store: Store, account: CostAccount, query: CostQuery) -> list[_Sum]:
    """Return the sums of loops, with those of no loop's runs and jobs; or of a loop's iterations.

    Raises NotFound.
    """
    folders = [path for path in home.loops.glob("*") if path.is_dir()]
    loops = {path.name: LoopRecords(home, path.name).known([]) for path in folders}
    if query.loop is not None and query.loop not in loops:
        raise NotFound(f"no loop {query.loop[:200]!r}", param="loop")
    known = {loop: progress_of(records) for loop, records in loops.items()}
    by_iteration = query.by == "iteration"
    sums: dict[LoopStep, _Sum] = {}

    def row_of(loop: str, number: int | None) -> _Sum:
        step = LoopStep(loop, number if by_iteration else None)
        if step not in sums:
            progress = known.get(loop, LoopGains())
            labels = {"loop": loop, "gain": progress.whole_gain}
            if by_iteration:
                at = -1 if number is None else number
                labels |= {"iteration": number, "gain": progress.gain.get(at)}
                labels["holdout_success"] = progress.success.get(at)
            name = (loop or "none") + (f":{number}" if by_iteration else "")
            sums[step] = _Sum(name, labels)
        return sums[step]

    runs = RunFilter(since=account.since, until=account.until, loop=query.loop)
    for row in token_rows(store, runs, ["loop", "iteration", "split"]):
        loop, number = row["loop"] or "", row["iteration"]
        if number is None and row["split"] != "train" and loop in loops:
            number = iteration_of_version(loops[loop], row["model"] or "")
        row_of(loop, number).count(row, account)
    for (loop, number), amount in training_by_loop(home, account.trained, loops).items():
        if query.loop in (None, loop):
            row_of(loop, number).training.add(amount)
    return [
        sums[step]
        for step in sorted(sums, key=lambda step: (step[0], -1 if step[1] is None else step[1]))
    ]


def _merged(sums: Sequence[_Sum], query: CostQuery, names: dict[str, str]) -> _Sum:
    """Return all sums of a key or a loop as one."""
    gains = [each.labels["gain"] for each in sums if each.labels.get("gain") is not None]
    labels: dict[str, Any] = {"loop": query.loop, "gain": sum(gains) if gains else None}
    if query.key is not None:
        labels |= {"key": query.key, "name": names.get(query.key, query.key)}
    return _Sum(
        "whole",
        labels,
        sum_of([each.serving for each in sums]),
        sum_of([each.training for each in sums]),
        **{name: sum(getattr(each, name) for each in sums) for name in _COUNTS},
    )


def _row(sums: _Sum, account: CostAccount) -> CostRow:
    spent, prices, gain = sums.spent, account.prices, sums.labels.get("gain")
    points = gain / POINT if gain is not None and gain > 0 else None
    return CostRow(
        id=sums.name,
        **sums.labels,
        **{name: getattr(sums, name) for name in _COUNTS},
        spent=spent.to_record(prices),
        serving=sums.serving.to_record(prices),
        training=sums.training.to_record(prices),
        per_success=spent.to_record(prices, 1 / sums.succeeded) if sums.succeeded else None,
        per_point=spent.to_record(prices, 1 / points) if points else None,
    )


def _table(
    account: CostAccount,
    query: CostQuery,
    whole: CostRow | None,
    rows: Sequence[CostRow],
    *,
    more: bool,
) -> CostTable:
    prices = account.prices
    return CostTable(
        by=query.by,
        bucket=query.bucket,
        since=account.since,
        until=account.until,
        currency=prices.currency if prices.known else None,
        unpriced=sorted(account.unpriced),
        total=account.total.to_record(prices),
        uses={use: amount.to_record(prices) for use, amount in account.uses().items()},
        whole=whole,
        data=list(rows),
        requests=None,
        has_more=more,
        first_id=rows[0].id if rows else None,
        last_id=rows[-1].id if rows else None,
    )
