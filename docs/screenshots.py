"""Screenshots of the dashboard for its page: each main screen, of the runs of a demo.

    cray-agents demo --home DIR
    .venv/bin/python docs/screenshots.py DIR      writes docs/screens/*.webp

Serves DIR with its model server, or asks the platform at a URL in its place. Needs Chromium and the
built pages (`make ui`). `--width 390 --dark --to OTHER` shows phones or the dark theme elsewhere.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

TARGET = Path(__file__).parent / "screens"
WIDTH, HEIGHT = 1280, 800
DARK = ("run",)  # screens that are also shown dark
QUALITY = 60
WAIT = 300_000  # milliseconds
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main(options: argparse.Namespace) -> None:
    """Take the pictures."""
    from playwright.sync_api import sync_playwright

    options.to.mkdir(parents=True, exist_ok=True)
    with served(options.source) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        addresses = screens(url)
        pictures = [(name, address, options.dark) for name, address in addresses.items()]
        if not options.dark:
            pictures += [(f"{name}_dark", addresses[name], True) for name in DARK]
        for name, address, dark in pictures:
            page = browser.new_page(
                viewport={"width": options.width, "height": HEIGHT},
                color_scheme="dark" if dark else "light",
            )
            page.set_default_timeout(WAIT)
            page.goto(f"{url}/#/{address}")
            take(page, options.to / f"{name}.webp")
            page.close()
        browser.close()


@contextmanager
def served(source: str) -> Iterator[str]:
    """The URL of a platform: `source` itself, or that of the root that it names."""
    if source.startswith("http"):
        yield source.rstrip("/")
        return
    command = [sys.executable, "-m", "cray_agents"]
    subprocess.run([*command, "up", "--home", source, "--port", "0", "--detach"], check=True)
    try:
        status = [*command, "status", "--home", source, "--json"]
        answer = subprocess.run(status, check=True, capture_output=True, text=True)
        yield json.loads(answer.stdout)["url"]
    finally:
        subprocess.run([*command, "down", "--home", source], check=True)


def screens(url: str) -> dict[str, str]:
    """Return the address of each screen: runs, job and versions as the demo left them."""
    loop = max(ask(url, "loops")["data"], key=lambda one: one["iterations"])
    promoted = [point["iteration"] for point in loop["holdout"] if point["promoted"]]
    loop = loop["id"]
    query = f"loop={loop}&view=summary&order=newest&split=holdout&limit=1000"
    better, worse = find_pair(ask(url, f"trajectories?{query}")["data"])
    query = f"loop={loop}&view=summary&split=train&iteration=1&max_reward=0&limit=1"
    surprised = ask(url, f"trajectories?{query}")["data"][0]["id"]
    job = ask(url, "jobs")["data"][0]["id"]
    datasets = [one["id"] for one in ask(url, "datasets?limit=2")["data"]]
    return {
        "overview": "overview",
        "loop": f"loop/{loop}",
        "iteration": f"iteration/{loop}/{promoted[-1] if promoted else 1}",
        "dataset": f"dataset/{datasets[0]}",
        "runs": "runs?q=" + urllib.parse.quote(f"loop:{loop} and reward>=1"),
        "tasks": "tasks?q=" + urllib.parse.quote(f"loop:{loop} and split:holdout"),
        "run": f"run/{better}",
        "tokens": f"run/{surprised}?t=0&mode=tokens&prompt=1",
        "compare": f"compare?a={worse}&b={better}",
        "job": f"job/{job}",
        "models": "models",
        "keys": "keys?span=quarter",
    }


def find_pair(runs: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the newest run that was right where an earlier version was wrong, and that one's.

    Runs with tool calls come before others.
    """
    for turns in (2, 1):
        long = [run for run in runs if run["turns"] >= turns]
        right = {run["task"]: run["id"] for run in reversed(long) if run["reward"]}
        wrong = {run["task"]: run["id"] for run in long if run["reward"] == 0}
        for task in right:
            if task in wrong:
                return right[task], wrong[task]
    sys.exit("no task went wrong and then right: take the root of a demo that has learned")


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", help="the root of a demo, or the URL of a platform")
    parser.add_argument("--to", type=Path, default=TARGET, help="the folder of the pictures")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--dark", action="store_true", help="all of them dark")
    main(parser.parse_args())
