"""Scanners: @scanner marks functions that look for something in stored runs, such as leaked data.

    @scanner
    def refused(run: Run) -> bool:
        return str(run.output).startswith("I cannot")

A finding is recorded as a reward of source `scan:NAME`, which counts in no sum. A run with one has
the tag `scan:NAME`, one in which nothing was found `clear:NAME`, and one on which a judge gave no
verdict `unjudged:NAME`. Filters, recipes and canaries use these tags. Called by `cray-agents scan`.
Read next: reward.py, whose functions are alike.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

from cray_agents.errors import BadInput, RewardError
from cray_agents.records import SCAN, UNJUDGED, Reward, Run
from cray_agents.rewards.llm_judge import NO_VERDICT, GroupJudge, LLMJudge
from cray_agents.rewards.reward import TIMEOUT, RewardFunction, RewardOptions, call_reward

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
LONGEST_COMMENT = 500  # characters of why there is no verdict
S = TypeVar("S", bound=RewardFunction)


@overload
def scanner(function: S) -> S: ...
@overload
def scanner(function: S, *, name: str) -> S: ...
@overload
def scanner(*, name: str | None = None, timeout: float | None = TIMEOUT) -> Callable[[S], S]: ...


def scanner(
    function: Any = None, *, name: str | None = None, timeout: float | None = TIMEOUT
) -> Any:
    """Make a function of a Run a scanner: `@scanner` or `@scanner(name="pii")`.

    The function, sync or async, returns True or a number that is not 0 if it found something, else
    False or 0; also a list or a dict of these by turn, as rewards do. A `Verdict` has a comment
    beside the number. A judge becomes a scanner by `scanner(judge(...), name="rude")`.

    Args:
        function: the decorated function, or a judge.
        name: name of the scanner; default: the function's name.
        timeout: seconds that a call may take; None: no limit. A judge keeps its own.

    Raises BadInput for a name that is no letter followed by letters, digits, `_`, `.` or `-`.
    """

    def mark(function: Any) -> Any:
        chosen = name or str(getattr(function, "__name__", ""))
        if not NAME.fullmatch(chosen):
            raise BadInput(
                f"name={chosen!r}: name the scanner by a letter followed by up to 63 letters, "
                "digits, _, . or -",
                param="name",
            )
        if isinstance(function, GroupJudge):
            raise BadInput("a scanner looks at one run: give it judge(...)", param="function")
        if isinstance(function, LLMJudge):
            options = replace(
                function.__reward_options__, weight=1.0, name=chosen, source=SCAN + chosen
            )
            return replace(function, __reward_options__=options)
        function.__reward_options__ = RewardOptions(1.0, chosen, timeout, SCAN + chosen)
        return function

    return mark(function) if function is not None else mark


def scanner_name(function: RewardFunction) -> str | None:
    """Return the name of a scanner, None for any other function."""
    options = getattr(function, "__reward_options__", None)
    if not isinstance(options, RewardOptions) or not options.source.startswith(SCAN):
        return None
    return options.name


async def scan(run: Run, scanners: Sequence[RewardFunction]) -> tuple[list[Reward], list[str]]:
    """Return the findings of scanners in a run, and the messages of those that failed.

    A finding of 0 says that the scanner looked and found nothing. One of source `unjudged:NAME`
    says that its judge answered without a verdict; the same question would have the same answer.
    """
    findings: list[Reward] = []
    failures = []
    for function in scanners:
        try:
            findings += (await call_reward(run, function))[0]
        except RewardError as error:
            failures.append(str(error))
            if error.code == NO_VERDICT and (name := scanner_name(function)) is not None:
                why = str(error)[:LONGEST_COMMENT]
                findings.append(Reward(name=name, value=0, source=UNJUDGED + name, comment=why))
    return findings, failures
