"""Root options, groups of commands, and where old commands and options went.

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
    """A group of commands. `command` is the one way to register a command."""

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
    """The root of the command line: its options may stand anywhere, and old names are refused."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line. Raises BadInput for what has another name now."""
        front, rest = split_root_options(args)
        refuse_old_names(rest)
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


#: Commands of earlier versions, and what does their work now.
MOVED = {
    "top": "status --watch",
    "events": "status --events",
    "gateway": "up --gateway-only",
    "goodput": "usage goodput",
    "cost": "usage cost",
    "keys usage": "usage keys",
    "audit verify": "doctor",
    "audit list": "GET /v1/audit, or the files in the root's audit folder",
    "upload": "the OpenAI client's files.create, or POST /v1/uploads",
    "models history": "models show NAME",
    "models lineage": "models show NAME",
    "models memorisation": "scan memorisation NAME",
    "models drift": "scan drift NAME@N NAME@M",
    "models prune": "maintain prune models",
    "jobs hardware": "jobs show --hardware JOB",
    "jobs script": "jobs show --script JOB",
    "jobs plot": "the job's page in the dashboard",
    "jobs submit-script": "sbatch",
    "batch submit": "batch run --detach FILE",
    "batch list": "batch status",
    "batch show": "batch status BATCH",
    "batch wait": "batch status --wait BATCH",
    "batch cancel": "batch status --cancel BATCH",
    "batch results": "batch status --output FILE BATCH",
    "runs fsck": "maintain fsck",
    "runs compact": "maintain compact",
    "runs prune": "maintain prune runs",
    "runs outline": "runs show --outline RUN",
    "runs score": "POST /v1/trajectories/RUN/turns/TURN/score",
    "runs diff": "the dashboard's page that compares two runs",
    "dataset fsck": "maintain fsck",
    "dataset diff": "the dashboard's page that compares two training sets",
    "dataset runs": "the training set's page in the dashboard, or runs.jsonl in its folder",
}
#: Options of earlier versions that are terms of --where now.
_TERMS = {
    "--loop": "loop=NAME",
    "--generation": "iteration=N",
    "--agent": "agent=NAME",
    "--task": "task=ID",
    "--split": "split=train",
    "--model": "model=NAME@N",
    "--stop-reason": "stop_reason=completed",
    "--error": "error=TYPE",
    "--since": "since=7d",
    "--until": "until=2026-07-01",
    "--tag": "tag=NAME",
    "--text": "text=WORD",
    **{
        f"--{side}-{name}": f"{name}{compare}N"
        for name in ("reward", "seconds", "turns", "tokens")
        for side, compare in (("min", ">="), ("max", "<="))
    },
}
_FILTERED = ("runs list", "runs stats", "runs rescore", "scan", "export", "maintain prune")
_OF_RECIPES = ("--loop", "--generation", "--agent", "--model", "--tag")
#: Options of `dataset build` that are fields for --set now.
_SET = ("min-reward", "best-of", "min-margin", "max-per-task", "max-tokens", "step", "max-uses",
        "validation", "near-duplicates", "balance-by", "balance-power", "render")  # fmt: skip


def key_value(text: str, option: str) -> tuple[str, Any]:
    """Parse the KEY=VALUE of an option; the value is JSON, or else a text. Raises BadInput."""
    key, equals, value = text.partition("=")
    if not (key.strip() and equals):
        raise BadInput(f"--{option} {text!r}: write it as key=value", param=option)
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value.strip()


def refuse_old_names(words: Sequence[str]) -> None:
    """Raise BadInput for a command or an option of an earlier version, with its new place."""
    names = " ".join(words[:2]), "".join(words[:1])
    for name in names:
        if (now := MOVED.get(name)) is not None:
            raise BadInput(f"`cray-agents {name}` is gone: use {_quoted(now)}", param="command")
    old: Sequence[str] = ()
    if any(name in _FILTERED for name in names):
        old = [term for term in _TERMS if (term, words[0]) != ("--split", "export")]
    elif names[0] == "dataset build":
        old = _OF_RECIPES
    for word in words:
        option = word.partition("=")[0]
        if option == "--generations" and names[1] in ("loop", "demo"):
            raise BadInput("--generations is --iterations now", param="iterations")
        if names[0] == "dataset build" and option[2:] in _SET:
            field = option[2:].replace("-", "_")
            raise BadInput(f"{option} is a field now: --set {field}=VALUE", param="set")
        if option in old:
            raise BadInput(
                f'{option} is a term of --where now: --where "{_TERMS[option]}"', param="where"
            )


def _quoted(now: str) -> str:
    first = now.partition(" ")[0]
    known = (
        "status",
        "up",
        "usage",
        "doctor",
        "models",
        "scan",
        "maintain",
        "jobs",
        "batch",
        "runs",
    )
    return f"`cray-agents {now}`" if first in known else now
