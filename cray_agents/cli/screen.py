"""Terminal output that commands share: consoles, and tables that are also JSON.

Texts of models, tools and logs are printed without markup, and their control characters as
pictures or escapes: a stored text must not drive the terminal. The consoles here see to it, also
where a command forgets to; before the layout, `disarm` and `one_line` do, so that columns fit.
"""

import asyncio
import getpass
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from cray_agents.cli.options import given
from cray_agents.config import Config, load_config
from cray_agents.errors import NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.server.permissions import keep_private
from cray_agents.server.platform_process import (
    ask_once,
    client,
    command,
    find_platform,
    running,
    shown_path,
)

if TYPE_CHECKING:
    from cray_agents.runtime.store import Store

LOG_WIDTH = 100  # columns, where there is no terminal to ask
GAP = 2  # between the columns of a table
_C1 = range(0x7F, 0xA0)  # with DEL; U+009B begins a command to xterm, as ESC [ does
_BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they turn the order of what follows
_PICTURES: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32) if code not in (9, 10)},
    **{code: f"\\u{code:04x}" for code in (*_C1, *_BIDI)},
}


class _DisarmedConsole(Console):
    """A console whose texts drive no terminal; only its own styles and controls do."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else disarm(text), style, control)


_width = None if sys.stderr.isatty() or "COLUMNS" in os.environ else LOG_WIDTH
console = _DisarmedConsole(width=None if sys.stdout.isatty() else _width, highlight=False)
errors = _DisarmedConsole(stderr=True, width=_width, highlight=False)


def say(text: str) -> None:
    """Print a line of text, without markup; a long one is not wrapped."""
    console.print(text, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a line as `say` does, on stderr: what is no answer of the command."""
    errors.print(text, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value, or a record of pydantic, as JSON."""
    if isinstance(value, BaseModel):
        print(disarm(value.model_dump_json(indent=2)))
    else:
        print(json.dumps(value, indent=2, default=str))


def show(
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    *,
    damaged: Sequence[dict[str, str]] = (),
) -> None:
    """Print rows as a table of some columns, or with `--json` whole as a list.

    The damaged records that the list leaves out are named on stderr.
    """
    for each in damaged:
        print(disarm(f"left out: {each['id']}: {each['reason']}"), file=sys.stderr)
    if given().json:
        print_json(list(rows))
    elif not rows:
        errors.print("there are none", style="dim")
    else:
        print_table(rows, columns)


def print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a table of some columns, or a block each where the screen is too narrow.

    No word is ever cut: people copy them.
    """
    heads = [column.replace("_", " ") for column in columns]
    texts = [[one_line(cell(row.get(column))) for column in columns] for row in rows]
    if (widths := column_widths(heads, texts)) is None:
        for name, *others in texts:
            say(name)
            line(", ".join(map(" ".join, zip(heads[1:], others, strict=True))), indent=2)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, head, width in zip(columns, heads, widths, strict=True):
        kinds = {type(row.get(column)) for row in rows if row.get(column) is not None}
        numbers = bool(kinds) and kinds <= {int, float}
        table.add_column(head, justify="right" if numbers else "left", width=width)
    for each in texts:
        table.add_row(*map(Text, each))
    console.print(table)


def column_widths(heads: Sequence[str], texts: Iterable[Sequence[str]]) -> list[int] | None:
    """Return how wide columns are that cut no word; None where the screen is too narrow."""
    places = list(zip(heads, *texts, strict=True))
    widths = [max(map(cell_len, " ".join(place).split())) for place in places]
    widths[0] = max(map(cell_len, places[0]))  # names stay on a line
    if (spare := console.width - sum(widths) - GAP * (len(widths) - 1)) < 0:
        return None
    whole = [max(map(cell_len, place)) for place in places]
    for place in sorted(range(len(whole)), key=whole.__getitem__):  # the widest wrap their words
        more = min(spare, whole[place] - widths[place])
        widths[place] += more
        spare -= more
    return widths


def cell(value: Any) -> str:
    """Return a value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1e7 else f"{value:.3g}"
    return str(value)


def when(seconds: float) -> str:
    """Return a unix time as local date and time."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def disarm(text: str) -> str:
    """Return a text with its control characters, but for tabs and line breaks, made visible.

    Those below a blank become pictures. DEL, C1 controls and bidi overrides become escapes as JSON
    has them, so a text of JSON stays one of the same value.
    """
    return text.translate(_PICTURES)


def one_line(text: str) -> str:
    """Return a text without line breaks and control characters."""
    return disarm(" ".join(text.split()))


def line(text: str, indent: int = 0, style: str = "", hanging: int = 0) -> None:
    """Print a text with each line indented; continuation lines are indented by `hanging` more.

    On a terminal lines are wrapped to its width; in a pipe they are not wrapped.
    """
    for number, source in enumerate(text.split("\n")):
        margin = indent + (hanging if number else 0)
        whole = Text(disarm(source.expandtabs(4)), style)
        if not console.is_terminal:
            console.print(Text(" " * margin) + whole, soft_wrap=True)
            continue
        for part, piece in enumerate(
            whole.wrap(console, max(20, console.width - margin - hanging))
        ):
            rest = hanging if part and not number else 0
            piece.rstrip()
            console.print(Text(" " * (margin + rest)) + piece, soft_wrap=True)


def user() -> str:
    """Return the name of this shell's user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "somebody"


def clock(seconds: float) -> str:
    """Return seconds as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def size(count: int) -> str:
    """Return a number of bytes with its unit, for people."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def progress_bar(*counts: str | ProgressColumn) -> Progress:
    """Return a bar on stderr, with counts before the time, that goes at its end; none in a log."""
    start = (TextColumn("{task.description}"), BarColumn())
    return Progress(*start, *counts, TimeRemainingColumn(), console=errors, transient=True,
                    disable=not errors.is_terminal)  # fmt: skip


def settings(**flags: Any) -> Config:
    """Return the configuration, with `--home` and flags of the command."""
    return load_config({"home": given().home, **flags})


def root() -> Home:
    """Return the root that a command looks at. Raises NotFound if nothing is stored there."""
    shared_root = settings().root
    check_stored(shared_root)
    return shared_root


def open_root(config: Config, *, new: bool = False) -> Home:
    """Make the root private and return it; later files of this process are private, too.

    Raises NotFound if nothing is stored there, unless it may be a `new` root.
    """
    if not new:
        check_stored(config.root)
    if change := keep_private(config):
        note(change)
    return config.root


def make_store(config: Config, *, new: bool = False) -> "Store":
    """Return the store of the root, which may be a `new` one; what is appended is redacted."""
    from cray_agents.runtime.store import Store
    from cray_agents.runtime.store.redaction import Redactor

    return Store(open_root(config, new=new), redactor=Redactor.of(config))


@contextmanager
def open_store() -> "Iterator[Store]":
    """Yield the store of the root, to read and append; close it at the end."""
    config = settings()
    with errors.status("looking at what is stored"):
        store = make_store(config)
    try:
        yield store
    finally:
        asyncio.run(store.close())


def check_stored(home: Home) -> None:
    """Raise NotFound if a root is not there, or holds nothing but other roots, such as a demo's."""
    inside = [*home.root.iterdir()] if home.root.is_dir() else []
    nested = [path for path in inside if Home(path).segments.is_dir()]
    if len(nested) == len(inside):
        named = ", ".join(f"--home {shown_path(path)}" for path in sorted(nested))
        hint = f"; roots in it: {named}" if nested else ""
        raise NotFound(f"nothing is stored on {home.root}{hint}", param="home")


# ---- Access of commands to a platform: the one at `--url`, on the root, or at $CRAY_AGENTS_URL
T = TypeVar("T")


def found_platform() -> dict[str, Any]:
    """Return the claim of the platform that this command means. Raises SetupError for none."""
    return find_platform(settings().root, given().url)


def platform_client() -> Platform:
    """Return a client of the platform that this command means. Raises SetupError for none."""
    return client(found_platform())


def ask_root(request: Callable[[Platform], Awaitable[T]]) -> T:
    """Return the answer of the platform on the root to one request. Raises SetupError for none."""
    home = root()
    if (info := running(home)) is None:
        raise SetupError(f"no platform runs on {home.root}: start it with `{command('up', home)}`")
    return ask_once(client(info), request)
