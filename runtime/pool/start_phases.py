"""Start phases: the seconds from a replica's start to its first token, where they are spent.

    place      Slurm's queue, until the supervisor of the replica's job answers
    spawn      the process, up to the first line of vllm_plugins/server.py
    imports    of vLLM
    engine     its configuration, its processes, and the layers, without the next two
    weights    their reading; on a GPU the building of the layers too
    warm_up    vLLM's profile run, KV cache, compiled code and graphs
    port       from the server's first moment until it has answered and is patched
    first_token   the check of the weights, which samples it

server.py and lock.py note the times of their process, vLLM's log says the seconds of its engine,
and vllm_process.py, slurm_replica.py and replica.py add what they wait for. A phase that nobody saw
is left out.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

StartPhase = Literal["place", "spawn", "imports", "engine", "weights", "warm_up", "port"]

_LOGGED: dict[StartPhase, re.Pattern[str]] = {
    "weights": re.compile(r"(?:Loading weights|Model loading) took .*?([\d.]+) seconds"),
    "warm_up": re.compile(r"init engine \(.*?\) took ([\d.]+) s"),
}


def seen_phases(
    began: float, marks: Mapping[str, float], ended: float, log: str
) -> dict[StartPhase, float]:
    """Return the seconds of a start by phase.

    `marks`: see `VllmEngine.marks`, by the same clock as `began` and `ended`. `log`: vLLM's, in
    which each worker says its own seconds: the slowest one's count.
    """
    names: tuple[StartPhase, ...] = ("spawn", "imports", "engine", "port")
    times = [began, *map(marks.get, ("begun", "imported", "built")), ended]
    phases = {
        phase: end - begin
        for phase, (begin, end) in zip(names, pairwise(times), strict=True)
        if begin is not None and end is not None
    }
    for phase, said in _LOGGED.items():
        if seconds := [float(match[1]) for match in said.finditer(log)]:
            phases[phase] = max(seconds)
            if "engine" in phases:
                phases["engine"] = max(0.0, phases["engine"] - max(seconds))
    return phases
