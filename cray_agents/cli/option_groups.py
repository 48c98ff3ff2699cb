"""Option groups: options of a command that belong together, as the fields of a dataclass.

A command takes such a dataclass as one parameter. `expand_groups` lets typer read each of its
fields as an option in that place. runs/filter_options.py has the group that most commands share.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, TypeVar

import typer

T = TypeVar("T")


def expand_groups(command: Callable[..., T]) -> Callable[..., T]:
    """Return the command with each dataclass among its parameters replaced by its fields."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            fields = inspect.signature(kind).parameters
            groups[name] = kind, list(fields)
            parameters += fields.values()
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def expanded(**options: object) -> T:
        for name, (kind, fields) in groups.items():
            options[name] = kind(**{field: options.pop(field) for field in fields})
        return command(**options)

    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    expanded.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return expanded


def options_under(heading: str) -> Callable[..., Any]:
    """Return a maker of options that stand under a heading of --help."""

    def option(text: str | None = None, *names: str, **limits: Any) -> Any:
        return typer.Option(*names, help=text, rich_help_panel=heading, **limits)

    return option
