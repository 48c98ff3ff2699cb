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
import time
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
            take(page, options.to / f"{name}.webp", str(Path(options.source).resolve()))
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
    batch = make_batch(url)
    return {
        "overview": "overview",
        "loops": "loop",
        "loop": f"loop/{loop}",
        "iteration": f"iteration/{loop}/{promoted[-1] if promoted else 1}",
        "datasets": "dataset",
        "dataset": f"dataset/{datasets[0]}",
        "dataset_comparison": f"dataset/{datasets[-1]}?against={datasets[0]}",
        "runs": "runs?q=" + urllib.parse.quote(f"loop:{loop} and reward>=1"),
        "tasks": "tasks?q=" + urllib.parse.quote(f"loop:{loop} and split:holdout"),
        "run": f"run/{better}",
        "tokens": f"run/{surprised}?t=0&mode=tokens&prompt=1",
        "compare": f"compare?a={worse}&b={better}",
        "search": "search?q=calculator",
        "jobs": "job",
        "job": f"job/{job}",
        "replica": "replica/0",
        "batches": "batch",
        "batch": f"batch/{batch}",
        "playground": f"playground?run={better}&t=0",
        "models": "models",
        "keys": "keys?span=quarter",
    }


def make_batch(url: str) -> str:
    """Answer a batch of two lines, one of which asks for a model that is absent; return its id."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    said = [{"role": "user", "content": "What is 472 * 385?"}]
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": model, "messages": said, "max_tokens": 32}}
        for model in (client.models.list().data[0].id.partition("@")[0], "absent")
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("questions.jsonl", text), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while client.batches.retrieve(batch.id).status != "completed":
        time.sleep(0.5)
    return batch.id


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


#: Write the root of the runs as `demo`, wherever the checkout is.
SHORTEN = """root => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(root, 'demo');
}"""


def take(page: "Page", target: Path, root: str) -> None:
    """Write a picture of a page that has loaded everything."""
    from PIL import Image

    page.wait_for_function(
        "() => document.querySelector('main') &&"
        " !/Loading …|Reads the runs …/.test(document.body.innerText)"
    )
    page.wait_for_timeout(1500)  # until charts are drawn
    page.evaluate(SHORTEN, root)
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
