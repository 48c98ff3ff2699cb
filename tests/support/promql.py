"""PromQL: the metrics of an expression, with the labels that it uses of each.

No evaluation and no full grammar: enough to check boards and alerts against a scrape.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from cray_agents.errors import BadInput

_TOKEN = re.compile(r'\s+|"(?:[^"\\]|\\.)*"|\$?[a-zA-Z_:][\w:]*|\d[\w.]*|[{}()\[\],=~!<>+\-*/^%@]')
_GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_AGGREGATIONS = {
    "sum", "min", "max", "avg", "group", "stddev", "stdvar", "count", "count_values", "bottomk",
    "topk", "quantile",
}  # fmt: skip
_OPERATORS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


class UsedMetric(NamedTuple):
    """A metric of an expression and the labels that it must have."""

    name: str
    labels: frozenset[str]


def used_metrics(expression: str) -> list[UsedMetric]:
    """Return the metrics of an expression, in their order.

    The labels by which the expression groups count for each of them. Raises BadInput for text that
    is no PromQL.
    """
    tokens = list(_tokens(expression))
    grouped, used = set[str](), list[tuple[str, set[str]]]()
    place = 0
    while place < len(tokens):
        token, following = tokens[place], tokens[place + 1] if place + 1 < len(tokens) else ""
        place += 1
        if token == "[":
            place = _skip(tokens, place, "]", expression)[1]
        elif token in _GROUPINGS and following == "(":
            labels, place = _skip(tokens, place + 1, ")", expression)
            grouped |= set(labels)
        elif _is_name(token) and token not in _OPERATORS and following != "(":
            if token in _AGGREGATIONS and following in _GROUPINGS:
                continue
            labels = []
            if following == "{":
                labels, place = _skip(tokens, place + 1, "}", expression)
            used.append((token, set(labels)))
    return [UsedMetric(name, frozenset(labels | grouped)) for name, labels in used]


def _tokens(expression: str) -> Iterator[str]:
    place = 0
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise BadInput(f"no PromQL from character {place} on: {expression!r}")
        if not match[0].isspace():
            yield match[0]
        place = match.end()


def _skip(tokens: list[str], place: int, end: str, expression: str) -> tuple[list[str], int]:
    """Return the names up to a closing bracket, and the place after it."""
    try:
        close = tokens.index(end, place)
    except ValueError:
        raise BadInput(f"{end!r} is missing: {expression!r}") from None
    return [token for token in tokens[place:close] if _is_name(token)], close + 1


def _is_name(token: str) -> bool:
    return token[0].isalpha() or token[0] in "_:"
