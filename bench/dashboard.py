"""Dashboard: seconds until people see something, in Chromium, beside Inspect View and Phoenix.

    python -m bench.dashboard [RUNS] [--seconds N] [--home DIR] [--no-huge] [--no-rivals]

Over a store of RUNS runs (100,000), with one of 5,000 turns and 50 MB, one with an answer of 32,768
tokens, and one of 300,000 events and 1 GB. `--home` keeps that root for another time. The first
paint and the time until it is usable are of a browser slowed down four times, all else is not. An
open page follows for `--seconds` (120) while calls are recorded. Prints a row per measure: its
median, its 95th percentile, the goal; then the same runs in the rivals. Needs Chromium and the
built pages (`make ui`).
"""

import argparse
import asyncio
import gzip
import os
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.dashboard_root import HUGE, HUGE_TURNS, TOKEN_RUN, TOKENS, write_root
from bench.rivals import run_viewers
from bench.timed_pages import TimedPage, print_row
from bench.views import LONG, TURNS
from cray_agents.paths import Home
from cray_agents.runtime.dashboard import static_files
from cray_agents.runtime.store import Store
from tests.support.gateway_process import gateway
from tests.support.watched_pages import CHROMIUM, FLAGS

TIMES = 12
SLOWER = 4  # times
MOST_NODES = "3,000"
FILTERS = ["reward>=1", "loop:loop-3", "agent:coder", "seconds>8", "error", "model:calc@1"]
NEW_ROW = ".virtual:not([data-old]) a.run-row"  # of a table that was made since
OVERVIEW = ("#/overview", "main", "Are the engines idle?")


def print_sizes() -> None:
    """Print the size of the code, compressed by gzip, before the first paint and in all."""
    page = (static_files.STATIC / "index.html").read_text()
    code = {
        path.name: len(gzip.compress(path.read_bytes(), 9)) / 1024
        for path in (static_files.STATIC / "assets").iterdir()
        if path.suffix in (".js", ".css")
    }
    first = sum(size for name, size in code.items() if name in page)
    print_row("code before the first paint", [first], "KB", "120 KB")
    print_row("code in all", [sum(code.values())], "KB", "400 KB")


def measure_opening(slow: TimedPage, runs: int) -> None:
    """Print how soon the list of runs is there in a slowed down browser."""
    paints, usable = [], []
    for _ in range(TIMES):
        usable.append(slow.load("#/runs", "a.run-row"))
        paints.append(slow.first_paint())
    print_row(f"first paint, slowed down {SLOWER} times", paints, "ms", "400 ms")
    print_row(
        f"usable with {runs:,} runs stored, slowed down {SLOWER} times", usable, "ms", "1,000 ms"
    )


def measure_list(page: TimedPage) -> None:
    """Print how soon a changed filter shows its rows, and how a list scrolls."""
    page.load("#/runs", "a.run-row")
    times, nodes = [], 0
    for number in range(TIMES * 3):
        line = FILTERS[number % len(FILTERS)] + f" and turns>={number // len(FILTERS) % 2}"
        times.append(page.go(f"#/runs?q={urllib.parse.quote(line)}", NEW_ROW))
        nodes = max(nodes, page.nodes())
    print_row("filter to rows", times, "ms", "200 ms (95th)")
    page.go("#/runs", NEW_ROW)
    print_row("a frame of scrolling the runs", page.scroll("main .virtual"), "ms", "17 ms (95th)")
    print_row("nodes of the page", [max(nodes, page.nodes())], "", MOST_NODES)


def measure_long_run(page: TimedPage) -> None:
    """Print how soon parts of a run of many turns are there."""
    outline, first = [], []
    for _ in range(TIMES):
        begun = page.load(f"#/run/{LONG}", ".outline .mark", "^0")
        outline.append(begun)
        first.append(begun + page.see("article", "0 abcdefghij"))
    print_row(f"run of {TURNS:,} turns, 50 MB: page and outline", outline, "ms", "300 ms")
    print_row("page and its first turn readable", first, "ms", "500 ms")
    jumps = [
        page.go(f"#/run/{LONG}?t={n}", "article", f"(^|\\D){n} abcdefghij")
        for n in range(97, TURNS, TURNS // TIMES // 2)
    ]
    print_row("any turn of it", jumps, "ms", "200 ms (95th)")
    print_row("heap with it", [page.heap()], "MB", "300 MB")


def measure_tokens(page: TimedPage) -> None:
    """Print how soon the tokens of a long answer have their colours."""
    colours = []
    for _ in range(TIMES):
        page.go(*OVERVIEW)
        colours.append(page.go(f"#/run/{TOKEN_RUN}?t=0&mode=tokens", "article .tokens"))
    print_row(f"colours of {TOKENS:,} tokens, their transfer included", colours, "ms", "300 ms")
    print_row("nodes of the page", [page.nodes()], "", MOST_NODES)


def measure_huge_run(page: TimedPage, pid: int) -> None:
    """Print how a run of 1 GB opens, first by a gateway that has not read it yet."""
    what = f"run of {HUGE_TURNS * 2:,} events, 1 GB"
    for times, when in ((1, "for the first time"), (TIMES // 2, "again")):
        marks, turns = [], []
        for _ in range(times):
            marks.append(page.load(f"#/run/{HUGE}", ".outline .mark", "^0"))
            turns.append(marks[-1] + page.see("article", "0 abcdefghij"))
        print_row(f"{what}: page and outline, {when}", marks, "ms", "-")
        print_row(f"page and its first turn readable, {when}", turns, "ms", "-")
    jumps = [
        page.go(f"#/run/{HUGE}?t={n}", "article", f"(^|\\D){n} abcdefghij")
        for n in range(997, HUGE_TURNS, HUGE_TURNS // TIMES)
    ]
    print_row("any turn of it", jumps, "ms", "-")
    print_row("heap with it", [page.heap()], "MB", "300 MB")
    print_row("the gateway's memory", [run_viewers.memory(pid)], "MB", "-")


async def record_calls(url: str, until: float) -> list[float]:
    """Ask about five times a second, so that there are changes; return milliseconds of each."""
    times = []
    async with aiohttp.ClientSession() as http:
        while time.time() < until:
            body = {"model": "m", "messages": [{"role": "user", "content": f"{len(times)}"}]}
            begun = time.perf_counter()
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()
            times.append((time.perf_counter() - begun) * 1000)
            await asyncio.sleep(0.2)
    return times


def spend(url: str, pid: int, seconds: float) -> tuple[float, float]:
    """Record calls meanwhile; return the gateway's share of a core, and a call's milliseconds."""
    begun, spent = time.time(), run_viewers.cpu_seconds(pid)
    with ThreadPoolExecutor(1) as pool:  # Playwright has an event loop in this thread
        times = pool.submit(asyncio.run, record_calls(url, begun + seconds)).result()
    share = (run_viewers.cpu_seconds(pid) - spent) / (time.time() - begun) * 100
    return share, statistics.median(times)


def measure_following(page: TimedPage, url: str, pid: int, seconds: float) -> None:
    """Print the growth of the heap, and what an open page costs the gateway."""
    page.close()
    alone = spend(url, pid, min(seconds, 120))
    page.open_context()
    page.load(*OVERVIEW)
    spend(url, pid, min(seconds, 20))  # until its lists are full
    before = page.heap()
    followed = spend(url, pid, seconds)
    after = page.heap()
    print_row(f"heap after {seconds:,.0f} s of following", [after], "MB", "200 MB")
    print_row("its growth meanwhile", [(after - before) * 1000], "KB", "none")
    shares, calls = (
        f"{unit[0]:.2f} {name} | {unit[1]:.2f} {name}"
        for unit, name in zip(zip(followed, alone, strict=True), ("%", "ms"), strict=True)
    )
    print(f"| the gateway's core: with an open page, without | {shares} | 1 % more |")
    print(f"| median call: with an open page, without | {calls} | the same |", flush=True)


@contextmanager
def served(folder: Path, runs: int, *, huge: bool) -> Iterator[tuple[Home, str, int]]:
    """The gateway of a root with the runs; the root, its URL and its process."""
    home = Home(folder / "home")
    if not home.root.exists():
        write_root(home, runs, huge=huge)
    # index it now, as a platform has that has been running for months
    asyncio.run(Store(home).close())
    with gateway(home.root) as (url, process):
        yield home, url, process.pid


def measure(browser: Any, home: Home, url: str, pid: int, options: argparse.Namespace) -> None:
    """Print all rows of the dashboard, then those of the rivals."""
    slow = TimedPage(browser, url, SLOWER)
    measure_opening(slow, options.runs)
    slow.close()
    page = TimedPage(browser, url)
    measure_list(page)
    measure_long_run(page)
    measure_tokens(page)
    if not options.no_huge:
        measure_huge_run(page, pid)
    measure_following(page, url, pid, options.seconds)
    page.close()
    if not options.no_rivals:
        run_viewers.main(browser, home, huge=not options.no_huge)


def main(options: argparse.Namespace, folder: Path) -> None:
    """Measure all, and print the table."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        sys.exit("there is no chromium: apt-get install chromium")
    with (
        served(folder, options.runs, huge=not options.no_huge) as (home, url, pid),
        sync_playwright() as playwright,
    ):
        print(f"load {os.getloadavg()[0]:.0f}\n")
        print("| measure | median | 95th percentile | goal |\n|---|---|---|---|", flush=True)
        print_sizes()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        measure(browser, home, url, pid, options)
        browser.close()
    print(f"\nload {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=int, nargs="?", default=100_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--home", type=Path, help="a folder for the root, kept")
    parser.add_argument("--no-huge", action="store_true", help="without the run of 1 GB")
    parser.add_argument("--no-rivals", action="store_true")
    given = parser.parse_args()
    if given.home:
        main(given, given.home)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(given, Path(temporary))
