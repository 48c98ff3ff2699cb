"""The dashboard in real Chromium: every screen, hostile texts, roles, keys, a restart.

A page fails its test by a report of its content policy, an error on its console, a request to
another origin, or more than 3,000 nodes. Without Chromium or a build of the pages all are skipped.
"""

import gzip
import json
import re
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cray_agents import Platform
from cray_agents.paths import Home
from cray_agents.records import Prompt
from cray_agents.runtime.dashboard import static_files
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.runtime.registry.registry import Registry
from tests.support.audit_lines import read_audit
from tests.support.campaign import free_port
from tests.support.dashboard_site import (
    BAD_LINES,
    BATCH_LINES,
    DEEP,
    HOSTILE,
    LONG_RUN,
    LONG_TURNS,
    LOOP,
    site,
)
from tests.support.gateway_process import first_version, gateway
from tests.support.watched_pages import Watched, chromium, needs_pages, watching

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
HTTP = httpx.Client(timeout=120)
FIRST_KB, ALL_KB = 120, 400  # compressed
#: Errors of a browser whose gateway ends before it.
GONE = ["ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY", "ERR_SOCKET"]
SCREENS = {
    "overview": "#/overview",
    "runs": "#/runs",
    "filtered runs": "#/runs?q=" + "reward%3E%3D1%20and%20loop%3Asums",
    "tasks": "#/tasks?q=loop%3Alucky",
    "tasks by iteration": f"#/tasks?q=loop%3A{LOOP}&by=iteration&order=worst",
    "run": "#/run/run-3-0",
    "tokens": "#/run/run-3-0?t=1&mode=tokens&prompt=1",
    "raw": "#/run/run-3-0?mode=raw",
    "long run": f"#/run/{LONG_RUN}?t=60",
    "compare": "#/compare?a=run-3-0&b=run-4-0",
    "playground": "#/playground?run=run-3-0&t=1",
    "search": "#/search?q=word",
    "loops": "#/loop",
    "loop": "#/loop/sums",
    "jobs": "#/job",
    "replica": "#/replica/0",
    "models": "#/models?at=" + "%40".join(map(str, DEEP)),
    "iteration": f"#/iteration/{LOOP}/1",
    "first iteration": f"#/iteration/{LOOP}/0",
    "foreign iteration": "#/iteration/sums/1",
    "datasets": "#/dataset",
    "batches": "#/batch",
    "keys": "#/keys",
    "keys of a quarter": "#/keys?span=quarter&key=none",
}
#: Keeps the texts that a page draws on its canvases.
DRAWN = """{ const { fillText } = CanvasRenderingContext2D.prototype; window.drawn = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
    drawn.push(text); fillText.call(this, text, ...at); } }"""
#: What people come for: the clicks from the overview (the words of the docs, where it is, its
#: name there), and a pattern of what is seen then.
MENU, LINK = "nav a", "main a"
QUESTIONS: dict[str, tuple[list[tuple[str, str, str]], str]] = {
    "Is the newest loop learning?": (
        [],
        r"lucky: yes. Held-out success rose from .* Its target is 95\s%",
    ),
    "Why was the last candidate rejected?": (
        [("why: iteration N", LINK, r"^why: iteration \d+$")],
        r"rejected.*why\s+(?!no reason)\S",
    ),
    "Which run failed, and what were its target and answer?": (
        [("N failed", LINK, r"^\d+ failed$"), ("the run", "a.run-row", r"^say \d")],
        r"target \d+\s+answer \S",
    ),
    "At which tokens do trainer and sampler differ most?": (
        [("the job it names", "section:has-text('Do trainer and sampler agree?') a", "^job-")],
        r"differ most.*token 79 of run-3-0\s+-1\s+-1.004\s+\+0.004\s+token 80 of run-4-0\s+-2",
    ),
    "What did a job cost?": (
        [("Jobs", MENU, "^Jobs$"), ("the job", "tr:has-text('running') a", "^job-")],
        r"cost\s+[\d.]+ EUR",
    ),
    "Which version answers now, and what are its parents?": (
        [("Models", MENU, "^Models$")],
        "m@2 answers now; its parents: m@1",
    ),
    "What is in a dataset, and what was left out?": (
        [("Datasets", MENU, "^Datasets$"), ("the dataset", LINK, "^ds-")],
        r"considered\s+\d+.*accepted\s+\d+.*\d+ trained on",
    ),
    "Who uses the most?": (
        [("the name after Most was asked by", LINK, "^this host, without a key$")],
        "this host, without a key, over time",
    ),
    "What is the state of a replica, and what does its log say?": (
        [("replica-N", LINK, "^replica-0$")],
        "serving.*the engine has started",
    ),
    "What went wrong today?": ([], r"failed job\s+job-\w+ failed: the loss is nan"),
}

pytestmark = [*needs_pages(), pytest.mark.slow]
pytest.importorskip("playwright", reason="needs playwright, of requirements/dev.txt")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with site(tmp_path_factory.mktemp("dashboard") / "home") as served:
        yield served


@pytest.fixture(scope="module")
def browser(platform: Platform) -> Iterator["Browser"]:
    """After the platform: while Playwright runs, this thread has an event loop."""
    with chromium() as launched:
        yield launched


@pytest.fixture
def watch(browser: "Browser") -> Iterator[Callable[..., Watched]]:
    """Opens pages, each in a profile of its own, and checks them at the end."""
    with watching(browser) as make:
        yield make


def _get(platform: Platform, path: str) -> Any:
    return HTTP.get(f"{platform.url}/v1/{path}").raise_for_status().json()


@pytest.mark.parametrize("name", SCREENS)
def test_every_screen_shows_fits_and_is_accessible(
    platform: Platform, watch: Any, name: str
) -> None:
    page = watch(platform.url, viewport={"width": 390, "height": 800}, at=SCREENS[name])
    page.check_layout()
    assert len(page.text()) > 20 and not page.page.query_selector(".failure")


def test_a_job_shows_its_state_curves_and_log(platform: Platform, watch: Any) -> None:
    jobs = _get(platform, "jobs")["data"]
    done, waits, runs = (
        next(job["id"] for job in jobs if job[field] == value)
        for field, value in (("steps", 3), ("state", "queued"), ("state", "running"))
    )
    page = watch(platform.url)
    page.page.add_init_script(DRAWN)
    page.open(f"#/job/{done}")
    page.page.get_by_role("heading", name="Log").wait_for()
    page.page.get_by_role("img", name="n1, GPU 0: power, W: 30 points from 512").wait_for()
    page.page.wait_for_function("() => ['time', '2023-11-1'].every(it => `${drawn}`.includes(it))")
    assert "3 of 3" in page.text()
    buttons = [page.page.get_by_role("button", name=name) for name in ("pause", "resume", "cancel")]
    assert all(button.is_disabled() for button in buttons)
    chart = page.page.get_by_role("img", name="loss: 3 points")
    chart.hover(position={"x": 70, "y": 60})
    page.wait_for("step 1: 2")
    (_, first), (_, second), (_, third) = _get(platform, f"jobs/{done}/series")["series"]["loss"]
    mean = (0.81 * first + 0.9 * second + third) / 2.71
    page.page.get_by_role("button", name="Smooth the curves").click()
    chart.hover(position={"x": chart.bounding_box()["width"] - 30, "y": 60})
    page.wait_for(f"step 3: {third:.4g}, smoothed {mean:.4g}")
    page.open(f"#/job/{waits}")
    page.page.get_by_role("heading", name="Log").wait_for()
    assert [button.is_enabled() for button in buttons] == [True, False, True]
    page.page.get_by_role("button", name="cancel").click()
    assert f"cray-agents jobs cancel {waits}" in page.page.inner_text("dialog")
    page.open(f"#/job/{runs}")
    worst = page.page.get_by_role("region", name="Where trainer and sampler differ most")
    tokens = worst.get_by_role("link").all_inner_texts()
    assert [token[:8] for token in tokens] == ["token 79", "token 80"]
    page.check_layout()
    worst.get_by_role("link", name="token 79").click()
    ours = page.page.locator("dt:text-is('by the trainer') + dd")
    assert re.fullmatch(r"-1 \([+-]?[\d.]+\)", ours.inner_text())
    page.page.wait_for_selector(".token.selected:is([class*=cool], [class*=heat])")
    assert page.page.locator(".token:is([class*=cool], [class*=heat])").count() == 1
    page.press("l", at="tok=80")
    assert ours.count() == 0
    page.open(f"#/job/{jobs[0]['id']}")
    page.wait_for("m@3")
    assert "adam_beta1" in page.page.get_by_role("region", name="Settings").inner_text()
    links = page.page.locator("main a").evaluate_all("all => all.map(one => one.hash)")
    known = {"#/dataset/ds-", f"#/loop/{LOOP}", "#/models?at=m%402", "#/models?at=m%403"}
    assert {re.sub("(?<=/ds-).*", "", link) for link in links} >= known


def test_rows_are_sorted_by_a_click_or_a_key_on_a_head(platform: Platform, watch: Any) -> None:
    """The list's own keys walk in that order. A page of a longer list is not sorted."""
    page = watch(platform.url, at="#/dataset")
    table = page.page.get_by_role("region", name="Training sets")
    table.get_by_role("button", name="method").focus()
    page.page.keyboard.press("Tab")
    for order in ("ascending", "descending"):
        page.page.keyboard.press("Enter")
        page.page.wait_for_selector(f"th[aria-sort={order}]")
        assert table.locator("th[aria-sort]").inner_text().split()[0] == "samples"
        seen = [int(one) for one in table.locator("tbody td:nth-child(4)").all_inner_texts()]
        assert seen == sorted(seen, reverse=order == "descending") and len({*seen}) > 1
    page.page.keyboard.press("j")
    page.page.wait_for_selector("tbody tr:first-child.selected")
    page.page.reload()
    page.page.wait_for_selector("th[aria-sort=descending]")
    table.get_by_role("button", name="samples").click()
    page.page.wait_for_function("() => !document.querySelector('th[aria-sort]')")
    page.alter("**/v1/datasets?*", lambda body: body | {"has_more": True})
    page.open("#/dataset?sort=samples")
    page.page.reload()
    page.page.get_by_role("button", name="Older ones").wait_for()
    assert page.page.locator("th button, th[aria-sort]").count() == 0


def test_versions_are_promoted_rejected_and_rolled_back_by_an_admin(
    tmp_path: Path, watch: Any
) -> None:
    home = Home(tmp_path / "home")
    boss, clerk = (Keys(home).create(role.name, role)[1] for role in (Role.admin, Role.train))
    first = (registry := first_version(home)).resolve("m@1")
    manifest = read_manifest(home.checkpoint(first.checkpoint))
    said = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "two"}]
    told = {"calculator": HOSTILE["script"]}
    learned = Prompt(instructions="Add.", examples=said, tools=told)
    registry.register("m", first.checkpoint, manifest, {"clerk": learned})
    with gateway(home.root) as (url, _):
        acts = ("promote", "roll back", "reject")
        for secret in (clerk, boss):
            page = watch(url)
            page.expected = ["401", "400", *GONE]
            page.open("#/models?at=m%402")
            _sign_in(page, secret, "m@1 answers now")
            card = page.page.get_by_role("region", name="The chosen version")
            buttons = [card.get_by_role("button", name=act) for act in acts]
            assert secret == boss or not any(button.count() for button in buttons)
            prompt = card.get_by_role("region", name="The prompt of clerk")
            lines = ["Add.", "user", "1 + 1", "assistant", "two", "tool calculator", *told.values()]
            assert [line for line in prompt.inner_text().split("\n") if line][1:] == lines
            assert page.barriers() == []

        def decide(act: str, title: str, reason: str) -> None:
            card.get_by_role("button", name=act).click()
            page.page.locator("dialog").get_by_label("Reason").fill(reason)
            page.page.locator("dialog").get_by_role("button", name=title).click()

        assert [button.is_enabled() for button in buttons] == [True, False, True]
        decide("reject", "reject m@2", "too short")
        card.get_by_text("by admin: too short").wait_for()
        decide("promote", "promote m@2", "it adds")
        page.wait_for("m@2 answers now")
        assert [button.is_enabled() for button in buttons] == [False, True, False]
        decide("roll back", "roll back from m@2", "it only adds")
        page.wait_for("m@1 answers now")
        page.open("#/models?at=m%401")
        decide("roll back", "roll back from m@1", "further")
        page.page.locator("dialog [role=alert]", has_text="nothing was promoted").wait_for()
    history = [(event.kind, event.version, event.reason) for event in Registry(home).history("m")]
    assert history[1:] == [
        ("rejected", 2, "too short"), ("promoted", 2, "it adds"), ("rolled_back", 1, "it only adds")
    ]  # fmt: skip
    audited = {(line.action, line.reason, line.status) for line in read_audit(home.audit)}
    assert ("POST /v1/models/{name}/promote", "it adds", 200) in audited


def test_an_outside_model_stands_beside_a_version_with_success_and_cost(
    platform: Platform, watch: Any
) -> None:
    with urllib.request.urlopen(f"{platform.url}/v1/evaluations") as answer:
        outside = json.load(answer)["data"][0]
    page = watch(platform.url)
    page.open("#/models")
    table = page.page.get_by_role("region", name="Evaluations")
    table.get_by_text("EUR").nth(1).wait_for()  # the account reaches to the version's runs
    lines = (row.split("\t") for row in table.locator("tbody tr").all_inner_texts())
    (_, theirs, *shown), (_, ours, success, interval, _, cost) = sorted(lines, key=lambda it: it[1])
    assert (theirs, ours) == (f"{platform.url.partition('//')[2]}#m", "m@1")
    assert (success, interval) == ("0.5", "0.167 to 0.833") and re.fullmatch(r"[\d.e−]+ EUR", cost)
    assert shown[0] == "1" and shown[1].endswith(" to 1") and shown[2].endswith("s")
    assert shown[3] == f"{outside['cost']:.3g} EUR" and outside["cost"] > 0


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_overview_answers_within_two_clicks(
    platform: Platform, watch: Any, question: str
) -> None:
    clicks, seen = QUESTIONS[question]
    page = watch(platform.url, at="#/overview")
    assert [head[:13] for head in page.page.locator("main h2").all_inner_texts()][:7] == [
        "Is it learnin", "What was deci", "What runs now", "Are the engin", "Do trainer an",
        "What did it c", "What went wro",
    ]  # fmt: skip
    curves = re.compile("^held-out success: 3 .*; test success: 2 .*; control shuffled: 3 points")
    page.page.get_by_role("img", name=curves).wait_for()
    now = page.page.locator("section:has-text('What runs now') li")
    now.get_by_text(re.compile("step 10 of 40, about .* left")).wait_for()
    for _, where, name in clicks:
        page.page.locator(where, has_text=re.compile(name)).first.click()
        page.settle()
    page.page.wait_for_function(
        "seen => RegExp(seen, 's').test(document.querySelector('main').innerText)", arg=seen
    )


def test_the_overview_tells_when_a_replica_was_lost_and_jobs_ended(
    platform: Platform, watch: Any
) -> None:
    page = watch(platform.url)
    lost = {"last_restart": {"time": time.time() - 3600, "why": "it did not answer"}}
    page.alter("**/v1/pool", lambda it: it | {"data": [one | lost for one in it["data"]]})
    page.alter("**/v1/jobs?*", lambda it: it | {"data": [j for j in it["data"] if j["step"] == 3]})
    page.open("#/overview")
    for told in (r"^replica lost replica-0 6\d min .* ago: it did not", "succeeded step .* ago$"):
        page.page.locator("main li", has_text=re.compile(told)).first.wait_for()


def test_the_docs_tell_those_clicks_and_show_every_screen() -> None:
    assert len(QUESTIONS) == 10 and all(len(clicks) <= 2 for clicks, _ in QUESTIONS.values())
    rows = [
        f"| {question} | {', then '.join(told for told, *_ in clicks) or 'none'} |"
        for question, (clicks, _) in QUESTIONS.items()
    ]
    table = "| question | clicks |\n|---|---|\n" + "\n".join(rows) + "\n"
    assert table in (ROOT / "docs" / "dashboard.md").read_text(), table
    screens = re.findall('{ name: "(.*?)"', (ROOT / "ui/src/screens/index.ts").read_text())
    pictures = {path.stem for path in (ROOT / "docs" / "screens").glob("*.webp")}
    assert len(screens) == 15 and {*screens} <= pictures


def test_an_iteration_shows_its_evidence_and_each_pair_compares(
    platform: Platform, watch: Any
) -> None:
    detail = _get(platform, f"loops/{LOOP}/iterations/1")
    assert detail["decision"]["numbers"]["evidence"] == detail["curve"]["points"][-1][1]
    page = watch(platform.url, at="#/loop")
    page.page.get_by_role("img", name=re.compile("lucky: 3 .*; sums: 3 points")).wait_for()
    assert "rft (sft on good runs)" in page.text()
    page.open(f"#/loop/{LOOP}")
    page.page.get_by_role("link", name="1", exact=True).click()
    page.page.wait_for_selector(".lane-bar")
    assert "hidden probes" in page.text() or "odd" in page.text()
    assert f"loop {LOOP}" in page.text() and "20 needed" in page.text()
    with page.page.expect_download() as saved:
        page.page.get_by_role("button", name="Download for Perfetto").click()
    assert json.loads(saved.value.path().read_text())["otherData"]["loop"] == LOOP
    page.page.get_by_role("button", name="won").click()
    page.page.wait_for_function("() => location.hash.includes('outcome=won')")
    page.settle()
    page.page.keyboard.press("j")
    page.page.wait_for_selector("tr.selected")
    page.press("Enter", at="^#/compare")


def test_a_dataset_shows_its_funnel_runs_and_samples(platform: Platform, watch: Any) -> None:
    sets = _get(platform, "datasets")["data"]
    made = [each for each in sets if each["method"] == "sft" and each["considered_runs"]][-1]
    page = watch(platform.url, at="#/dataset")
    page.page.get_by_role("link", name=made["id"]).click()
    page.page.wait_for_selector(".token.trained[data-n]")
    assert f"--dataset {made['id']}" in page.text()
    reason, count = next(iter(made["rejected"].items()))
    page.page.locator(".funnel").get_by_role("link", name=reason.replace("_", " ")).click()
    page.page.wait_for_function("() => location.hash.includes('reason=')")
    page.settle()
    rows = page.page.get_by_role("region", name="Considered runs").locator("tbody tr")
    assert rows.count() == min(count, 50)
    page.press("]", at="at=1")
    page.settle()
    page.page.locator(".token[data-n]").first.click()
    page.page.wait_for_selector(".token.selected")
    advantages = next(each["id"] for each in sets if each["method"] == "grpo")
    page.open(f"#/dataset/{advantages}?color=advantage")
    page.page.wait_for_selector(".token.masked ~ .token:is([class*=cool], [class*=heat])")
    page.check_layout()
    page.open(f"#/dataset/{made['id']}?against={advantages}")
    page.wait_for("Left out, by reason")
    page.check_layout()
    page.open(f"#/dataset/{next(each['id'] for each in sets if not each['considered_runs'])}")
    page.wait_for("demonstration/0")
    assert "What is 2 + 2?" in page.page.inner_text("div.tokens")


def test_batches_show_failed_lines_and_are_cancelled_and_saved(
    platform: Platform, watch: Any
) -> None:
    page = watch(platform.url, at="#/batch")
    page.page.locator("tr", has_text="completed").get_by_role("link").click()
    page.page.get_by_role("heading", name="Failed lines").wait_for()
    page.settle()
    assert f"of {BATCH_LINES} lines" in page.text() and "line-0" in page.text()
    page.check_layout()
    with page.page.expect_download() as saved:
        page.page.get_by_role("button", name="Download errors").click()
    assert len(saved.value.path().read_text().splitlines()) == BAD_LINES
    page.open("#/batch")
    page.page.locator("tr", has_text="validating").get_by_role("link").click()
    page.page.get_by_role("button", name="Cancel the batch").click()
    assert "cray-agents batch status --cancel batch_" in page.page.inner_text("dialog")
    page.page.locator("dialog").get_by_role("button", name="Cancel the batch").click()
    page.wait_for("cancel")
    assert page.page.evaluate("window.broken") is None


def test_keys_are_made_and_revoked_with_a_reason(tmp_path: Path, watch: Any) -> None:
    home = Home(tmp_path / "home")
    boss = Keys(home).create("boss", Role.admin)[1]
    with gateway(home.root) as (url, _):
        page = watch(url)
        page.expected = ["401", *GONE]
        page.open("#/keys")
        _sign_in(page, boss, "Create a key")
        page.page.get_by_role("button", name="Create a key").click()
        dialog = page.page.locator("dialog")
        dialog.get_by_label("Name").fill("two words")
        dialog.get_by_label("Role").select_option("train")
        dialog.get_by_label("Reason").fill("Zoë asked")
        shown = "cray-agents keys create 'two words' --role train --reason 'Zoë asked'"
        assert shown in dialog.inner_text()
        dialog.get_by_role("button", name="Create the key").click()
        dialog.get_by_role("alert").wait_for()
        assert "cannot name a key" in dialog.inner_text()
        page.expected.append("400")
        dialog.get_by_label("Name").fill("zoe")
        dialog.get_by_role("button", name="Create the key").click()
        page.page.get_by_role("heading", name="The key zoe").wait_for()
        secret = page.page.locator("dialog .mono").inner_text().strip()
        page.page.get_by_role("button", name="Done").click()
        _ask(url, secret)
        page.page.reload()
        page.settle()
        row = page.page.get_by_role("region", name="Keys").locator("tr", has_text="zoe")
        row.get_by_text("works").wait_for()
        assert "ago" in row.inner_text() and secret not in page.page.content()
        _own_usage(watch(url), secret)
        row.get_by_role("button", name="Revoke zoe").click()
        act = page.page.locator("dialog").get_by_role("button", name="Revoke the key")
        assert act.is_disabled()
        page.page.locator("dialog").get_by_label("Reason").fill("she left")
        act.click()
        row.get_by_text("revoked").wait_for()
        assert Keys(home).check(secret) is None
    reasons = {(line.action, line.reason, line.status) for line in read_audit(home.audit)}
    assert ("POST /v1/keys", "Zoë asked", 200) in reasons
    assert ("DELETE /v1/keys/{key}", "she left", 200) in reasons


def _sign_in(page: Watched, secret: str, seen: str) -> None:
    page.page.get_by_label("API key").fill(secret)
    page.page.get_by_role("button", name="Sign in").click()
    page.wait_for(seen)
    page.settle()


def _ask(url: str, secret: str) -> None:
    """Ask a model with a key just made, which works within a second."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {secret}"}
    for _ in range(600):
        answer = HTTP.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        if answer.status_code == 200:
            return
        assert answer.status_code == 401
        time.sleep(0.2)
    raise AssertionError("the key does not work")


def _own_usage(page: Watched, secret: str) -> None:
    """A key below admin sees its own use, no other key, and nothing to change."""
    page.expected = ["401", *GONE]
    page.open("#/keys")
    _sign_in(page, secret, "zoe")
    rows = page.page.get_by_role("region", name="Keys").locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 1 and "zoe" in rows.inner_text() and "boss" not in page.text()
    assert page.page.get_by_role("button", name="Create a key").count() == 0
    assert page.page.get_by_role("button", name="Revoke").count() == 0


@pytest.mark.parametrize("mode", ["text", "tokens", "raw"])
def test_hostile_texts_neither_run_nor_break_a_page(
    platform: Platform, watch: Any, mode: str
) -> None:
    page = watch(platform.url)
    for name in HOSTILE:
        page.check_hostile(f"#/run/hostile-{name}?mode={mode}&prompt=1")


def test_long_numbers_keep_their_digits(platform: Platform, watch: Any) -> None:
    numbers = ["123456789012345678901234567890", "9007199254740993"]
    asked = [{"role": "user", "content": "digits?"}]
    body = {"model": "m", "messages": asked, "metadata": {"n": [int(one) for one in numbers]}}
    address = platform.url + "/v1/chat/completions"
    HTTP.post(address, json=body, headers={"x-run-id": "run-digits"}).raise_for_status()
    page = watch(platform.url, at="#/run/run-digits")
    page.page.wait_for_selector("article .message")
    page.wait_for(f'{{"n":[{",".join(numbers)}]}}')


def test_the_filter_line_facets_and_keys_choose_runs(platform: Platform, watch: Any) -> None:
    page = watch(platform.url, at="#/runs")
    page.page.keyboard.press("/")
    page.page.keyboard.type("reward>=1 and loop:sums")
    page.press("Enter", at="reward")
    page.settle()
    rows = page.page.locator("a.run-row")
    page.page.wait_for_function(
        "() => document.querySelector('a.run-row') && !document.body.innerText.includes('hostile')"
    )
    assert 0 < rows.count() <= 8
    page.press("Escape", "j", at="at=")
    page.press("Enter", at="^#/run/")
    page.page.wait_for_selector("article .message")
    page.open("#/runs?q=nonsense%3A1")
    page.wait_for('"nonsense" is no field')
    page.open("#/search?q=use%20the%20tool")
    page.page.locator("mark", has_text="Use the tool").first.wait_for()


def test_the_grid_of_tasks_is_walked_by_keys_and_a_cell_leads_to_its_runs(
    platform: Platform, watch: Any
) -> None:
    asked = f"trajectories/stats?loop={LOOP}&by=task,model&limit=10000"
    groups = _get(platform, asked)["data"]
    tasks = sorted({each["task"] for each in groups})
    versions = sorted({each["model"] for each in groups})
    page = watch(platform.url, at=f"#/tasks?q=loop%3A{LOOP}")
    table = page.page.get_by_role("table", name="Success by task")
    assert table.get_by_role("columnheader").count() == 1 + len(versions) > 2
    assert f"{len(tasks)} tasks" in page.text()
    assert "say 0" in table.inner_text() and "%" not in table.get_by_role("row").first.inner_text()
    page.press("j", "l", at="row=.+col=")
    cell = groups[0]
    chosen = urllib.parse.urlencode({"row": cell["task"], "col": cell["model"]})
    page.open(f"#/tasks?q=loop%3A{LOOP}&{chosen}")
    page.page.wait_for_selector(".cell.selected")
    success = cell["success"]
    rate = "no reward" if success is None else f"{round(success * 1000) / 10:g} %"
    shown = page.page.inner_text(".cell.selected")
    assert shown.split() == [*rate.split(), str(cell["runs"])]
    page.press("Enter", at="^#/runs")
    page.page.wait_for_selector("a.run-row")
    page.settle()
    page.page.wait_for_function(
        f"() => document.querySelectorAll('a.run-row').length === {cell['runs']}"
    )


def test_a_run_is_walked_by_keys_and_linked_by_turn_and_token(
    platform: Platform, watch: Any
) -> None:
    page = watch(platform.url, at=f"#/run/{LONG_RUN}?t=60")
    page.wait_for("turn 60: word")
    page.press("j", at="t=61")
    page.page.keyboard.press("J")
    page.wait_for(f"turn {LONG_TURNS - 1}: word")
    page.page.keyboard.press("m")
    page.page.wait_for_selector(".token.heat2, .token.heat1, .token.heat0")
    page.page.keyboard.press("l")
    page.page.wait_for_selector(".token.selected")
    page.wait_for("(sampled 0)")
    link = page.page.url
    again = watch(platform.url)
    again.open(link.removeprefix(f"{platform.url}/"))
    again.page.wait_for_selector(".token.selected")


def test_the_difference_under_another_version_is_scored_by_an_engine(
    platform: Platform, watch: Any
) -> None:
    page = watch(platform.url, at="#/run/run-5-0?t=1&mode=tokens")
    page.page.get_by_label("Colour").select_option("delta")
    page.page.get_by_role("textbox", name="Version").fill("m@2")
    page.wait_for("which first loads the version")
    page.page.get_by_role("button", name="Score").click()
    page.page.wait_for_selector(".token:is(.heat3, .cool3, .heat1, .cool1, .heat2)")
    page.page.locator(".token").first.click()
    page.wait_for("likeliest")
    page.page.get_by_label("Colour").select_option("entropy")
    page.page.wait_for_selector(".token:is(.heat1, .heat2, .heat3, .heat4, .heat5)")


def test_a_reward_is_given_by_keys_and_stored(platform: Platform, watch: Any) -> None:
    page = watch(platform.url, at="#/run/run-6-0")
    page.page.wait_for_selector("article .message")
    page.page.keyboard.press("4")
    page.page.get_by_label("of turn 1 alone").check()
    assert "--turn 1" in page.page.inner_text("dialog")
    page.page.get_by_label("of turn 1 alone").uncheck()
    page.page.get_by_label("Reason").fill("nearly")
    assert "cray-agents runs reward run-6-0 0.75 --name feedback" in page.page.inner_text("dialog")
    page.page.get_by_role("button", name="Give the reward").click()
    page.wait_for("feedback 0.75")
    page.page.wait_for_function("() => !document.querySelector('dialog')")


def test_the_playground_asks_and_its_answer_is_a_run(platform: Platform, watch: Any) -> None:
    page = watch(platform.url, at="#/playground?model=m&other=m%402")
    page.page.get_by_label("Message").fill("echo me")
    page.page.get_by_role("button", name="Send").click()
    page.page.locator("section.card >> text=echo me").first.wait_for()
    page.page.get_by_role("link", name="its tokens").first.click()
    page.page.wait_for_selector("article .token")


def test_help_palette_and_theme_by_keys(platform: Platform, watch: Any) -> None:
    page = watch(platform.url, at="#/overview")
    page.page.keyboard.press("?")
    page.wait_for("keys of one letter")
    page.page.keyboard.press("Escape")
    page.page.wait_for_function("() => !document.querySelector('dialog')")
    page.page.keyboard.press("Control+k")
    page.page.keyboard.type("run-3-0")
    page.press("Enter", at="^#/run/run-3-0$")
    page.page.keyboard.press("t")
    page.page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")


def test_each_role_sees_what_it_may_and_a_link_signs_in_once(tmp_path: Path, watch: Any) -> None:
    home = Home(tmp_path / "home")
    keys = Keys(home)
    secrets = {role: keys.create(role.name, role)[1] for role in Role}
    with gateway(home.root) as (url, _):
        for role, secret in secrets.items():
            page = watch(url)
            page.expected = ["401", *GONE]
            page.open("#/overview")
            _sign_in(page, secret, f"{role.name} ({role.name})")
            menu = page.page.inner_text("nav")
            assert ("Runs" in menu) == (role >= Role.train)
            assert not page.page.query_selector(".failure")
            kept = page.page.evaluate("document.cookie + Object.keys(localStorage).join()")
            assert "key" not in kept
        argv = [sys.executable, "-m", "cray_agents", "dashboard", "--no-browser", "--url", url]
        environment = {"CRAY_AGENTS_API_KEY": secrets[Role.train], "PATH": "/usr/bin:/bin"}
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        link = done.stdout.strip()
        assert secrets[Role.train] not in link
        for attempt in range(2):
            page = watch(url)
            page.expected = ["401", *GONE]
            page.page.goto(link)
            page.wait_for("train (train)" if attempt == 0 else "this link was used")
            assert "sign_in" not in page.page.url


def test_a_killed_gateway_is_followed_again(tmp_path: Path, watch: Any) -> None:
    port = free_port()
    with gateway(tmp_path / "home", port=port) as (url, process):
        page = watch(url)
        page.expected = GONE
        page.open("#/overview")
        page.page.wait_for_selector(".connection.live")
        process.kill()
        process.wait()
        page.page.wait_for_selector(".connection.waiting")
    with gateway(tmp_path / "home", port=port):
        page.page.wait_for_selector(".connection.live")


def test_pages_side_by_side_share_one_stream(platform: Platform, watch: Any) -> None:
    """A browser has six connections to a host: more pages than these are all told of a change."""
    watched = watch(platform.url)
    context = watched.page.context
    streams: list[str] = []
    context.on("request", lambda one: streams.append(one.url) if "/v1/events" in one.url else None)
    reader, *pages = [*(context.new_page() for _ in range(7)), watched.page]
    for page in (reader, *pages):
        page.goto(f"{platform.url}/#/overview")
        page.wait_for_selector(".connection.live")
    assert len(streams) == 1

    def change(run_id: str) -> None:
        address = f"{platform.url}/v1/trajectories/{run_id}/rewards"
        HTTP.post(address, json={"value": 1, "name": "seen"}).raise_for_status()
        for page in pages:
            page.get_by_text(run_id).first.wait_for()

    change("run-1-0")
    reader.close()
    for _ in range(1200):  # another one reads on
        pages[0].wait_for_timeout(100)
        if len(streams) == 2:
            break
    change("run-1-1")
    assert len(streams) == 2


def test_the_files_are_small_compressed_and_strict(platform: Platform, watch: Any) -> None:
    folder = static_files.STATIC
    page_text = (folder / "index.html").read_text()
    code = [path for path in (folder / "assets").iterdir() if path.suffix in (".js", ".css")]
    packed = {path: len(gzip.compress(path.read_bytes(), 9)) for path in code}
    first = sum(size for path, size in packed.items() if path.name in page_text)
    assert 0 < first <= FIRST_KB * 1024 and sum(packed.values()) <= ALL_KB * 1024
    assert "resolved" not in (ROOT / "ui" / "package-lock.json").read_text()
    for encoding, name in (("gzip", "gzip"), ("zstd, gzip", "zstd"), ("identity", None)):
        answer = HTTP.get(platform.url, headers={"accept-encoding": encoding})
        assert answer.headers.get("content-encoding") == name
        assert "require-trusted-types-for 'script'" in answer.headers["content-security-policy"]
    headers = {"if-none-match": answer.headers["etag"], "accept-encoding": "identity"}
    assert HTTP.get(platform.url, headers=headers).status_code == 304
    licences = (folder / "LICENSES.txt").read_text()
    lock = json.loads((ROOT / "ui" / "package-lock.json").read_text())
    for name in lock["packages"][""]["dependencies"]:
        assert f"{name} {lock['packages'][f'node_modules/{name}']['version']}" in licences
