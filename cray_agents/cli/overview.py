"""Overview of a platform, for `status --watch`: the dashboard's first page, in a terminal.

It asks the same routes as that page, with the caller's key: what the key may not read is left out.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cray_agents.cli.options import given
from cray_agents.cli.runs import age
from cray_agents.cli.screen import console, one_line, print_json
from cray_agents.errors import AccessDenied, EngineError
from cray_agents.platform.client import Platform

EVERY = 2.0  # seconds between two looks
LOOPS, JOBS, WARNINGS, REPLICAS = 6, 8, 5, 24  # rows of each
BARS = "▁▂▃▄▅▆▇█"
POINTS = 24  # of a curve of held-out success
STATES = {"serving": "green", "running": "green", "succeeded": "green", "failed": "red"}


def watch(platform: Platform) -> None:
    """Show replicas, queue, loops, jobs and warnings of a platform, until q or Ctrl-C.

    Without a terminal, or with `--json`, once.
    """
    once = given().json or not (sys.stdin.isatty() and sys.stdout.isatty())
    with suppress(KeyboardInterrupt):
        asyncio.run(_show_once(platform) if once else _follow(platform))


async def _show_once(platform: Platform) -> None:
    try:
        overview = await look(platform)
    finally:
        await platform.close()
    if given().json:
        print_json(overview)
    else:
        console.print(draw(overview))


async def _follow(platform: Platform) -> None:
    quitting = asyncio.Event()
    overview: dict[str, Any] | None = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live, _keys(quitting):
            while not quitting.is_set():
                try:
                    overview = await look(platform)
                    picture: RenderableType = draw(overview)
                except EngineError as error:  # it may come back
                    lost = Text(one_line(str(error)), style="red")
                    picture = lost if overview is None else Group(lost, draw(overview))
                live.update(picture, refresh=True)
                try:
                    await asyncio.wait_for(quitting.wait(), EVERY)
                except TimeoutError:
                    continue
    finally:
        await platform.close()


@contextmanager
def _keys(quitting: asyncio.Event) -> Iterator[None]:
    """Set the event when q is pressed."""
    import termios
    import tty

    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)

    def read() -> None:
        if sys.stdin.read(1) in ("q", "Q"):
            quitting.set()

    loop.add_reader(stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


async def look(platform: Platform) -> dict[str, Any]:
    """Return what the key may read of the overview; None for what it may not.

    Raises EngineUnavailable if nobody answers, AccessDenied for a wrong key.
    """

    async def loops() -> list[dict[str, Any]]:
        return [row async for row in _first(platform.views.loops(), LOOPS)]

    who = await platform.whoami()
    names = ("replicas", "queue", "warnings", "loops", "jobs")
    answers = await asyncio.gather(
        _allowed(platform.pool(spares=True)),
        _allowed(platform.views.queue()),
        _allowed(platform.views.warnings()),
        _allowed(loops()),
        _allowed(platform.views.jobs()),
    )
    looked = {"url": platform.url, "time": time.time(), "who": who}
    return looked | dict(zip(names, answers, strict=True))


async def _allowed(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except AccessDenied:
        return None


async def _first(rows: Any, count: int) -> Any:
    async for row in rows:
        yield row
        if (count := count - 1) <= 0:
            return


def draw(overview: dict[str, Any]) -> RenderableType:
    """Return the overview as text and tables."""
    who = overview["who"]
    moment = time.strftime("%H:%M:%S", time.localtime(overview["time"]))
    about = [overview["url"], moment, f"{who.get('name') or '-'} ({who.get('role') or '-'})"]
    picture: list[RenderableType] = [Text(one_line("   ".join(about)), style="bold")]
    for warning in (overview["warnings"] or [])[:WARNINGS]:
        style = "red" if warning.get("level") == "error" else "yellow"
        picture.append(Text("! " + one_line(str(warning["message"])), style=style))
    for title, rows in (
        ("replicas", _replicas(overview["replicas"])),
        ("queue", _queue(overview["queue"])),
        ("loops", _loops(overview["loops"], overview["time"])),
        ("jobs", _jobs(overview["jobs"])),
    ):
        picture += [Text(), Text(title, style="bold"), rows]
    return Group(*picture)


def _replicas(replicas: Sequence[dict[str, Any]] | None) -> RenderableType:
    if not replicas:
        return _none(replicas, "no replica: no model is served")
    table = _table("state", "version", "in flight", "host", "logprob check", "restarts", "")
    for each in replicas[:REPLICAS]:
        _add_row(
            table,
            _state(each.get("state")),
            str(each.get("version") or "-"),
            str(each.get("in_flight") or 0),
            str(each.get("host") or "-"),
            _number((each.get("probe") or {}).get("max_logprob_diff")),
            str(each.get("restarts") or 0),
            str(each.get("error") or "")[:200],
        )
    return _with_rest(table, len(replicas) - REPLICAS)


def _queue(queue: dict[str, Any] | None) -> RenderableType:
    if queue is None:
        return _none(queue, "")
    table = _table("class", "at the engines", "waiting")
    for name in ("interactive", "batch"):
        _add_row(table, name, str(queue[name]["inside"]), str(queue[name]["waiting"]))
    note = f"{queue['capacity']} fit at once, {queue['mean_seconds']:.1f} s each"
    if queue["parked"]:
        note += f"; {queue['parked']} wait for a version that no replica holds"
    return Group(table, Text(note, style="dim"))


def _loops(loops: Sequence[dict[str, Any]] | None, now: float) -> RenderableType:
    if not loops:
        return _none(loops, "no loop ran yet: `cray-agents demo` shows one")
    table = _table("loop", "iteration", "held-out", "", "outcome", "changed")
    for loop in loops:
        last = loop["last"] or {}
        success = last.get("holdout_success")
        decision = "promoted" if last.get("promoted") else "not promoted"
        _add_row(
            table,
            loop["id"][:40],
            str(last.get("iteration", "-")),
            "-" if success is None else f"{success:.1%}",
            curve([point["success"] for point in loop["holdout"]]),
            decision if last else "-",
            f"{age(now - loop['updated'])} ago",
        )
    return table


def _jobs(jobs: Sequence[dict[str, Any]] | None) -> RenderableType:
    if not jobs:
        return _none(jobs, "no training job yet")
    table = _table("job", "state", "steps", "loss")
    for job in islice(jobs, JOBS):
        _add_row(
            table,
            str(job["id"])[:40],
            _state(job.get("state")),
            f"{job.get('step') or 0}/{job.get('steps') or '-'}",
            _number(job.get("loss_last")),
        )
    return _with_rest(table, len(jobs) - JOBS)


def curve(values: Sequence[float]) -> str:
    """Return values from 0 to 1 as bars, the newest last."""
    last = values[-POINTS:]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(each * len(BARS))))] for each in last)


def _none(value: Any, text: str) -> Text:
    return Text("not for this key" if value is None else text, style="dim")


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _add_row(table: Table, *cells: str | Text) -> None:
    """Add cells whose texts cannot drive the terminal."""
    table.add_row(*(Text(one_line(cell)) if isinstance(cell, str) else cell for cell in cells))


def _with_rest(table: Table, more: int) -> RenderableType:
    return table if more <= 0 else Group(table, Text(f"and {more} more", style="dim"))


def _state(state: Any) -> Text:
    return Text(one_line(str(state or "-")), style=STATES.get(str(state), "yellow"))


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"
