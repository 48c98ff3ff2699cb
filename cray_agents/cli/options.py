"""Root options, and groups of commands.

`--home`, `--url` and `--json` are options of `cray-agents` itself: `given()` returns them. People
also type them behind the command, so `RootGroup` moves them to the front.
"""

import functools
import json
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import typer.core

from cray_agents.errors import BadInput


@dataclass(frozen=True)
class RootOptions:
    """The options of `cray-agents` itself."""

    home: Path | None = None
    url: str | None = None
    json: bool = False

    @property
    def words(self) -> str:
        """`--home` or `--url` as it was typed, to repeat in a command; "" without either."""
        return f" --url {self.url}" if self.url else f" --home {self.home}" if self.home else ""


_GIVEN: ContextVar[RootOptions] = ContextVar("root options", default=RootOptions())  # noqa: B039


def given() -> RootOptions:
    """Return the root options of the command that runs."""
    return _GIVEN.get()


_EPILOG = "--home, --url and --json: see `cray-agents --help`."


class Commands(typer.Typer):
    """A group of commands, or commands without one; `command` is the one way to register them."""

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, no_args_is_help=True, **settings)

    def command(  # type: ignore[override]
        self, name: str, takes: str = "json", **settings: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a function as a command; `takes`: which of `json` and `url` it heeds.

        All commands take `--home`. The others are refused where they would have no effect.
        """

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def checked(*words: Any, **options: Any) -> Any:
                for option in ("json", "url"):
                    if getattr(given(), option) and option not in takes.split():
                        raise BadInput(f"--{option} has no effect here: leave it out", param=option)
                return function(*words, **options)

            settings.setdefault("epilog", _EPILOG)
            super(Commands, self).command(name, **settings)(checked)
            return function

        return register


class RootGroup(typer.core.TyperGroup):
    """The root of the command line: its options may stand anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line."""
        front, rest = split_root_options(args)
        return super().parse_args(ctx, [*front, *rest])

    def invoke(self, ctx: Any) -> Any:
        """Run the command with its root options as `given`."""
        options = {name: ctx.params[name] for name in ("home", "url", "json")}
        token = _GIVEN.set(RootOptions(**options))
        try:
            return super().invoke(ctx)
        finally:
            _GIVEN.reset(token)


def split_root_options(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the root options among the words of a command line, and the other words.

    Words behind `--` stay where they are. Raises BadInput for `--home` or `--url` without a value.
    """
    front: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in ("--home", "--url"):
            value = next(words, None)
            if value is None:
                raise BadInput(f"{word} needs a value", param=word[2:])
            front += [word, value]
        elif word == "--json" or word.startswith(("--home=", "--url=")):
            front.append(word)
        else:
            rest.append(word)
    return front, rest


def key_value(text: str, option: str) -> tuple[str, Any]:
    """Parse the KEY=VALUE of an option; the value is JSON, or else a text. Raises BadInput."""
    key, equals, value = text.partition("=")
    if not (key.strip() and equals):
        raise BadInput(f"--{option} {text!r}: write it as key=value", param=option)
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value.strip()
