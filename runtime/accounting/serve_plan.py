"""Serving plan: how many replicas a load needs, by what calls of this pool took.

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
from typing import Any, NamedTuple

import numpy as np

from cray_agents.config.settings import PriceSettings
from cray_agents.errors import BadInput
from cray_agents.queries import RunQuery
from cray_agents.records import ModelCall, Record
from cray_agents.runtime.accounting.holdings import HOUR, LedgerAccount
from cray_agents.runtime.store import Store

LEAST_CALLS = 20
TOLD = 60.0  # seconds between two lines of a holding that goes on
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

    def seconds(self, load: ServedLoad, replicas: float) -> float:
        """Return the mean seconds of a request; infinite where the replicas cannot keep up."""
        read, step = self.read * load.prompt, self.step * load.sampled
        beside = self.beside * load.sampled
        busy = load.rate / replicas * (read + beside)
        return (read + step + beside) / (1 - busy) if busy < 1 else math.inf


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
    runs = store.stream(RunQuery(model=model, since=since, order="newest", limit=MOST_RUNS))
    calls = [call for run in runs for call in run.calls
             if call.model.partition("@")[0] == model and call.seconds and call.token_ids
             ]  # fmt: skip
    held = [piece for piece in ledger.pieces
            if piece.line.kind == "replica" and piece.line.what.partition("@")[0] == model
            and piece.line.state == "serving"]  # fmt: skip
    if len(calls) < LEAST_CALLS:
        raise BadInput(
            f"{len(calls)} answered calls of {model!r} are on record, and a plan needs"
            f" {LEAST_CALLS}: put a load like yours on it for some minutes first",
            param="model",
        )
    if not held:
        raise BadInput(
            f"no replica of {model!r} is on record: its calls were answered elsewhere, or less than"
            " a minute ago",
            param="model",
        )
    last = max(piece.end for piece in held)
    spans = {(one.line.holder, one.begin, math.inf if one.end > last - TOLD else one.end)
             for one in held}  # fmt: skip
    begins, ends = (np.sort([span[place] for span in spans]) for place in (1, 2))
    starts = np.array([call.started for call in calls])
    there = np.searchsorted(begins, starts, "right") - np.searchsorted(ends, starts, "right")
    columns, seconds = _measures(calls, np.maximum(there, 1))
    fitted = _fit(columns / seconds[:, None])
    line = max(held, key=lambda piece: piece.end).line
    return Calibration(
        model=model,
        calls=len(calls),
        **dict(zip(("read", "step", "beside"), map(float, fitted), strict=True)),
        busiest=float(np.quantile(columns[:, 2] / columns[:, 1], BUSIEST)),
        error=float(np.abs(columns @ fitted / seconds - 1).mean()),
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
    alone = measured.seconds(load, math.inf)
    if latency is not None and alone >= latency:
        raise BadInput(
            f"a request takes {alone:.3g} s alone on a replica, by {measured.calls} calls: allow"
            " more than that, or fewer tokens",
            param="latency",
        )
    limit = "one is enough"
    for replicas in range(1, MOST_REPLICAS):
        seconds = measured.seconds(load, replicas)
        under_way = load.rate / replicas * seconds
        if math.isinf(seconds):
            limit = "fewer cannot keep up"
        elif latency is not None and seconds > latency:
            limit = f"fewer take more than {latency:g} s"
        elif under_way > max(1.0, measured.busiest):
            limit = f"more than {measured.busiest:.3g} at a time on a replica were not measured"
        else:
            break
    else:
        raise BadInput(f"{load.rate:g} requests a second need too many replicas", param="rate")
    known = prices.of_gpu(measured.gpu_type) if measured.gpus else prices.core_hour
    hourly = known if price is None else price
    devices = replicas * (measured.gpus or measured.cores)
    return ServePlan(
        replicas=replicas,
        gpus=replicas * measured.gpus,
        cores=replicas * measured.cores,
        seconds=seconds,
        under_way=under_way,
        limit=limit,
        cost=None if hourly is None else devices * hourly / HOUR / load.rate,
        currency=prices.currency,
        calibration=measured,
    )


def _measures(calls: Sequence[ModelCall], replicas: Any) -> tuple[Any, Any]:
    """Return the columns of the formula [calls, 3], and seconds [calls]."""
    starts = np.array([call.started for call in calls])
    ends = starts + np.array([call.seconds for call in calls])
    prompts = np.array([len(c.prompt_token_ids) - c.cached_tokens for c in calls], float)
    sampled = np.array([len(call.token_ids) for call in calls], float)
    times = np.sort(np.concatenate([starts, ends]))
    begun, ended = np.sort(starts), np.sort(ends)
    going = np.searchsorted(begun, times, "right") - np.searchsorted(ended, times, "right")
    passed = np.concatenate([[0.0], np.cumsum(going[:-1] * np.diff(times))])
    area = np.interp(ends, times, passed) - np.interp(starts, times, passed)
    others = np.maximum(0.0, area / (ends - starts) - 1) / replicas
    came = np.concatenate([[0.0], np.cumsum(prompts[np.argsort(starts, kind="stable")])])
    after = np.searchsorted(begun, starts, "right")
    late = np.maximum(np.searchsorted(begun, ends, "left"), after)
    read = prompts + (came[late] - came[after]) / replicas
    return np.stack([read, sampled, sampled * (1 + others)], 1), ends - starts


def _fit(columns: Any) -> Any:
    """Return the least squares of columns [calls, n] for ones [calls], none below 0."""
    used = list(range(columns.shape[1]))
    while True:
        found = np.zeros(columns.shape[1])
        found[used] = np.linalg.lstsq(columns[:, used], np.ones(len(columns)), rcond=None)[0]
        if found.min() >= 0:
            return found
        used.remove(int(found.argmin()))
