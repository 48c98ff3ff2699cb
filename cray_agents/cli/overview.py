"""Overview of a platform, for `status --watch`: the dashboard's first page, in a terminal.

It asks the same routes as that page, with the caller's key: what the key may not read is left out.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cray_agents.cli.options import given
from cray_agents.cli.runs import age
from cray_agents.cli.screen import cell, column_widths, console, one_line, print_json
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
        rows: list[dict[str, Any]] = []
        async for row in platform.views.loops():
            rows.append(row)
            if len(rows) == LOOPS:
                break
        return rows

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
    heads = ("state", "version", "in flight", "host", "logprob check", "restarts", "error")
    rows = [
        (each.get("state"), each.get("version"), each.get("in_flight") or 0, each.get("host"),
         _number((each.get("probe") or {}).get("max_logprob_diff")), each.get("restarts") or 0,
         str(each.get("error") or "-")[:200])
        for each in replicas[:REPLICAS]
    ]  # fmt: skip
    return _with_rest(_table(heads, rows), len(replicas) - REPLICAS)


def _queue(queue: dict[str, Any] | None) -> RenderableType:
    if queue is None:
        return _none(queue, "")
    rows = [
        (name, queue[name]["inside"], queue[name]["waiting"]) for name in ("interactive", "batch")
    ]
    note = f"{queue['capacity']} fit at once, {queue['mean_seconds']:.1f} s each"
    if queue["parked"]:
        note += f"; {queue['parked']} wait for a version that no replica holds"
    return Group(_table(("class", "at the engines", "waiting"), rows), Text(note, style="dim"))


def _loops(loops: Sequence[dict[str, Any]] | None, now: float) -> RenderableType:
    if not loops:
        return _none(loops, "no loop ran yet: `cray-agents demo` shows one")
    rows = []
    for loop in loops:
        last = loop["last"] or {}
        success = None if (part := last.get("holdout_success")) is None else f"{part:.1%}"
        decision = "promoted" if last.get("promoted") else "not promoted"
        points = curve([point["success"] for point in loop["holdout"]])
        rows.append((loop["id"], last.get("iteration"), success, points,
                     decision if last else None, f"{age(now - loop['updated'])} ago"))  # fmt: skip
    return _table(("loop", "iteration", "held-out", "curve", "outcome", "changed"), rows)


def _jobs(jobs: Sequence[dict[str, Any]] | None) -> RenderableType:
    if not jobs:
        return _none(jobs, "no training job yet")
    rows = []
    for job in jobs[:JOBS]:
        steps = f"{job.get('step') or 0}/{job.get('steps') or '-'}"
        rows.append((job["id"], job.get("state"), steps, _number(job.get("loss_last"))))
    return _with_rest(_table(("job", "state", "steps", "loss"), rows), len(jobs) - JOBS)


def curve(values: Sequence[float]) -> str:
    """Return values from 0 to 1 as bars, the newest last."""
    last = values[-POINTS:]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(each * len(BARS))))] for each in last)


def _none(value: Any, text: str) -> Text:
    return Text("not for this key" if value is None else text, style="dim")


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> RenderableType:
    """Return a table, or a block for each row where the screen is too narrow: nothing is cut."""
    texts = [[one_line(cell(value)) for value in row] for row in rows]
    if (widths := column_widths(heads, texts)) is None:
        return Group(*(
            Text(f"{name}: " + ", ".join(map(" ".join, zip(heads[1:], others, strict=True))))
            for name, *others in texts
        ))  # fmt: skip
    table = Table(box=None, header_style="dim", pad_edge=False)
    for head, width in zip(heads, widths, strict=True):
        table.add_column(head, width=width)
    for each in texts:
        styles = (STATES.get(text, "yellow") if head == "state" else ""
                  for head, text in zip(heads, each, strict=True))  # fmt: skip
        table.add_row(*map(Text, each, styles))
    return table


def _with_rest(table: RenderableType, more: int) -> RenderableType:
    return table if more <= 0 else Group(table, Text(f"and {more} more", style="dim"))


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"
