"""Watched pages: real Chromium, whose pages fail a test by what goes wrong on them.

A page fails by a report of its content policy, an error on its console, a request to another
origin, or more than MOST_NODES nodes. Without Chromium or a build of the pages tests are skipped.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cray_agents.runtime.dashboard import static_files

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE = Path(__file__).parents[2] / "ui" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BUILT = (static_files.STATIC / "index.html").is_file()
MOST_NODES = 3000
#: What is wider than its place: the page, or text with a digit that is cut. Of people's texts
#: (`dir=auto`) the beginning may be shown.
TOO_WIDE = """async () => {
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  return [...document.querySelectorAll('html, main, main *')].filter(one =>
    one.scrollWidth > one.clientWidth + 1 && (one.matches('html, main') || /\\d/.test(one.innerText)
    && ['hidden', 'clip'].includes(getComputedStyle(one).overflowX)
    && !one.closest('[dir=auto], .visually-hidden'))).map(one => one.outerHTML.slice(0, 200)) }"""
WAIT = 120_000  # milliseconds: a busy machine is slow
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def needs_pages() -> list[pytest.MarkDecorator]:
    """Marks that skip a module's tests where they cannot run."""
    return [
        pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
        pytest.mark.skipif(not BUILT, reason="needs the built dashboard: make ui"),
    ]


@dataclass
class Watched:
    """A page, and what went wrong on it."""

    page: "Page"
    url: str
    problems: list[str] = field(default_factory=list)
    join: str = "/"  # between the address and a fragment
    expected: list[str] = field(default_factory=list)  # patterns of errors that the test makes

    def open(self, fragment: str) -> None:
        """Show a screen, as it is when nothing is loaded any more."""
        self.page.goto(f"{self.url}{self.join}{fragment}")
        self.settle()

    def settle(self) -> None:
        self.page.wait_for_function(
            "() => document.querySelector('main') &&"
            " !/Loading …|Reads the runs …/.test(document.body.innerText)"
        )

    def text(self) -> str:
        return str(self.page.inner_text("main"))

    def wait_for(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()

    def press(self, *keys: str, at: str) -> None:
        """Press keys, and wait until the fragment has this pattern."""
        for key in keys:
            self.page.keyboard.press(key)
        self.page.wait_for_function("at => RegExp(at).test(location.hash)", arg=at)

    def alter(self, path: str, change: Callable[[Any], Any]) -> None:
        """Change the gateway's answers on their way to the page."""
        self.page.route(path, lambda route: route.fulfill(json=change(route.fetch().json())))

    def check_hostile(self, fragment: str) -> None:
        """Check that a run whose text would be more is shown, and is text."""
        self.open(fragment)
        self.page.wait_for_selector("article .message, article .tokens, article .json")
        assert self.page.evaluate("window.broken") is None
        assert not self.page.query_selector("main script, main img, main iframe, main object")
        assert self.page.evaluate("document.querySelectorAll('*').length") <= MOST_NODES
        hidden = "/[\\u202a-\\u202e\\u2066-\\u2069\\u001b]/.test(document.body.innerText)"
        assert self.page.evaluate(hidden) is False, fragment

    def check_layout(self) -> None:
        """Check that the page fits and is accessible on three widths, in both themes."""
        for dark in (False, True):
            self.page.emulate_media(color_scheme="dark" if dark else "light")
            for width in (390, 1024, 1440):
                self.page.set_viewport_size({"width": width, "height": 800})
                assert (width, self.page.evaluate(TOO_WIDE)) == (width, [])
            assert self.barriers() == []

    def barriers(self) -> list[Any]:
        """What axe finds against WCAG 2.1 AA; nothing where the build's packages are absent."""
        if not AXE.is_file():
            return []
        self.page.evaluate(AXE.read_text())
        self.page.wait_for_timeout(50)
        found = self.page.evaluate(
            "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})"
        )
        return [
            (one["id"], node["target"], node["failureSummary"])
            for one in found["violations"]
            for node in one["nodes"][:3]
        ]

    def check(self) -> None:
        nodes = self.page.evaluate("document.querySelectorAll('*').length")
        assert nodes <= MOST_NODES
        reports = self.page.evaluate("window.reports")
        bad = [one for one in self.problems if not any(re.search(p, one) for p in self.expected)]
        assert (reports, bad) == ([], []), f"{reports} {bad}"


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser. While it runs, this thread has an event loop."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, timeout=WAIT,
            ignore_default_args=["--hide-scrollbars"],
        )  # fmt: skip
        yield launched
        launched.close()


@contextmanager
def watching(browser: "Browser") -> Iterator[Callable[..., Watched]]:
    """A maker of pages, each in a profile of its own; at the end they are checked and closed."""
    pages: list[Watched] = []

    def make(url: str, *, join: str = "/", at: str | None = None, **options: Any) -> Watched:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(WAIT)
        page = context.new_page()
        watched = Watched(page, url, join=join)
        page.add_init_script(
            "window.reports = [];"
            "addEventListener('securitypolicyviolation', e =>"
            " reports.push(e.blockedURI + e.violatedDirective))"
        )
        note = watched.problems.append
        page.on("console", lambda m: note(f"console: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on(
            "request",
            lambda r: (
                None if r.url.startswith((url, "data:", "blob:")) else note(f"request: {r.url}")
            ),
        )
        pages.append(watched)
        if at is not None:
            watched.open(at)
        return watched

    yield make
    for watched in pages:
        watched.check()
        watched.page.context.close()
