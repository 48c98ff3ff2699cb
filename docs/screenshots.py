"""Screenshots of the dashboard for its page: each main screen, of the runs of a demo.

    cray-agents demo --home DIR
    .venv/bin/python docs/screenshots.py DIR      writes docs/screens/*.webp

Serves DIR with its model server, and needs Chromium and the built pages (`make ui`).
"""

import io
import json
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

TARGET = Path(__file__).parent / "screens"
SIZE = {"width": 1280, "height": 800}
QUALITY = 60
WAIT = 300_000  # milliseconds
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main(home: Path) -> None:
    """Serve the root, and take the pictures."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "cray_agents"]
    options = ["--home", str(home), "--port", "0", "--detach"]
    subprocess.run([*command, "up", *options], check=True)
    try:
        state = json.loads(
            subprocess.run(
                [*command, "status", "--home", str(home), "--json"],
                check=True, capture_output=True, text=True,
            ).stdout
        )  # fmt: skip
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=FLAGS
            )
            page = browser.new_page(viewport=SIZE, color_scheme="light")
            page.set_default_timeout(WAIT)
            TARGET.mkdir(exist_ok=True)
            for name, address in screens(state["url"]).items():
                page.goto(f"{state['url']}/#/{address}")
                take(page, TARGET / f"{name}.webp")
            browser.close()
    finally:
        subprocess.run([*command, "down", "--home", str(home)], check=True)


def screens(url: str) -> dict[str, str]:
    """Return the address of each screen: runs, job and versions as the demo left them."""
    loop = ask(url, "loops")["data"][0]["id"]
    query = f"loop={loop}&view=summary&order=newest&min_turns=2&split=holdout&limit=1000"
    better, worse = find_pair(ask(url, f"trajectories?{query}")["data"])
    query = f"loop={loop}&view=summary&split=train&generation=1&max_reward=0&min_turns=2&limit=1"
    surprised = ask(url, f"trajectories?{query}")["data"][0]["id"]
    job = ask(url, "jobs")["data"][0]["id"]
    dataset = ask(url, "datasets?limit=1")["data"][0]["id"]
    return {
        "overview": "overview",
        "loop": f"loop/{loop}",
        "dataset": f"dataset/{dataset}",
        "runs": "runs?q=" + urllib.parse.quote(f"loop:{loop} and reward>=1"),
        "run": f"run/{better}",
        "tokens": f"run/{surprised}?t=1&mode=tokens&prompt=1",
        "compare": f"compare?a={worse}&b={better}",
        "job": f"job/{job}",
        "models": "models",
    }


def find_pair(runs: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the newest run that was right where an earlier version was wrong, and that one's."""
    right = {run["task"]: run["id"] for run in reversed(runs) if run["reward"]}
    wrong = {run["task"]: run["id"] for run in runs if run["reward"] == 0}
    task = next(task for task in right if task in wrong)
    return right[task], wrong[task]


def ask(url: str, path: str) -> Any:
    """Return the answer of a route of the gateway."""
    with urllib.request.urlopen(f"{url}/v1/{path}") as answer:
        return json.load(answer)


def take(page: "Page", target: Path) -> None:
    """Write a picture of a page that has loaded everything."""
    from PIL import Image

    page.wait_for_function(
        "() => document.querySelector('main') && !document.body.innerText.includes('Loading …')"
    )
    page.wait_for_timeout(1500)  # until charts are drawn
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.save(target, quality=QUALITY, method=6)
    print(target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
