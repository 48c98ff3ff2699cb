"""@reward, score and scored: named numbers on a run, or on turns of it.

A reward that fails is a RewardError on the run, which then has no reward until it is scored again:
it is never taken for a 0. Called by agent authors and the loop. Read next: judges.py, rewards that
a model gives; runtime/datasets/advantages.py, what a turn's reward does to its tokens.
"""

import contextlib
import functools
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, overload, runtime_checkable

from pydantic import TypeAdapter, ValidationError

from cray_agents.agent import user_code
from cray_agents.errors import BadInput, RewardError
from cray_agents.ports import ChatEngine
from cray_agents.records import UNSCORED, Reward, Run, RunError

#: One number for the run (a bool is one); one for each of its turns, None for none; or by turn.
Values = float | Sequence[float | None] | Mapping[int, float]
RewardFunction = Callable[[Run], Values | Awaitable[Values]]
R = TypeVar("R", bound=RewardFunction)

TIMEOUT = 60.0  # seconds, of a reward that names none
SUSPECT = "suspect"  # tag of a run that a reward function found so


class Verdict(float):
    """What a reward function may return for a number: with a comment, kept beside it.

    `suspect`: the run did what honest work does not do. It then gets the tag `suspect`, by which
    people find it.
    """

    comment: str | None
    suspect: bool

    def __new__(cls, value: float, comment: str | None = None, *, suspect: bool = False) -> Self:
        made = super().__new__(cls, value)
        made.comment = f"{SUSPECT}: {comment}" if suspect else comment
        made.suspect = suspect
        return made


@runtime_checkable
class AsksModel(Protocol):
    """A reward function that asks a model, such as judges.Judge."""

    def with_engine(self, engine: ChatEngine) -> RewardFunction:
        """The same, asking there unless it has an engine of its own."""
        ...


@dataclass(frozen=True)
class RewardOptions:
    """What `@reward` says of a function; others keep theirs as `__reward_options__` too."""

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

    The function, sync or async, stays what it was. It returns a float or bool for the whole run; a
    list with a number (or None) for each turn; or a dict of numbers by turn, counted from 0. What
    turns are given is of use to method grpo (DatasetRecipe), and to the others as a sum.

    Args:
        function: what is decorated.
        weight: its values are multiplied by this; a run's reward is the sum over its rewards.
        name: what the reward is called; default: the function's name.
        timeout: seconds it may take; None: no limit.

    Raises BadInput for a weight that is no number or a timeout that is not above 0.
    """
    options = RewardOptions(weight, name, timeout)

    def mark(function: R) -> R:
        function.__reward_options__ = options  # type: ignore[attr-defined]
        return function

    return mark(function) if function is not None else mark


async def scored(
    run: Run, rewards: Sequence[RewardFunction], *, engine: ChatEngine | None = None
) -> Run:
    """The run with its rewards and its error (see `score`), and with the tag `suspect` or not."""
    found, error, suspect = await _score(run, rewards, engine)
    tags = [tag for tag in run.tags if tag != SUSPECT] + [SUSPECT] * suspect
    return run.model_copy(update={"rewards": found, "error": error, "tags": tags})


async def score(
    run: Run, rewards: Sequence[RewardFunction], *, engine: ChatEngine | None = None
) -> tuple[list[Reward], RunError | None]:
    """The rewards that a run has already, and those the functions give; and its error, if any.

    Functions that ask a model do so at `engine` unless they have one. Where a reward fails, the
    error is a RewardError, in the place of the run's own: recorded with it, the run has no reward
    (`Run.reward` is None, no dataset takes it) and can be scored again (`restored`). A run that the
    infrastructure failed is not scored: no rewards, and its own error.
    """
    found, error, _ = await _score(run, rewards, engine)
    return found, error


async def _score(
    run: Run, rewards: Sequence[RewardFunction], engine: ChatEngine | None
) -> tuple[list[Reward], RunError | None, bool]:
    """Rewards, error, and whether one of the functions found the run suspect."""
    own = run.error if run.error is not None and run.error.type != UNSCORED else None
    if own is not None and own.infrastructure:
        return [], own, SUSPECT in run.tags
    failures = [
        f"reward {each.name} of turn {each.turn} is {each.value}: give a finite number"
        for each in run.rewards
        if not math.isfinite(each.value)
    ]
    given: list[Reward] = []
    suspect = False
    for function in rewards:
        bound = function
        if engine is not None and isinstance(function, AsksModel):
            bound = function.with_engine(engine)
        try:
            rewarded, doubted = await _given(run, bound)
            given += rewarded
            suspect |= doubted
        except RewardError as error:
            failures.append(str(error))
    replaced = {(each.name, each.source, each.turn) for each in given}
    earlier = [r for r in run.rewards if (r.name, r.source, r.turn) not in replaced]
    found = [*(each for each in earlier if math.isfinite(each.value)), *given]
    if not failures:
        return found, own, suspect
    told = "; ".join(failures) + ("" if own is None else f" (the run: {own.type}: {own.message})")
    return found, RunError(type=UNSCORED, message=told), suspect


def unscored(run: Run) -> bool:
    """Whether one of its rewards failed: the run is whole and needs to be scored, not done, again.

    What was taken out of a run before it was stored cannot be judged: such a run is not scored.
    """
    return run.error is not None and run.error.type == UNSCORED and not run.redacted


def restored(run: Run, output_type: Any) -> Run:
    """A stored run as its reward functions saw it: without its RewardError, its output typed."""
    output = run.output
    if output is not None:
        with contextlib.suppress(ValidationError):  # an answer that was never of the type
            output = TypeAdapter(output_type).validate_python(output)
    return run.model_copy(update={"output": output, "error": None})


async def _given(run: Run, function: RewardFunction) -> tuple[list[Reward], bool]:
    """What a function gives, and whether it found the run suspect. Raises RewardError."""
    options: RewardOptions = getattr(function, "__reward_options__", RewardOptions())
    name = options.name or str(getattr(function, "__name__", type(function).__name__))
    try:
        values: Any = await user_code.call(functools.partial(function, run), options.timeout)
    except user_code.UserCodeTimeout:
        raise RewardError(f"reward {name} took more than {options.timeout:g} s") from None
    except RewardError as error:
        raise RewardError(f"reward {name} failed: {error}") from error
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
    """(turn, value) of what a reward function returned; turn None: the whole run's."""
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
        with contextlib.suppress(OverflowError):  # an int that no float holds
            number = float(value)
    if not math.isfinite(number):
        large = isinstance(value, int)  # Python does not print one of 5,000 digits
        told = f"an int of {value.bit_length()} bits" if large else repr(value)[:100]
        raise RewardError(f"reward {name} returned {told}: give a finite float or a bool")
    return value if isinstance(value, Verdict) else number
