"""Files of runs (`export --format html`) in real Chromium, opened from the disk.

They show what the dashboard shows, ask nobody, and let no text of a run be more than text. The
fixtures of a page fail it by a report of its policy, an error, or any request but for the file.
"""

import base64
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cray_agents.cli import app
from cray_agents.paths import Home
from cray_agents.runtime.dashboard import static_files
from cray_agents.runtime.exports.formats import html
from cray_agents.runtime.store import Store
from cray_agents.runtime.views.token_text import Vocabularies
from tests.support.dashboard_site import HOSTILE, LONG_RUN, LONG_TURNS, site
from tests.support.watched_pages import Watched, chromium, needs_pages, watching

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [*needs_pages(), pytest.mark.slow]
pytest.importorskip("playwright", reason="needs playwright, of requirements/dev.txt")

Watch = Callable[..., Watched]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run-files") / "home"
    with site(root, whole=False):
        pass
    return root


def written(home: Path, target: Path, *words: str) -> dict[str, Any]:
    """An export to a page, and its summary."""
    argv = ["export", *words, "-f", "html", "--home", str(home), "-o", str(target), "--json"]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, done.exception
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.fixture(scope="module")
def everything(home: Path) -> Path:
    """A file of all runs."""
    target = home.parent / "all.html"
    summary = written(home, target)
    assert summary["records"] == summary["runs"] > 200
    return target


@pytest.fixture(scope="module")
def browser(everything: Path) -> Iterator["Browser"]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def watch(browser: "Browser") -> Iterator[Watch]:
    with watching(browser) as make:
        yield make


def opened(watch: Watch, file: Path, fragment: str = "", **options: Any) -> Watched:
    return watch(file.as_uri(), join="", at=fragment, **options)


@pytest.mark.parametrize(
    "fragment",
    [
        "",
        "#/runs?q=clerk",
        "#/run/run-3-0",
        "#/run/run-3-0?t=1&mode=tokens&prompt=1&tok=3",
        "#/run/run-3-0?mode=raw",
        f"#/run/{LONG_RUN}?t=60",
    ],
)
def test_every_page_shows_and_is_accessible(everything: Path, watch: Watch, fragment: str) -> None:
    page = opened(watch, everything, fragment, viewport={"width": 390, "height": 800})
    if "/run/" in fragment:
        page.page.wait_for_selector("article .message, article .tokens, article .json")
    assert len(page.text()) > 20 and not page.page.query_selector(".failure")
    page.check_layout()


def test_the_list_is_walked_by_keys_and_leads_to_runs(everything: Path, watch: Watch) -> None:
    page = opened(watch, everything)
    page.page.keyboard.press("/")
    page.page.keyboard.type("clerk")
    page.page.wait_for_function("() => location.hash.includes('q=clerk')")
    page.wait_for("16 of")
    page.press("Escape", "j", at="at=")
    page.press("Enter", at="^#/run/")
    page.page.wait_for_selector("article .call")
    first = page.page.url
    page.page.keyboard.press("n")
    page.page.wait_for_function(f"() => location.href !== {json.dumps(first)}")
    page.page.keyboard.press("t")
    page.page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
    page.page.keyboard.press("?")
    page.wait_for("keys of one letter")
    assert "reward the run" not in page.page.inner_text("dialog")


def test_a_run_has_its_calls_results_rewards_and_tokens(everything: Path, watch: Watch) -> None:
    page = opened(watch, everything, "#/run/run-3-0?t=1")
    page.page.wait_for_selector("article .call")
    text = page.text()
    assert "calculator" in text and "correct" in text and "7" in text
    for name in ("Reward", "Playground", "Copy as"):
        assert page.page.get_by_text(name, exact=True).count() == 0
    page.page.keyboard.press("m")
    page.page.wait_for_selector(".token.heat2, .token.heat1, .token.heat0")
    page.page.keyboard.press("l")
    page.wait_for("(sampled 0)")
    assert page.page.locator("select option").count() == 2  # no engine scores here


def test_tokens_are_those_that_the_gateway_shows(home: Path, everything: Path) -> None:
    """The page's parts, read by hand: prompts are whole again, and every token has its text."""
    text = everything.read_text()
    parts = dict(re.findall(r'<script type="text/plain" id="([^"]+)">([A-Za-z0-9+/=]+)<', text))

    def part(name: str) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(parts[f"{LONG_RUN}/{name}"])))

    texts = part("tokens")
    packer = html.RunPacker(Store(Home(home)))
    before: list[int] = []
    for number in range(LONG_TURNS):
        window, at = divmod(number, html.WINDOW)
        tokens = part(str(window))["tokens"][at]
        call = packer._pages.call(LONG_RUN, number)
        prompt = [*before[: tokens["same"]], *tokens["prompt"]]
        assert (prompt, tokens["ids"]) == (call["prompt_token_ids"], call["token_ids"])
        assert tokens["logprobs"] == call["logprobs"]
        before = [*prompt, *tokens["ids"]] if at + 1 < html.WINDOW else []
    checkpoint = packer._registry.resolve("m").checkpoint
    vocabulary = Vocabularies().of(Home(home).checkpoint(checkpoint))
    [table] = texts["vocabularies"]
    assert table["texts"] == {
        name: vocabulary.texts_of([int(name)]).texts[0] for name in table["texts"]
    }
    assert set(map(str, call["prompt_token_ids"])) <= set(table["texts"])


@pytest.mark.parametrize("mode", ["text", "tokens", "raw"])
def test_hostile_texts_neither_run_nor_break_the_page(
    everything: Path, watch: Watch, mode: str
) -> None:
    assert everything.read_bytes().removeprefix(static_files.viewer()).isascii()
    page = opened(watch, everything)
    for name in HOSTILE:
        page.check_hostile(f"#/run/hostile-{name}?mode={mode}&prompt=1")


def test_texts_that_would_end_the_script_stay_within_it(tmp_path: Path, watch: Watch) -> None:
    """Whatever a record holds, also half a character, it comes to the page as it is."""
    evil = "</script><script>window.broken = 1</script><!--<script>\ud800\u202e\u2028" + "x" * 10**6
    run_id = 'a"b<c>&'
    facts = {"id": run_id, "input": evil, "output": evil, "rewards": [], "tags": [evil]}
    about = {"id": run_id, "run": facts, "rewards": [], "turns": 0, "bytes": 0}
    about |= {"target": evil, "metadata": {evil: evil}, "error": None}
    about |= {"included": 0, "window": html.WINDOW}
    call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": evil}}
    said = {"role": "user", "content": evil}, {"role": "assistant", "tool_calls": [call]}
    part = {"turns": [], "tokens": [], "closing": said}
    scripts = [
        f'<script type="application/json" data-run>{html._plain(about)}</script>',
        html._script(run_id, "outline", html._pack({"data": []})),
        html._script(run_id, "0", html._pack(part)),
    ]
    file = tmp_path / "evil.html"
    file.write_bytes(static_files.viewer() + "\n".join(scripts).encode("ascii"))
    page = opened(watch, file)
    page.page.wait_for_selector(".conversation .message")
    shown = page.page.inner_text(".conversation")
    assert "lookup" in shown and "arguments" in shown
    assert "</script><script>window.broken = 1</script><!--<script>\ufffd" in shown
    assert page.page.evaluate("window.broken") is None


def test_the_policy_of_the_page_stops_other_scripts_and_requests(
    everything: Path, tmp_path: Path, watch: Watch
) -> None:
    """Were a text ever to become markup, nothing of it would run or be loaded."""
    file = tmp_path / "changed.html"
    added = b'<script>window.broken = 1</script><img src="https://elsewhere.test/x.png">'
    file.write_bytes(everything.read_bytes() + added)
    page = opened(watch, file)
    page.expected = ["Content Security Policy", "violates the", "TrustedHTML", "elsewhere"]
    page.wait_for("runs")
    assert page.page.evaluate("window.broken") is None
    sink = "() => { try { document.body.innerHTML = '' } catch (error) { return error.name } }"
    assert page.page.evaluate(sink) == "TypeError"
    page.page.wait_for_function("() => reports.some(one => one.includes('trusted-types'))")
    reports = page.page.evaluate("reports.splice(0)")
    assert any("script-src" in one for one in reports)
    assert any("img-src" in one for one in reports)


def test_some_runs_in_a_file_and_one_alone(home: Path, tmp_path: Path, watch: Watch) -> None:
    two, one = tmp_path / "two.html", tmp_path / "one.html"
    assert written(home, two, "run-3-0", "run-4-1")["runs"] == 2
    assert written(home, one, "run-3-0")["runs"] == 1
    page = opened(watch, two)
    page.wait_for("2 of 2")
    page = opened(watch, one)
    page.page.wait_for_selector("article .message")
    assert not page.page.query_selector("nav")


def test_what_is_too_large_is_cut_and_said(
    home: Path, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "RUN_BYTES", 8000)
    summary = written(home, tmp_path / "cut.html", LONG_RUN)
    assert summary["losses"]["later_turns"]["count"] == 1
    page = opened(watch, tmp_path / "cut.html")
    page.wait_for(f"of {LONG_TURNS} turns are in this file")
    page.page.wait_for_selector("article .message")
    page.press("J", at="t=")
    page.settle()
    assert not page.page.query_selector(".failure")
