"""`batch` command: run a file of requests on a platform, and look after batches."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import MofNCompleteColumn

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import found_platform, print_json, progress_bar, say, show, when
from cray_agents.errors import BadInput, EngineUnavailable, NotFound
from cray_agents.exact_json import load_json
from cray_agents.platform.client import Platform
from cray_agents.platform.transport import typed_error
from cray_agents.server.platform_process import key

if TYPE_CHECKING:
    import openai

POLL = 1.0  # seconds between polls of a batch
NEWEST = 20  # batches that `batch status` lists
ENDED = {"completed", "failed", "expired", "cancelled"}
COLUMNS = ["id", "status", "total", "completed", "failed", "created"]

OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the results to this file; - for the screen."),
]
ErrorsOption = Annotated[
    Path | None,
    typer.Option("--errors", help="Write the failed lines to this file; - for the screen."),
]

commands = Commands("batch", help="Batches of requests: run, status.")


@commands.command("run", takes="json url")
def run(
    file: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="A file of requests, one a line."),
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(help="The endpoint that the lines ask \\[default: the url of the first one]."),
    ] = None,
    window: Annotated[str, typer.Option(help="The time to finish in, such as 24h or 7d.")] = "24h",
    output: OutputOption = None,
    errors: ErrorsOption = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return when it is queued; `batch status` looks after it."),
    ] = False,
) -> None:
    """Upload a file of requests, queue it, and wait for its end.

    The exit code is 1 if the batch did not complete.
    """
    if detach and (output or errors):
        raise BadInput("--output and --errors: there is nothing yet with --detach", param="output")
    endpoint = endpoint or first_url(file)
    with openai_client() as client:
        with file.open("rb") as content:
            uploaded = client.files.create(file=(file.name, content), purpose="batch")
        options: Any = {"endpoint": endpoint, "completion_window": window}
        entry = client.batches.create(input_file_id=uploaded.id, **options)
        if not detach:
            entry = follow(client, entry.id)
        _show_or_save(client, entry, output, errors)
    if not detach:
        exit_unless_completed(entry)


@commands.command("status", takes="json url")
def status(
    batch_id: Annotated[
        str | None,
        typer.Argument(help=f"The batch's id \\[default: the newest {NEWEST} are listed]."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait for its end; exit with 1 if it did not complete."),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Ask no more of its lines; what is done is kept.")
    ] = False,
    output: OutputOption = None,
    errors: ErrorsOption = None,
) -> None:
    """List the newest batches; or show one: how far it is, and what is wrong with its input."""
    if batch_id is None:
        if wait or cancel or output or errors:
            raise BadInput("name a batch: `cray-agents batch status` lists them", param="batch_id")
        with openai_client() as client:
            page = client.batches.list(limit=NEWEST)
            damaged = (page.model_extra or {}).get("damaged", ())
            show([table_row(entry) for entry in page.data], COLUMNS, damaged=damaged)
        return
    with openai_client() as client:
        entry: Any = client.batches.cancel(batch_id) if cancel else None
        entry = entry or (follow(client, batch_id) if wait else client.batches.retrieve(batch_id))
        _show_or_save(client, entry, output, errors)
    if wait:
        exit_unless_completed(entry)


def _show_or_save(
    client: "openai.OpenAI", entry: Any, output: Path | None, errors: Path | None
) -> None:
    """Print a batch, or write its files where they were asked for. Raises NotFound."""
    for path, which in ((output, "output"), (errors, "error")):
        if path is not None:
            _save(client, entry, which, path)
    if output is None and errors is None:
        print_batch(entry)


def _save(client: "openai.OpenAI", entry: Any, which: str, path: Path) -> None:
    file_id = getattr(entry, f"{which}_file_id")
    if file_id is None:
        raise NotFound(f"batch {entry.id} is {entry.status} and has no {which} file")
    with client.files.with_streaming_response.content(file_id) as response:
        if str(path) != "-":
            response.stream_to_file(path)
            return
        for chunk in response.iter_bytes():
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


@contextmanager
def openai_client() -> "Iterator[openai.OpenAI]":
    """Yield an OpenAI client of the platform; its errors are raised as this package's errors."""
    import openai

    info = found_platform()
    url = Platform(info["url"]).url
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key(info) or "none") as client:
        try:
            yield client
        except openai.APIStatusError as error:
            raise typed_error(error) from error
        except openai.APIConnectionError as error:
            raise EngineUnavailable(
                f"no platform answers at {url}: start one with `cray-agents up`, or name another "
                "with --url"
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


def print_batch(entry: Any) -> None:
    """Print one batch."""
    if given().json:
        print_json(entry)
        return
    show([table_row(entry)], COLUMNS)
    for name in ("output_file_id", "error_file_id"):
        if value := getattr(entry, name):
            say(f"{name}: {value}")
    for problem in entry.errors.data if entry.errors else []:
        line = f"line {problem.line}: " if problem.line else ""
        say(f"{line}{problem.code}: {problem.message}")


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
