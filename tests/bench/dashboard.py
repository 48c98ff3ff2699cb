"""Dashboard: seconds until people see something, in Chromium slowed down four times.

    python -m tests.bench.dashboard [RUNS] [SECONDS]

Over a store of RUNS runs (100,000), with one run of 5,000 turns and 50 MB, and one turn of 32,768
tokens. The page is followed for SECONDS (120) while calls are recorded. Prints a row per measure:
its median, its 95th percentile, the goal. Needs Chromium and the built pages (`make ui`).
"""

import asyncio
import gzip
import os
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from cray_agents.paths import Home
from cray_agents.runtime.dashboard import static_files
from cray_agents.runtime.disk.checksums import with_crc
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.segments.sealed import write_sealed
from tests.bench.corpus import write_corpus
from tests.bench.views import LONG, TURNS, write_long_run
from tests.runtime.views.test_run_views import model_with_tokenizer
from tests.support.gateway_process import gateway
from tests.support.watched_pages import CHROMIUM, FLAGS

TOKENS = 32_768
TIMES = 12
SLOWER = 4  # times
WAIT = 300_000  # milliseconds
FILTERS = ["reward>=1", "loop:loop-3", "agent:coder", "seconds>8", "error", "model:calc@1"]
#: Resolves to the milliseconds from the call to the second frame in which a text matches.
SEEN = """
([selector, pattern]) => new Promise((resolve) => {
  const begun = performance.now(), wanted = new RegExp(pattern);
  const look = () => {
    const places = [...document.querySelectorAll(selector)];
    if (!places.some((place) => wanted.test(place.innerText))) return requestAnimationFrame(look);
    requestAnimationFrame(() => resolve(performance.now() - begun));
  };
  look();
})
"""


def write_token_run(home: Home, vocabulary: int) -> None:
    """Write a run whose one answer has TOKENS tokens."""
    tokens = [n % vocabulary for n in range(TOKENS)]
    body = {
        "id": "call-tokens",
        "run_id": "tokens",
        "model": "m@1",
        "messages": [{"role": "user", "content": "q"}],
        "message": {"role": "assistant", "content": "long"},
        "prompt_token_ids": [1],
        "token_ids": tokens,
        "logprobs": [-(n % 50) / 10 for n in tokens],
        "started": 1.0,
        "seconds": 9.0,
    }
    event = {"id": "call-tokens", "run_id": "tokens", "kind": "call", "time": 1.0, "body": body}
    write_sealed(home.segments, "segment_tokens-0000", iter([with_crc(orjson.dumps(event))]))


def print_row(what: str, values: list[float], unit: str, goal: str) -> None:
    """Print the median and the 95th percentile of a measure, beside its goal."""
    high = sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]
    print(
        f"| {what} | {statistics.median(values):,.0f} {unit} | {high:,.0f} {unit} | {goal} |",
        flush=True,
    )


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


class SlowPage:
    """Pages of a browser with an empty cache, slowed down SLOWER times."""

    def __init__(self, browser: Any, url: str) -> None:
        self._browser, self._url = browser, url
        self.open_context()

    def open_context(self) -> None:
        """Begin with an empty cache."""
        context = self._browser.new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(WAIT)
        self.page = context.new_page()
        self.devtools = context.new_cdp_session(self.page)
        self.devtools.send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
        self.devtools.send("Performance.enable")

    def load(self, fragment: str, selector: str, pattern: str = ".") -> tuple[float, float]:
        """Open a screen anew; return milliseconds to the first paint, and to a text of it."""
        self.page.context.close()
        self.open_context()
        self.page.goto(f"{self._url}/{fragment}", wait_until="commit")
        self.page.evaluate(SEEN, [selector, pattern])
        now = self.page.evaluate("performance.now()")
        paint = self.page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
        )
        return float(paint), float(now)

    def go(self, fragment: str, selector: str, pattern: str = ".") -> float:
        """Change the address; return milliseconds to a text of the screen."""
        self.page.evaluate(f"location.hash = {fragment!r}")
        return float(self.page.evaluate(SEEN, [selector, pattern]))

    def heap(self) -> float:
        """Return the megabytes of the page's heap after a collection."""
        self.devtools.send("HeapProfiler.collectGarbage")
        values = self.devtools.send("Performance.getMetrics")["metrics"]
        return float(next(v["value"] for v in values if v["name"] == "JSHeapUsedSize")) / 1e6


def measure_screens(slow: SlowPage, runs: int) -> None:
    """Print the rows of single screens."""
    paints, usable = zip(
        *(slow.load("#/runs", "a.run-row", "Task") for _ in range(TIMES)), strict=True
    )
    print_row("first paint", list(paints), "ms", "400 ms")
    print_row(f"usable, {runs:,} runs stored", list(usable), "ms", "1,000 ms")
    times = []
    for number in range(TIMES * 2):
        line = FILTERS[number % len(FILTERS)] + f" and turns>={number % 2}"
        slow.go("#/overview", "h1, h2", "Replicas|Overview")
        times.append(slow.go(f"#/runs?q={urllib.parse.quote(line)}", "a.run-row", "Task"))
    print_row("filter to rows", times, "ms", "200 ms (95th)")
    outline, first = [], []
    for _ in range(TIMES // 2):
        _, seen = slow.load(f"#/run/{LONG}", ".outline", "1")
        outline.append(seen)
        first.append(seen + float(slow.page.evaluate(SEEN, ["article", "0 abcdefghij"])))
    print_row(
        f"run of {TURNS:,} turns, 50 MB: outline, the page's load included", outline, "ms", "300 ms"
    )
    print_row("its first turn readable, the page's load included", first, "ms", "500 ms")
    jumps = [
        slow.go(f"#/run/{LONG}?t={n}", "article", f"(^|\\D){n} abcdefghij")
        for n in range(97, TURNS, TURNS // TIMES)
    ]
    print_row("any turn of it", jumps, "ms", "200 ms")
    print_row("heap with it", [slow.heap()], "MB", "300 MB")
    colours = []
    for _ in range(TIMES // 2):
        slow.go("#/overview", "h1, h2", "Replicas|Overview")
        colours.append(slow.go("#/run/tokens?t=0&mode=tokens", "article .tokens", "."))
    print_row(f"colours of {TOKENS:,} tokens, their transfer included", colours, "ms", "300 ms")


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def record_calls(url: str, until: float) -> int:
    """Ask about five times a second, so that the pages have changes to follow."""
    count = 0
    async with aiohttp.ClientSession() as http:
        while time.time() < until:
            body = {"model": "m", "messages": [{"role": "user", "content": f"{count}"}]}
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()
            count += 1
            await asyncio.sleep(0.2)
    return count


def measure_following(
    open_page: Callable[[], SlowPage], url: str, pid: int, seconds: float
) -> None:
    """Print the growth of the heap, and what an open page costs the gateway."""
    shares = []
    pages: list[SlowPage] = []
    for _ in (False, True):
        begun, spent = time.time(), cpu_seconds(pid)
        heap = pages[0].heap() if pages else 0.0
        with ThreadPoolExecutor(1) as pool:  # Playwright has an event loop in this thread
            pool.submit(asyncio.run, record_calls(url, begun + seconds)).result()
        shares.append((cpu_seconds(pid) - spent) / (time.time() - begun) * 100)
        if pages:
            print_row(
                f"heap at the end of {seconds:.0f} s of following",
                [pages[0].heap()],
                "MB",
                "200 MB",
            )
            print_row("its growth meanwhile", [(pages[0].heap() - heap) * 1000], "KB", "none")
        else:
            pages.append(open_page())
            pages[0].go("#/overview", "h1, h2", "Replicas|Overview")
    print(
        f"| the gateway's processor with one open page, and without | {shares[1]:.1f} % |"
        f" {shares[0]:.1f} % | 1 % more |",
        flush=True,
    )


@contextmanager
def served(runs: int) -> Iterator[tuple[str, int]]:
    """The gateway of a root with the runs; its URL and pid."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        write_corpus(home, runs)
        write_long_run(home)
        model = model_with_tokenizer(Path(folder) / "model")
        registry = Registry(home)
        registry.promote("m", registry.register("m", *registry.import_checkpoint(model)).number)
        vocabulary = len(orjson.loads((model / "tokenizer.json").read_bytes())["model"]["vocab"])
        write_token_run(home, vocabulary)
        store = Store(home)  # index it now, as a platform that has been running for months
        asyncio.run(store.close())
        with gateway(home.root) as (url, process):
            yield url, process.pid


def main(runs: int, seconds: float) -> None:
    """Measure all, and print the table."""
    from playwright.sync_api import sync_playwright

    print(f"load {os.getloadavg()[0]:.0f}\n")
    print("| measure | median | 95th percentile | goal |\n|---|---|---|---|", flush=True)
    print_sizes()
    with served(runs) as (url, pid), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        slow = SlowPage(browser, url)
        measure_screens(slow, runs)
        slow.page.context.close()
        measure_following(lambda: SlowPage(browser, url), url, pid, seconds)
        browser.close()
    print(f"\nload {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["100000"])[0]), float((sys.argv[2:] or ["120"])[0]))
