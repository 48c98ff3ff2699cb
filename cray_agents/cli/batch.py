"""`batch` command: queue a file of requests on a platform, watch it, fetch its results."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import MofNCompleteColumn

from cray_agents.cli.screen import (
    HomeOption,
    JsonOption,
    UrlOption,
    console,
    disarm,
    progress_bar,
    show,
    when,
)
from cray_agents.errors import BadInput, EngineUnavailable, NotFound
from cray_agents.exact_json import load_json
from cray_agents.platform.client import Platform
from cray_agents.platform.transport import typed_error
from cray_agents.server.platform_process import find_platform, key

if TYPE_CHECKING:
    import openai

POLL = 1.0  # seconds between polls of a batch
ENDED = {"completed", "failed", "expired", "cancelled"}
COLUMNS = ["id", "status", "total", "completed", "failed", "created"]

BatchId = Annotated[str, typer.Argument(help="As `batch list` shows it.")]

batch = typer.Typer(
    no_args_is_help=True, help="Batches: submit, list, show, wait, cancel, results."
)


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    app.add_typer(batch, name="batch")


@batch.command()
def submit(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL of requests.")],
    endpoint: Annotated[
        str | None, typer.Option(help="What the lines ask \\[default: the url of the first one].")
    ] = None,
    window: Annotated[str, typer.Option(help="Time to finish in, such as 24h or 7d.")] = "24h",
    wait_too: Annotated[bool, typer.Option("--wait", help="Return when it has ended.")] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Upload a file of requests and queue it."""
    endpoint = endpoint or first_url(file)
    with Server(home, url) as client:
        with file.open("rb") as content:
            uploaded = client.files.create(file=(file.name, content), purpose="batch")
        options: Any = {"endpoint": endpoint, "completion_window": window}
        submitted = client.batches.create(input_file_id=uploaded.id, **options)
        if wait_too:
            submitted = follow(client, submitted.id)
        print_batch(submitted, as_json)
        if wait_too:
            exit_unless_completed(submitted)


@batch.command("list")
def list_batches(
    home: HomeOption = None,
    url: UrlOption = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List batches, the newest first."""
    rows: list[dict[str, Any]] = []
    damaged: list[dict[str, str]] = []
    with Server(home, url) as client:
        for page in client.batches.list(limit=min(limit, 100)).iter_pages():
            rows += map(table_row, page.data)
            damaged += (page.model_extra or {}).get("damaged", ())
            if len(rows) >= limit:
                break
    show(rows[:limit], COLUMNS, as_json=as_json, damaged=damaged)


@batch.command("show")
def show_batch(
    batch_id: BatchId, home: HomeOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Show one batch: how far it is, and what is wrong with its input."""
    with Server(home, url) as client:
        print_batch(client.batches.retrieve(batch_id), as_json)


@batch.command()
def wait(
    batch_id: BatchId, home: HomeOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Wait for a batch's end. Exit code 1 if it did not complete."""
    with Server(home, url) as client:
        ended = follow(client, batch_id)
        print_batch(ended, as_json)
        exit_unless_completed(ended)


@batch.command()
def cancel(
    batch_id: BatchId, home: HomeOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Ask no more lines of a batch; what is done is kept."""
    with Server(home, url) as client:
        print_batch(client.batches.cancel(batch_id), as_json)


@batch.command()
def results(
    batch_id: BatchId,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A file \\[default: the screen].")
    ] = None,
    failed: Annotated[bool, typer.Option("--errors", help="The error file instead.")] = False,
    home: HomeOption = None,
    url: UrlOption = None,
) -> None:
    """Fetch the output file of a batch, or its error file."""
    with Server(home, url) as client:
        current = client.batches.retrieve(batch_id)
        file_id = current.error_file_id if failed else current.output_file_id
        if file_id is None:
            which = "error" if failed else "output"
            raise NotFound(f"batch {batch_id} is {current.status} and has no {which} file")
        with client.files.with_streaming_response.content(file_id) as response:
            if output is not None:
                response.stream_to_file(output)
                return
            for chunk in response.iter_bytes():
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()


class Server:
    """An OpenAI client of the platform; its errors are raised as this package's errors."""

    def __init__(self, home: Path | None, url: str | None) -> None:
        info = find_platform(home, url)
        self.url = Platform(info["url"]).url
        secret = key(info) or "none"
        import openai

        self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=secret)

    def __enter__(self) -> "openai.OpenAI":
        return self._client

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        import openai

        self._client.close()
        if isinstance(error, openai.APIStatusError):
            raise typed_error(error) from error
        if isinstance(error, openai.APIConnectionError):
            raise EngineUnavailable(
                f"no platform answers at {self.url}: start one with `cray-agents up`, or name "
                "another with --url"
            ) from error


def follow(client: "openai.OpenAI", batch_id: str) -> Any:
    """Wait until a batch has ended and return it; show a progress bar meanwhile."""
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("validating", total=None)
        while (current := client.batches.retrieve(batch_id)).status not in ENDED:
            counts = current.request_counts
            done = counts.completed + counts.failed if counts else 0
            total = (counts.total if counts else 0) or None
            bar.update(task, description=current.status, completed=done, total=total)
            time.sleep(POLL)
    return current


def print_batch(entry: Any, as_json: bool) -> None:
    """Print one batch."""
    if as_json:
        print(disarm(entry.model_dump_json(indent=2)))
        return
    show([table_row(entry)], COLUMNS, as_json=False)
    for name in ("output_file_id", "error_file_id"):
        if value := getattr(entry, name):
            console.print(f"{name}: {value}", highlight=False)
    for problem in entry.errors.data if entry.errors else []:
        line = f"line {problem.line}: " if problem.line else ""
        console.print(f"{line}{problem.code}: {problem.message}", markup=False, highlight=False)


def exit_unless_completed(entry: Any) -> None:
    """Exit with code 1 if the batch did not complete."""
    if entry.status != "completed":
        raise typer.Exit(1)


def table_row(entry: Any) -> dict[str, Any]:
    """Return a batch as a row of the table."""
    counts = entry.request_counts
    return {
        "id": entry.id,
        "status": entry.status,
        "endpoint": entry.endpoint,
        "total": counts.total if counts else 0,
        "completed": counts.completed if counts else 0,
        "failed": counts.failed if counts else 0,
        "created": when(entry.created_at),
    }


def first_url(file: Path) -> str:
    """Return the endpoint in the first line of a file. Raises BadInput."""
    with file.open("rb") as content:
        line = content.readline(16 * 2**20)
    try:
        return str(load_json(line)["url"])
    except (ValueError, KeyError, TypeError):
        raise BadInput(
            f"the first line of {file} is no batch request: "
            '{"custom_id", "method": "POST", "url": "/v1/...", "body"}',
            param="file",
        ) from None
