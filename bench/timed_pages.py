"""Timed pages: pages of Chromium, timed from a change of the address to a text in a frame.

Used by dashboard.py for the dashboard, and by rivals/run_viewers.py for other viewers.
"""

import statistics
from typing import Any

WAIT = 120_000  # milliseconds
#: Resolves to the milliseconds from the call to the second frame with a text that matches.
SEEN = """
([address, selector, pattern, most]) => new Promise((resolve, reject) => {
  const begun = performance.now(), wanted = new RegExp(pattern);
  for (const old of document.querySelectorAll(".virtual")) old.dataset.old = 1;
  if (address !== null) location.hash = address;
  const look = () => {
    if (performance.now() - begun > most) return reject(new Error(`no ${pattern} in ${most} ms`));
    const places = [...document.querySelectorAll(selector)];
    if (!places.some((place) => wanted.test(place.textContent))) return requestAnimationFrame(look);
    requestAnimationFrame(() => resolve(performance.now() - begun));
  };
  look();
})
"""
#: Scrolls down a list in 120 frames; resolves to the milliseconds of each frame.
SCROLLED = """
(selector) => new Promise((resolve) => {
  const list = document.querySelector(selector), frames = [];
  let before = performance.now();
  const step = (now) => {
    frames.push(now - before);
    before = now;
    list.scrollTop += 93;
    if (frames.length <= 120) requestAnimationFrame(step); else resolve(frames.slice(1));
  };
  requestAnimationFrame(step);
})
"""


def print_row(what: str, values: list[float], unit: str, goal: str) -> None:
    """Print the median and the 95th percentile of a measure, beside its goal."""
    high = sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]
    middle = statistics.median(values)
    print(f"| {what} | {middle:,.0f} {unit} | {high:,.0f} {unit} | {goal} |", flush=True)


class TimedPage:
    """Pages of a browser, the next one with an empty cache; slowed down `slower` times."""

    def __init__(self, browser: Any, url: str, slower: int = 1) -> None:
        self._browser, self._url, self._slower = browser, url, slower
        self.open_context()

    def open_context(self) -> None:
        """Begin with an empty cache."""
        context = self._browser.new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(WAIT)
        self.page = context.new_page()
        self.devtools = context.new_cdp_session(self.page)
        if self._slower > 1:  # Chromium spends the rest of the core on waiting
            self.devtools.send("Emulation.setCPUThrottlingRate", {"rate": self._slower})
        self.devtools.send("Performance.enable")

    def close(self) -> None:
        """Close the page and its cache."""
        self.page.context.close()

    def load(self, fragment: str, selector: str, pattern: str = ".") -> float:
        """Open a screen anew; return milliseconds to a text of it."""
        self.close()
        self.open_context()
        self.page.goto(f"{self._url}/{fragment}", wait_until="commit")
        self.see(selector, pattern)
        return float(self.page.evaluate("performance.now()"))

    def first_paint(self) -> float:
        """Return the milliseconds from the request of the page to its first content."""
        entry = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
        return float(self.page.evaluate(entry))

    def go(self, fragment: str, selector: str, pattern: str = ".") -> float:
        """Change the address; return milliseconds to a text of the screen."""
        return float(self.page.evaluate(SEEN, [fragment, selector, pattern, WAIT]))

    def see(self, selector: str, pattern: str = ".") -> float:
        """Return the milliseconds until a text is there."""
        return float(self.page.evaluate(SEEN, [None, selector, pattern, WAIT]))

    def scroll(self, selector: str) -> list[float]:
        """Scroll down a list; return the milliseconds of each frame."""
        return [float(frame) for frame in self.page.evaluate(SCROLLED, selector)]

    def nodes(self, selector: str = "*") -> int:
        """Return how many nodes match."""
        return int(self.page.evaluate("s => document.querySelectorAll(s).length", selector))

    def heap(self) -> float:
        """Return the megabytes of the page's heap after a collection."""
        self.devtools.send("HeapProfiler.collectGarbage")
        values = self.devtools.send("Performance.getMetrics")["metrics"]
        return float(next(v["value"] for v in values if v["name"] == "JSHeapUsedSize")) / 1e6
