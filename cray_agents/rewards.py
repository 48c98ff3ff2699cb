"""@reward and score: named numbers on a run.

A reward that fails is a RewardError on the run, and the run is not trained on: it is never taken
for a 0. Called by agent authors and loop.py.
"""

import functools
import math
import numbers
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from cray_agents import foreign
from cray_agents.errors import BadInput, RewardError
from cray_agents.records import Reward, Run, RunError

RewardFunction = Callable[[Run], float | Awaitable[float]]  # bool is a float to the type checker
R = TypeVar("R", bound=RewardFunction)

TIMEOUT = 60.0  # seconds, of a reward that names none


@dataclass(frozen=True)
class _Options:
    weight: float = 1.0
    name: str | None = None
    timeout: float | None = TIMEOUT


@overload
def reward(function: R) -> R: ...
@overload
def reward(
    *, weight: float = 1.0, name: str | None = None, timeout: float | None = TIMEOUT
) -> Callable[[R], R]: ...


def reward(
    function: R | None = None,
    *,
    weight: float = 1.0,
    name: str | None = None,
    timeout: float | None = TIMEOUT,
) -> R | Callable[[R], R]:
    """Make a function of a Run a reward: `@reward` or `@reward(weight=0.5)`.

    The function, sync or async, returns a float or bool and stays what it was.

    Args:
        function: what is decorated.
        weight: its value is multiplied by this; a run's reward is the sum over its rewards.
        name: what the reward is called; default: the function's name.
        timeout: seconds it may take; None: no limit.

    Raises BadInput for a weight that is no number or a timeout that is not above 0.
    """
    if not math.isfinite(weight):
        raise BadInput(f"weight={weight!r}: must be a finite number", param="weight")
    if timeout is not None and not timeout > 0:
        raise BadInput(f"timeout={timeout!r}: must be above 0 seconds, or None", param="timeout")

    def mark(function: R) -> R:
        function.__reward_options__ = _Options(weight, name, timeout)  # type: ignore[attr-defined]
        return function

    return mark(function) if function is not None else mark


async def score(
    run: Run, rewards: Sequence[RewardFunction]
) -> tuple[list[Reward], RunError | None]:
    """What the functions make of a run: all rewards, or none and the error of the first to fail.

    A run that the infrastructure failed is not scored: its own error comes back.
    """
    if run.error is not None and run.error.infrastructure:
        return [], run.error
    try:
        return [await _value(run, function) for function in rewards], None
    except RewardError as error:
        return [], RunError(type="RewardError", message=str(error), infrastructure=True)


async def _value(run: Run, function: RewardFunction) -> Reward:
    options: _Options = getattr(function, "__reward_options__", _Options())
    name = options.name or getattr(function, "__name__", type(function).__name__)
    try:
        value: Any = await foreign.call(functools.partial(function, run), options.timeout)
    except foreign.Overdue:
        raise RewardError(f"reward {name} took more than {options.timeout:g} s") from None
    except Exception as error:
        raise RewardError(f"reward {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(f"reward {name} returned {value!r}: give a finite float or a bool")
    return Reward(name=name, value=options.weight * float(value))
