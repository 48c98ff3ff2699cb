"""Serving plan: how many replicas a load needs, by what calls of this pool took. No GPU.

A call reads `prompt` tokens and samples `sampled` ones, a step each. By the calls on record,

    seconds = read x (prompt tokens that came in meanwhile, its own too)
            + step x sampled + beside x sampled x (calls under way)

where calls beside it count by the share of its replica. At a rate r, a replica has r x seconds of
them (Little 1961), so that

    seconds = alone / (1 - r x (read x prompt + beside x sampled))
    alone = read x prompt + (step + beside) x sampled

`read`, `step` and `beside` are the least squares of the relative errors, none below 0. Nothing is
promised beyond the calls under way that were measured. Called by cli/plan.py.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cray_agents.config.settings import PriceSettings
from cray_agents.errors import BadInput
from cray_agents.queries import RunQuery
from cray_agents.records import ModelCall, Record
from cray_agents.runtime.accounting.holdings import HOUR, LedgerAccount, Piece
from cray_agents.runtime.store import Store

LEAST_CALLS = 20
MOST_RUNS = 5000  # the newest, whose calls are read
MOST_REPLICAS = 10_000
BUSIEST = 0.95  # quantile of the calls under way up to which a plan goes


class ServedLoad(NamedTuple):
    """A load: requests a second of `prompt` tokens, without cached ones, and `sampled` tokens."""

    rate: float
    prompt: float
    sampled: float


class Calibration(Record):
    """Seconds by measured calls: see the formula at the top.

    `busiest`: the calls under way on a replica, up to which there are enough measurements. `error`:
    the mean relative error of the calls' seconds. `gpus`, `gpu_type`, `cores`: of a replica.
    """

    model: str
    calls: int
    read: float
    step: float
    beside: float
    busiest: float
    error: float
    gpus: int
    gpu_type: str
    cores: int

    def alone(self, load: ServedLoad) -> float:
        """Return the seconds of a request that has a replica to itself."""
        return self.read * load.prompt + (self.step + self.beside) * load.sampled

    def seconds(self, load: ServedLoad, replicas: int) -> float:
        """Return the mean seconds of a request; infinite where the replicas cannot keep up."""
        busy = load.rate / replicas * (self.read * load.prompt + self.beside * load.sampled)
        return self.alone(load) / (1 - busy) if busy < 1 else math.inf


class ServePlan(Record):
    """What a load needs. `seconds`: of a request, on average. `under_way`: calls on a replica.

    `limit`: what asks for so many replicas. `cost`: of a request; null without a price.
    """

    replicas: int
    gpus: int
    cores: int
    seconds: float
    under_way: float
    limit: str
    cost: float | None
    currency: str
    calibration: Calibration


def calibrate(store: Store, ledger: LedgerAccount, model: str, since: float = 0.0) -> Calibration:
    """Measure a model by the newest calls of its name that the pool answered.

    Raises BadInput where too few are on record.
    """
    runs = store.stream(RunQuery(since=since, order="newest", limit=MOST_RUNS))
    calls = [
        call
        for run in runs
        for call in run.calls
        if call.model.partition("@")[0] == model and call.seconds > 0 and call.token_ids
    ]
    held = [
        piece
        for piece in ledger.pieces
        if piece.line.kind == "replica" and piece.line.what.partition("@")[0] == model
    ]
    if len(calls) < LEAST_CALLS or not held:
        raise BadInput(
            f"{len(calls)} answered calls of {model!r} are on record here, and a plan needs"
            f" {LEAST_CALLS} of a pool's: serve it, put a load like yours on it for some minutes,"
            " and plan then",
            param="model",
        )
    replicas = np.array([_replicas_at(held, call.started) for call in calls])
    columns, under_way, seconds = _measures(calls, replicas)
    fitted = _fit(columns / seconds[:, None])
    errors = np.abs(columns @ fitted / seconds - 1)
    line = max(held, key=lambda piece: piece.end).line
    return Calibration(
        model=model,
        calls=len(calls),
        **dict(zip(("read", "step", "beside"), map(float, fitted), strict=True)),
        busiest=float(np.quantile(under_way, BUSIEST)),
        error=float(errors.mean()),
        gpus=len(line.gpus),
        gpu_type=line.gpu_type,
        cores=line.cores,
    )


def plan_load(
    measured: Calibration,
    load: ServedLoad,
    latency: float | None,
    prices: PriceSettings,
    price: float | None = None,
) -> ServePlan:
    """Return the fewest replicas that answer a load, on average within `latency` seconds.

    `price`: of a GPU, or of a core where replicas have no GPUs, for an hour; None: by `prices`.
    Raises BadInput for a latency that no number of replicas reaches.
    """
    if latency is not None and measured.alone(load) >= latency:
        raise BadInput(
            f"a request takes {measured.alone(load):.3g} s alone on a replica, by"
            f" {measured.calls} calls: allow more than that, or fewer tokens",
            param="latency",
        )
    limit, replicas = "one is enough", 1
    while why := _lacks(measured, load, replicas, latency):
        limit, replicas = why, replicas + 1
        if replicas > MOST_REPLICAS:
            raise BadInput(f"{load.rate:g} requests a second need too many replicas", param="rate")
    seconds = measured.seconds(load, replicas)
    known = prices.of_gpu(measured.gpu_type) if measured.gpus else prices.core_hour
    hourly = known if price is None else price
    devices = replicas * (measured.gpus or measured.cores)
    return ServePlan(
        replicas=replicas,
        gpus=replicas * measured.gpus,
        cores=replicas * measured.cores,
        seconds=seconds,
        under_way=load.rate / replicas * seconds,
        limit=limit,
        cost=None if hourly is None else devices * hourly / HOUR / load.rate,
        currency=prices.currency,
        calibration=measured,
    )


def _lacks(measured: Calibration, load: ServedLoad, replicas: int, latency: float | None) -> str:
    """Say why so many replicas are too few; "" where they are enough."""
    seconds = measured.seconds(load, replicas)
    if seconds == math.inf:
        return "fewer cannot keep up"
    if latency is not None and seconds > latency:
        return f"fewer take more than {latency:g} s"
    if load.rate / replicas * seconds > max(1.0, measured.busiest):
        return f"more than {measured.busiest:.3g} calls at a time on a replica were not measured"
    return ""


def _replicas_at(held: Sequence[Piece], time: float) -> int:
    return max(1, len({one.line.holder for one in held if one.begin <= time < one.end}))


def _measures(
    calls: Sequence[ModelCall], replicas: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the columns of the formula [calls, 3], calls under way on a replica, and seconds."""
    starts = np.array([call.started for call in calls])
    seconds = np.array([call.seconds for call in calls])
    prompts = np.array([len(c.prompt_token_ids) - c.cached_tokens for c in calls], float)
    sampled = np.array([len(call.token_ids) for call in calls], float)
    times = np.concatenate([starts, starts + seconds])
    order = np.argsort(times, kind="stable")
    count = np.cumsum(np.repeat([1, -1], len(calls))[order])[:-1]
    passed = np.concatenate([[0.0], np.cumsum(count * np.diff(times[order]))])
    area = np.interp(times, times[order], passed)
    under_way = (area[len(calls) :] - area[: len(calls)]) / seconds / replicas
    first = np.argsort(starts, kind="stable")
    came = np.concatenate([[0.0], np.cumsum(prompts[first])])
    begun = np.searchsorted(starts[first], starts, "right")
    ended = np.searchsorted(starts[first], starts + seconds, "left")
    beside = came[np.maximum(begun, ended)] - came[begun]
    under_way = np.maximum(under_way, 1.0)
    columns = np.stack([prompts + beside / replicas, sampled, sampled * under_way], 1)
    return columns, under_way, seconds


def _fit(columns: np.ndarray) -> np.ndarray:
    """Return the least squares of columns [calls, n] for ones [calls], none below 0."""
    used = list(range(columns.shape[1]))
    while True:
        found = np.zeros(columns.shape[1])
        found[used] = np.linalg.lstsq(columns[:, used], np.ones(len(columns)), rcond=None)[0]
        if found.min() >= 0:
            return found
        used.remove(int(found.argmin()))
