"""Rewards: @reward marks functions of a run, and `score` calls them to get named numbers.

A reward that fails is a RewardError on the run, never a 0. The run then has no reward until it is
scored again. Called by agent authors and the loop. Read next: llm_judge.py, rewards that a model
gives; runtime/datasets/selection.py, the effect of a turn's reward on its tokens.
"""

import contextlib
import functools
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, overload

from pydantic import TypeAdapter, ValidationError

from cray_agents.agent import user_code
from cray_agents.agent.signatures import unbound
from cray_agents.errors import BadInput, RewardError
from cray_agents.records import UNSCORED, Reward, Run, RunError

#: A number (or bool) for the run; a list with a number or None for each turn; or numbers by turn.
Values = float | Sequence[float | None] | Mapping[int, float]
RewardFunction = Callable[[Run], Values | Awaitable[Values]]
R = TypeVar("R", bound=RewardFunction)

TIMEOUT = 60.0  # seconds, the default of a reward
SUSPECT = "suspect"  # tag of a run that a reward function suspects of cheating


class Verdict(float):
    """A reward's number with a comment, as a reward function may return it.

    `suspect` marks a run that did something that honest work does not do. The run gets the tag
    `suspect`, so that people can find it.
    """

    comment: str | None
    suspect: bool

    def __new__(cls, value: float, comment: str | None = None, *, suspect: bool = False) -> Self:
        made = super().__new__(cls, value)
        made.comment = f"{SUSPECT}: {comment}" if suspect else comment
        made.suspect = suspect
        return made


@dataclass(frozen=True)
class RewardOptions:
    """Options of a reward function, stored as its `__reward_options__`."""

    weight: float = 1.0
    name: str | None = None
    timeout: float | None = TIMEOUT
    source: str = "function"

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise BadInput(f"weight={self.weight!r}: must be a finite number", param="weight")
        if self.timeout is not None and not self.timeout > 0:
            raise BadInput(
                f"timeout={self.timeout!r}: must be above 0 seconds, or None", param="timeout"
            )


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

    The function, sync or async, stays unchanged. It returns a float or bool for the whole run, a
    list with a number (or None) for each turn, or a dict of numbers by turn, counted from 0. Method
    grpo uses the rewards of turns (DatasetRecipe), the other methods use their sum.

    Args:
        function: the decorated function.
        weight: factor of its values; a run's reward is the sum over its rewards.
        name: name of the reward; default: the function's name.
        timeout: seconds that a call may take; None: no limit.

    Raises BadInput for a weight that is no number, a timeout that is not above 0, an empty name.
    """
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise BadInput(f"name={name!r}: give the reward a name, or leave it out", param="name")
    options = RewardOptions(weight, name, timeout)

    def mark(function: R) -> R:
        function.__reward_options__ = options  # type: ignore[attr-defined]
        return function

    return mark(function) if function is not None else mark


def options_of(function: RewardFunction) -> RewardOptions:
    """Return the options of a reward function, also within functools.partial."""
    plain, _ = unbound(function)
    return getattr(plain, "__reward_options__", RewardOptions())


def name_of(function: RewardFunction) -> str:
    """Return the name of a reward: the one that @reward was given, else its function's."""
    plain, _ = unbound(function)
    return options_of(function).name or str(getattr(plain, "__name__", type(plain).__name__))


def check_names(rewards: Sequence[RewardFunction]) -> None:
    """Raise BadInput for two rewards of one name, of which the store would keep one."""
    seen: set[tuple[str, str]] = set()
    for function in rewards:
        key = name_of(function), options_of(function).source
        if key in seen:
            raise BadInput(
                f"two rewards are called {key[0]!r}, and a run keeps one of a name: name one of "
                "them otherwise, as in @reward(name='short')",
                param="rewards",
            )
        seen.add(key)


async def score_run(run: Run, rewards: Sequence[RewardFunction]) -> Run:
    """Return the run with its rewards and error (see `score`), and with or without `suspect`."""
    all_rewards, error, suspect = await _score(run, rewards)
    tags = [tag for tag in run.tags if tag != SUSPECT] + [SUSPECT] * suspect
    return run.model_copy(update={"rewards": all_rewards, "error": error, "tags": tags})


async def score(
    run: Run, rewards: Sequence[RewardFunction]
) -> tuple[list[Reward], RunError | None]:
    """Return a run's present rewards and those of the functions, and its error, if any.

    If a reward fails, the error is a RewardError, in the place of the run's own. A run recorded
    with it has no reward (`Run.reward` is None, no dataset uses it), and can be scored again
    (`prepare_rescoring`). A run that the infrastructure failed is not scored: it has no rewards and
    keeps its own error.
    """
    all_rewards, error, _ = await _score(run, rewards)
    return all_rewards, error


async def _score(
    run: Run, rewards: Sequence[RewardFunction]
) -> tuple[list[Reward], RunError | None, bool]:
    """Return rewards, error, and True if one of the functions suspects the run."""
    check_names(rewards)
    own = run.error
    if own is not None and own.infrastructure:
        return [], own, SUSPECT in run.tags
    own = None if own is None or own.type == UNSCORED else own
    given: list[Reward] = []
    failures: list[str] = []
    suspect = False
    for function in rewards:
        try:
            rewarded, suspicious = await call_reward(run, function)
            given += rewarded
            suspect |= suspicious
        except RewardError as error:
            failures.append(str(error))
    replaced = {(each.name, each.source, each.turn) for each in given}
    earlier = [r for r in run.rewards if (r.name, r.source, r.turn) not in replaced]
    all_rewards = [*earlier, *given]
    if not failures:
        return all_rewards, own, suspect
    of_run = "" if own is None else f" (the run: {own.type}: {own.message})"
    return all_rewards, RunError(type=UNSCORED, message="; ".join(failures) + of_run), suspect


def needs_scoring(run: Run) -> bool:
    """Return True if one of a run's rewards failed, so that it must be scored again, not repeated.

    A redacted run is not scored again, as the removed text cannot be judged.
    """
    error = run.error
    if error is None or error.type != UNSCORED:
        return False
    return not (error.infrastructure or run.redacted)


def prepare_rescoring(run: Run, output_type: Any) -> Run:
    """Return a stored run as reward functions need it: without RewardError, its output typed."""
    output = run.output
    if output is not None:
        with contextlib.suppress(ValidationError):  # the answer never was of the type
            output = TypeAdapter(output_type).validate_python(output)
    return run.model_copy(update={"output": output, "error": None})


async def call_reward(run: Run, function: RewardFunction) -> tuple[list[Reward], bool]:
    """Call a function; return its rewards, and True if it suspects the run. Raises RewardError."""
    options, name = options_of(function), name_of(function)
    try:
        values: Any = await user_code.call(functools.partial(function, run), options.timeout)
    except user_code.UserCodeTimeout:
        raise RewardError(f"reward {name} took more than {options.timeout:g} s") from None
    except RewardError as error:
        raise RewardError(f"reward {name} failed: {error}", code=error.code) from error
    except Exception as error:
        raise RewardError(f"reward {name} failed: {type(error).__name__}: {error}") from error
    by_turn = _by_turn(values, name, len(run.trajectory.turns))
    given = [
        Reward(
            name=name,
            value=options.weight * value,
            source=options.source,
            turn=turn,
            comment=value.comment if isinstance(value, Verdict) else None,
        )
        for turn, value in by_turn
    ]
    return given, any(isinstance(value, Verdict) and value.suspect for _, value in by_turn)


def _by_turn(values: Any, name: str, turns: int) -> list[tuple[int | None, float]]:
    """Return (turn, value) pairs of a reward function's result; turn None: the whole run."""
    pairs: list[tuple[Any, Any]]
    if isinstance(values, Mapping):
        pairs = list(values.items())
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes):
        if len(values) != turns:
            raise RewardError(
                f"reward {name} returned {len(values)} values for a run of {turns} turns: give one "
                "for each, None for none, or a dict by turn"
            )
        pairs = [(turn, value) for turn, value in enumerate(values) if value is not None]
    else:
        return [(None, _number(values, name))]
    if not pairs:
        raise RewardError(f"reward {name} returned {values!r}, a reward for no turn")
    for turn, _ in pairs:
        if not isinstance(turn, int) or not 0 <= turn < turns:
            raise RewardError(
                f"reward {name} rewarded turn {turn!r} of a run of {turns}: turns count from 0"
            )
    return [(turn, _number(value, name)) for turn, value in pairs]


def _number(value: Any, name: str) -> float:
    number = math.nan
    if isinstance(value, numbers.Real):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            number = float(value)
    if not math.isfinite(number):
        large = isinstance(value, int)  # Python does not print one of 5,000 digits
        text = f"an int of {value.bit_length()} bits" if large else repr(value)[:100]
        raise RewardError(f"reward {name} returned {text}: give a finite float or a bool")
    return value if isinstance(value, Verdict) else number
