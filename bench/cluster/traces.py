"""Traces: a day of requests, training jobs and failures of nodes, from a seed.

    bursty    little load, and bursts of some minutes that come at random
    diurnal   load that follows the day, with noise
    failures  the diurnal day with bursts, on nodes that fail

Requests come in numbers per `step` seconds, and jobs are all in the queue at the beginning: there
is always something to train. simulation.py plays a trace.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from cray_agents.errors import BadInput

TraceKind = Literal["bursty", "diurnal", "failures"]
HOUR = 3600.0
_SMALL = 30.0  # above this mean Poisson's distribution is drawn as a normal one


@dataclass(frozen=True)
class ServingTrace:
    """The requests of one class of serving, and how quick its replicas are.

    `arrivals`: requests in each step. `share`: of the nodes, that its peak takes. `answer`, `start`
    and `wake` (at level 1 and 2): seconds.
    """

    name: str
    arrivals: list[int]
    slots: int = 64
    answer: float = 20.0
    start: float = 90.0
    wake: tuple[float, float] = (5.0, 20.0)


@dataclass(frozen=True)
class JobTrace:
    """A training job: `work` seconds of steps on its nodes, each of `step` seconds.

    `load`: seconds before its first step, and after each interruption. `save`: seconds of a save.
    `save_every`: seconds between two saves on its own account; a failure loses the time since.
    """

    name: str
    nodes: int
    work: float
    priority: int = 0
    step: float = 10.0
    load: float = 60.0
    save: float = 30.0
    save_every: float = 900.0


@dataclass(frozen=True)
class Failure:
    """A node that is gone at `time` for `repair` seconds."""

    time: float
    node: int
    repair: float


@dataclass(frozen=True)
class Trace:
    """Events of a cluster of `nodes` nodes within `seconds`, from midnight on."""

    kind: str
    seed: int
    nodes: int
    seconds: float
    step: float
    serving: tuple[ServingTrace, ...]
    jobs: tuple[JobTrace, ...]
    failures: tuple[Failure, ...]


def make_trace(kind: str, seed: int, nodes: int, hours: float = 24.0, step: float = 5.0) -> Trace:
    """Make a trace. The same arguments give the same trace. Raises BadInput."""
    if kind not in (kinds := get_args(TraceKind)):
        raise BadInput(f"there is no trace {kind!r}, only {', '.join(kinds)}", param="trace")
    if not 4 <= nodes <= 100_000 or not 0 < hours <= 24 * 31:
        raise BadInput("a trace has 4 to 100,000 nodes, and more than 0 to 744 hours")
    draw = random.Random(f"{kind} {seed} {nodes}")
    steps = round(hours * HOUR / step)
    # two models: a large share for chats, and a smaller one that may have no request for an hour
    weights = {"chat": 0.8, "tools": 0.2}
    serving = []
    for name, weight in weights.items():
        load = _LOADS[kind](draw, steps, step)
        mean = 64 / 20.0 * nodes * weight * step  # requests that all its nodes answer in a step
        arrivals = [_poisson(draw, mean * part) for part in load]
        serving.append(ServingTrace(name, arrivals))
    jobs = _jobs(draw, nodes, hours)
    failures = _failures(draw, nodes, hours) if kind == "failures" else ()
    return Trace(kind, seed, nodes, steps * step, step, tuple(serving), jobs, failures)


def _bursts(draw: random.Random, steps: int, step: float) -> list[float]:
    """Return the share of all nodes that the load takes, by step: a floor with bursts on it."""
    load = [0.06] * steps
    time = draw.expovariate(1 / HOUR)
    while time < steps * step:
        height = min(0.6, draw.lognormvariate(math.log(0.35), 0.35))
        ramp, length = draw.uniform(60, 240), draw.uniform(300, 1500)
        for at in range(int(time / step), min(steps, int((time + length + 2 * ramp) / step))):
            since = at * step - time
            shape = min(1.0, since / ramp, (length + 2 * ramp - since) / ramp)
            load[at] = min(0.7, load[at] + height * max(0.0, shape))
        time += length + draw.expovariate(1 / (1.5 * HOUR))
    return load


def _day(draw: random.Random, steps: int, step: float) -> list[float]:
    """Return a load that is least at four at night and most at four in the afternoon."""
    noise, load = 0.0, []
    for at in range(steps):
        noise += -noise * step / 600 + draw.gauss(0, 0.03) * math.sqrt(step / 600)
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * (at * step / HOUR - 4) / 24)
        load.append(max(0.0, 0.05 + 0.5 * wave + noise))
    return load


def _both(draw: random.Random, steps: int, step: float) -> list[float]:
    day, bursts = _day(draw, steps, step), _bursts(draw, steps, step)
    return [min(0.8, 0.6 * a + 0.6 * b) for a, b in zip(day, bursts, strict=True)]


_LOADS: dict[str, Callable[[random.Random, int, float], list[float]]] = {
    "bursty": _bursts,
    "diurnal": _day,
    "failures": _both,
}


def _jobs(draw: random.Random, nodes: int, hours: float) -> tuple[JobTrace, ...]:
    """Return jobs for a quarter more than all node-hours; the largest takes a sixteenth."""
    sizes = [2**power for power in range(max(1, (nodes // 16).bit_length()))]
    jobs: list[JobTrace] = []
    work = 0.0
    while work < 1.25 * nodes * hours * HOUR:
        size = draw.choice(sizes)
        seconds = min(24 * HOUR, max(600.0, draw.lognormvariate(math.log(2 * HOUR), 0.8)))
        priority = draw.choice((0, 0, 0, 1))
        jobs.append(JobTrace(f"job-{len(jobs)}", size, seconds, priority))
        work += size * seconds
    return tuple(jobs)


def _failures(draw: random.Random, nodes: int, hours: float) -> tuple[Failure, ...]:
    """Return failures of nodes: each one fails once in 20 days, for two hours on average."""
    failures, time = [], 0.0
    while (time := time + draw.expovariate(nodes / (20 * 24 * HOUR))) < hours * HOUR:
        repair = draw.expovariate(1 / (2 * HOUR))
        failures.append(Failure(time, draw.randrange(nodes), repair))
    return tuple(failures)


def _poisson(draw: random.Random, mean: float) -> int:
    """Draw a number of Poisson's distribution; of a large mean by the normal one."""
    if mean > _SMALL:
        return max(0, round(draw.gauss(mean, math.sqrt(mean))))
    limit, count, product = math.exp(-mean), 0, draw.random()
    while product > limit:
        product *= draw.random()
        count += 1
    return count
